"""The chart of ``treadle tune --plot``: a panel for each sweep.

A sweep in which two fields vary, as of tile sizes, is a heat map: one field across, one down,
stronger colours are faster. Other sweeps are bars: hot and cold for each configuration. ``top`` and
returned bottoms are y in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.base.humanize import counted
from treadle.cli.ui.svg import (
    CHAR_PX,
    LINE_PX,
    MARGIN,
    AxisScale,
    Canvas,
    Panel,
    SeriesStyle,
    document,
)

Row = dict[str, Any]  # of tune_results.rows_of

# x of the panels' axes; labels lie outside
LEFT = 180
RIGHT = 770
CELL = 28  # pixels of a map's row
BAR = 30  # pixels of a configuration's two bars
THIN = 9  # pixels of one bar
FAINT = 0.08  # colour strength of the slowest cell
STRONG = 0.7  # above it, numbers in a cell have the background's colour
HOT, COLD = SeriesStyle(0), SeriesStyle(1)


def draw(sweeps: Sequence[Sequence[Row]], subtitle: str, origin: str) -> str:
    """Return an SVG document with all sweeps, each a list of rows as ``rows_of`` yields them, one
    below another. ``subtitle``: text below the title; ``origin``: where and when they were
    measured.
    """
    canvas = Canvas()
    sound = [[row for row in rows if row["problem"] is None] for rows in sweeps]
    sound = [rows for rows in sound if rows]
    top = canvas.head("treadle tune", subtitle, origin)
    top = legend(canvas, sound, top + 26)
    for rows in sound:
        first = rows[0]
        title = f"{first['kernel']} {first['format']}, {counted(first['tokens'], 'token')}"
        panel = heat_map if len(varying(rows)) >= 2 else bars
        top = panel(canvas, rows, title, top + 52)
    return document(canvas.lines, top + MARGIN, f"treadle tune: {subtitle}; {origin}")


def legend(canvas: Canvas, sweeps: Sequence[Sequence[Row]], top: float) -> float:
    """Draw the meaning of the colours, rings and labels in use, from ``top`` (y in pixels) down;
    return the y of the bottom.
    """
    maps = any(len(varying(rows)) >= 2 for rows in sweeps)
    x = float(MARGIN)
    y = top
    if maps:
        for i in range(5):
            canvas.box(x + 14 * i, y - 7, 14, 12, "heat", FAINT + (1 - FAINT) * i / 4)
        canvas.text(x + 78, y + 3, "slow to fast, caches cold")
        x += 78 + CHAR_PX * 25 + 24
        for css, name in (("ring", "best"), ("ring dashed", "shipped")):
            canvas.box(x, y - 7, 22, 12, css)
            canvas.text(x + 28, y + 3, name)
            x += 28 + CHAR_PX * len(name) + 24
        y += LINE_PX + 6
    if any(len(varying(rows)) < 2 for rows in sweeps):
        x = MARGIN
        for look, name in ((HOT, "caches hot"), (COLD, "caches cold: what counts")):
            canvas.box(x, y - 6, 22, THIN, f"bar {look.css}")
            canvas.text(x + 28, y + 3, name)
            x += 28 + CHAR_PX * len(name) + 24
        y += LINE_PX + 6
    return y - LINE_PX


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the names of the fields that vary among ``rows``, one sweep's configurations: two or
    more make a heat map.
    """
    return [name for name in rows[0]["fields"] if len({row["fields"][name] for row in rows}) > 1]


def meaning(field: str, kernel: str) -> str:
    """Return a field's name with its meaning for ``kernel``, as an axis title."""
    rows = "rows" if kernel == "gemv" else "vectors of rows"
    counted = {"mr": rows, "nr": "tokens of a tile", "kc": "weights of a row at once"}
    counted["ahead"] = "prefetch distance in bytes; 0: rows in order"
    return f"{field}, {counted[field]}" if field in counted else field


def tip(row: Row) -> str:
    """Return the tooltip of a configuration's cell or bar: its fields and speeds."""
    fields = " ".join(f"{name} {value}" for name, value in row["fields"].items())
    speeds = f"{row['cold_ops_s'] / 1e9:.1f} cold, {row['hot_ops_s'] / 1e9:.1f} hot"
    marks = "".join(f", {word}" for word in ("best", "shipped") if row[word])
    return f"{fields}: {speeds} GOP/s{marks}"


# -- maps -----------------------------------------------------------------------------------------


def heat_map(canvas: Canvas, rows: Sequence[Row], title: str, top: float) -> float:
    """Draw the best cold speed for each pair of values of the first two varying fields, from
    ``top`` (y in pixels) down; return the y of the bottom.
    """
    down, across = varying(rows)[:2]
    best: dict[tuple[int, int], Row] = {}
    for row in rows:
        at = row["fields"][down], row["fields"][across]
        if at not in best or row["cold_ops_s"] > best[at]["cold_ops_s"]:
            best[at] = row
    ys, xs = (sorted({at[i] for at in best}) for i in (0, 1))
    width = (RIGHT - LEFT) / len(xs)
    height = CELL * len(ys)
    speeds = [row["cold_ops_s"] for row in best.values()]
    low = min(speeds)
    high = max(speeds)
    canvas.text(MARGIN, top - 20, f"{title}: GOP/s, caches cold", "ink head")
    for (a, b), row in best.items():
        x = LEFT + xs.index(b) * width
        y = top + ys.index(a) * CELL
        share = FAINT + (1 - FAINT) * (row["cold_ops_s"] - low) / (high - low or 1)
        canvas.box(x + 2, y + 2, width - 4, CELL - 4, "heat", share, tip(row))
        words = f"{row['cold_ops_s'] / 1e9:.{0 if high >= 1e10 else 1}f}"
        ink = "back" if share > STRONG else "ink"
        canvas.text(x + width / 2, y + CELL / 2 + 4, words, ink, "middle")
    for word, css in (("shipped", "ring dashed"), ("best", "ring")):
        for row in rows:
            if row[word]:
                a = ys.index(row["fields"][down])
                b = xs.index(row["fields"][across])
                canvas.box(LEFT + b * width + 1, top + a * CELL + 1, width - 2, CELL - 2, css)
    for i, a in enumerate(ys):
        canvas.text(LEFT - 10, top + i * CELL + CELL / 2 + 4, str(a), "muted", "end")
    for i, b in enumerate(xs):
        canvas.text(LEFT + (i + 0.5) * width, top + height + 16, str(b), "muted", "middle")
    canvas.text(MARGIN, top + height / 2 + 4, meaning(down, rows[0]["kernel"]), "muted")
    canvas.text(
        (LEFT + RIGHT) / 2, top + height + 36, meaning(across, rows[0]["kernel"]), "muted", "middle"
    )
    scale_bar(canvas, low, high, top, height)
    return top + height + 40


def scale_bar(canvas: Canvas, low: float, high: float, top: float, height: float) -> None:
    """Draw the colour scale of a heat map, ``height`` pixels from ``top`` (y) down, from its
    ``low`` speed at the bottom to ``high`` at the top.
    """
    steps = 12
    x = RIGHT + 24
    for i in range(steps):
        share = FAINT + (1 - FAINT) * (steps - 1 - i) / (steps - 1)
        canvas.box(x, top + i * height / steps, 14, height / steps, "heat", share)
    canvas.text(x + 20, top + 10, f"{high / 1e9:.1f}", "muted")
    canvas.text(x + 20, top + height, f"{low / 1e9:.1f}", "muted")


# -- bars -----------------------------------------------------------------------------------------


def bars(canvas: Canvas, rows: Sequence[Row], title: str, top: float) -> float:
    """Draw two bars, hot and cold, for each configuration, from ``top`` (y in pixels) down; return
    the y of the bottom.
    """
    most = max(max(row["hot_ops_s"], row["cold_ops_s"]) for row in rows) / 1e9
    x = AxisScale(0, most * 1.02, LEFT, RIGHT)
    panel = Panel(canvas, top, BAR * len(rows), x)
    panel.axes(title, "GOP/s")
    for i, row in enumerate(rows):
        y = top + i * BAR + (BAR - 2 * THIN) / 2
        name = " ".join(f"{field} {value}" for field, value in row["fields"].items())
        canvas.text(LEFT - 10, y + THIN + 4, name, "ink", "end")
        for look, field, at in ((HOT, "hot_ops_s", y), (COLD, "cold_ops_s", y + THIN)):
            end = x(row[field] / 1e9)
            canvas.box(LEFT, at, end - LEFT, THIN - 1, f"bar {look.css}", tip=tip(row))
        words = ", ".join(word for word in ("best", "shipped") if row[word])
        canvas.text(RIGHT + 10, y + THIN + 4, words, "ink strong")
    return top + BAR * len(rows) + 44

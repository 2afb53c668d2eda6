"""The picture of ``treadle tune --plot``: a panel for each sweep, an SVG without any library.

A sweep of tiles, where two fields vary, is a map (one field across, one down, the brighter the
faster); any other is bars, hot behind cold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

Row = dict[str, Any]  # of tune.rows_of

WIDTH, MARGIN = 720, 16
TITLE, CELL, BAR, LABELS = 30, 26, 20, 150  # px: a panel's heading, a map's row, a bar, its label
COLD, HOT, BEST, DARK, LIGHT = "#2b6cb0", "#bcd3ea", "#c05621", (24, 66, 120), (235, 243, 251)


def draw(sweeps: Sequence[Sequence[Row]], caption: str) -> str:
    """All sweeps below one another, as one SVG document."""
    parts, y = [text(MARGIN, 24, caption, size=14, weight="bold")], 40
    for rows in sweeps:
        sound = [row for row in rows if row["problem"] is None]
        if not sound:
            continue
        first = sound[0]
        tokens = f"{first['tokens']} token{'s' * (first['tokens'] > 1)}"
        title = f"{first['kernel']} {first['format']}, {tokens}: GOP/s, cold"
        parts.append(text(MARGIN, y + 18, title, weight="bold"))
        made, height = heat_map(sound, y + TITLE) if is_map(sound) else bars(sound, y + TITLE)
        parts += made
        y += TITLE + height + MARGIN
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}"'
    style = 'font-family="sans-serif" font-size="12"'
    back = f'<rect width="{WIDTH}" height="{y}" fill="white"/>'
    return "\n".join([f"{head} {style}>", back, *parts, "</svg>"]) + "\n"


def axes(rows: Sequence[Row]) -> list[str]:
    """The fields that vary among ``rows``."""
    return [name for name in rows[0]["fields"] if len({row["fields"][name] for row in rows}) > 1]


def is_map(rows: Sequence[Row]) -> bool:
    """Whether two or more fields vary: then the first two span a map."""
    return len(axes(rows)) >= 2


def heat_map(rows: Sequence[Row], top: int) -> tuple[list[str], int]:
    """The best speed of every pair of the first two fields that vary; its height."""
    down, across = axes(rows)[:2]
    best: dict[tuple[int, int], Row] = {}
    for row in rows:
        at = row["fields"][down], row["fields"][across]
        if at not in best or row["cold_ops_s"] > best[at]["cold_ops_s"]:
            best[at] = row
    ys, xs = (sorted({at[i] for at in best}) for i in (0, 1))
    width = (WIDTH - 2 * MARGIN - LABELS // 2) / len(xs)
    speeds = [row["cold_ops_s"] for row in best.values()]
    low, high = min(speeds), max(speeds)
    parts = []
    for (a, b), row in best.items():
        x, y = MARGIN + LABELS // 2 + xs.index(b) * width, top + ys.index(a) * CELL
        share = (row["cold_ops_s"] - low) / (high - low or 1)
        edge = f' stroke="{BEST}" stroke-width="3"' if is_winner(rows, a, b, down, across) else ""
        parts.append(box(x + 1, y + 1, width - 2, CELL - 2, shade(share), edge))
        ink = "white" if share > 0.5 else "black"
        value = f"{row['cold_ops_s'] / 1e9:.0f}"
        parts.append(text(x + width / 2, y + 17, value, fill=ink, anchor="middle"))
    parts += [text(MARGIN, top + i * CELL + 17, f"{down} {a}") for i, a in enumerate(ys)]
    for i, b in enumerate(xs):
        x = MARGIN + LABELS // 2 + (i + 0.5) * width
        parts.append(text(x, top + len(ys) * CELL + 14, f"{across} {b}", anchor="middle"))
    return parts, len(ys) * CELL + 18


def is_winner(rows: Sequence[Row], a: int, b: int, down: str, across: str) -> bool:
    """Whether the best configuration of a sweep has these two values."""
    return any(
        row["best"] and (row["fields"][down], row["fields"][across]) == (a, b) for row in rows
    )


def bars(rows: Sequence[Row], top: int) -> tuple[list[str], int]:
    """A pair of bars for each configuration, and their height in all."""
    most = max(max(row["hot_ops_s"], row["cold_ops_s"]) for row in rows)
    room = WIDTH - 2 * MARGIN - LABELS - 60
    return [part for i, row in enumerate(rows) for part in bar(row, top + i * BAR, room / most)], (
        len(rows) * BAR
    )


def bar(row: Row, y: int, scale: float) -> Iterator[str]:
    """One configuration: hot, paler, behind cold."""
    label = " ".join(f"{name} {value}" for name, value in row["fields"].items())
    x = MARGIN + LABELS
    yield text(MARGIN, y + 14, label)
    yield box(x, y + 2, row["hot_ops_s"] * scale, BAR - 4, HOT)
    yield box(x, y + 5, row["cold_ops_s"] * scale, BAR - 10, BEST if row["best"] else COLD)
    end = x + max(row["hot_ops_s"], row["cold_ops_s"]) * scale
    yield text(end + 6, y + 14, f"{row['cold_ops_s'] / 1e9:.1f}")


def shade(share: float) -> str:
    """The colour of a share of the best, from light to dark."""
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(LIGHT, DARK, strict=True))
    return f"rgb({red},{green},{blue})"


def box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A filled rectangle."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}"{more}/>'


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: str = "normal",
    fill: str = "black",
    anchor: str = "start",
) -> str:
    """Words at a place; ``y`` is their baseline."""
    look = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'

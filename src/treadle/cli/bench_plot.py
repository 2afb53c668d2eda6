"""The chart of ``treadle bench --plot``: a roofline, speed by depth, speed by model file.

Panels without data are omitted: the second needs several depths, the third several files. A series
is a set of results that differ only in depth. Each series has a colour, each engine a marker shape;
markers are filled for prefill, hollow for decode. ``top`` and returned bottoms are y in pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import atan2, degrees, hypot

from treadle.base.humanize import scaled
from treadle.cli.bench_results import Result
from treadle.cli.speed import ARITHMETIC, reading
from treadle.cli.ui.svg import (
    CHAR_PX,
    LINE_PX,
    MARGIN,
    SERIES,
    WIDTH,
    AxisScale,
    Canvas,
    Panel,
    SeriesStyle,
    document,
    log_scale,
    spread,
)
from treadle.cli.ui.table import shorten

# x of the panels' axes; labels lie outside
LEFT = 110
RIGHT = 660
PLOT_HEIGHT = 300
ROW_PX = 26  # height of a model file's row
NAME_CHARS = 34  # at most, of a model file's name
SAMPLES = 60  # points on a line that labels must not cover


Key = tuple[object, ...]
Looks = Mapping[Key, SeriesStyle]


def draw(results: Sequence[Result], origin: str) -> str:
    """Return the chart as an SVG document; ``origin`` says where and when it was measured."""
    canvas = Canvas()
    looks = looks_of(results)
    top = canvas.head("treadle bench", subtitle(results), origin)
    top = legend(canvas, looks, results, top + 28)
    for name, panel in (("roofline", roofline), ("depth", draw_by_depth), ("models", by_model)):
        begin = len(canvas.lines)
        bottom = panel(canvas, results, looks, top + 44)
        if bottom is not None:
            canvas.lines[begin:] = [f'<g id="{name}">', *canvas.lines[begin:], "</g>"]
            top = bottom
    return document(canvas.lines, top + MARGIN, f"treadle bench: {subtitle(results)}; {origin}")


def series(r: Result) -> Key:
    """Return the key of the series that a result belongs to: engine, model, test, threads and
    sequences, but not depth.
    """
    return r.engine, r.model, r.test, r.threads, r.sequences


def looks_of(results: Sequence[Result]) -> Looks:
    """Return the style of each series, by its key (see ``series``): colour, marker shape by engine,
    hollow for decode. Series of the first engine in ``results`` come first.
    """
    engines = list(dict.fromkeys(r.engine for r in results))
    ordered = sorted(results, key=lambda r: engines.index(r.engine))
    looks: dict[Key, SeriesStyle] = {}
    for r in ordered:
        if series(r) not in looks:
            engine = engines.index(r.engine)
            n_before = sum(key[0] == r.engine for key in looks)  # reused colours: another shape
            shape = engine + len(engines) * (n_before // SERIES)
            looks[series(r)] = SeriesStyle(len(looks), shape, kind_of(r) == "tg")
    return looks


def subtitle(results: Sequence[Result]) -> str:
    """Return the subtitle: the model or the number of models, the threads, and the statistic that
    is drawn (medians, with lowest and highest).
    """
    models = list(dict.fromkeys(r.model for r in results))
    what = models[0] if len(models) == 1 else f"{len(models)} model files"
    threads = sorted({r.threads for r in results})
    plural = "" if threads == [1] else "s"
    many = " and ".join(map(str, threads)) if len(threads) < 3 else ", ".join(map(str, threads))
    return f"{shorten(what, 60)}, {many} thread{plural}; medians, with lowest and highest"


def legend(canvas: Canvas, looks: Looks, results: Sequence[Result], top: float) -> float:
    """Draw each series' marker (``looks``: as of ``looks_of``) and name in columns from ``top`` (y
    in pixels) down, and the meaning of filled and hollow markers; return the y of the bottom.
    """
    first = {series(r): r for r in reversed(results)}
    programs = len({r.engine for r in results}) > 1
    names = [
        shorten(f"{r.engine} " * programs + series_name(r, results), 48)
        for r in (first[key] for key in looks)
    ]
    column = 18 + CHAR_PX * max(map(len, names)) + 24
    per_row = max(1, int((WIDTH - 2 * MARGIN) // column))
    for i, (look, name) in enumerate(zip(looks.values(), names, strict=True)):
        x = MARGIN + i % per_row * column
        y = top + i // per_row * (LINE_PX + 4)
        canvas.mark(x + 6, y, look)
        canvas.text(x + 18, y + 4, name)
    kinds = {"pp": "full, solid: prompt processing (pp)", "tg": "hollow, dashed: generation (tg)"}
    present = {kind_of(r) for r in results}
    text = "; ".join(text for kind, text in kinds.items() if kind in present)
    below = top + -(-len(names) // per_row) * (LINE_PX + 4)
    canvas.text(MARGIN, below + 4, text, "muted")
    return below + 12


def kind_of(r: Result) -> str:
    """Return the kind of a result's test: ``pp`` (prefill) or ``tg`` (decode)."""
    return r.test.rstrip("0123456789")


def tip(r: Result) -> str:
    """Return the tooltip of a result's marker: engine, model, test, depth, threads and speeds."""
    group = f", {r.sequences} sequences" if r.sequences > 1 else ""
    return (
        f"{r.engine}, {r.model}, {r.test} at depth {r.depth}, {r.threads} threads{group}: "
        f"{r.tok_s:.1f} tokens/s ({r.tok_s_min:.1f} to {r.tok_s_max:.1f})"
    )


# -- roofline -------------------------------------------------------------------------------------


def roofline(canvas: Canvas, results: Sequence[Result], looks: Looks, top: float) -> float | None:
    """Draw operations a second over operations per byte read, with the limits of memory and
    arithmetic, from ``top`` (y in pixels) down; return the y of the bottom, None if no operations
    were counted.

    The work of an engine other than treadle is not counted: its points assume treadle's bytes and
    operations.
    """
    points = [(r, *place) for r in results if (place := intensity(r, results))]
    if not points:
        return None
    peaks: dict[str, float] = {}
    for r in results:
        for name, rate in r.peaks.items():
            peaks[name] = max(rate, peaks.get(name, 0.0))
    read = reading(peaks)
    bandwidth = peaks[read]
    roofs = {name: rate for name, rate in peaks.items() if name in ARITHMETIC.values()}
    ridges = [rate / bandwidth for rate in roofs.values()]
    x = log_scale([p[1] for p in points] + ridges, LEFT, RIGHT, room=2.5)
    y = log_scale([p[2] for p in points] + list(roofs.values()), top + PLOT_HEIGHT, top, room=2)
    panel = Panel(canvas, top, PLOT_HEIGHT, x, y)
    panel.axes(
        "Roofline: this machine's measured peaks, and the share of them in use",
        "operations per byte read",
        "operations a second",
        y_ticks=[(tick, scaled(tick, "op/s").replace(".0 ", " ")) for tick in y.ticks()],
    )
    draw_roofs(panel, f"{read} {scaled(bandwidth, 'B/s')}", bandwidth, roofs)
    for r, ops_per_byte, ops_s in points:
        text = f"{tip(r)}; {scaled(ops_s, 'op/s')} at {ops_per_byte:.2g} op/B"
        if r.share_of_peak is not None and r.peak:
            text += f", {r.share_of_peak:.0%} of {r.peak}"
        canvas.mark(x(ops_per_byte), y(ops_s), looks[series(r)], text)
    for r, ops_per_byte, ops_s in points:
        if r.bytes_s is not None:  # the other engine's point is above or below it
            canvas.label(x(ops_per_byte), y(ops_s), series_name(r, results, with_depth=True))
    return top + PLOT_HEIGHT + 44


def draw_roofs(panel: Panel, text: str, bandwidth: float, roofs: dict[str, float]) -> None:
    """Draw the slope of the memory bandwidth (``bandwidth``, bytes a second) with the label
    ``text``, and a horizontal line for each of ``roofs``: operations a second by kind of
    arithmetic.
    """
    canvas = panel.canvas
    x = panel.x
    y = panel.y
    top = panel.top
    assert y is not None
    highest = max(roofs.values())
    foot = max(x.low, y.low / bandwidth)
    low = (x(foot), y(foot * bandwidth))
    high = (x(highest / bandwidth), y(highest))
    canvas.path((low, high), "roof")
    turn = degrees(atan2(high[1] - low[1], high[0] - low[0]))
    canvas.keep_clear(low, high, SAMPLES)
    beside = (low[0] + high[0]) / 2 - 8, (low[1] + high[1]) / 2 - 8
    canvas.text(*beside, text, "muted", "middle", turn)
    half = CHAR_PX * len(text) / 2 / hypot(high[0] - low[0], high[1] - low[1])
    dx = half * (high[0] - low[0])
    dy = half * (high[1] - low[1])
    ends = (beside[0] - dx, beside[1] - dy), (beside[0] + dx, beside[1] + dy)
    canvas.keep_clear(*ends, SAMPLES)
    canvas.taken += [(0, top, x.start, top + panel.height), (x.end, top, WIDTH, top + panel.height)]
    labels = spread([y(rate) + 4 for rate in roofs.values()], LINE_PX, top, top + panel.height)
    for (name, rate), at in zip(roofs.items(), labels, strict=True):
        start = x(rate / bandwidth), y(rate)
        canvas.line(*start, x.end, start[1], "roof dashed")
        canvas.keep_clear(start, (x.end, start[1]), SAMPLES)
        canvas.text(x.end + 8, at, f"{name} {scaled(rate, 'op/s')}", "muted")


def intensity(r: Result, results: Sequence[Result]) -> tuple[float, float] | None:
    """Return a result's operations per byte read and operations a second; None if they were not
    counted. Those of an engine other than treadle follow from its speed and treadle's counts for
    the same work.
    """
    ours = next((o for o in results if o.work == r.work and o.bytes_s and o.ops_s), None)
    if ours is None or not ours.bytes_s or not ours.ops_s:
        return None
    return ours.ops_s / ours.bytes_s, ours.ops_s / ours.tok_s * r.tok_s


# -- speed by depth -------------------------------------------------------------------------------


def draw_by_depth(
    canvas: Canvas, results: Sequence[Result], looks: Looks, top: float
) -> float | None:
    """Draw tokens a second over the tokens already in the cache, from ``top`` (y in pixels) down;
    return the y of the bottom, None if all results have one depth.
    """
    depths = sorted({r.depth for r in results})
    if len(depths) < 2:
        return None
    lines: dict[Key, list[Result]] = {}
    for r in results:
        lines.setdefault(series(r), []).append(r)
    x = AxisScale(0, depths[-1], LEFT + 8, RIGHT)
    speeds = [s for r in results for s in (r.tok_s_min, r.tok_s_max)]
    y = log_scale(speeds, top + PLOT_HEIGHT, top)
    panel = Panel(canvas, top, PLOT_HEIGHT, x, y)
    ticks = depth_ticks(depths, x)
    panel.axes("Speed by depth", "tokens in the context before", "tokens a second", ticks)
    ends: list[tuple[float, float, str, SeriesStyle]] = []
    for key, members in lines.items():
        members.sort(key=lambda r: r.depth)
        look = looks[key]
        line = [(x(r.depth), y(r.tok_s)) for r in members]
        canvas.path(line, f"curve {look.css}" + " dashed" * look.hollow)
        for r, at in zip(members, line, strict=True):
            canvas.line(at[0], y(r.tok_s_min), at[0], y(r.tok_s_max), f"whisker {look.css}")
            canvas.mark(*at, look, tip(r))
        ends.append((*line[-1], series_name(members[0], results), look))
    places = spread([end[1] + 4 for end in ends], LINE_PX, top, top + PLOT_HEIGHT)
    for (end_x, _, text, look), at_y in zip(ends, places, strict=True):
        if end_x == x.end:
            canvas.mark(x.end + 18, at_y - 4, look)
            canvas.text(x.end + 30, at_y, shorten(text, 30))
    return top + PLOT_HEIGHT + 44


def depth_ticks(depths: Sequence[int], x: AxisScale) -> list[tuple[float, str]]:
    """Return ticks (depth, label) at the timed depths, except those whose label would overlap the
    previous one on the horizontal scale ``x``.
    """
    ticks: list[tuple[float, str]] = []
    for depth in depths:
        text = f"{depth}"
        if not ticks or x(depth) - x(ticks[-1][0]) > CHAR_PX * len(text) + 8:
            ticks.append((depth, text))
    return ticks


def series_name(r: Result, results: Sequence[Result], with_depth: bool = False) -> str:
    """Return the name of a result's test, the number of sequences if there are several, and depth
    (only ``with_depth``), threads and weight format, each only if it varies among ``results`` (the
    format: if their models vary).
    """
    words = [r.test]
    if r.sequences > 1:
        words.append(f"× {r.sequences}")
    if with_depth and len({other.depth for other in results}) > 1:
        words.append(f"at {r.depth}")
    if len({other.threads for other in results}) > 1:
        words.append(f"{r.threads} thr.")
    if len({other.model for other in results}) > 1:
        words.append(r.format)
    return " ".join(words)


# -- speed by model file --------------------------------------------------------------------------


def by_model(canvas: Canvas, results: Sequence[Result], looks: Looks, top: float) -> float | None:
    """Draw tokens a second of each model file, test by test, from ``top`` (y in pixels) down;
    return the y of the bottom, None for one file.
    """
    models = list(dict.fromkeys(r.model for r in results))
    if len(models) < 2:
        return None
    tests: dict[tuple[object, ...], list[Result]] = {}
    for r in results:
        tests.setdefault((r.test, r.depth, r.threads, r.sequences), []).append(r)
    height = sum(
        LINE_PX + 14 + ROW_PX * len({r.model for r in members}) for members in tests.values()
    )
    left = LEFT + CHAR_PX * NAME_CHARS
    x = log_scale(
        [s for r in results for s in (r.tok_s_min, r.tok_s_max)], left, WIDTH - MARGIN - 40, 1.6
    )
    panel = Panel(canvas, top, height, x, None)
    title = "Speed by format" if len({r.format for r in results}) > 1 else "Speed by model file"
    panel.axes(title, "tokens a second")
    at = top
    for members in tests.values():
        at += LINE_PX + 4
        canvas.text(MARGIN, at, test_name(members[0], results), "ink strong")
        at += 10
        for model in models:
            of_model = [r for r in members if r.model == model]
            if of_model:
                row(canvas, of_model, looks, x, left, at + ROW_PX / 2)
                at += ROW_PX
    return top + height + 44


def test_name(r: Result, results: Sequence[Result]) -> str:
    """Return the heading of a result's test: its name, what varies among the results of its model,
    and whether it is prefill or decode.
    """
    one_model = [other for other in results if other.model == r.model]
    name = series_name(r, one_model, with_depth=True)
    return f"{name}: {'reads a prompt' if kind_of(r) == 'pp' else 'writes'}"


def row(
    canvas: Canvas,
    results: Sequence[Result],
    looks: Looks,
    x: AxisScale,
    left: float,
    at: float,
) -> None:
    """Draw the results of one file in one test, one for each engine: markers, styled by ``looks``
    (see ``looks_of``), with their speeds, on the horizontal scale ``x``. ``at``: y of the row in
    pixels; ``left``: x at which the file's name ends.
    """
    r = results[0]
    canvas.text(left - 12, at + 4, shorten_name(r), "ink", "end")
    canvas.line(x.start, at, x.end, at, "grid")
    for r in results:
        look = looks[series(r)]
        canvas.line(x(r.tok_s_min), at, x(r.tok_s_max), at, f"whisker {look.css}")
        canvas.mark(x(r.tok_s), at, look, tip(r))
    # The slowest engine's number is left of its marker, the others' right of theirs.
    slowest = min(results, key=lambda r: r.tok_s)
    for r in results:
        text = f"{r.tok_s:.0f}" if r.tok_s >= 100 else f"{r.tok_s:.1f}"
        if r is slowest and len(results) > 1:
            canvas.text(min(x(r.tok_s), x(r.tok_s_min)) - 10, at + 4, text, "muted", "end")
        else:
            canvas.text(max(x(r.tok_s), x(r.tok_s_max)) + 10, at + 4, text, "muted")


def shorten_name(r: Result) -> str:
    """Return the name of a result's model file without its suffix, with its middle omitted if it is
    long.
    """
    name = r.model.removesuffix(".gguf")
    half = NAME_CHARS // 2 - 1
    return name if len(name) <= NAME_CHARS else f"{name[:half]}…{name[-half:]}"

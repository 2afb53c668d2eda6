"""The chart of the study: bars for each kernel, a line for each setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from bench.kernel_study.sweep import SweepResult

# pixels: the axes, and a setting's height
LEFT = 210
RIGHT = 740
BAR = 22
Value = Callable[["SweepResult"], float | None]
# Values to draw, if known: name and getter.
SERIES: list[tuple[str, Value]] = [
    ("hot, ns", lambda f: f.hot_ns),
    ("cold, ns", lambda f: f.cold_ns),
    ("X60, cycles by llvm-mca", lambda f: f.cycles.get("X60")),
    ("P670, cycles by llvm-mca", lambda f: f.cycles.get("P670")),
    ("instructions", lambda f: f.instructions),
]


def draw(found: Sequence[SweepResult], subtitle: str, origin: str) -> str:
    """Return all kernels, one below another, as an SVG document."""
    canvas = Canvas()
    top = canvas.head("the RISC-V study's kernels", subtitle, origin)
    known = [(name, value) for name, value in SERIES if any(value(f) is not None for f in found)]
    top = legend(canvas, [name for name, _ in known], top + 26)
    for kernel, group in groupby(found, key=lambda f: f.kernel):
        top = panel(canvas, kernel, list(group), [value for _, value in known], top + 52)
    return document(canvas.lines, top + MARGIN, f"kernel study: {subtitle}; {origin}")


def legend(canvas: Canvas, names: Sequence[str], top: float) -> float:
    """Draw the meaning of the colours; return the bottom."""
    x = float(MARGIN)
    for i, name in enumerate(names):
        canvas.box(x, top - 6, 22, 9, f"bar {SeriesStyle(i).css}")
        canvas.text(x + 28, top + 3, name)
        x += 28 + CHAR_PX * len(name) + 24
    return top + LINE_PX - 12


def panel(
    canvas: Canvas, kernel: str, found: Sequence[SweepResult], values: Sequence[Value], top: float
) -> float:
    """Draw a bar for each value of each setting; return the bottom."""
    most = max(v for f in found for value in values if (v := value(f)) is not None)
    x = AxisScale(0, most * 1.02, LEFT, RIGHT)
    height = BAR * len(found)
    Panel(canvas, top, height, x).axes(f"{kernel}, {counted(found[0].size, 'value')} of K", "")
    thin = (BAR - 6) / len(values)
    for i, f in enumerate(found):
        y = top + i * BAR + 3
        canvas.text(LEFT - 10, y + BAR / 2, f.spec.setting, "ink", "end")
        for j, value in enumerate(values):
            v = value(f)
            if v is not None:
                tip = f"{f.spec.setting}: {v:g}"
                css = f"bar {SeriesStyle(j).css}"
                canvas.box(LEFT, y + j * thin, x(v) - LEFT, max(1.0, thin - 1), css, tip=tip)
        words = "best" if f.best else "" if f.is_right else "WRONG"
        canvas.text(RIGHT + 10, y + BAR / 2, words, "ink strong")
    return top + height + 30

"""Pieces of a picture in SVG: scales, marks, text that keeps clear of other text.

The text is plain SVG 1.1 with classes, so that every viewer shows it; where the viewer prefers dark
colours the same classes take others. The picture brings its own background along.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

from treadle.cli.table import printable

FONT_PX = 12
CHAR_PX = 6.4  # of a letter at that size, on average and a little more
LINE_PX = 15
MARK_PX = 5.0  # from a mark's middle to its edge
SHAPES = ("circle", "diamond", "square")  # by engine, with its colour
TICKS = 9  # on an axis, at most

LIGHT = {
    "back": "#fcfcfa", "ink": "#20201e", "muted": "#62615c", "grid": "#e6e5e0", "axis": "#8b8a84",
    "e0": "#1f6fd0", "e1": "#c4480c", "e2": "#0f7f6a",
}  # fmt: skip
DARK = {
    "back": "#191918", "ink": "#f1f0ec", "muted": "#b3b1aa", "grid": "#353532", "axis": "#84837c",
    "e0": "#6cabf7", "e1": "#ff9c5e", "e2": "#4fc7ae",
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """From values in ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of ``value``."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = log10(low), log10(high), log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within: 1, 2, 5 of each decade, or fewer of each; else equal steps."""
        if not self.log:
            rough = (self.high - self.low) / (TICKS - 1)
            power = 10.0 ** floor(log10(rough))
            step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
            first, last = ceil(self.low / step), floor(self.high / step)
            return [step * i for i in range(first, last + 1)]
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [d * 10.0**p for p in decades for d in digits]
            found = [tick for tick in found if self.low <= tick <= self.high]
            if len(found) <= TICKS:
                break
        if len(found) < 2:  # too small a part of a decade
            return Scale(self.low, self.high, self.start, self.end).ticks()
        return found[:: ceil(len(found) / TICKS)]


def log_scale(values: Iterable[float], start: float, end: float, room: float = 1.5) -> Scale:
    """A logarithmic scale around ``values``, by the factor ``room`` wider at both ends."""
    values = [value for value in values if value > 0]
    return Scale(min(values) / room, max(values) * room, start, end, log=True)


@dataclass
class Canvas:
    """Lines of SVG, and where they hold text and marks already."""

    lines: list[str] = field(default_factory=list)
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def add(self, line: str) -> None:
        """One element."""
        self.lines.append(line)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self.add(f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def path(self, points: Iterable[tuple[float, float]], css: str) -> None:
        """A line through ``points``."""
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<polyline class="{css}" points="{text}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        css: str = "ink",
        anchor: str = "start",
        turn: float = 0.0,
    ) -> None:
        """Text whose baseline is at ``y``, turned by ``turn`` degrees."""
        place = f'x="{x:.1f}" y="{y:.1f}"'
        turned = f' transform="rotate({turn:.1f} {x:.1f} {y:.1f})"' if turn else ""
        self.add(f'<text class="{css}" {place} text-anchor="{anchor}"{turned}>{safe(text)}</text>')

    def mark(self, x: float, y: float, engine: int, hollow: bool, tip: str = "") -> None:
        """A point, in its engine's colour and shape; ``tip`` is shown when pointed at."""
        css = f"mark e{engine % len(SHAPES)}" + " hollow" * hollow
        title = f"<title>{safe(tip)}</title>" if tip else ""
        shape, r = SHAPES[engine % len(SHAPES)], MARK_PX
        if shape == "circle":
            self.add(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{r}">{title}</circle>')
        else:
            corners = [(0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)]
            if shape == "square":
                corners = [(-r, -r), (r, -r), (r, r), (-r, r)]
            points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
            self.add(f'<polygon class="{css}" points="{points}">{title}</polygon>')
        self.taken.append((x - r, y - r, x + r, y + r))

    def keep_clear(
        self, start: tuple[float, float], end: tuple[float, float], samples: int
    ) -> None:
        """Let no label cross the line from ``start`` to ``end``."""
        for i in range(samples + 1):
            x, y = (a + (b - a) * i / samples for a, b in zip(start, end, strict=True))
            self.taken.append((x - 2, y - 2, x + 2, y + 2))

    def label(self, x: float, y: float, text: str, css: str = "ink") -> bool:
        """Text beside a mark, on the first side where it hides nothing; False if there is none."""
        width, gap = CHAR_PX * len(text), MARK_PX + 4
        sides = (
            (x + gap, y + 4, "start", x + gap),
            (x - gap, y + 4, "end", x - gap - width),
            (x, y - gap, "middle", x - width / 2),
            (x, y + gap + 9, "middle", x - width / 2),
        )
        for at, base, anchor, left in sides:
            box = left, base - 10, left + width, base + 3
            if not any(overlap(box, other) for other in self.taken):
                self.taken.append(box)
                self.text(at, base, text, css, anchor)
                return True
        return False


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Tell whether two boxes (left, top, right, bottom) share a point."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Move places on a line apart to ``gap`` at least, in their order, within ``low`` to ``high``
    if they fit.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = [0.0] * len(wanted)
    last = low - gap
    for i in order:
        last = places[i] = max(wanted[i], last + gap)
    limit = high
    for i in reversed(order):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places


def safe(text: str) -> str:
    """Text as XML may hold it, control characters written out."""
    return escape(printable(text))


def style() -> str:
    """The classes of all that is drawn."""
    return (
        "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}"
        ".title{font-size:20px;font-weight:600}.head{font-size:15px;font-weight:600}"
        ".strong{font-weight:600}"
        ".grid,.axis,.roof,.curve,.whisker{fill:none}.grid{stroke-width:1}.axis{stroke-width:1}"
        ".roof{stroke-width:1.5}.dashed{stroke-dasharray:6 4}.curve{stroke-width:2}"
        ".whisker{stroke-width:1.5}.mark{stroke-width:2}"
        + colours(LIGHT)
        # A style of its own within: what does not know the query skips it alone.
        + "@media (prefers-color-scheme:dark){"
        + colours(DARK)
        + "}"
    )


def colours(palette: dict[str, str]) -> str:
    """The rules that name a colour."""
    rules = f".back{{fill:{palette['back']}}}"
    for name in ("ink", "muted"):
        rules += f".{name}{{fill:{palette[name]}}}"
    for name in ("grid", "axis"):
        rules += f".{name}{{stroke:{palette[name]}}}"
    rules += f".roof{{stroke:{palette['muted']}}}"
    for name in ("e0", "e1", "e2"):
        colour = palette[name]
        rules += f".{name}{{stroke:{colour}}}.mark.{name}{{fill:{colour}}}"
    return rules + f".mark.hollow{{fill:{palette['back']}}}"


def document(lines: Iterable[str], width: float, height: float, title: str) -> str:
    """The whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
    )
    back = f'<rect class="back" width="{width:.0f}" height="{height:.0f}" rx="8"/>'
    body = "\n".join(lines)
    return (
        f"{head}\n<title>{safe(title)}</title>\n<style>{style()}</style>\n{back}\n{body}\n</svg>\n"
    )

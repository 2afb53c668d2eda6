"""SVG charts: document frame, axes, markers, labels that do not overlap.

The output is plain SVG 1.1 with classes, so that every viewer shows it; viewers that prefer dark
colours get other colours for the same classes. The chart has its own background.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from html import escape
from math import ceil, floor, log10
from pathlib import Path

from treadle.base.fast_classes import dataclass
from treadle.cli.ui.table import printable
from treadle.errors import FileError
from treadle.files.target import check_folder, check_not_read

HEAD = b'<svg xmlns="http://www.w3.org/2000/svg"'  # the first bytes of each chart
CHAR_PX = 6.4  # width of a 12 px letter, a little above average
LINE_PX = 15
MARK_PX = 5.0  # from a marker's centre to its edge
# Corners of marker shapes around their centre; a circle has none.
SHAPES: tuple[list[tuple[float, float]], ...] = (
    [],
    [(0, -MARK_PX - 1), (MARK_PX + 1, 0), (0, MARK_PX + 1), (-MARK_PX - 1, 0)],
    [(-MARK_PX, -MARK_PX), (MARK_PX, -MARK_PX), (MARK_PX, MARK_PX), (-MARK_PX, MARK_PX)],
    [(0, -MARK_PX - 1), (MARK_PX + 1, MARK_PX), (-MARK_PX - 1, MARK_PX)],
)
TICKS = 9  # on an axis, at most
WIDTH = 880
MARGIN = 24

# Colours of series are s0, s1, ...: any two of them, and each and the background, are distinct
# also for viewers without red, green or blue cones (a distance of 20 and more in CIELAB).
LIGHT = {
    "back": "#fcfcfa",
    "ink": "#20201e",
    "muted": "#62615c",
    "grid": "#e6e5e0",
    "axis": "#8b8a84",
    "s0": "#1f6fd0",
    "s1": "#c4480c",
    "s2": "#074d32",
    "s3": "#c27095",
    "s4": "#8526fc",
    "s5": "#7a0a7b",
    "heat": "#14508f",
}
DARK = {
    "back": "#191918",
    "ink": "#f1f0ec",
    "muted": "#b3b1aa",
    "grid": "#353532",
    "axis": "#84837c",
    "s0": "#6cabf7",
    "s1": "#ff9c5e",
    "s2": "#12eac8",
    "s3": "#f2dc30",
    "s4": "#f0496b",
    "s5": "#d1eea9",
    "heat": "#6cabf7",
}
SERIES = sum(name[0] == "s" for name in LIGHT)  # number of colours, after which they repeat


@dataclass(frozen=True)
class SeriesStyle:
    """Style of a series: index of its colour and of its marker's shape, and whether markers are
    hollow.
    """

    colour: int
    shape: int = 0
    hollow: bool = False

    @property
    def css(self) -> str:
        """The CSS class of the colour."""
        return f"s{self.colour % SERIES}"


@dataclass(frozen=True)
class AxisScale:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of ``value``."""
        low = self.low
        high = self.high
        if self.log:
            low = log10(low)
            high = log10(high)
            value = log10(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return at most TICKS round values in the range. On a logarithmic scale 1, 2, 5 of each
        decade, or fewer of these; else equal steps.
        """
        if not self.log:
            rough = (self.high - self.low) / (TICKS - 1)
            power = 10.0 ** floor(log10(rough))
            step = next(s * power for s in (1, 2, 5, 10) if s * power >= rough)
            first = ceil(self.low / step)
            last = floor(self.high / step)
            return [step * i for i in range(first, last + 1)]
        decades = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = [d * 10.0**p for p in decades for d in digits]
            found = [tick for tick in found if self.low <= tick <= self.high]
            if len(found) <= TICKS:
                break
        if len(found) < 2:  # the range is too small a part of a decade
            return AxisScale(self.low, self.high, self.start, self.end).ticks()
        return found[:: ceil(len(found) / TICKS)]

    def labelled(self) -> list[tuple[float, str]]:
        """Return the ticks as (value, label)."""
        return [(tick, f"{tick:g}") for tick in self.ticks()]


def log_scale(values: Iterable[float], start: float, end: float, room: float = 1.5) -> AxisScale:
    """Return a logarithmic scale around the positive ``values``, wider by the factor ``room`` at
    both ends, from the pixel ``start`` to the pixel ``end``.
    """
    values = [value for value in values if value > 0]
    return AxisScale(min(values) / room, max(values) * room, start, end, log=True)


@dataclass
class Canvas:
    """Lines of SVG in ``lines``, and boxes that labels must not cover in ``taken``: (left, top,
    right, bottom) in pixels.
    """

    lines: list[str] = field(default_factory=list)
    taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def add(self, name: str, css: str, inside: str | None = None, **at: float | str) -> None:
        """Append the SVG element ``name``. ``css``: its class; ``inside``: its content, as SVG;
        ``at``: attributes, with ``_`` for ``-``.
        """
        values = {
            key: value if isinstance(value, str) else f"{value:.1f}" for key, value in at.items()
        }
        places = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in values.items())
        end = "/>" if inside is None else f">{inside}</{name}>"
        self.lines.append(f'<{name} class="{css}"{places}{end}')

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """Draw a straight line with the class ``css``."""
        self.add("line", css, x1=x1, y1=y1, x2=x2, y2=y2)

    def path(self, points: Iterable[tuple[float, float]], css: str) -> None:
        """Draw a polyline through ``points`` with the class ``css``."""
        self.add("polyline", css, points=places(points))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        css: str = "ink",
        anchor: str = "start",
        turn: float = 0.0,
    ) -> None:
        """Draw text with its baseline at ``y``, rotated by ``turn`` degrees. ``css``: its class;
        ``anchor``: which part of it is at ``x`` ("start", "middle" or "end").
        """
        turned = {"transform": f"rotate({turn:.1f} {x:.1f} {y:.1f})"} if turn else {}
        self.add("text", css, safe(text), x=x, y=y, text_anchor=anchor, **turned)

    def mark(self, x: float, y: float, look: SeriesStyle, tip: str = "") -> None:
        """Draw the marker of the style ``look`` with the tooltip ``tip``."""
        css = f"mark {look.css}" + " hollow" * look.hollow
        r = MARK_PX
        corners = SHAPES[look.shape % len(SHAPES)]
        if corners:
            points = places((x + dx, y + dy) for dx, dy in corners)
            self.add("polygon", css, titled(tip), points=points)
        else:
            self.add("circle", css, titled(tip), cx=x, cy=y, r=r)
        self.taken.append((x - r, y - r, x + r, y + r))

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        css: str,
        opacity: float = 1.0,
        tip: str = "",
    ) -> None:
        """Draw a filled rectangle with the class ``css`` and the tooltip ``tip``."""
        faint = {"fill_opacity": f"{opacity:.3f}"} if opacity < 1 else {}
        self.add("rect", css, titled(tip), x=x, y=y, width=width, height=height, **faint)

    def head(self, title: str, subtitle: str, origin: str) -> float:
        """Draw title, subtitle and ``origin`` (where, when and by which version it was measured);
        return the y of their bottom.
        """
        self.text(MARGIN, 40, title, "ink title")
        self.text(MARGIN, 62, subtitle, "ink")
        self.text(MARGIN, 80, origin, "muted")
        return 80

    def keep_clear(
        self, start: tuple[float, float], end: tuple[float, float], samples: int
    ) -> None:
        """Keep labels off the line from ``start`` to ``end``, by marking ``samples`` + 1 points on
        it as taken.
        """
        for i in range(samples + 1):
            x, y = (a + (b - a) * i / samples for a, b in zip(start, end, strict=True))
            self.taken.append((x - 2, y - 2, x + 2, y + 2))

    def label(self, x: float, y: float, text: str, css: str = "ink") -> bool:
        """Draw a label beside the marker at (x, y), on the first side where it covers nothing.
        Return whether there was one.
        """
        width = CHAR_PX * len(text)
        gap = MARK_PX + 4
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


@dataclass
class Panel:
    """One diagram with its axes. ``top`` and ``height`` are in pixels; without ``y`` it has no
    vertical axis.
    """

    canvas: Canvas
    top: float
    height: float
    x: AxisScale
    y: AxisScale | None = None

    def axes(
        self,
        title: str,
        x_title: str,
        y_title: str = "",
        x_ticks: Iterable[tuple[float, str]] = (),
        y_ticks: Iterable[tuple[float, str]] = (),
    ) -> None:
        """Draw title, grid, ticks (value, label; by default the scales' own) and axis titles."""
        c = self.canvas
        x = self.x
        top = self.top
        bottom = self.top + self.height
        c.text(MARGIN, top - 20, title, "ink head")
        for value, text in x_ticks or x.labelled():
            c.line(x(value), top, x(value), bottom, "grid")
            c.text(x(value), bottom + 18, text, "muted", "middle")
        if self.y:
            for value, text in y_ticks or self.y.labelled():
                at = self.y(value)
                c.line(x.start, at, x.end, at, "grid")
                c.text(x.start - 8, at + 4, text, "muted", "end")
            c.text(MARGIN + 4, (top + bottom) / 2, y_title, "muted", "middle", turn=-90)
        c.line(x.start, bottom, x.end, bottom, "axis")
        c.text((x.start + x.end) / 2, bottom + 38, x_title, "muted", "middle")


def overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Return whether two boxes (left, top, right, bottom) overlap."""
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def spread(wanted: list[float], gap: float, low: float, high: float) -> list[float]:
    """Return positions at least ``gap`` apart, in the order of ``wanted`` and near them, within
    ``low`` to ``high`` if they fit.
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


def places(points: Iterable[tuple[float, float]]) -> str:
    """Format points as SVG's attribute ``points``."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def titled(tip: str) -> str:
    """Return the SVG element that shows ``tip`` as a tooltip; "" without a tip."""
    return f"<title>{safe(tip)}</title>" if tip else ""


def safe(text: str) -> str:
    """Escape text for XML; control characters become visible escapes."""
    return escape(printable(text))


def origin(facts: Iterable[str]) -> str:
    """Return where and when something was measured, in a line: processor, ``facts``, date and
    treadle's version.
    """
    from datetime import date

    from treadle import __version__
    from treadle.machine.topology import cpu_name

    parts = [cpu_name(), *facts, date.today().isoformat(), f"treadle {__version__}"]
    return " · ".join(parts)


def style() -> str:
    """Return the charts' CSS."""
    return (
        "text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}"
        ".title{font-size:20px;font-weight:600}.head{font-size:15px;font-weight:600}"
        ".strong{font-weight:600}"
        ".grid,.axis,.roof,.curve,.whisker,.ring{fill:none}.grid,.axis{stroke-width:1}"
        ".roof{stroke-width:1.5}.dashed{stroke-dasharray:6 4}.curve{stroke-width:2}"
        ".whisker{stroke-width:1.5}.mark,.ring{stroke-width:2}"
        + colours(LIGHT)
        # A separate block, so that viewers without media queries skip only this.
        + "@media (prefers-color-scheme:dark){"
        + colours(DARK)
        + "}"
    )


def colours(palette: dict[str, str]) -> str:
    """Return the CSS rules for the colours of ``palette``, LIGHT or DARK."""
    rules = f".back{{fill:{palette['back']}}}"
    for name in ("ink", "muted", "heat"):
        rules += f".{name}{{fill:{palette[name]}}}"
    for name in ("grid", "axis"):
        rules += f".{name}{{stroke:{palette[name]}}}"
    rules += f".roof{{stroke:{palette['muted']}}}.ring{{stroke:{palette['ink']}}}"
    for name in (f"s{i}" for i in range(SERIES)):
        colour = palette[name]
        rules += f".{name}{{stroke:{colour}}}.mark.{name},.bar.{name}{{fill:{colour}}}"
    return rules + f".bar{{stroke:none}}.mark.hollow{{fill:{palette['back']}}}"


def document(lines: Iterable[str], height: float, title: str) -> str:
    """Return the SVG document with these ``lines`` (SVG elements), ``height`` pixels high.
    ``title``: the text of its ``<title>``.
    """
    head = (
        f'{HEAD.decode()} width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
    )
    back = f'<rect class="back" width="{WIDTH}" height="{height:.0f}" rx="8"/>'
    body = "\n".join(lines)
    return (
        f"{head}\n<title>{safe(title)}</title>\n<style>{style()}</style>\n{back}\n{body}\n</svg>\n"
    )


def check_place(path: Path, sources: Iterable[Path] = ()) -> None:
    """Raise FileError unless a chart may be written to ``path``: an earlier chart may be replaced,
    any other file may not, and the files of ``sources`` never. Called before the work.
    """
    check_not_read(path, sources)
    check_folder(path)
    if not path.is_file():
        return
    with path.open("rb") as file:
        head = file.read(len(HEAD))
    if head and head != HEAD:
        what = "already exists, and is not a chart by treadle"
        raise FileError(what, path=path, expected="another file name")

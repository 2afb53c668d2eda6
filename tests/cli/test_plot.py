"""The picture, parsed: where its marks lie follows from the numbers they stand for."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations, pairwise
from math import log10
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import pytest

from treadle import __version__
from treadle.cli.bench_plot import LEFT, PLOT_HEIGHT, RIGHT, draw, looks_of
from treadle.cli.bench_results import Result
from treadle.cli.ui.svg import (
    DARK,
    LIGHT,
    SERIES,
    AxisScale,
    Canvas,
    SeriesStyle,
    log_scale,
    origin,
    spread,
)

SVG = "{http://www.w3.org/2000/svg}"
ORIGIN = "A Processor 9000 · 2026-01-02 · treadle 9"
PEAKS = {"bandwidth": 50e9, "int8": 2e12, "bf16": 1e12, "f32": 5e11}
OURS = Result(
    "pp512",
    0,
    2,
    1,
    500.0,
    480.0,
    510.0,
    2e9,
    1e12,
    0.5,
    "treadle",
    "a-Q8_0.gguf",
    "Q8_0",
    "int8",
    {"int8": 0.5},
    PEAKS,
)
WRITES = replace(
    OURS, test="tg64", tok_s=40.0, tok_s_min=30.0, tok_s_max=44.0, bytes_s=4e10, ops_s=8e10
)


def theirs(ours: Result, slower: float) -> Result:
    speeds = {f: getattr(ours, f) / slower for f in ("tok_s", "tok_s_min", "tok_s_max")}
    unknown = replace(ours, bytes_s=None, ops_s=None, share_of_peak=None, peak=None, shares=None)
    return replace(unknown, engine="llama-cpp-python", **speeds)


def at_depth(ours: Result, depth: int, slower: float) -> Result:
    speeds = {f: getattr(ours, f) / slower for f in ("tok_s", "tok_s_min", "tok_s_max")}
    return replace(ours, depth=depth, **speeds)


def parse(*results: Result) -> Element:
    return ElementTree.fromstring(draw(results, ORIGIN))


def panels(root: Element) -> dict[str, Element]:
    return {g.attrib["id"]: g for g in root.iter(f"{SVG}g")}


def marks(panel: Element) -> dict[str, tuple[float, float, str]]:
    """x, y and classes of each mark, by what is shown when it is pointed at."""
    found = {}
    for element in panel:
        title = element.find(f"{SVG}title")
        if title is None or not title.text:
            continue
        if element.tag == f"{SVG}circle":
            x = float(element.attrib["cx"])
            y = float(element.attrib["cy"])
        else:
            corners = [tuple(map(float, p.split(","))) for p in element.attrib["points"].split()]
            x = sum(c[0] for c in corners) / len(corners)
            y = sum(c[1] for c in corners) / len(corners)
        found[title.text] = x, y, element.attrib["class"]
    return found


def mark(panel: Element, *words: str) -> tuple[float, float, str]:
    """The one mark whose text has all ``words``."""
    (found,) = (m for text, m in marks(panel).items() if all(word in text for word in words))
    return found


def texts(element: Element) -> list[str]:
    return [text.text or "" for text in element.iter(f"{SVG}text")]


# -- panels ---------------------------------------------------------------------------------------


def test_panels_without_data_are_left_out() -> None:
    assert list(panels(parse(OURS, WRITES))) == ["roofline"]
    deep = at_depth(OURS, 4096, 2)
    assert list(panels(parse(OURS, deep))) == ["roofline", "depth"]
    other = replace(OURS, model="b.gguf", format="Q4_0")
    assert list(panels(parse(OURS, other))) == ["roofline", "models"]
    assert list(panels(parse(theirs(OURS, 2), theirs(at_depth(OURS, 9, 2), 2)))) == ["depth"]
    assert list(panels(parse(OURS, other, deep))) == ["roofline", "depth", "models"]
    assert list(panels(parse(theirs(OURS, 2)))) == []


def test_a_point_lies_where_its_work_and_speed_put_it() -> None:
    panel = panels(parse(OURS, WRITES))["roofline"]
    (x1, y1, css1), (x2, y2, css2) = mark(panel, "pp512"), mark(panel, "tg64")
    assert (css1, css2) == ("mark s0", "mark s1 hollow")
    # 500 operations a byte against 2, and 1e12 operations a second against 8e10. One decade is as
    # wide as the axis over its decades: from the ridge of f32, 10, or 2, to 500, and a margin.
    room = 2.5
    decades = log10(500 * room) - log10(2 / room)
    assert x1 - x2 == pytest.approx((RIGHT - LEFT) / decades * log10(250), abs=0.2)
    assert x2 == pytest.approx(LEFT + (RIGHT - LEFT) / decades * log10(room), abs=0.2)
    tall = PLOT_HEIGHT / (log10(2e12 * 2) - log10(8e10 / 2))
    assert y2 - y1 == pytest.approx(tall * log10(12.5), abs=0.2)


def test_a_speed_at_the_roof_is_drawn_on_the_roof() -> None:
    at_int8 = replace(OURS, bytes_s=1e9, ops_s=2e12)
    at_memory = replace(WRITES, bytes_s=50e9, ops_s=25e10)
    panel = panels(parse(at_int8, at_memory))["roofline"]
    lines = [e for e in panel.iter(f"{SVG}line") if e.attrib["class"] == "roof dashed"]
    assert len(lines) == 3  # int8, bf16, f32
    heights = {float(line.attrib["y1"]) for line in lines}
    assert mark(panel, "pp512")[1] == min(heights)
    (slope,) = (e for e in panel.iter(f"{SVG}polyline") if e.attrib["class"] == "roof")
    (x1, y1), (x2, y2) = (map(float, p.split(",")) for p in slope.attrib["points"].split())
    x, y, _ = mark(panel, "tg64")
    assert y == pytest.approx(y1 + (x - x1) / (x2 - x1) * (y2 - y1), abs=0.3)
    assert (x2, y2) == (float(lines[0].attrib["x1"]), min(heights))  # they meet at the ridge
    assert {"int8 2.0 Top/s", "bf16 1.0 Top/s", "f32 500 Gop/s"} <= set(texts(panel))
    assert "bandwidth 50.0 GB/s" in texts(panel)


def test_another_program_does_the_same_work_slower() -> None:
    panel = panels(parse(OURS, WRITES, theirs(OURS, 4.0)))["roofline"]
    ours = mark(panel, "treadle", "pp512")
    other = mark(panel, "llama-cpp-python")
    assert other[0] == pytest.approx(ours[0], abs=0.1)
    assert other[2] == "mark s2"
    tall = PLOT_HEIGHT / (log10(2e12 * 2) - log10(8e10 / 2))
    assert other[1] - ours[1] == pytest.approx(tall * log10(4), abs=0.2)


def test_the_best_measurement_of_a_peak_is_the_roof() -> None:
    slow = replace(WRITES, peaks={**PEAKS, "int8": 1.5e12, "bandwidth": 60e9})
    panel = panels(parse(OURS, slow))["roofline"]
    assert {"int8 2.0 Top/s", "bandwidth 60.0 GB/s"} <= set(texts(panel))


def test_speed_by_depth() -> None:
    deep = [at_depth(OURS, d, s) for d, s in ((0, 1), (4096, 2), (16384, 10))]
    panel = panels(parse(*deep, *(theirs(r, 2) for r in deep)))["depth"]
    found = [mark(panel, "treadle", f"depth {d},") for d in (0, 4096, 16384)]
    assert found[0][0] == LEFT + 8
    assert found[2][0] == RIGHT
    assert found[1][0] == pytest.approx(LEFT + 8 + (RIGHT - LEFT - 8) / 4, abs=0.1)
    halves = found[1][1] - found[0][1]
    tenth = found[2][1] - found[0][1]
    assert tenth / halves == pytest.approx(log10(10) / log10(2), abs=0.01)
    other = mark(panel, "llama-cpp-python", "depth 0,")
    assert other[1] - found[0][1] == pytest.approx(halves, abs=0.1)
    curves = [e for e in panel.iter(f"{SVG}polyline") if "curve" in e.attrib["class"]]
    assert [c.attrib["class"] for c in curves] == ["curve s0", "curve s1"]
    assert len(curves[0].attrib["points"].split()) == 3
    whiskers = [e for e in panel.iter(f"{SVG}line") if e.attrib["class"] == "whisker s0"]
    top = float(whiskers[0].attrib["y2"])
    bottom = float(whiskers[0].attrib["y1"])
    assert top < found[0][1] < bottom  # from the lowest to the highest repetition
    assert {"0", "4096", "16384", "tokens in the context before"} <= set(texts(panel))


def test_speed_by_model_file() -> None:
    other = replace(OURS, model="b-Q4_0.gguf", format="Q4_0", tok_s=250.0, tok_s_min=245.0)
    slow = theirs(replace(OURS, tok_s=50.0), 1)
    panel = panels(parse(OURS, other, slow, WRITES))["models"]
    x500 = mark(panel, "a-Q8_0", "pp512", "treadle")
    x250 = mark(panel, "b-Q4_0")
    x50 = mark(panel, "llama")
    x40 = mark(panel, "tg64")
    assert x500[0] - x250[0] == pytest.approx((x500[0] - x50[0]) * log10(2), abs=0.2)
    assert x500[1] == x50[1] < x250[1] < x40[1]  # a row a file, tests below each other
    assert "Speed by format" in texts(panel)
    assert {"a-Q8_0", "b-Q4_0", "pp512: reads a prompt", "tg64: writes"} <= set(texts(panel))
    same = replace(other, format="Q8_0")
    assert "Speed by model file" in texts(panels(parse(OURS, same))["models"])


def test_long_names_keep_their_ends() -> None:
    long = replace(OURS, model=f"{'x' * 60}-Q8_0.gguf")
    (name,) = (t for t in texts(panels(parse(long, OURS))["models"]) if "…" in t)
    assert name.startswith("xxx")
    assert name.endswith("x-Q8_0")
    assert len(name) <= 34


def test_series_say_what_differs() -> None:
    deep = at_depth(WRITES, 9, 2)
    many = [replace(r, sequences=8, threads=1) for r in (WRITES, deep)]
    names = texts(panels(parse(WRITES, deep, *many))["depth"])
    assert {"tg64 2 thr.", "tg64 × 8 1 thr."} <= set(names)


def test_axes_have_titles_and_units() -> None:
    deep = at_depth(OURS, 100, 2)
    root = parse(OURS, deep, replace(OURS, model="b"))
    said = {name: texts(panel) for name, panel in panels(root).items()}
    assert {"operations per byte read", "operations a second"} <= set(said["roofline"])
    assert {"tokens in the context before", "tokens a second"} <= set(said["depth"])
    assert "tokens a second" in said["models"]
    assert any(re.fullmatch(r"\d+ Gop/s", text) for text in said["roofline"])


def test_the_legend_has_every_program_and_kind() -> None:
    root = parse(OURS, theirs(WRITES, 2))
    assert {"treadle pp512", "llama-cpp-python tg64"} <= set(texts(root))
    assert {"pp512", "tg64"} <= set(texts(parse(OURS, WRITES)))  # one program needs no name
    assert "full, solid: prompt processing (pp); hollow, dashed: generation (tg)" in texts(root)
    assert not any("writes" in text for text in texts(parse(OURS)))


# -- as a file ------------------------------------------------------------------------------------


def test_names_are_escaped() -> None:
    hostile = "<script>alert('&')</script>\x1b\x00\ud800\".gguf"
    text = draw([replace(OURS, model=hostile), replace(OURS, model="b", engine="a&<b>")], "<\x1b>")
    root = ElementTree.fromstring(text.encode())  # parses, as bytes in UTF-8
    assert root.find(f".//{SVG}script") is None
    assert "\x1b" not in text
    assert any("<script>" in (t.text or "") for t in root.iter(f"{SVG}title"))


def test_it_stands_alone_and_fits_both_backgrounds() -> None:
    root = parse(OURS, WRITES)
    width = float(root.attrib["width"])
    height = float(root.attrib["height"])
    back = root.find(f"{SVG}rect")
    assert back is not None
    assert back.attrib["class"] == "back"
    assert (float(back.attrib["width"]), float(back.attrib["height"])) == (width, height)
    style = root.findtext(f"{SVG}style") or ""
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    for name in ("back", "ink", "muted", "heat", *(f"s{i}" for i in range(SERIES))):
        assert f".{name}{{" in light
        assert f".{name}{{" in dark
    assert "http" not in draw([OURS], ORIGIN).replace('xmlns="http://www.w3.org/2000/svg"', "")
    # Text and background differ enough to be read: a ratio of 4.5, as WCAG asks.
    for part in (light, dark):
        back_colour = luminance(part, "back")
        for name in ("ink", "muted"):
            low, high = sorted((luminance(part, name), back_colour))
            assert (high + 0.05) / (low + 0.05) >= 4.5, name


def luminance(style: str, name: str) -> float:
    found = re.search(rf"\.{name}{{fill:(#\w+)}}", style)
    assert found
    return float(np.array([0.2126, 0.7152, 0.0722]) @ linear(found.group(1)))


def linear(colour: str) -> np.ndarray:
    """Light of red, green and blue."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


# Machado, Oliveira and Fernandes (2009): what an eye sees that lacks one kind of cones altogether.
SEEN = {
    "all three": np.eye(3),
    "no red": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "no green": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "no blue": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(light: np.ndarray) -> np.ndarray:
    """In CIELAB, where distances are about as large as they look."""
    x = XYZ @ np.clip(light, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_series_stay_apart_for_every_eye(palette: dict[str, str], eye: np.ndarray) -> None:
    seen = [lab(eye @ linear(palette[f"s{i}"])) for i in range(SERIES)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) >= 20
    back = lab(eye @ linear(palette["back"]))
    assert min(np.linalg.norm(back - colour) for colour in seen) >= 30


def test_every_series_has_a_look_of_its_own() -> None:
    models = [
        replace(r, model=f"{i}.gguf", format=f"Q{i}") for i in range(5) for r in (OURS, WRITES)
    ]
    looks = looks_of([*models, *(theirs(r, 2) for r in models)])
    assert len(looks) == 20
    assert len({(look.css, look.shape) for look in looks.values()}) == 20
    assert {look.shape % 2 for key, look in looks.items() if key[0] == "treadle"} == {0}


def test_it_says_where_and_when_and_by_which_version() -> None:
    assert ORIGIN in texts(parse(OURS))
    text = origin(["avx2"])
    assert re.search(r" · avx2 · \d{4}-\d\d-\d\d · treadle ", text)
    assert text.endswith(__version__)


def test_everything_is_inside() -> None:
    results = [at_depth(r, d, 1 + d / 999) for r in (OURS, WRITES) for d in (0, 1000, 32768)]
    results += [replace(r, model="b" * 50, format="Q4_K") for r in results]
    results += [theirs(r, 3) for r in results]
    root = parse(*results)
    width = float(root.attrib["width"])
    height = float(root.attrib["height"])
    for panel in panels(root).values():
        for x, y, _ in marks(panel).values():
            assert 0 < x < width
            assert 0 < y < height
    for text in root.iter(f"{SVG}text"):
        x = float(text.attrib["x"])
        length = 7 * len(text.text or "")
        if text.attrib["text-anchor"] == "start" and "title" not in text.attrib["class"]:
            assert x + length < width + 20, text.text
        assert 0 < float(text.attrib["y"]) < height


# -- scales ---------------------------------------------------------------------------------------


def test_a_log_scale_is_even_in_ratios() -> None:
    scale = AxisScale(1, 1000, 100, 400, log=True)
    assert [scale(v) for v in (1, 10, 100, 1000)] == pytest.approx([100, 200, 300, 400])
    values = [1.0, 1.5, 2, 7, 80, 81, 999]
    assert all(scale(a) < scale(b) for a, b in pairwise(values))
    upward = log_scale([3, 0, 30], 300, 0, room=2)
    assert (upward.low, upward.high) == (1.5, 60)
    assert upward(60) == pytest.approx(0)


@pytest.mark.parametrize(
    ("scale", "ticks"),
    [
        (AxisScale(0, 100, 0, 1), [0, 20, 40, 60, 80, 100]),
        (AxisScale(0.5, 60, 0, 1, log=True), [0.5, 1, 2, 5, 10, 20, 50]),
        (AxisScale(0.5, 9000, 0, 1, log=True), [1, 3, 10, 30, 100, 300, 1000, 3000]),
        (AxisScale(1, 1e8, 0, 1, log=True), [10.0**p for p in range(9)]),
        (AxisScale(1, 1e12, 0, 1, log=True), [10.0**p for p in range(0, 13, 2)]),
        (AxisScale(2.05, 2.95, 0, 1, log=True), [2.2, 2.4, 2.6, 2.8]),
    ],
)
def test_ticks_are_round_and_few(scale: AxisScale, ticks: list[float]) -> None:
    assert scale.ticks() == pytest.approx(ticks)


def test_labels_keep_clear() -> None:
    canvas = Canvas()
    canvas.mark(100, 100, SeriesStyle(0))
    assert canvas.label(100, 100, "first")
    assert canvas.label(100, 100, "second")
    boxes = canvas.taken
    assert not any(
        a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
        for i, a in enumerate(boxes)
        for b in boxes[:i]
    )
    assert [canvas.label(100, 100, "more") for _ in range(3)] == [True, True, False]
    assert canvas.label(300, 100, "elsewhere")


def test_spreading() -> None:
    assert spread([10, 50, 11], 15, 0, 100) == [10, 50, 25]
    assert spread([95, 96], 15, 0, 100) == [85, 100]
    assert spread([5.0], 15, 0, 100) == [5]

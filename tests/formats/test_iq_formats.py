"""The IQ formats: read to the bit as ggml and the gguf package do, written no worse than ggml."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from treadle.devices.cpu.weight_quantizer import Searcher
from treadle.files.gguf import open_gguf
from treadle.formats import GGML_TYPES, Format, format, grids, scale_search, signs
from treadle.formats.grids import Codebook
from treadle.formats.iq1 import IQ1_M, IQ1_S
from treadle.formats.iq2 import IQ2_S, IQ2_XS, IQ2_XXS
from treadle.formats.iq3 import IQ3_S, IQ3_XXS
from treadle.formats.iq4 import IQ4_NL, IQ4_XS, STEPS, encode
from treadle.formats.nearest import Nearest, number
from treadle.formats.packing import join_words, split_words
from treadle.kernels.quantize.select import search_kernel

F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]
FORMATS = [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS]
EVERY = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def by_kernel(fmt: Format) -> Format:
    """The same format, whose scales a kernel searches for."""

    def quantize_blocks(x: F32Array, weights: F32Array | None = None) -> npt.NDArray[Any]:
        spec = search_kernel(fmt, weights is not None)
        assert spec is not None
        return quantize(fmt, x, weights, Searcher(spec))

    return replace(fmt, quantize=quantize_blocks)


COMPILED = [by_kernel(fmt) for fmt in FORMATS if search_kernel(fmt, False)]
# What a search promises, each kind of it keeps.
SEARCHES = pytest.mark.parametrize(
    "fmt",
    [*FORMATS, *COMPILED],
    ids=[*(fmt.name for fmt in FORMATS), *(f"{fmt.name} by kernel" for fmt in COMPILED)],
)
GRIDS = [grids.IQ1, grids.IQ2_XXS, grids.IQ2_XS, grids.IQ2_S, grids.IQ3_XXS, grids.IQ3_S]
EVERY_GRID = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: grid.name)
NEAREST = [Nearest(grid, 5 if grid.dim == 8 else 16) for grid in GRIDS]
EVERY_NEAREST = pytest.mark.parametrize("nearest", NEAREST, ids=lambda n: n.grid.name)


def same_bits(a: F32Array, b: F32Array) -> bool:
    """Equal to the bit; a NaN equals any NaN, for its sign is the processor's choice."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan]))


def dequantize_by_gguf(fmt: Format, packed: npt.NDArray[np.uint8]) -> F32Array:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        kind = gguf_package.GGMLQuantizationType(fmt.ggml_id)
        return np.asarray(gguf_package.dequantize(packed, kind))


def quantize(
    fmt: Format, x: F32Array, weights: F32Array | None = None, *search: Any
) -> npt.NDArray[Any]:
    """With weights, which the type of a row's function does not name."""
    function: Callable[..., npt.NDArray[Any]] = fmt.quantize
    return function(x, weights, *search)


def loss(y: npt.NDArray[Any], x: F32Array, weights: float | F32Array = 1) -> F64Array:
    """[..., n] -> [...]: the root of the mean square of the error."""
    square = (y.astype(np.float64) - x) ** 2
    mean: F64Array = (square * weights).mean(axis=-1)
    return np.sqrt(mean)


def blocks_of(fmt: Format, n: int, seed: int, scale: float = 1.0) -> F32Array:
    x = np.random.default_rng(seed).standard_normal((n, fmt.block)) * scale
    return x.astype(np.float32)


def round_trip(fmt: Format, x: F32Array, weights: F32Array | None = None) -> F32Array:
    return fmt.dequantize(quantize(fmt, x, weights))


@pytest.fixture(scope="module")
def vectors(data: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(data / "quant" / "ggml_quant_vectors.npz") as z:
        return dict(z)


# -- reading ----------------------------------------------------------------------------


@EVERY
def test_a_row_agrees_with_the_table(fmt: Format) -> None:
    assert GGML_TYPES[fmt.ggml_id] == (fmt.name, fmt.block, fmt.dtype.itemsize, 0)


@EVERY
def test_dequantize_gives_the_floats_of_ggml(
    fmt: Format, vectors: dict[str, npt.NDArray[Any]]
) -> None:
    weights = fmt.dequantize_rows(vectors[f"{fmt.name.lower()}_q"])
    assert same_bits(weights, vectors[f"{fmt.name.lower()}_y"])


@EVERY
@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=20)
def test_dequantize_agrees_on_any_bytes(fmt: Format, seed: int) -> None:
    """Scales of infinity and NaN are one in 32."""
    shape = (100, fmt.row_bytes(512))
    packed = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    assert same_bits(fmt.dequantize_rows(packed), dequantize_by_gguf(fmt, packed))


@EVERY
@pytest.mark.parametrize("d", [0x0000, 0x8000, 0x0001, 0x7BFF, 0x7C00, 0xFC00, 0x7E01])
def test_dequantize_agrees_on_odd_scales(fmt: Format, d: int) -> None:
    """Zeros of both signs, the smallest and largest number, infinities, NaN."""
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (20, fmt.dtype.itemsize), np.uint8)
    blocks = packed.view(fmt.dtype)[:, 0]
    if "d" in (fmt.dtype.names or ()):
        blocks["d"] = np.uint16(d).view(np.float16)
    else:  # IQ1_M keeps 4 bits of it in the high nibble of every other byte
        for i in range(4):
            nibble = d >> 4 * i & 15
            blocks["scales"][:, 2 * i + 1] = blocks["scales"][:, 2 * i + 1] & 15 | nibble << 4
    assert same_bits(fmt.dequantize(blocks), dequantize_by_gguf(fmt, packed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "names"),
    [
        ("babyllama105", ("babyllama105-F32.gguf", "babyllama105-IQ4_NL.gguf")),
        ("babyllama105_pad256", ("F32.gguf", "IQ4_NL.gguf")),
    ],
    ids=["babyllama105", "pad256"],
)
def test_a_real_model(data: Path, folder: str, names: tuple[str, str]) -> None:
    """Its weights are those of the gguf package, and ours are nearer to what it was made from."""
    exact, model = (open_gguf(data / "models" / folder / name) for name in names)
    n = 0
    for tensor in model.tensors.values():
        if tensor.type_name != "IQ4_NL":
            continue
        theirs = IQ4_NL.dequantize_rows(tensor.data.reshape(*tensor.shape[:-1], -1))
        assert same_bits(theirs, dequantize_by_gguf(IQ4_NL, tensor.data).reshape(theirs.shape))
        x = exact.tensors[tensor.name].data.view(np.float32).reshape(tensor.shape)
        ours = IQ4_NL.dequantize_rows(IQ4_NL.quantize_rows(x))
        assert (loss(ours, x) <= loss(theirs, x)).all(), tensor.name
        n += 1
    assert n > 30


# -- codebooks --------------------------------------------------------------------------


@EVERY_GRID
def test_a_grid_is_that_of_the_gguf_package(grid: Codebook) -> None:
    table = getattr(gguf_package.quants, grid.name)
    table.init_grid()
    assert np.array_equal(grid.points, table.grid.reshape(table.grid_shape))
    assert grid.points.dtype == (np.int8 if grid is grids.IQ1 else np.uint8)
    assert not grid.points.flags.writeable


def test_steps_and_signs_are_those_of_the_gguf_package() -> None:
    assert STEPS.tolist() == list(gguf_package.quants.IQ4_NL.kvalues)
    assert signs.even_signs().tobytes() == gguf_package.quants.IQ2_XXS.ksigns


def test_nothing_is_decoded_on_import() -> None:
    program = """
import sys
from treadle.formats import grids, iq1, iq2, iq3
for grid in (grids.IQ1, grids.IQ2_XXS, grids.IQ2_XS, grids.IQ2_S, grids.IQ3_XXS, grids.IQ3_S):
    assert "points" not in vars(grid), grid.name
for coder in (iq2.S_CODER, iq2.XS_CODER, iq2.XXS_CODER, iq3.S_CODER, iq3.XXS_CODER):
    assert set(vars(coder.encode.__self__)) == {"grid", "cells"}, coder
assert set(vars(iq1.NEAREST)) == {"grid", "cells"}
assert "gguf" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


# -- finding codes ----------------------------------------------------------------------


def vectors_near(nearest: Nearest, seed: int) -> F32Array:
    """Normal numbers, without their signs where the codebook has none, at the scale that suits."""
    low = nearest.grid.alphabet[0]
    high = nearest.grid.alphabet[-1]
    u = np.random.default_rng(seed).standard_normal((1000, nearest.grid.dim))
    u = u * 0.9 if low < 0 else np.abs(u) * (high / 2.2)
    return u.astype(np.float32)


def distances(nearest: Nearest, u: F32Array, weights: F32Array) -> F64Array:
    """[n vectors, n points]: by the definition."""
    p = nearest.grid.points.astype(np.float64)
    out: F64Array = ((u[:, None] - p) ** 2 * weights[:, None]).sum(axis=-1)
    return out


@EVERY_NEAREST
def test_search_finds_the_nearest_point(nearest: Nearest) -> None:
    u = vectors_near(nearest, 1)
    far = distances(nearest, u, np.ones_like(u))
    found = far[np.arange(len(u)), nearest.search(u, None)]
    assert (found <= far.min(axis=1) * (1 + 1e-4)).mean() > 0.98
    assert found.mean() <= far.min(axis=1).mean() * 1.003


@EVERY_NEAREST
def test_search_heeds_weights(nearest: Nearest) -> None:
    """The points compared are those near without weights: seldom is the best elsewhere."""
    u = vectors_near(nearest, 2)
    weights = np.random.default_rng(3).chisquare(2, u.shape).astype(np.float32)
    far = distances(nearest, u, weights)
    found = far[np.arange(len(u)), nearest.search(u, weights)]
    assert (found <= far.min(axis=1) * (1 + 1e-4)).mean() > 0.95
    assert found.mean() <= far.min(axis=1).mean() * 1.02
    blind = far[np.arange(len(u)), nearest.search(u, None)]
    assert found.mean() < blind.mean() * 0.95


@pytest.mark.slow
@EVERY_NEAREST
def test_find_is_good_enough_to_choose_scales_by(nearest: Nearest) -> None:
    u = vectors_near(nearest, 4)
    far = distances(nearest, u, np.ones_like(u))
    found = far[np.arange(len(u)), nearest.find(u)]
    assert found.mean() <= far.min(axis=1).mean() * 1.5


@EVERY_NEAREST
def test_find_knows_its_own_points(nearest: Nearest) -> None:
    n = len(nearest.points)
    if nearest.grid is grids.IQ3_XXS:  # one of its 8 numbers is off the table's even pitch
        far = nearest.points.take(nearest.find(nearest.points), axis=0) - nearest.points
        assert np.abs(far).max() <= 8
    else:
        assert np.array_equal(nearest.find(nearest.points), np.arange(n))
    assert np.array_equal(nearest.search(nearest.points, None), np.arange(n))


@given(base=st.integers(2, 16), dim=st.sampled_from([4, 8]), seed=st.integers(0, 1 << 32))
def test_number_reads_digits(base: int, dim: int, seed: int) -> None:
    digits = np.random.default_rng(seed).integers(0, base, (10, dim), np.uint8)
    expected = [sum(int(digit) * base**i for i, digit in enumerate(row)) for row in digits]
    assert number(digits, base).tolist() == expected


def test_uneven_steps_are_the_nearest() -> None:
    u = np.random.default_rng(0).uniform(-140, 130, (1000, 32)).astype(np.float32)
    codes, y = encode(u, None, False)
    assert np.array_equal(y, STEPS[codes])
    assert np.array_equal(np.abs(y - u), np.abs(STEPS - u[..., None]).min(axis=-1))


@given(width=st.sampled_from([(2, 4), (4, 2), (8, 1), (4, 3), (4, 7)]), seed=st.integers(0, 99))
def test_bits_come_back(width: tuple[int, int], seed: int) -> None:
    n, w = width
    dtype = "<u4" if n * w > 16 else "<u2" if n * w > 8 else "u1"
    parts = np.random.default_rng(seed).integers(0, 1 << w, (3, 5 * n), np.uint8)
    words = join_words(parts, n, w, dtype)
    assert words.shape == (3, 5)
    assert words.dtype == np.dtype(dtype)
    assert int(words[0, 0]) == sum(int(p) << w * i for i, p in enumerate(parts[0, :n]))
    assert np.array_equal(split_words(words, n, w), parts)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_signs_come_off_and_go_on(even: bool, weighted: bool) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((50, 256)).astype(np.float32)
    weights = rng.random((50, 256)).astype(np.float32) if weighted else None
    magnitude, sign = signs.split_signs(x, weights, even)
    back = magnitude.reshape(-1, 8) * signs.plus_minus()[sign.reshape(-1)]
    assert np.array_equal(back.reshape(x.shape), x)
    if not even:
        assert (magnitude >= 0).all()
        return
    assert np.array_equal(signs.even_signs()[sign & 127], sign)
    odd = (x < 0).reshape(-1, 8).sum(axis=1) % 2 == 1
    flipped = magnitude.reshape(-1, 8) < 0
    assert np.array_equal(flipped.sum(axis=1), odd)
    eights = np.abs(x).reshape(-1, 8)
    if weights is None:
        assert (eights[flipped] == eights.min(axis=1)[odd]).all()
    else:  # what it costs is known only when the codes are: it is among the cheapest
        cost = eights * weights.reshape(-1, 8)
        assert (cost[flipped] <= np.sort(cost, axis=1)[odd, 2]).mean() > 0.98


# -- writing ----------------------------------------------------------------------------


@pytest.mark.slow
@SEARCHES
def test_no_row_is_worse_than_from_ggml(fmt: Format, vectors: dict[str, npt.NDArray[Any]]) -> None:
    x = vectors["x"]
    ours = loss(fmt.dequantize_rows(fmt.quantize_rows(x)), x)
    theirs = loss(vectors[f"{fmt.name.lower()}_y"], x)
    worse = np.flatnonzero(ours > theirs)
    assert not len(worse), list(zip(worse, ours[worse] / theirs[worse], strict=True))


@pytest.mark.parametrize("fmt", [IQ2_XXS, IQ2_XS, IQ1_S], ids=lambda fmt: fmt.name)
def test_weights_make_it_no_worse_than_ggml_with_them(
    fmt: Format, vectors: dict[str, npt.NDArray[Any]]
) -> None:
    """ggml was given these, which are what it calls an importance matrix."""
    x = vectors["x"]
    weights = (x**2).sum(axis=0)
    ours = loss(round_trip(fmt, x, weights), x, weights)
    theirs = loss(vectors[f"{fmt.name.lower()}_y"], x, weights)
    assert (ours <= theirs).all(), (ours / theirs).max()


@SEARCHES
def test_weights_are_heeded(fmt: Format) -> None:
    """Their loss falls, in every block, and that of all alike rises."""
    x = blocks_of(fmt, 64, 1)
    weights = np.random.default_rng(2).chisquare(1, x.shape).astype(np.float32)
    blind = round_trip(fmt, x)
    seeing = round_trip(fmt, x, weights)
    assert (loss(seeing, x, weights) <= loss(blind, x, weights)).mean() > 0.95
    assert loss(seeing, x, weights).mean() < 0.97 * loss(blind, x, weights).mean()
    assert loss(seeing, x).mean() > loss(blind, x).mean()


@SEARCHES
def test_weights_may_be_one_row_and_only_their_ratios_count(fmt: Format) -> None:
    x = blocks_of(fmt, 6, 3).reshape(2, 3, fmt.block)
    row = np.random.default_rng(4).chisquare(2, fmt.block).astype(np.float32)
    blocks = quantize(fmt, x, row)
    full = np.broadcast_to(row, x.shape)
    assert np.array_equal(quantize(fmt, x, full.copy()), blocks)
    assert np.array_equal(quantize(fmt, x, full * np.float32(2.0**60)), blocks)


@SEARCHES
def test_weights_that_are_none(fmt: Format) -> None:
    """What is not a positive number weighs nothing, and nothing at all is all alike."""
    x = blocks_of(fmt, 6, 5)
    weights = np.ones_like(x)
    weights[1] = 0
    weights[2, ::2] = np.nan
    weights[3, ::2] = -1
    weights[4, ::2] = np.inf
    weights[5, ::2] = 0
    blocks = quantize(fmt, x, weights)
    assert np.array_equal(blocks[1], quantize(fmt, x[1]))
    for i in (2, 3, 4):
        assert np.array_equal(blocks[i], quantize(fmt, x[i], weights[5]))
    error = fmt.dequantize(blocks) - x
    assert (loss(error[2:, 1::2], x[2:, 1::2] * 0) < loss(error[2:, ::2], x[2:, ::2] * 0)).all()


@SEARCHES
@pytest.mark.parametrize("scale", [1e-45, 1e-30, 1e-8, 1e-6, 1e-4, 1.0, 1e4, 1e7, 1e38])
def test_at_every_magnitude_better_than_nothing(fmt: Format, scale: float) -> None:
    x = np.clip(np.float64(scale) * blocks_of(fmt, 20, 6), -3e38, 3e38).astype(np.float32)
    y = round_trip(fmt, x)
    assert np.isfinite(y).all()
    assert (loss(y, x) <= loss(np.zeros_like(x), x)).all()
    if 1e-4 <= scale <= 1e4:
        norm = loss(y, x) / loss(np.zeros_like(x), x)
        assert norm.max() < {"IQ1": 0.6, "IQ2": 0.45, "IQ3": 0.25, "IQ4": 0.12}[fmt.name[:3]]


@pytest.mark.slow
@SEARCHES
@given(pattern=hnp.arrays(np.uint32, (2, 256)), weighted=st.booleans())
@settings(deadline=None, max_examples=30)
def test_any_floats(fmt: Format, pattern: npt.NDArray[np.uint32], weighted: bool) -> None:
    """No warning, which is an error here; numbers give numbers, in every block."""
    x = pattern.view(np.float32).reshape(-1, fmt.block)
    y = round_trip(fmt, x, np.abs(x[::-1]) if weighted else None)
    assert np.array_equal(np.isfinite(y).all(axis=1), np.isfinite(x).all(axis=1))


@SEARCHES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_spoils_its_block(fmt: Format, bad: float) -> None:
    """Never silently a number; ggml's C may end the process."""
    x = blocks_of(fmt, 3, 7)
    x[1, 17] = bad
    y = round_trip(fmt, x)
    assert np.isnan(y[1]).all()
    good = [0, 2]
    assert same_bits(y[good], round_trip(fmt, x[good]))


@SEARCHES
def test_zeros_are_zeros(fmt: Format) -> None:
    assert not round_trip(fmt, np.zeros((3, fmt.block), np.float32)).any()


@SEARCHES
def test_blocks_of_one_number(fmt: Format) -> None:
    x = np.repeat(np.array([[1], [-1], [0.37], [-0.05], [999]], np.float32), fmt.block, axis=1)
    y = round_trip(fmt, x)
    assert (np.abs(y - x) <= np.abs(x) * 2.0**-11).all()  # half a unit in the last place of f16


@SEARCHES
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
def test_any_shape_of_blocks(fmt: Format, lead: tuple[int, ...]) -> None:
    x = blocks_of(fmt, int(np.prod(lead)), 8).reshape(*lead, fmt.block)
    blocks = fmt.quantize(x)
    assert blocks.shape == lead
    assert blocks.dtype == fmt.dtype
    y = fmt.dequantize(blocks)
    assert y.shape == x.shape
    assert y.dtype == np.float32
    assert (loss(y, x) < loss(0 * y, x)).all()


@pytest.mark.slow
@SEARCHES
def test_strips_do_not_show(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x = blocks_of(fmt, 7, 9)
    weights = np.abs(blocks_of(fmt, 7, 10))
    packed = fmt.quantize(x)
    weighted = quantize(fmt, x, weights)
    monkeypatch.setattr(format, "CACHED_WEIGHTS", 512)
    monkeypatch.setattr(scale_search, "SEARCHED_WEIGHTS", 512)
    assert np.array_equal(fmt.quantize(x), packed)
    assert np.array_equal(quantize(fmt, x, weights), weighted)
    assert np.array_equal(fmt.quantize_rows(x).reshape(-1), packed.view(np.uint8))
    assert np.array_equal(fmt.quantize(np.asfortranarray(x)), packed)

"""Every weight format, to the bit: against ggml's C (by its vectors) and the gguf package.

What only some families promise, exact bytes above all, stands in test_k_formats.py and
test_iq_formats.py.
"""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.files import gguf_bytes as gb
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import (
    FORMATS,
    GGML_TYPES,
    REMOVED,
    Format,
    by_name,
    format,
    type_of,
)

F32Array = npt.NDArray[np.float32]
# ik_llama.cpp's are test_ik_formats.py's: neither ggml nor the package has them.
GGML = [fmt for number, fmt in FORMATS.items() if number < 100]
EVERY = pytest.mark.parametrize("fmt", GGML, ids=lambda fmt: fmt.name)
QUANTISED = [fmt for fmt in GGML if fmt.block > 1]
EVERY_QUANTISED = pytest.mark.parametrize("fmt", QUANTISED, ids=lambda fmt: fmt.name)

# Those whose bytes ggml defines for all floats; the rest of this family are test_k_formats.py's.
PLAIN = [by_name(name) for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")]
EVERY_PLAIN = pytest.mark.parametrize("fmt", PLAIN, ids=lambda fmt: fmt.name)
PLAIN_QUANTISED = pytest.mark.parametrize(
    "fmt", [fmt for fmt in PLAIN if fmt.block > 1], ids=lambda fmt: fmt.name
)
FP4 = {"MXFP4", "NVFP4"}  # whose scales can say neither NaN nor infinity
NEW = {"Q1_0", "Q2_0"}  # newer than the vectors and the package


def same_bits(a: F32Array, b: F32Array) -> bool:
    """Equal to the bit; a NaN equals any NaN, for its sign is the processor's choice."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan]))


def quantize_by_gguf(fmt: Format, x: F32Array) -> npt.NDArray[np.uint8]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        packed = gguf_package.quantize(x, gguf_package.GGMLQuantizationType(fmt.ggml_id))
    return np.ascontiguousarray(packed).view(np.uint8)


def dequantize_by_gguf(fmt: Format, packed: npt.NDArray[np.uint8]) -> F32Array:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        kind = gguf_package.GGMLQuantizationType(fmt.ggml_id)
        return np.asarray(gguf_package.dequantize(packed, kind))


# -- against ggml's C -------------------------------------------------------------------


@pytest.fixture(scope="module")
def vectors(data: Path) -> dict[str, npt.NDArray[Any]]:
    with np.load(data / "quant" / "ggml_quant_vectors.npz") as z:
        return {key.lower(): z[key] for key in z.files}


@EVERY_PLAIN
def test_quantize_gives_the_bytes_of_ggml(
    fmt: Format, vectors: dict[str, npt.NDArray[Any]]
) -> None:
    x = vectors["x"]
    expected = x if fmt.name == "F32" else vectors[f"{fmt.name.lower()}_q"]
    assert np.array_equal(fmt.quantize_rows(x), expected.view(np.uint8))


@pytest.mark.parametrize(
    "fmt", [f for f in QUANTISED if f.name not in FP4 | NEW], ids=lambda fmt: fmt.name
)
def test_dequantize_gives_the_floats_of_ggml(
    fmt: Format, vectors: dict[str, npt.NDArray[Any]]
) -> None:
    weights = fmt.dequantize_rows(vectors[f"{fmt.name.lower()}_q"])
    assert same_bits(weights, vectors[f"{fmt.name.lower()}_y"])


# -- against the gguf package -----------------------------------------------------------

BITS = hnp.arrays(np.uint32, st.tuples(st.integers(1, 4), st.just(64)))
SCALES = st.sampled_from([1e-45, 1e-41, 1e-39, 1e-20, 1e-7, 1e-3, 1.0, 1e6, 1e30, 3e38])


def normals(seed: int, scale: float) -> F32Array:
    x = np.random.default_rng(seed).standard_normal((8, 256)) * scale
    return x.clip(-3.4e38, 3.4e38).astype(np.float32)


@pytest.mark.slow
@EVERY_PLAIN
@given(seed=st.integers(0, 1 << 32), scale=SCALES)
@settings(deadline=None)
def test_quantize_agrees_at_every_magnitude(fmt: Format, seed: int, scale: float) -> None:
    x = normals(seed, scale)
    assert np.array_equal(fmt.quantize_rows(x), quantize_by_gguf(fmt, x))


@pytest.mark.slow
@EVERY_PLAIN
@given(bits=BITS)
@settings(deadline=None)
def test_quantize_agrees_on_any_floats(fmt: Format, bits: npt.NDArray[np.uint32]) -> None:
    x = bits.view(np.float32)
    x[np.isnan(x)] = 0  # test_nan
    if fmt.name == "Q4_1":  # (max - min) may overflow, and C leaves a cast of it undefined
        x = x.clip(-1e38, 1e38)
    x = np.where(np.isinf(x), np.float32(1), x)
    assert np.array_equal(fmt.quantize_rows(x), quantize_by_gguf(fmt, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fmt", [f for f in GGML if f.name not in NEW | {"F64"}], ids=lambda fmt: fmt.name
)
@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None)
def test_dequantize_agrees_on_any_bytes(fmt: Format, seed: int) -> None:
    shape = (50, fmt.row_bytes(max(64, fmt.block)))
    packed = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    assert same_bits(fmt.dequantize_rows(packed), dequantize_by_gguf(fmt, packed))


# -- what a format promises -------------------------------------------------------------


def f16_ulp(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.maximum(np.abs(x) * 2.0**-10, 2.0**-24)


@PLAIN_QUANTISED
@given(seed=st.integers(0, 1 << 32), scale=st.sampled_from([1e-4, 1e-2, 1.0, 1e3]))
@settings(deadline=None)
def test_a_weight_comes_back_within_half_a_step(fmt: Format, seed: int, scale: float) -> None:
    x = normals(seed, scale).reshape(-1, 32)
    blocks = fmt.quantize(x)
    error = np.abs(fmt.dequantize(blocks).astype(np.float64) - x)
    step = np.abs(blocks["d"].astype(np.float64))
    # Half a step of rounding (a whole one at the far end of Q4_0, whose +8 does not exist); half
    # a unit in the last place of the f16 scale, times the quants, and of the f16 minimum; float32.
    largest, far = {"Q8_0": (127, 0.5), "Q4_0": (8, 1.0), "Q4_1": (15, 0.5)}[fmt.name]
    tolerance = far * step + (largest + 1) * f16_ulp(step) / 2 + 2.0**-22 * np.abs(x).max(axis=-1)
    if "m" in (fmt.dtype.names or ()):
        tolerance += f16_ulp(blocks["m"].astype(np.float64)) / 2
    assert (error.max(axis=-1) <= tolerance).all(), error.max(axis=-1) / tolerance


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_all_numbers_of_16_bits_come_back(name: str) -> None:
    fmt = by_name(name)
    codes = np.arange(1 << 16, dtype=np.uint16)
    x = fmt.dequantize(codes.view(fmt.dtype))
    assert x.shape == (1 << 16, 1)
    back = fmt.quantize(x).view(np.uint16)
    number = ~np.isnan(x[:, 0])
    assert np.array_equal(back[number], codes[number])
    assert np.isnan(fmt.dequantize(back.view(fmt.dtype))[~number]).all()


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("F16", 65519.0, 0x7BFF),  # rounds down to the largest
        ("F16", 65520.0, 0x7C00),  # halfway: to even, which is infinity
        ("F16", -1e10, 0xFC00),
        ("F16", 2.0**-25, 0x0000),  # halfway to the smallest subnormal: to even, zero
        ("F16", 2.0**-24, 0x0001),
        ("F16", -0.0, 0x8000),
        ("BF16", 3.4028235e38, 0x7F80),  # the largest float32 rounds up to infinity
        ("BF16", 1.0 + 2.0**-8, 0x3F80),  # halfway: to even, down
        ("BF16", 1.0 + 3 * 2.0**-8, 0x3F82),  # halfway: to even, up
        ("BF16", -0.0, 0x8000),
        ("BF16", float("inf"), 0x7F80),
    ],
)
def test_rounding_at_the_edges(name: str, x: float, expected: int) -> None:
    code = by_name(name).quantize(np.array([x], np.float32)).view(np.uint16)
    assert code == expected


def test_bf16_keeps_a_nan_whose_payload_is_in_the_lower_half() -> None:
    x = np.array([[0x7F800001], [0xFF80FFFF], [0x7FFFFFFF]], np.uint32).view(np.float32)
    assert by_name("BF16").quantize(x).tolist() == [0x7FC0, 0xFFC0, 0x7FFF]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fmt", [f for f in QUANTISED if f.name not in FP4], ids=lambda fmt: fmt.name
)
@given(at=st.lists(st.integers(0, 31), min_size=1), seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=20)
def test_nan_spoils_its_block_wherever_it_is(fmt: Format, at: list[int], seed: int) -> None:
    """Never silently a number; ggml's C makes it one or not, by its place in the block."""
    x = normals(seed, 1.0).reshape(-1, fmt.block)
    x[0, at] = np.nan
    out = fmt.dequantize(fmt.quantize(x))
    assert np.isnan(out[0]).all()
    assert np.isfinite(out[1:]).all()


@PLAIN_QUANTISED
@pytest.mark.parametrize("values", [[np.inf], [-np.inf], [np.inf, -np.inf], [3e38]])
def test_what_f16_cannot_scale_spoils_its_block(fmt: Format, values: list[float]) -> None:
    """As in ggml's C: the scale is an infinity, so no weight of the block is finite."""
    x = normals(0, 1.0).reshape(-1, 32)
    x[0, : len(values)] = values
    blocks = fmt.quantize(x)
    assert np.isinf(blocks["d"][0])
    assert not np.isfinite(fmt.dequantize(blocks)[0]).any()
    if np.isinf(values).any():
        quants = {"Q8_0": 0, "Q4_0": 0x88, "Q4_1": 0}[fmt.name]
        assert (blocks["qs"][0][len(values) :] == quants).all()


@EVERY_QUANTISED
def test_zeros_are_zeros(fmt: Format) -> None:
    blocks = fmt.quantize(np.zeros((3, fmt.block), np.float32))
    assert not fmt.dequantize(blocks).any()
    for field in {"d", "dmin", "m", "e"} & set(fmt.dtype.names or ()):
        assert not blocks[field].any()


def test_q8_0_rounds_halves_away_from_zero() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, -0.5, 1.5, -2.5, 0.49999997]
    assert by_name("Q8_0").quantize(x)["qs"][0, :6].tolist() == [127, 1, -1, 2, -3, 0]


def test_q4_0_gives_the_longer_end_to_the_extreme() -> None:
    for sign in (1, -1):
        x = np.linspace(-1, 0.9, 32, dtype=np.float32)[None] * np.float32(sign)
        block = by_name("Q4_0").quantize(x)
        assert block["d"][0] == np.float16(0.125 * sign)
        assert block["qs"][0, 0] & 15 == 0


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1"])
def test_nibbles_lie_as_in_ggml(name: str) -> None:
    """Weight j is the low nibble of byte j, weight j + 16 the high one."""
    fmt = by_name(name)
    block = np.zeros(1, fmt.dtype)
    block["d"] = 1
    block["qs"][0, 3] = 0xA5
    x = fmt.dequantize(block)[0]
    x = x - x[0]
    assert {int(i): float(x[i]) for i in np.flatnonzero(x)} == {3: 5.0, 19: 10.0}


# -- shapes -----------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
def test_any_shape_of_blocks(fmt: Format, lead: tuple[int, ...]) -> None:
    x = np.ones((*lead, fmt.block), np.float32)
    blocks = fmt.quantize(x)
    assert blocks.shape == lead
    assert blocks.dtype == fmt.dtype
    out = fmt.dequantize(blocks)
    assert out.shape == x.shape
    assert out.dtype == np.float32
    # A code of few bits may have no exact 1 for its scale.
    assert np.allclose(out, x, rtol=2.0**-11 if fmt in PLAIN else 0.1)


@EVERY
def test_strips_do_not_show(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normals(1, 1.0)
    packed = fmt.quantize_rows(x)
    weights = fmt.dequantize_rows(fmt.quantize_rows(x))
    monkeypatch.setattr(format, "CACHED_WEIGHTS", max(96, 3 * fmt.block))
    assert np.array_equal(fmt.quantize_rows(x), packed)
    assert np.array_equal(fmt.dequantize_rows(packed), weights)
    assert np.array_equal(fmt.quantize_rows(x.reshape(2, 4, 256)).reshape(packed.shape), packed)
    assert np.array_equal(fmt.quantize_rows(np.asfortranarray(x)), packed)


@EVERY_QUANTISED
def test_rows_that_blocks_do_not_fill(fmt: Format) -> None:
    with pytest.raises(UnsupportedError, match=rf"{fmt.name}.* {fmt.block + 1} "):
        fmt.row_bytes(fmt.block + 1)
    with pytest.raises(UnsupportedError):
        fmt.quantize_rows(np.zeros((2, fmt.block + 1), np.float32))


# -- tables -----------------------------------------------------------------------------


def test_the_table_of_types_is_that_of_the_gguf_package() -> None:
    theirs = {int(t): (t.name, *sizes) for t, sizes in gguf_package.GGML_QUANT_SIZES.items()}
    # ggml's struct of Q8_1 has two f16 fields; the package still counts two f32.
    assert theirs.pop(9) == ("Q8_1", 32, 40)
    theirs.setdefault(42, ("Q2_0", 64, 18))  # newer than the package
    ours = {n: row for n, row in GGML_TYPES.items() if n < 100}  # others: ik_llama.cpp's
    assert {n: tuple(row)[:3] for n, row in ours.items() if n != 9} == theirs
    assert not any(row.head for row in ours.values())
    assert GGML_TYPES[9] == ("Q8_1", 32, 36, 0)
    assert not REMOVED.keys() & GGML_TYPES.keys()
    assert sorted([*(n for n in REMOVED if n < 100), *ours]) == list(range(max(ours) + 1))


@EVERY
def test_a_row_agrees_with_the_table(fmt: Format) -> None:
    assert FORMATS[fmt.ggml_id] is fmt
    assert type_of(fmt.ggml_id) == GGML_TYPES[fmt.ggml_id]
    assert by_name(fmt.name.lower()) is fmt
    assert fmt.row_bytes(fmt.block * 3) == fmt.dtype.itemsize * 3


def test_names_and_numbers_that_are_none() -> None:
    assert type_of(4) is None
    assert type_of(12) == ("Q4_K", 256, 144, 0)
    with pytest.raises(UnsupportedError, match="F32, F16"):
        by_name("Q9_9")


def test_a_new_format_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = np.dtype([("qs", "i1", (4,))])
    toy = Format(
        "TOY",
        200,
        4,
        layout,
        lambda blocks: blocks["qs"].astype(np.float32),
        lambda x: np.ascontiguousarray(x.astype(np.int8)).view(layout)[..., 0],
    )
    monkeypatch.setitem(FORMATS, toy.ggml_id, toy)
    path = tmp_path / "toy.gguf"
    path.write_bytes(gb.gguf([], [gb.info(b"t", [8, 2], 200)], struct.pack("16b", *range(16))))
    tensor = open_gguf(path).tensors["t"]
    assert (tensor.format, tensor.type_name, tensor.n_bytes) == (toy, "TOY", 16)
    assert np.array_equal(tensor.dequantize(), np.arange(16).reshape(2, 8))
    assert by_name("toy") is toy


# -- whole tensors ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_real_model_in_every_format(data: Path, name: str) -> None:
    """Its bytes are ours from the F32 file; its weights, those of the gguf package."""
    folder = data / "models" / "babyllama105"
    exact = open_gguf(folder / "babyllama105-F32.gguf")
    model = open_gguf(folder / f"babyllama105-{name}.gguf")
    n = 0
    for tensor in model.tensors.values():
        assert tensor.format is not None
        weights = tensor.dequantize()
        assert weights.shape == tensor.shape
        rows = tensor.data.reshape(*tensor.shape[:-1], -1)
        assert same_bits(weights, dequantize_by_gguf(tensor.format, rows))
        x = exact.tensors[tensor.name].dequantize()
        assert np.array_equal(tensor.format.quantize_rows(x).reshape(-1), tensor.data), tensor.name
        n += tensor.type_name == name
    assert n > 30


def test_a_tensor_in_a_format_that_treadle_lacks(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMATS, by_name("Q4_K").ggml_id)
    model = open_gguf(data / "models" / "babyllama105_pad256" / "mixed_Q4_K_M.gguf")
    tensor = next(t for t in model.tensors.values() if t.format is None)
    with pytest.raises(UnsupportedError, match=tensor.name):
        tensor.dequantize()

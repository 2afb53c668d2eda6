"""K formats, five bits, ternary, four-bit floats: to the bit where ggml is exact, and where it
searches, no worse than it row by row."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.devices.cpu.weight_quantizer import Searcher
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import FORMATS, GGML_TYPES, Format, format, k_search
from treadle.formats.blocks32 import Q4_0, Q4_1, Q5_0, Q5_1
from treadle.formats.floats import F64
from treadle.formats.fp4 import MXFP4, NVFP4, to_e4m3
from treadle.formats.k_low import Q2_K, Q3_K
from treadle.formats.k_quants import Q4_K, Q5_K, Q6_K, join_scales, split_scales
from treadle.formats.packing import join_bits, split_bits
from treadle.formats.ternary import Q1_0, Q2_0, TQ1_0, TQ2_0
from treadle.kernels.quantize.select import search_kernel

F32Array = npt.NDArray[np.float32]
F64Array = npt.NDArray[np.float64]
U8Array = npt.NDArray[np.uint8]
Vectors = dict[str, npt.NDArray[Any]]

FOUR = [Q4_0, Q4_1]
FIVE = [Q5_0, Q5_1]
TERNARY = [TQ1_0, TQ2_0]
FP4 = [MXFP4, NVFP4]
NEW = [Q1_0, Q2_0]
OFFSET = [Q2_K, Q4_K, Q5_K]
SIGNED = [Q3_K, Q6_K]
K = [*OFFSET, *SIGNED]


def by_kernel(fmt: Format) -> Format:
    """The same format, whose scales a kernel searches for."""

    def quantize_blocks(x: F32Array, weights: F32Array | None = None) -> npt.NDArray[Any]:
        spec = search_kernel(fmt, weights is not None)
        assert spec is not None
        return quantize(fmt, x, weights, Searcher(spec))

    return replace(fmt, quantize=quantize_blocks)


COMPILED = list(map(by_kernel, K))
SEARCHES = [*K, *COMPILED]
OFFSET_SEARCHES = [fmt for fmt in SEARCHES if "dmin" in (fmt.dtype.names or ())]
SIGNED_SEARCHES = [fmt for fmt in SEARCHES if fmt not in OFFSET_SEARCHES]
ALL = [*FIVE, *K, *TERNARY, *FP4, *NEW]
PACKAGE = [*FIVE, *K, *TERNARY, *FP4]  # what the gguf package can read
SCALED = [fmt for fmt in ALL if fmt not in FP4]  # with an f16 scale, which can say NaN


def of(formats: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fmt", formats, ids=label)


def label(fmt: Format) -> str:
    return fmt.name if fmt is FORMATS[fmt.ggml_id] else f"{fmt.name} by kernel"


def same_bits(a: F32Array, b: F32Array) -> bool:
    """Equal to the bit; a NaN equals any NaN, for its sign is the processor's choice."""
    nan = np.isnan(a) & np.isnan(b)
    return bool(np.array_equal(a.view(np.uint32)[~nan], b.view(np.uint32)[~nan]))


def by_gguf(function: Callable[..., Any], fmt: Format, data: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        out = function(data, gguf_package.GGMLQuantizationType(fmt.ggml_id))
    return np.ascontiguousarray(out)


def quantize(
    fmt: Format, x: F32Array, weights: F32Array | None = None, *search: Any
) -> npt.NDArray[Any]:
    """With weights, which the type of a row's function does not name."""
    function: Callable[..., npt.NDArray[Any]] = fmt.quantize
    return function(x, weights, *search)


def loss(y: npt.NDArray[Any], x: F32Array, weights: float | F32Array = 1) -> F64Array:
    """[..., n] -> [...]: the root of the mean square of the error."""
    mean: F64Array = ((y.astype(np.float64) - x) ** 2 * weights).mean(axis=-1)
    return np.sqrt(mean)


def normals(seed: int, scale: float, rows: int = 8) -> F32Array:
    x = np.random.default_rng(seed).standard_normal((rows, 256)) * scale
    return x.clip(-1e38, 1e38).astype(np.float32)


@pytest.fixture(scope="module")
def vectors(data: Path) -> Vectors:
    with np.load(data / "quant" / "ggml_quant_vectors.npz") as z:
        return {key.lower(): z[key] for key in z.files}


@pytest.fixture(scope="module")
def golden() -> Vectors:
    """By ggml 0.25.3 (of llama-cpp-python 0.3.36), for what ``vectors`` lacks: ``x`` and its bytes
    ``_q``; for what the gguf package cannot read, random bytes ``_p`` and their weights ``_y``."""
    path = Path(__file__).parent.parent / "golden" / "ggml_blocks.npz"
    with np.load(path) as z:
        return dict(z)


# -- reading ----------------------------------------------------------------------------


@of(PACKAGE)
@given(seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=25)
def test_dequantize_agrees_on_any_bytes(fmt: Format, seed: int) -> None:
    """f16 scales of infinity and NaN are one in 32."""
    shape = (50, fmt.row_bytes(512))
    packed = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    assert same_bits(fmt.dequantize_rows(packed), by_gguf(gguf_package.dequantize, fmt, packed))


@of([*FIVE, *K, *TERNARY])
@pytest.mark.parametrize("d", [0x0000, 0x8000, 0x0001, 0x7BFF, 0x7C00, 0xFC00, 0x7D01, 0x7E01])
def test_dequantize_agrees_on_odd_scales(fmt: Format, d: int) -> None:
    """Zeros of both signs, the smallest and largest number, infinities, NaN (a signalling one)."""
    packed = np.random.default_rng(d).integers(0, 256, (20, fmt.dtype.itemsize), np.uint8)
    blocks = packed.view(fmt.dtype)[:, 0]
    for field in {"d", "dmin", "m"} & set(fmt.dtype.names or ()):
        blocks[field] = np.uint16(d).view(np.float16)
    assert same_bits(fmt.dequantize_rows(packed), by_gguf(gguf_package.dequantize, fmt, packed))


@of([*FIVE, *K, *TERNARY])
def test_dequantize_gives_the_floats_of_ggml(fmt: Format, vectors: Vectors) -> None:
    weights = fmt.dequantize_rows(vectors[f"{fmt.name.lower()}_q"])
    assert same_bits(weights, vectors[f"{fmt.name.lower()}_y"])


@of(NEW)
def test_dequantize_gives_the_golden_floats(fmt: Format, golden: Vectors) -> None:
    packed = golden[f"{fmt.name}_p"]
    assert same_bits(fmt.dequantize_rows(packed), golden[f"{fmt.name}_y"])


@of(FP4)
def test_every_scale_of_four_bit_floats(fmt: Format) -> None:
    """Those too that no quantiser writes: subnormal, the largest, the NaN of E4M3."""
    blocks = np.zeros(256, fmt.dtype)
    blocks["e" if "e" in (fmt.dtype.names or ()) else "d"].T[...] = np.arange(256)
    blocks["qs"] = np.random.default_rng(0).integers(0, 256, blocks["qs"].shape)
    packed = blocks.view(np.uint8).reshape(256, -1)
    assert same_bits(fmt.dequantize(blocks), by_gguf(gguf_package.dequantize, fmt, packed))


def test_f64_is_rounded_to_f32() -> None:
    x = np.array([1 / 3, 1e300, -1e300, 1e-300, 1e-45, np.inf, 0.1])
    assert np.array_equal(
        F64.dequantize(x)[:, 0],
        np.array([1 / 3, np.inf, -np.inf, 0, 1e-45, np.inf, 0.1], np.float32),
    )
    assert np.isnan(F64.dequantize(np.array([np.nan]))).all()
    x32 = normals(0, 1.0).reshape(-1, 1)
    assert np.array_equal(F64.dequantize(F64.quantize(x32)), x32)
    assert F64.quantize(x32).dtype == F64.dtype


# -- writing, where ggml's bytes are defined ---------------------------------------------


@of([*FIVE, *TERNARY])
def test_quantize_gives_the_bytes_of_ggml(fmt: Format, vectors: Vectors) -> None:
    assert np.array_equal(fmt.quantize_rows(vectors["x"]), vectors[f"{fmt.name.lower()}_q"])


@of([*FP4, *NEW])
def test_quantize_gives_the_golden_bytes(fmt: Format, golden: Vectors) -> None:
    assert np.array_equal(fmt.quantize_rows(golden["x"]), golden[f"{fmt.name}_q"])


@of([*FIVE, *TERNARY, MXFP4])
@given(
    seed=st.integers(0, 1 << 32),
    scale=st.sampled_from([1e-30, 1e-20, 1e-7, 1e-3, 1.0, 1e6, 1e30, 3e37]),
)
@settings(deadline=None, max_examples=25)
def test_quantize_agrees_at_every_magnitude(fmt: Format, seed: int, scale: float) -> None:
    x = normals(seed, scale)
    expected = by_gguf(gguf_package.quantize, fmt, x)
    assert np.array_equal(fmt.quantize_rows(x), expected.view(np.uint8))


def rwkv_tensors(path: Path) -> Iterator[tuple[bytes, int, tuple[int, ...], U8Array]]:
    """Name, type (0 and 1 as in ggml, 7 is Q5_0, 8 is Q5_1), shape and bytes of a ggmf file."""
    file = path.read_bytes()
    at = 24  # magic, version, n_vocab, n_embd, n_layer, type
    while at < len(file):
        n_dims, n_name, kind = struct.unpack_from("<3i", file, at)
        dims = struct.unpack_from(f"<{n_dims}i", file, at + 12)
        at += 12 + 4 * n_dims
        name = file[at : at + n_name]
        at = at + n_name
        n = int(np.prod(dims))
        size = {0: n * 4, 1: n * 2, 7: n // 32 * 22, 8: n // 32 * 24}[kind]
        yield name, kind, dims[::-1], np.frombuffer(file, np.uint8, size, at)
        at += size


@of(FIVE)
def test_quantize_gives_the_bytes_of_a_trained_model(fmt: Format, data: Path) -> None:
    stem = str(data / "quant" / "tiny-rwkv-5v1-730K-{}.bin")
    exact = {name: raw for name, _, _, raw in rwkv_tensors(Path(stem.format("FP32")))}
    n = 0
    for name, kind, shape, raw in rwkv_tensors(Path(stem.format(fmt.name))):
        if kind > 1:
            x = exact[name].view(np.float32).reshape(shape)
            assert np.array_equal(fmt.quantize_rows(x).reshape(-1), raw), name
            n += 1
    assert n > 10


# -- writing, where it is a search -------------------------------------------------------


@of(SEARCHES)
def test_no_row_is_worse_than_ggml(fmt: Format, vectors: Vectors) -> None:
    x = vectors["x"]
    ours = loss(fmt.dequantize_rows(fmt.quantize_rows(x)), x)
    theirs = loss(vectors[f"{fmt.name.lower()}_y"], x)
    assert (ours <= theirs).all(), np.flatnonzero(ours > theirs)
    real = slice(0, 44)  # trained weights and normals, which no luck makes exact
    assert (ours[real] / theirs[real]).mean() < 0.99


MODELS = [(Q4_K, "Q4_K_S"), (Q6_K, "Q6_K"), (Q3_K, "Q3_K_S")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "name"),
    [(how(fmt), name) for how in (lambda fmt: fmt, by_kernel) for fmt, name in MODELS],
    ids=lambda v: v if isinstance(v, str) else label(v),
)
def test_no_tensor_of_a_model_is_worse_than_ggml(fmt: Format, name: str, data: Path) -> None:
    folder = data / "models" / "babyllama105_pad256"
    exact = {path.stem: path for path in folder.glob("*.gguf")}
    source = open_gguf(next(p for stem, p in exact.items() if stem.endswith("F32")))
    model = open_gguf(next(p for stem, p in exact.items() if stem.endswith(name)))
    n = 0
    for tensor in model.tensors.values():
        if tensor.ggml_type == fmt.ggml_id:
            x = source.tensors[tensor.name].data.view(np.float32).reshape(tensor.shape)
            theirs = fmt.dequantize_rows(tensor.data.reshape(len(x), -1))
            ours = fmt.dequantize_rows(fmt.quantize_rows(x))
            assert loss(ours, x).mean() < loss(theirs, x).mean(), tensor.name
            n += 1
    assert n > 10


@pytest.mark.slow
@of([*FOUR, *FIVE, *SEARCHES])
@pytest.mark.parametrize("seed", range(3))
def test_importance_buys_precision_where_it_is(fmt: Format, seed: int) -> None:
    x = normals(seed, 1.0, 64).reshape(-1, fmt.block)
    weights = np.random.default_rng(seed).gamma(0.5, size=x.shape).astype(np.float32)
    plain = loss(fmt.dequantize(fmt.quantize(x)), x, weights).mean()
    aware = fmt.dequantize(quantize(fmt, x, weights))
    assert loss(aware, x, weights).mean() < plain * 0.97
    assert loss(aware, x).mean() < loss(x * 0, x).mean() * 0.5  # the rest is not forgotten


@of(SEARCHES)
def test_equal_importance_is_none(fmt: Format) -> None:
    x = normals(3, 1.0)
    plain = fmt.quantize(x)
    equal = quantize(fmt, x, np.full_like(x, 2.5))
    assert np.allclose(loss(fmt.dequantize(plain), x), loss(fmt.dequantize(equal), x), rtol=0.01)


@of([*FOUR, *FIVE, *FP4, *SEARCHES])
@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 3e38, 1e-45])
def test_any_importance_gives_sound_blocks(fmt: Format, bad: float) -> None:
    x = normals(4, 1.0).reshape(-1, fmt.block)
    weights = np.ones_like(x)
    weights[0] = bad
    weights[1, ::2] = bad
    out = fmt.dequantize(quantize(fmt, x, weights))
    # Codes reach every weight, so what does not count still comes back within a coarse step.
    assert (loss(out, x) < loss(x * 0, x) * 0.6).all()


@of([*TERNARY, *NEW])
def test_where_importance_changes_nothing(fmt: Format) -> None:
    x = normals(5, 1.0).reshape(-1, fmt.block)
    weights = np.random.default_rng(0).random(x.shape, np.float32)
    assert np.array_equal(quantize(fmt, x, weights), fmt.quantize(x))


@of(OFFSET_SEARCHES)
def test_weights_far_from_zero(fmt: Format) -> None:
    """A minimum cannot be positive, but scales can be negative."""
    for sign in (1, -1):
        x = sign * (10 + normals(6, 0.1))
        out = fmt.dequantize(fmt.quantize(x))
        assert (loss(out, x) < 0.1).all()
        assert (fmt.quantize(x)["dmin"] * sign < 0).all()


@of(SIGNED_SEARCHES)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.375, -(2.0**-12)])
def test_one_value_is_exact(fmt: Format, value: float) -> None:
    x = np.full((2, 256), value, np.float32)
    assert np.array_equal(fmt.dequantize(fmt.quantize(x)), x)


@of(SEARCHES)
def test_weights_too_small_for_a_fine_scale(fmt: Format) -> None:
    """Their scale would be below the smallest f16: it is that one, fewer times."""
    x = normals(7, 1e-6)
    out = fmt.dequantize(fmt.quantize(x))
    assert (loss(out, x) < 0.6 * loss(x * 0, x)).all()


@of(SEARCHES)
@pytest.mark.parametrize("scale", [1e-45, 1e-39, 1e-20, 1e-9])
def test_weights_too_small_for_any_scale_are_zero(fmt: Format, scale: float) -> None:
    x = normals(8, scale)
    assert (loss(fmt.dequantize(fmt.quantize(x)), x) <= loss(x * 0, x)).all()


# -- what a format promises ---------------------------------------------------------------


@of([*ALL, *COMPILED])
def test_zeros_are_zeros(fmt: Format) -> None:
    blocks = fmt.quantize(np.zeros((3, fmt.block), np.float32))
    out = fmt.dequantize(blocks)
    assert not out.any()
    for field in {"d", "dmin", "m", "e"} & set(fmt.dtype.names or ()):
        assert not blocks[field].any()


@pytest.mark.slow
@of([*SCALED, *COMPILED])
@given(at=st.lists(st.integers(0, 31), min_size=1), seed=st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=15)
def test_nan_spoils_its_block_wherever_it_is(fmt: Format, at: list[int], seed: int) -> None:
    """Never silently a number; and no warning, for pytest makes those errors."""
    x = normals(seed, 1.0).reshape(-1, fmt.block)
    x[0, at] = np.nan
    for weights in (None, np.ones_like(x)):
        out = fmt.dequantize(quantize(fmt, x, weights))
        assert np.isnan(out[0]).all()
        assert np.isfinite(out[1:]).all()


@of([*SCALED, *COMPILED])
@pytest.mark.parametrize("values", [[np.inf], [-np.inf], [np.inf, -np.inf], [3e38, -3e38, 3e38]])
def test_what_f16_cannot_scale_spoils_its_block(fmt: Format, values: list[float]) -> None:
    x = normals(0, 1.0).reshape(-1, fmt.block)
    x[0, : len(values)] = values
    for weights in (None, np.ones_like(x)):
        out = fmt.dequantize(quantize(fmt, x, weights))
        assert not np.isfinite(out[0]).any()
        assert np.isfinite(out[1:]).all()


@of(FP4)
def test_four_bit_floats_have_no_nan_and_no_infinity(fmt: Format) -> None:
    x = normals(0, 1.0).reshape(-1, fmt.block)
    x[0, 3] = np.nan
    x[1, 5] = np.inf
    x[2, 7] = -np.inf
    out = fmt.dequantize(fmt.quantize(x))
    assert np.isfinite(out).all()
    assert out[0, 3] == 0
    assert out[1, 5] == out[1].max() > 1000
    assert out[2, 7] == out[2].min() < -1000


def test_e4m3_keeps_its_own_values_and_rounds_halves_up() -> None:
    code = np.arange(120, dtype=np.uint8)
    exponent = code >> 3
    mantissa = code & 7
    value = np.where(exponent > 0, mantissa + 8, mantissa) * 2.0 ** (np.maximum(exponent, 1) - 10.0)
    assert np.array_equal(to_e4m3(value.astype(np.float32)), code)
    half = ((value[1:] + value[:-1]) / 2).astype(np.float32)
    assert np.array_equal(to_e4m3(half)[8:], code[9:])  # subnormals: the last half is cut off
    assert to_e4m3(np.array([256, 1e30, 3e38], np.float32)).tolist() == [126] * 3


# -- layouts ------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("run", [1, 4, 16, 32])
def test_packed_codes_come_back(bits: int, run: int) -> None:
    packed = np.random.default_rng(0).integers(0, 256, (3, 2, 64), np.uint8)
    codes = split_bits(packed, bits, run)
    assert codes.shape == (3, 2, 64 * 8 // bits)
    assert codes.max() == (1 << bits) - 1
    assert np.array_equal(join_bits(codes, bits, run), packed)
    # the last weight of a run, in the uppermost bits
    byte = run - 1
    up = 8 // bits - 1
    assert codes[0, 0, up * run + byte] == packed[0, 0, byte] >> (8 - bits)


def test_scales_of_six_bits_come_back() -> None:
    packed = np.random.default_rng(0).integers(0, 256, (50, 12), np.uint8)
    scales, minima = split_scales(packed)
    assert max(scales.max(), minima.max()) == 63
    assert np.array_equal(join_scales(scales, minima), packed)


@of([*FIVE, *SEARCHES])
def test_what_was_read_is_written_again(fmt: Format) -> None:
    """Random codes under scales that no search improves on: the weights come back."""
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (40, fmt.dtype.itemsize), np.uint8)
    blocks = packed.view(fmt.dtype)[:, 0]
    for field in {"d", "dmin", "m"} & set(fmt.dtype.names or ()):
        blocks[field] = 0.5
    x = fmt.dequantize(blocks)
    assert (loss(fmt.dequantize(fmt.quantize(x)), x) <= 0.04 * np.abs(x).max(axis=-1)).all()


# -- shapes -------------------------------------------------------------------------------


@of([*ALL, *COMPILED, F64])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
def test_any_shape_of_blocks(fmt: Format, lead: tuple[int, ...]) -> None:
    x = np.ones((*lead, fmt.block), np.float32)
    for weights in (None, x) if fmt is not F64 else (None,):
        blocks = fmt.quantize(x) if weights is None else quantize(fmt, x, weights)
        assert blocks.shape == lead
        assert blocks.dtype == fmt.dtype
        out = fmt.dequantize(blocks)
        assert out.shape == x.shape
        assert out.dtype == np.float32
        assert np.allclose(out, x, rtol=2.0**-4 if fmt is NVFP4 else 2.0**-11)


@of([*ALL, *COMPILED])
def test_strips_do_not_show(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x = normals(1, 1.0)
    packed = fmt.quantize_rows(x)
    weights = fmt.dequantize_rows(fmt.quantize_rows(x))
    monkeypatch.setattr(format, "CACHED_WEIGHTS", 3 * fmt.block)
    monkeypatch.setattr(k_search, "SEARCHED_WEIGHTS", 2 * fmt.block)
    assert np.array_equal(fmt.quantize_rows(x), packed)
    assert np.array_equal(fmt.dequantize_rows(packed), weights)
    assert np.array_equal(fmt.quantize_rows(x.reshape(2, 4, 256)).reshape(packed.shape), packed)
    assert np.array_equal(fmt.quantize_rows(np.asfortranarray(x)), packed)


@of([*ALL, *COMPILED])
def test_the_weights_given_are_left_as_they_were(fmt: Format) -> None:
    x = normals(2, 1.0).reshape(-1, fmt.block)
    x[0, 0], x[1] = np.nan, np.abs(x[1]) + 1  # one to be spoilt, one to be negated
    for part in (x, x[:1], x[1:2]):
        before = part.copy()
        importance = np.full_like(part, 3)
        quantize(fmt, part, importance)
        assert np.array_equal(part, before, equal_nan=True)
        assert (importance == 3).all()


@of(ALL)
def test_rows_that_blocks_do_not_fill(fmt: Format) -> None:
    with pytest.raises(UnsupportedError, match=rf"{fmt.name}.* {fmt.block + 1} "):
        fmt.row_bytes(fmt.block + 1)


@of([*ALL, F64])
def test_a_row_agrees_with_the_table(fmt: Format) -> None:
    known = {int(t): (t.name, *sizes, 0) for t, sizes in gguf_package.GGML_QUANT_SIZES.items()}
    known.setdefault(42, ("Q2_0", 64, 18, 0))  # newer than the package
    assert known[fmt.ggml_id] == (fmt.name, fmt.block, fmt.dtype.itemsize, 0)
    assert GGML_TYPES.get(fmt.ggml_id, known[fmt.ggml_id]) == known[fmt.ggml_id]


def test_which_types_have_codes_is_known_without_their_modules() -> None:
    formats = type(FORMATS)()
    late = {number: formats.has_codes(number) for number in formats}
    assert not formats.made
    assert late == {number: fmt.codes is not None for number, fmt in formats.items()}
    assert late == {number: formats.has_codes(number) for number in formats}
    assert not formats.has_codes(-5)

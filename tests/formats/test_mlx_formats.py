"""MLX's formats against the mlx package: what it quantises is read as it reads it, to the bit."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.mlx_package import DTYPES, import_mlx, raw, to_numpy
from treadle.errors import UnsupportedError
from treadle.formats import FORMATS, Format, by_name
from treadle.formats.format import NO_GGML
from treadle.formats.mlx import BITS, GROUPS, SCALES, join, mlx, split

ALL = [mlx(bits, group, scales) for bits, group, scales in product(BITS, GROUPS, SCALES)]
EVERY = pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)


def settings(fmt: Format) -> tuple[int, int, str]:
    """Bits, group, type of scales, from the layout."""
    kind = {"<f2": "F16", "<u2": "BF16", "<f4": "F32"}[fmt.dtype["d"].str]
    return fmt.dtype["qs"].itemsize * 8 // fmt.block, fmt.block, kind


def weights(fmt: Format, rows: int = 6) -> np.ndarray:
    """Rows of ordinary weights, and groups that are all zero, constant, of one sign."""
    rng = np.random.default_rng(fmt.dtype.itemsize)
    x = rng.standard_normal((rows, 3 * fmt.block)).astype(np.float32)
    x[0, : fmt.block] = 0
    x[1, : fmt.block] = -2.5
    x[2] = np.abs(x[2]) + 1
    x[3] = -np.abs(x[3])
    return x


@EVERY
def test_reads_what_mlx_wrote(fmt: Format) -> None:
    """In f32 to the bit; in the scales' own type, where MLX rounds product and sum to it."""
    mx = import_mlx()
    bits, group, kind = settings(fmt)
    dtype = getattr(mx, DTYPES[kind])
    packed, scales, biases = mx.quantize(mx.array(weights(fmt)).astype(dtype), group, bits)
    assert packed.dtype == mx.uint32
    ours = fmt.dequantize_rows(fmt.join([raw(a) for a in (packed, scales, biases)]).reshape(6, -1))

    theirs = mx.dequantize(
        packed, scales.astype(mx.float32), biases.astype(mx.float32), group, bits
    )
    np.testing.assert_array_equal(ours.view(np.uint32), to_numpy(theirs).view(np.uint32))

    codes = split(raw(packed), bits).astype(np.float32)
    d, m = (to_numpy(a).repeat(group, -1) for a in (scales, biases))
    np.testing.assert_array_equal(ours, codes * d + m)
    scaled = mx.array(codes * d).astype(dtype)
    rounded = to_numpy(mx.array(to_numpy(scaled) + m).astype(dtype))
    in_type = to_numpy(mx.dequantize(packed, scales, biases, group, bits))
    np.testing.assert_array_equal(rounded, in_type)


@EVERY
def test_reads_any_bytes_as_mlx_does(fmt: Format) -> None:
    """Every code in every place; scales of any size and sign."""
    mx = import_mlx()
    bits, group, kind = settings(fmt)
    rng = np.random.default_rng(group * bits)
    blocks = np.zeros((7, 3), fmt.dtype)
    blocks["qs"] = rng.integers(0, 256, blocks["qs"].shape)
    for name in ("d", "m"):
        x = rng.standard_normal(blocks.shape) * 10.0 ** rng.integers(-3, 3, blocks.shape)
        number = mx.array(x.astype(np.float32)).astype(getattr(mx, DTYPES[kind]))
        blocks[name] = raw(number).view(fmt.dtype[name]).reshape(blocks.shape)
    data = blocks.view(np.uint8).reshape(7, -1)
    packed, *numbers = fmt.split(data)
    scales, biases = (_as_f32(mx, n, kind) for n in numbers)
    theirs = mx.dequantize(mx.array(packed.view(np.uint32)), scales, biases, group, bits)
    np.testing.assert_array_equal(fmt.dequantize_rows(data), to_numpy(theirs))


def _as_f32(mx: Any, number: np.ndarray, kind: str) -> Any:
    return mx.view(mx.array(number), getattr(mx, DTYPES[kind])).astype(mx.float32)


@pytest.mark.parametrize(
    "fmt", [mlx(bits, group, "F32") for bits, group in product(BITS, GROUPS)], ids=lambda f: f.name
)
def test_quantises_as_mlx_does(fmt: Format) -> None:
    """With f32 scales, byte by byte."""
    mx = import_mlx()
    bits, group, _ = settings(fmt)
    x = weights(fmt)
    theirs = [raw(a) for a in mx.quantize(mx.array(x), group, bits)]
    for ours, expected in zip(fmt.split(fmt.quantize_rows(x)), theirs, strict=True):
        np.testing.assert_array_equal(ours, expected)


@EVERY
def test_parts_come_together_and_apart(fmt: Format) -> None:
    data = fmt.quantize_rows(weights(fmt))
    parts = fmt.split(data)
    assert [p.shape for p in parts] == [(6, 3 * n) for n in fmt.strides]
    assert sum(fmt.strides) == fmt.dtype.itemsize
    np.testing.assert_array_equal(fmt.join(parts).reshape(data.shape), data)
    for n, name in enumerate(fmt.parts):
        assert fmt.place(name) == (n, 0)


@pytest.mark.parametrize("bits", BITS)
def test_codes_lie_in_one_stream(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 64)).astype(np.uint8)
    packed = join(codes, bits)
    for row, one in zip(codes, packed, strict=True):
        stream = int.from_bytes(one.tobytes(), "little")
        assert [stream >> (bits * i) & ((1 << bits) - 1) for i in range(64)] == row.tolist()
    np.testing.assert_array_equal(split(packed, bits), codes)


@EVERY
def test_they_are_known_by_name_alone(fmt: Format) -> None:
    """No number of ggml's, so no GGUF file can ask for one."""
    assert by_name(fmt.name.lower()) is fmt
    assert fmt.ggml_id == NO_GGML
    assert NO_GGML not in FORMATS
    with pytest.raises(UnsupportedError, match=f"{fmt.name}.* {fmt.block + 1} "):
        fmt.row_bytes(fmt.block + 1)


def test_names() -> None:
    assert len({fmt.name for fmt in ALL}) == 54
    assert mlx(4, 64, "F16").name == "MLX4_G64"
    assert mlx(3, 128, "BF16").name == "MLX3_G128_BF16"
    for name in ("MLX7_G64", "MLX4_G16", "MLX4_G64_F16", "MLX4", "MLX4_G64_F64"):
        with pytest.raises(UnsupportedError, match="unknown weight format"):
            by_name(name)


@pytest.mark.parametrize(
    ("bits", "group", "scales", "what"),
    [(7, 64, "F16", "bits 7"), (4, 16, "F16", "group_size 16"), (4, 64, "F64", "scales in F64")],
)
def test_what_mlx_does_not_have(bits: int, group: int, scales: str, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        mlx(bits, group, scales)


@EVERY
def test_numbers_that_are_none_spoil_their_group_alone(fmt: Format) -> None:
    x = weights(fmt)
    x[4, 5] = np.nan
    x[5, fmt.block] = np.inf
    y = fmt.dequantize_rows(fmt.quantize_rows(x))
    bad = ~np.isfinite(y).reshape(6, 3, -1).all(-1)
    assert bad.tolist() == [[False] * 3] * 4 + [[True, False, False], [False, True, False]]

"""ik_llama.cpp's formats: read to the bit as its C does, written no worse; tensors and rows."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.files import gguf_bytes as gb
from treadle.convert.sources.check_finite import find_nonfinite
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.files.gguf_writer import GGUFWriter
from treadle.formats import FORMATS, GGML_TYPES, REMOVED, Format, by_name, type_of
from treadle.formats.ggml_types import OTHERS
from treadle.formats.ik_rows import PARITY

# sha256 of the floats that dequantize_row_* of ik_llama.cpp's iqk_quantize.cpp (8337e4cd, August
# 2026; gcc 12) makes of ``stored``, in hexadecimal, and the first of them. IQ6_K's are those of its
# table of integers, as in its products, by a loop in C: see formats/ik_blocks.py.
TRUTH = {
    "IQ2_K": ("622c73e1997870072b8d72d6315802ab", [26.0, -6.0, -6.0, -6.0, 26.0, 8.0]),
    "IQ3_K": ("030c5dcb129d8bd5e869c206e86edcf6", [-728.5, -434.0, -201.5, -15.5, -728.5, 620.0]),
    "IQ4_K": ("3c31f7599fe60553772d6a9d44876edb", [871.5, -262.5, -262.5, -136.5, 367.5, -934.5]),
    "IQ5_K": ("8b0ce63baccdfc07ed2d18869a57905b", [-75.0, -1.5, 115.5, -97.5, -1.5, -18.0]),
    "IQ6_K": ("a4d064fae153baf4e86683894b9dd259", [277.5, -2109.0, -18.5, 74.0, 2035.0, -499.5]),
    "IQ2_KS": ("f919016d8eae4786610db44d4f2c1f33", [-24.0, 18.0, -24.0, -24.0, -78.0, 66.0]),
    "IQ3_KS": ("1118a15c376d5675a0818b7ab66dcedb", [216.0, 114.0, 36.0, 354.0, -30.0, 216.0]),
    "IQ4_KS": ("dd403824ceb1ee624d26a66e04c3c28b", [4450.0, -3248.5, -1869.0, 3515.5, 5473.5]),
    "IQ5_KS": ("4f5e78b48d95195f1128acb2619610ee", [-270.0, 45.0, 427.5, -82.5, -907.5, -37.5]),
    "IQ4_KSS": ("c114b7e1f198f75580260e1b5d8211d0", [4523.5, -1362.5, -2071.0, -1362.5, 5668.0]),
    "IQ1_KT": ("b86649594d24325a6d5a9c975fac0a03", [-575.0, -887.5, -962.5, 75.0, -187.5, -150.0]),
    "IQ2_KT": ("2f53d9f756035afc1f55bf3e916e181e", [-287.5, -125.0, -225.0, 162.5, 825.0, -25.0]),
    "IQ3_KT": ("e263c4057011601a229d0618948af9f3", [-40.0, -12.0, 12.0, 24.0, 112.0, -40.0]),
    "IQ4_KT": ("f4f51490fa25b58aa4ff93523fb5d2a8", [101.5, 1087.5, 928.0, -275.5, -899.0, -826.5]),
}
# Root of the mean square of the error of its quantize_iq* for ``normals``, by the same reader.
THEIRS = {
    "IQ2_K": 0.29872,
    "IQ3_K": 0.13596,
    "IQ4_K": 0.065135,
    "IQ5_K": 0.032325,
    "IQ6_K": 0.015031,
    "IQ2_KS": 0.33889,
    "IQ3_KS": 0.15698,
    "IQ4_KS": 0.074196,
    "IQ5_KS": 0.036681,
    "IQ4_KSS": 0.10354,
    "IQ1_KT": 0.44404,
    "IQ2_KT": 0.3326,
    "IQ3_KT": 0.16769,
    "IQ4_KT": 0.098762,
}
FMTS = [by_name(name) for name in TRUTH]
EVERY = pytest.mark.parametrize("fmt", FMTS, ids=lambda fmt: fmt.name)
OF_ROWS = pytest.mark.parametrize("fmt", [f for f in FMTS if f.head], ids=lambda fmt: fmt.name)

F32Array = npt.NDArray[np.float32]


def stored(fmt: Format) -> npt.NDArray[np.uint8]:
    """Four rows of 512 weights: any bytes, and scales that are numbers."""
    n = fmt.row_bytes(512)
    given = hashlib.shake_256(fmt.name.encode()).digest(4 * n)
    blocks = fmt.blocks_of(np.frombuffer(given, np.uint8).reshape(4, n)).copy()
    blocks["d"] = np.array([[0.5], [-0.0123], [3e-5], [60000]])
    return fmt.bytes_of(blocks)


def normals(n_rows: int, k: int) -> F32Array:
    return np.random.default_rng(1).standard_normal((n_rows, k)).astype(np.float32)


def error(fmt: Format, x: F32Array, weights: F32Array | None = None) -> F32Array:
    back = fmt.dequantize_rows(fmt.quantize_rows(x, weights))
    return np.asarray(back - x)


@EVERY
def test_weights_are_those_of_ik_llama_cpp(fmt: Format) -> None:
    found = fmt.dequantize_rows(stored(fmt))
    digest, first = TRUTH[fmt.name]
    assert found[0, : len(first)].tolist() == first
    assert hashlib.sha256(found.tobytes()).hexdigest().startswith(digest)


@EVERY
def test_no_more_error_than_its_quantiser(fmt: Format) -> None:
    rmse = float(np.sqrt(np.square(error(fmt, normals(8, 1024)).astype(np.float64)).mean()))
    assert rmse < THEIRS[fmt.name]


@EVERY
def test_importances_lower_their_error(fmt: Format) -> None:
    x = normals(4, 512)
    w = np.random.default_rng(2).gamma(0.5, size=512).astype(np.float32)
    plain, aware = (float((np.square(error(fmt, x, given)) * w).sum()) for given in (None, w))
    assert aware < 0.95 * plain


@EVERY
def test_rows_that_are_zero_or_no_numbers(fmt: Format) -> None:
    """What a row's scale spoils is the row, a block's the block."""
    x = normals(4, 512)
    x[1] = 0
    x[2, 3] = np.nan
    x[3, :256] = 0
    back = fmt.dequantize_rows(fmt.quantize_rows(x))
    assert np.isfinite(back[[0, 1, 3]]).all()
    assert not back[1].any()
    least = 0 if 0 in fmt.search.ladder else 0.01  # no step of the others is zero
    assert np.abs(back[3, :256]).max() <= least
    assert np.isnan(back[2, :256]).all()
    assert np.isnan(back[2, 256:]).all() == bool(fmt.head)


@EVERY
def test_magnitudes(fmt: Format) -> None:
    """Scales of any size, with an f16 scale within its range."""
    x = normals(2, 256)
    for size in (1e-3, 1e3) if fmt.whole["d"].itemsize == 2 else (1e-30, 1e-3, 1e3, 1e30):
        scaled = x * np.float32(size)
        top = np.abs(scaled).max()
        most = {"1": 0.6, "2": 0.5}.get(fmt.name[2], 0.3)
        assert np.abs(error(fmt, scaled)).max() < top * most, size


def test_a_word_of_four_codes_has_an_even_number_of_ones() -> None:
    fmt = by_name("IQ4_KSS")
    x = normals(2, 512)
    blocks = fmt.blocks_of(fmt.quantize_rows(x))
    words = blocks["qs"] & np.uint16(0xFFFE)
    plain = words ^ words >> np.uint16(1)
    ones = sum(PARITY[plain >> np.uint16(4 * i) & np.uint16(15)] for i in range(4))
    assert not (np.asarray(ones) & 1).any()


# -- rows with scales of their own ---------------------------------------------------------


@OF_ROWS
def test_blocks_and_bytes_of_rows(fmt: Format) -> None:
    rows = stored(fmt)
    assert rows.shape == (4, fmt.head_bytes + 2 * fmt.dtype.itemsize)
    blocks = fmt.blocks_of(rows)
    assert blocks.shape == (4, 2)
    assert (blocks["d"][:, 0] == blocks["d"][:, 1]).all()
    assert np.array_equal(fmt.bytes_of(blocks), rows)
    assert fmt.quantize_rows(np.zeros((0, 512), np.float32)).shape == (0, fmt.row_bytes(512))


@OF_ROWS
def test_a_scale_that_is_no_number_is_found(fmt: Format) -> None:
    blocks = fmt.blocks_of(stored(fmt)).copy()
    assert find_nonfinite(fmt, fmt.bytes_of(blocks).reshape(-1), 512) == -1
    blocks["d"][2] = np.inf
    assert find_nonfinite(fmt, fmt.bytes_of(blocks).reshape(-1), 512) == 4


@EVERY
def test_a_file(fmt: Format, tmp_path: Path) -> None:
    rows = stored(fmt)
    writer = GGUFWriter(tmp_path / "a.gguf")
    writer.add_tensor("w", (2, 2, 512), fmt, rows)
    writer.write()
    tensor = open_gguf(tmp_path / "a.gguf").tensors["w"]
    assert (tensor.type_name, tensor.n_bytes) == (fmt.name, rows.nbytes)
    assert np.array_equal(tensor.dequantize(), fmt.dequantize_rows(rows).reshape(2, 2, 512))
    assert tensor.blocks.shape == (2, 2, 2)


def test_sizes_of_types() -> None:
    for fmt in FMTS:
        assert FORMATS[fmt.ggml_id] is fmt
        assert type_of(fmt.ggml_id) == (fmt.name, 256, fmt.dtype.itemsize, fmt.head_bytes)
        assert GGML_TYPES[fmt.ggml_id].tensor_bytes((3, 2, 512)) == 6 * fmt.row_bytes(512)
    assert GGML_TYPES[144].tensor_bytes((3, 0)) == 0
    assert not REMOVED.keys() & GGML_TYPES.keys()


def test_other_types_of_ik_llama_cpp(tmp_path: Path) -> None:
    """The size of some is known; repacked rows are named; other numbers are none."""
    path = tmp_path / "a.gguf"
    path.write_bytes(gb.gguf([], [gb.info(b"t", [256, 2], 157)], bytes(2 * 88)))
    tensor = open_gguf(path).tensors["t"]
    assert (tensor.type_name, tensor.format) == ("IQ2_KL", None)
    with pytest.raises(UnsupportedError, match="t: IQ2_KL weights are not supported yet"):
        tensor.dequantize()
    assert set(OTHERS) >= {133, 134, 157}
    for number, what in ((339, "IQ4_K_R4: rows interleaved"), (143, "")):
        path.write_bytes(gb.gguf([], [gb.info(b"t", [256, 2], number)], bytes(512)))
        with pytest.raises((UnsupportedError, FileError), match=re.escape(f"type {number}")) as e:
            open_gguf(path)
        assert what in str(e.value)

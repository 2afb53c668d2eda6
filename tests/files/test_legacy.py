"""Files of before GGUF, put together byte by byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf_v1 import HeaderV1
from treadle.files.legacy import Legacy
from treadle.files.metadata import GGUFArray, ValueType

MAGIC = {"GGML": b"lmgg", "GGMF": b"fmgg", "GGJT": b"tjgg"}
Item = tuple[str, np.ndarray, int]


def ggml(
    kind: str,
    version: int,
    tensors: list[Item],
    pieces: list[tuple[bytes, float]],
    *,
    n_embd: int = 32,
    n_head: int = 4,
    n_layer: int = 1,
    n_mult: int = 32,
) -> bytes:
    """A file as llama.cpp's convert.py of that time would write it; arrays in the type's bytes."""
    out = bytearray(MAGIC[kind])
    if kind != "GGML":
        out += struct.pack("<I", version)
    out += struct.pack("<7I", len(pieces), n_embd, n_mult, n_head, n_layer, n_embd // n_head, 0)
    for text, score in pieces:
        out += struct.pack("<I", len(text)) + text
        if kind != "GGML":
            out += struct.pack("<f", score)
    for name, array, ggml_type in tensors:
        shape = array.shape
        if ggml_type > 1:  # an array of bytes, 32 weights to a block
            n_bytes = {2: 18, 6: 22, 8: 34}[ggml_type]
            shape = (*shape[:-1], shape[-1] // n_bytes * 32)
        out += struct.pack("<3I", len(shape), len(name), ggml_type)
        out += struct.pack(f"<{len(shape)}I", *reversed(shape)) + name.encode()
        if kind == "GGJT":
            out += bytes(-len(out) % 32)
        out += array.tobytes()
    return bytes(out)


PIECES = [(b"<unk>", 0.0), (b"", 0.0), (b"", 0.0), (b" a", -1.5)]
VERSIONS = [("GGML", 0), ("GGMF", 1), ("GGJT", 1), ("GGJT", 2), ("GGJT", 3)]


@pytest.mark.parametrize(("kind", "version"), VERSIONS)
def test_every_version(tmp_path: Path, kind: str, version: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((5, 32)).astype("<f4")
    h = rng.standard_normal((3, 32)).astype("<f2")
    path = tmp_path / "x.bin"
    path.write_bytes(ggml(kind, version, [("a", x, 0), ("bc", h, 1), ("n", x[0], 0)], PIECES))
    file = Legacy(path)
    assert (file.kind, file.version) == (kind, version)
    assert file.sizes["n_head"] == 4
    assert file.pieces == [text for text, _ in PIECES]
    assert file.scores == (None if kind == "GGML" else [0.0, 0.0, 0.0, -1.5])
    assert [t.shape for t in file.tensors.values()] == [(5, 32), (3, 32), (32,)]
    assert np.array_equal(file.tensors["a"].data.view("<f4").reshape(5, 32), x)
    assert np.array_equal(file.tensors["bc"].data.view("<f2").reshape(3, 32), h)
    assert np.shares_memory(file.tensors["a"].data, file.file)


@pytest.mark.parametrize(("kind", "version"), VERSIONS)
@pytest.mark.parametrize(("ggml_type", "n_bytes", "since"), [(2, 18, 3), (8, 34, 3), (6, 22, 2)])
def test_blocks_whose_layout_changed(
    tmp_path: Path, kind: str, version: int, ggml_type: int, n_bytes: int, since: int
) -> None:
    path = tmp_path / "x.bin"
    blocks = np.arange(3 * n_bytes, dtype=np.uint8).reshape(3, n_bytes)
    path.write_bytes(ggml(kind, version, [("w", blocks, ggml_type)], PIECES))
    if kind == "GGJT" and version >= since:
        assert np.array_equal(Legacy(path).tensors["w"].data, blocks.reshape(-1))
    else:
        with pytest.raises(UnsupportedError, match=r"w: Q\d_0 of .* version \d: .*May \d+, 2023"):
            Legacy(path)


def test_real_files_of_another_program(data: Path) -> None:
    """rwkv.cpp's, of the same magic."""
    for path in sorted((data / "quant").glob("tiny-rwkv*.bin")):
        with pytest.raises(UnsupportedError, match="GGMF version 101 is not a llama file"):
            Legacy(path)


@pytest.fixture(scope="module")
def whole() -> bytes:
    x = np.ones((4, 32), "<f4")
    return ggml("GGJT", 3, [("a", x, 0), ("b", x[0], 0)], PIECES)


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_is_an_error_or_harmless(whole: bytes, tmp_path: Path, data: Any) -> None:
    raw = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3)) if raw else 0):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.bin"
    path.write_bytes(raw)
    said = str(path)
    try:
        for tensor in Legacy(path).tensors.values():
            assert len(tensor.data) == tensor.n_bytes
    except TreadleError as error:
        said = str(error)
    assert str(path) in said


# -- GGUF version 1 ----------------------------------------------------------------------------


def string(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


def gguf_v1(magic: bytes = b"GGUF") -> bytes:
    kvs = [
        string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama"),
        string(b"n") + struct.pack("<IH", 2, 513),
        string(b"yes") + struct.pack("<IB", 7, 1),
        string(b"words") + struct.pack("<3I", 9, 8, 2) + string(b"a") + string("é".encode()),
        string(b"xs") + struct.pack("<3I3f", 9, 6, 3, 1.5, 2.5, -1),
    ]
    infos = [
        string(b"w") + struct.pack("<3I", 2, 3, 2) + struct.pack("<IQ", 0, 32),
        string(b"v") + struct.pack("<2I", 1, 4) + struct.pack("<IQ", 1, 0),
    ]
    out = magic + struct.pack("<3I", 1, len(infos), len(kvs)) + b"".join(kvs) + b"".join(infos)
    out += bytes(-len(out) % 32)
    out += np.arange(4, dtype="<f2").tobytes().ljust(32, b"\0")
    return out + np.arange(6, dtype="<f4").tobytes()


@pytest.mark.parametrize("magic", [b"GGUF", b"FUGG"])
def test_gguf_of_version_1(tmp_path: Path, magic: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_v1(magic))
    file = HeaderV1(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["n"] == 513
    assert file.types["n"] == ValueType.UINT16
    assert file.metadata["yes"] is True
    words = file.metadata["words"]
    xs = file.metadata["xs"]
    assert isinstance(words, GGUFArray)
    assert isinstance(xs, GGUFArray)
    assert list(words) == ["a", "é"]
    assert xs.numpy().tolist() == [1.5, 2.5, -1.0]
    assert file.tensors["w"].shape == (2, 3)
    assert file.tensors["w"].data.view("<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert file.tensors["v"].data.view("<f2").tolist() == [0, 1, 2, 3]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_to_version_1_is_an_error_or_harmless(tmp_path: Path, data: Any) -> None:
    whole = gguf_v1()
    raw = bytearray(whole[: data.draw(st.integers(1, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    said = str(path)
    try:
        for tensor in HeaderV1(path).tensors.values():
            assert len(tensor.data) == tensor.n_bytes
    except TreadleError as error:
        said = str(error)
    assert str(path) in said


def test_version_1_cut_short(tmp_path: Path) -> None:
    raw = gguf_v1()
    path = tmp_path / "x.gguf"
    for n in range(1, len(raw)):
        path.write_bytes(raw[:n])
        with pytest.raises(FileError):
            HeaderV1(path)

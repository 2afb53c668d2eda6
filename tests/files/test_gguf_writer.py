"""Writing GGUF: the same bytes as other writers, the same values to other readers."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFArray, GGUFWriter, ValueType, open_gguf
from treadle.formats import FORMATS


def copy(source: Path, target: Path) -> None:
    with open_gguf(source) as g:
        writer = GGUFWriter(target, g.alignment)
        for key, value in g.metadata.items():
            writer.add(key, value, g.types[key])
        for t in g.tensors.values():
            writer.add_tensor(t.name, t.shape, t.ggml_type, t.data)
        writer.write()


@pytest.mark.parametrize(
    "name",
    [
        "models/stories260K.gguf",
        "models/babyllama105/babyllama105-Q4_1.gguf",
        "models/babyllama105_pad256/mixed_Q4_K_M.gguf",
        "models/other/superpoint.gguf",
        "vocab/ggml-vocab-phi-3.gguf",
        "vocab/ggml-vocab-falcon.gguf",
    ],
)
def test_a_copy_of_a_real_file_is_the_file(data: Path, tmp_path: Path, name: str) -> None:
    copy(data / name, tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == (data / name).read_bytes()


def test_a_copy_of_random_values_has_the_same(data: Path, tmp_path: Path) -> None:
    source = data / "malformed" / "seed1_KV_RANDOM_KV__accept.gguf"
    copy(source, tmp_path / "copy.gguf")
    a = open_gguf(source)
    b = open_gguf(tmp_path / "copy.gguf")
    assert list(a.types.items()) == list(b.types.items())
    assert len(a.metadata) > 90
    for key, value in a.metadata.items():
        back = b.metadata[key]
        if isinstance(value, GGUFArray) and isinstance(back, GGUFArray):
            assert bytes(back.payload) == bytes(value.payload)
        else:
            assert repr(back) == repr(value)  # NaN among them


@pytest.mark.slow
@pytest.mark.parametrize("alignment", [32, 1, 256])
def test_the_gguf_package_reads_what_was_written(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "x.gguf"
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, alignment)
    writer.add("general.architecture", "llama")
    writer.add("n", 3)
    writer.add("eps", 1e-5)
    writer.add("flag", True)
    writer.add("names", ["a", "▁b", ""])
    writer.add("ids", [1, -2])
    weights = {}
    theirs = {int(t) for t in gguf_package.GGMLQuantizationType}
    known = [f for f in FORMATS.values() if f.ggml_id in theirs]
    missing = [f for f in FORMATS.values() if f.ggml_id < 100 and f not in known]
    assert len(missing) <= 1  # Q2_0 is newer than the package
    for fmt in known:
        x = rng.standard_normal((3, 256)).astype(np.float32)
        weights[fmt.name] = fmt.quantize_rows(x)
        writer.add_tensor(f"{fmt.name}.weight", x.shape, fmt, weights[fmt.name])
    writer.write()
    reader = gguf_package.GGUFReader(path)
    values = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    if alignment != 32:
        assert values.pop("general.alignment") == alignment
    assert values == {
        "general.architecture": "llama",
        "n": 3,
        "eps": np.float32(1e-5),
        "flag": True,
        "names": ["a", "▁b", ""],
        "ids": [1, -2],
    }
    assert len(reader.tensors) == len(known)
    for t in reader.tensors:
        assert t.data_offset % alignment == 0
        assert [int(n) for n in t.shape] == [256, 3]
        assert f"{t.tensor_type.name}.weight" == t.name
        assert np.array_equal(t.data.view(np.uint8).reshape(3, -1), weights[t.tensor_type.name])
    assert list(open_gguf(path).tensors) == [t.name for t in reader.tensors]


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    theirs = gguf_package.GGUFWriter(path, "llama")
    theirs.add_uint64("big", 1 << 40)
    theirs.add_float64("f64", 0.1)
    theirs.add_int8("i8", -3)
    theirs.add_array("words", ["x", "yy"])
    theirs.add_array("floats", [0.5, 1.5])
    x = np.arange(64, dtype=np.float32).reshape(2, 32)
    theirs.add_tensor("x", x)
    packed = gguf_package.quantize(x, gguf_package.GGMLQuantizationType.Q8_0)
    theirs.add_tensor("q", packed, raw_dtype=gguf_package.GGMLQuantizationType.Q8_0)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    ours = open_gguf(path)
    assert (ours.metadata["big"], ours.metadata["f64"], ours.metadata["i8"]) == (1 << 40, 0.1, -3)
    words = ours.metadata["words"]
    floats = ours.metadata["floats"]
    assert isinstance(words, GGUFArray)
    assert isinstance(floats, GGUFArray)
    assert (list(words), list(floats)) == (["x", "yy"], [0.5, 1.5])
    assert np.array_equal(ours.tensors["x"].blocks, x)
    assert ours.tensors["q"].shape == (2, 32)
    assert np.array_equal(ours.tensors["q"].data, packed.reshape(-1))
    copy(path, tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, ValueType.UINT32),
        (-1, ValueType.INT32),
        (1 << 32, ValueType.UINT64),
        (-(1 << 40), ValueType.INT64),
        (True, ValueType.BOOL),
        (0.5, ValueType.FLOAT32),
        (1e300, ValueType.FLOAT64),
        (float("inf"), ValueType.FLOAT32),
        ("x", ValueType.STRING),
        (b"\xff", ValueType.STRING),
        (np.int8(-1), ValueType.INT8),
        (np.float64(0.1), ValueType.FLOAT64),
        ([1, 2], ValueType.INT32),
        ([1, 1 << 31], ValueType.UINT32),
        ([-1, 1 << 31], ValueType.INT64),
        ([0, 1 << 63], ValueType.UINT64),
        ([True, False], ValueType.BOOL),
        ([1, 0.5], ValueType.FLOAT32),
        ([np.float32(0.5)], ValueType.FLOAT32),
        ([np.int64(5)], ValueType.INT32),
        (("a", b"b"), ValueType.STRING),
        (np.arange(3, dtype=np.uint16), ValueType.UINT16),
        (np.array([True, False]), ValueType.BOOL),
    ],
)
def test_types_are_inferred(tmp_path: Path, value: Any, expected: ValueType) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add("x", value)
    writer.write()
    g = open_gguf(tmp_path / "x.gguf")
    assert g.types["x"] is expected
    back = g.metadata["x"]
    if isinstance(back, GGUFArray):
        assert list(back) == [v.decode() if isinstance(v, bytes) else v for v in value]
    else:
        assert back == (value.decode("utf-8", "surrogateescape") if value == b"\xff" else value)


@pytest.mark.slow
@given(
    value=st.one_of(
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(allow_nan=False, width=32),
        st.text(),
        st.lists(st.text(), min_size=1),
        st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1),
        st.lists(st.booleans(), min_size=1),
    ),
    key=st.text(min_size=1, max_size=20).filter(lambda key: key != "general.alignment"),
)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_round_trip(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path)
    writer.add(key, value)
    writer.write()
    back = open_gguf(path).metadata[key]
    assert (list(back) if isinstance(back, GGUFArray) else back) == value


def test_given_types(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add("a", 7, ValueType.UINT16)
    writer.add("b", [], ValueType.STRING)
    writer.add("c", np.arange(3), ValueType.UINT8)
    writer.add("d", 7, ValueType.FLOAT32)
    writer.add("a", 8, ValueType.UINT8)  # the last one counts
    writer.write()
    g = open_gguf(tmp_path / "x.gguf")
    assert {k: int(v) for k, v in g.types.items()} == {"a": 0, "b": 8, "c": 0, "d": 6}
    assert (g.metadata["a"], g.metadata["d"]) == (8, 7.0)


@pytest.mark.parametrize(
    ("value", "type"),
    [
        (300, ValueType.UINT8),
        (1 << 64, None),
        ([], None),
        ([1, "a"], None),
        ([["a"]], None),
        (None, None),
        ({"a": 1}, None),
        (1e300, ValueType.FLOAT32),
        ("a", ValueType.UINT32),
        (1, ValueType.STRING),
        ([1], ValueType.STRING),
        ("a", ValueType.ARRAY),
        (np.zeros((2, 2)), None),
        (np.array([300]), ValueType.UINT8),
        (np.array([1 + 2j]), None),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, value: Any, type: ValueType | None) -> None:
    with pytest.raises(FileError, match="the key"):
        GGUFWriter(tmp_path / "x.gguf").add("the key", value, type)


@pytest.mark.parametrize("alignment", [0, 3, -32, 1 << 32])
def test_alignments_that_are_none(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(FileError, match="power of two"):
        GGUFWriter(tmp_path / "x.gguf", alignment)


# -- tensors ----------------------------------------------------------------------------


def test_data_in_every_form(tmp_path: Path) -> None:
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    writer = GGUFWriter(tmp_path / "x.gguf")
    forms: list[Any] = [
        x,
        x.tobytes(),
        memoryview(x.tobytes()),
        lambda: x,
        x.view(np.uint8),
        np.asfortranarray(x),
    ]
    for i, form in enumerate(forms):
        writer.add_tensor(f"t{i}", x.shape, "f32", form)
    writer.write()
    g = open_gguf(tmp_path / "x.gguf")
    assert all(np.array_equal(t.blocks, x) for t in g.tensors.values())
    assert len(g.tensors) == len(forms)


def test_types_that_treadle_cannot_read_are_passed_on(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("a", (2, 256), "Q6_K", bytes(420))
    writer.add_tensor("b", (2, 256), 14, bytes(420))
    writer.write()
    assert {t.type_name for t in open_gguf(tmp_path / "x.gguf").tensors.values()} == {"Q6_K"}


@pytest.mark.parametrize(
    ("name", "shape", "fmt", "message"),
    [
        ("t", (2, 33), "Q8_0", "blocks of 32"),
        ("t", (1, 1, 1, 1, 1), "F32", "shape"),
        ("t", (-1,), "F32", "shape"),
        ("n" * 64, (4,), "F32", "at most 63"),
        ("t", (4,), "Q9_9", "ggml type"),
        ("t", (4,), 4, "ggml type 4"),
    ],
)
def test_tensors_that_no_reader_would_take(
    tmp_path: Path, name: str, shape: tuple[int, ...], fmt: str | int, message: str
) -> None:
    with pytest.raises(FileError, match=message):
        GGUFWriter(tmp_path / "x.gguf").add_tensor(name, shape, fmt, b"")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(15), "15 bytes of data"),
        (np.zeros(5, np.float32), "20 bytes of data"),
        (np.zeros(4, np.int32), "data of int32"),
        (np.zeros(2, np.float64), "data of float64"),
    ],
)
def test_wrong_data_leaves_no_file(tmp_path: Path, data: Any, message: str) -> None:
    target = tmp_path / "x.gguf"
    target.write_bytes(b"what was there")
    writer = GGUFWriter(target)
    writer.add_tensor("t", (4,), "F32", data)
    with pytest.raises(FileError, match=message):
        writer.write()
    assert target.read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["x.gguf"]


def test_a_failure_of_the_caller_leaves_no_file(tmp_path: Path) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("t", (4,), "F32", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.write()
    assert os.listdir(tmp_path) == []


def test_a_tensor_twice(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("t", (4,), "F32", bytes(16))
    with pytest.raises(FileError, match="added twice"):
        writer.add_tensor("t", (4,), "F32", bytes(16))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written"):
        GGUFWriter(tmp_path / "no" / "x.gguf").write()


def test_an_open_model_survives_being_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for value in (1, 2):
        writer = GGUFWriter(path)
        writer.add_tensor("t", (4,), "F32", np.full(4, value, np.float32))
        writer.write()
        if value == 1:
            old = open_gguf(path)
    assert old.tensors["t"].blocks[0] == 1
    assert open_gguf(path).tensors["t"].blocks[0] == 2


def test_rows_that_blocks_do_not_fill() -> None:
    with pytest.raises(UnsupportedError, match="33"):
        FORMATS[8].row_bytes(33)


def test_a_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("t", (1 << 20,), "F32", lambda: pytest.fail("asked for its data"))
    usage = shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        FileError, match=r"x\.gguf: not enough disk space: 4\.0 MiB needed, 1\.0 MiB"
    ):
        writer.write()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = GGUFWriter(tmp_path / "x.gguf")
    writer.add_tensor("t", (256,), "F32", full)
    message = r"x\.gguf: cannot be written: the disk is full \(1\.\d KiB needed, .* free\)$"
    with pytest.raises(FileError, match=message):
        writer.write()
    assert list(tmp_path.iterdir()) == []

"""Reading GGUF: real models against the gguf package, and every way a file can be wrong."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest

from tests.files import gguf_bytes as gb
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFArray, ValueType, open_gguf
from treadle.formats import FORMATS, by_name

MODELS = [
    "stories260K.gguf",
    "babyllama105/babyllama105-Q8_0.gguf",
    "babyllama105/babyllama105-IQ4_NL.gguf",
    "babyllama105_pad256/mixed_Q4_K_M.gguf",
    "other/superpoint.gguf",
    "other/gridcore_test.gguf",
    "../vocab/ggml-vocab-llama-spm.gguf",
    "../vocab/ggml-vocab-gpt-2.gguf",
]


def write(folder: Path, raw: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(raw)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_reads_as_the_gguf_package_does(data: Path, name: str) -> None:
    path = data / "models" / name
    theirs = gguf_package.GGUFReader(path)
    with open_gguf(path) as ours:
        fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
        assert list(ours.metadata) == list(fields)
        for key, field in fields.items():
            value = ours.metadata[key]
            expected = field.contents()
            if isinstance(value, GGUFArray):
                assert list(value) == expected, key
                assert len(value) == len(expected)
                assert int(ours.types[key]) == int(field.types[-1])
            else:
                assert value == expected, key
                assert type(value) is type(expected), key
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            tensor = ours.tensors[t.name]
            assert tensor.shape == tuple(reversed([int(n) for n in t.shape]))
            assert (tensor.ggml_type, tensor.offset) == (int(t.tensor_type), int(t.data_offset))
            assert tensor.type_name == t.tensor_type.name
            assert tensor.format is FORMATS.get(int(t.tensor_type))
            assert np.array_equal(tensor.data, t.data.reshape(-1).view(np.uint8))


def test_a_file_of_v2_reads_like_v3(tmp_path: Path) -> None:
    raw = gb.gguf([gb.kv(b"a", gb.U32, b"\1\0\0\0")], version=2)
    g = open_gguf(write(tmp_path, raw))
    assert g.version == 2
    assert g.metadata == {"a": 1}


def test_a_model_with_separator_ids_of_all_ones(data: Path) -> None:
    g = open_gguf(data / "models" / "stories260K.gguf")
    assert 4294967295 in g.metadata.values()
    tokens = g.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GGUFArray)
    assert len(tokens) == 512
    assert tokens[1:4] == ["<s>", "</s>", "<0x00>"]


def test_nothing_is_copied(data: Path) -> None:
    path = data / "models" / "babyllama105" / "babyllama105-Q8_0.gguf"
    g = open_gguf(path)
    tensor = g.tensors["blk.0.attn_q.weight"]
    assert not tensor.data.flags.writeable
    assert np.shares_memory(tensor.data, tensor.file)
    assert np.shares_memory(tensor.blocks, tensor.file)
    base: Any = tensor.file
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(getattr(base, "obj", base), mmap.mmap)
    assert tensor.blocks.shape == (128, 4)
    assert tensor.blocks.dtype.names == ("d", "qs")
    scores = g.metadata["tokenizer.ggml.scores"]
    assert isinstance(scores, GGUFArray)
    assert np.shares_memory(scores.numpy(), tensor.file)


def test_a_view_outlives_close(data: Path) -> None:
    g = open_gguf(data / "models" / "stories260K.gguf")
    weights = g.tensors["output_norm.weight"].blocks
    before = weights.copy()
    g.close()
    g.close()
    assert not g.tensors
    assert np.array_equal(weights, before)


def test_a_tensor_without_a_format_row_is_open_but_not_read(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMATS, by_name("Q4_K").ggml_id)
    g = open_gguf(data / "models" / "babyllama105_pad256" / "mixed_Q4_K_M.gguf")
    other = [t for t in g.tensors.values() if t.format is None]
    assert other
    assert all(t.data.size == t.n_bytes for t in other)
    with pytest.raises(UnsupportedError, match="K weights"):
        _ = other[0].blocks


# -- arrays -----------------------------------------------------------------------------


def array_file(tmp_path: Path, kind: int, n: int, payload: bytes) -> GGUFArray:
    value = struct.pack("<IQ", kind, n) + payload
    array = open_gguf(write(tmp_path, gb.gguf([gb.kv(b"x", gb.ARRAY, value)]))).metadata["x"]
    assert isinstance(array, GGUFArray)
    return array


def test_string_array(tmp_path: Path) -> None:
    items = [b"a", b"", "▁x".encode(), b"\xff\0", b"z" * 300]
    value = b"".join(map(gb.string, items))
    array = array_file(tmp_path, gb.STRING, len(items), value)
    assert array.type is ValueType.STRING
    assert [array.raw(i) for i in range(5)] == items
    assert array.raw(-1) == items[-1]
    assert array[0:3] == ["a", "", "▁x"]
    assert [s.encode("utf-8", "surrogateescape") for s in map(str, array)] == items
    starts, lengths = array.offsets()
    assert [bytes(array.buffer[a : a + n]) for a, n in zip(starts, lengths, strict=True)] == items
    assert bytes(array.payload) == value
    assert repr(array) == "GGUFArray(STRING, 5)"
    with pytest.raises(IndexError):
        array.raw(5)
    with pytest.raises(TypeError):
        array.numpy()


def test_numeric_arrays(tmp_path: Path) -> None:
    array = array_file(tmp_path, ValueType.INT16, 3, struct.pack("<3h", 1, -2, 3))
    assert list(array) == [1, -2, 3]
    assert array.numpy().dtype == np.int16
    assert (array[-1], array[::2]) == (3, [1, 3])
    with pytest.raises(IndexError):
        array[3]
    with pytest.raises(TypeError):
        array.raw(0)
    with pytest.raises(TypeError):
        array.offsets()


def test_a_bool_of_two_is_true(tmp_path: Path) -> None:
    array = array_file(tmp_path, ValueType.BOOL, 3, b"\0\1\2")
    assert list(array) == [False, True, True]
    assert array[2] is True


@pytest.mark.parametrize("kind", [ValueType.STRING, ValueType.FLOAT32])
def test_empty_arrays(tmp_path: Path, kind: ValueType) -> None:
    array = array_file(tmp_path, kind, 0, b"")
    assert (list(array), len(array), array.payload.size) == ([], 0, 0)


# -- verdicts ---------------------------------------------------------------------------


def test_every_malformed_file_gets_its_verdict(data: Path) -> None:
    files = sorted((data / "malformed").iterdir())
    assert len(files) == 27
    for path in files:
        if path.stem.endswith("__accept"):
            open_gguf(path).close()
        else:
            with pytest.raises((FileError, UnsupportedError), match=path.name):
                open_gguf(path)


def test_a_header_alone_opens_and_its_data_raises(data: Path) -> None:
    g = open_gguf(data / "malformed" / "seed1_TENSORS_SUCCESS__accept.gguf")
    assert g.header_only
    with pytest.raises(FileError, match="no tensor data"):
        _ = g.tensors["my_tensor_0"].data
    assert not open_gguf(data / "malformed" / "seed1_DATA_SUCCESS__accept.gguf").header_only


def test_legacy_files_are_refused_with_the_reason(data: Path) -> None:
    for path in (data / "legacy").iterdir():
        if path.read_bytes()[:8] == b"GGUF\3\0\0\0":  # two of them are current after all
            open_gguf(path).close()
        else:
            with pytest.raises(UnsupportedError, match="treadle convert"):
                open_gguf(path)


F32_INFO = gb.info(b"t", [4])
DATA = bytes(32)


@pytest.mark.parametrize(
    ("raw", "error", "message"),
    [
        (b"", FileError, "empty file"),
        (b"GG", FileError, "2 bytes left"),
        (b"<what>" + bytes(40), FileError, "not a GGUF file: it starts with b'<wha'"),
        (b"PK\3\4" + bytes(40), UnsupportedError, "PyTorch"),
        (gb.gguf(version=1), UnsupportedError, "version 1"),
        (gb.gguf(version=3 << 24), UnsupportedError, "big-endian"),
        (gb.gguf([gb.kv(b"\xff", gb.U32, bytes(4))]), FileError, "UTF-8"),
        (gb.gguf([gb.kv(b"a", 99, bytes(4))]), FileError, "value type 99"),
        (gb.gguf([gb.kv(b"a", gb.U32, bytes(4))] * 2), FileError, "appears twice"),
        (gb.gguf()[:-8], FileError, "metadata count: cut short"),
        (gb.gguf([gb.kv(b"a", gb.U32, b"")]), FileError, "a: cut short"),
        (gb.gguf([gb.kv(b"a", gb.STRING, struct.pack("<Q", 9) + b"x")]), FileError, "9, but 1 "),
        (
            gb.gguf([gb.kv(b"a", gb.ARRAY, struct.pack("<IQ", 10, 1 << 61) + bytes(16))]),
            FileError,
            "but 16 bytes left",
        ),
        (
            gb.gguf([gb.kv(b"a", gb.ARRAY, struct.pack("<IQQ", 8, 1, 1 << 63))]),
            FileError,
            "string 0 of 1",
        ),
        (
            gb.gguf([gb.kv(b"a", gb.ARRAY, struct.pack("<IQ", gb.ARRAY, 0))]),
            UnsupportedError,
            "array of arrays",
        ),
        (gb.gguf([gb.kv(b"general.alignment", gb.U32, bytes(4))]), FileError, "power of two"),
        (gb.gguf([gb.kv(b"general.alignment", 8, gb.string(b"x"))]), FileError, "power of two"),
        (gb.gguf([], [F32_INFO] * 2, DATA), FileError, "appears twice"),
        (gb.gguf([], [gb.info(b"t" * 65, [4])], DATA), FileError, "at most 64"),
        (gb.gguf([], [gb.info(b"t", [1] * 5)], DATA), FileError, "5 dimensions"),
        (gb.gguf([], [gb.info(b"t", [1 << 62, 2])], DATA), FileError, "under 2"),
        (gb.gguf([], [gb.info(b"t", [0, 1 << 63])], DATA), FileError, "under 2"),
        (gb.gguf([], [gb.info(b"t", [1 << 32, 1 << 30])], DATA), FileError, "cut short"),
        (gb.gguf([], [gb.info(b"t", [33], 8)], DATA), FileError, "its block, 32"),
        (gb.gguf([], [gb.info(b"t", [4], 12345)], DATA), FileError, "ggml type 12345"),
        (gb.gguf([], [gb.info(b"t", [32], 4)], DATA), UnsupportedError, "Q4_2"),
        (gb.gguf([], [gb.info(b"t", [32], 31)], DATA), UnsupportedError, "Q4_0_4_4"),
        (gb.gguf([], [gb.info(b"t", [4], 0, 4)], DATA), FileError, "multiple of 32"),
        (gb.gguf([], [gb.info(b"t", [4], 0, 1 << 40)], DATA), FileError, "cut short"),
        (gb.gguf([], [gb.info(b"t", [9])], DATA), FileError, "cut short"),
        (gb.gguf([], [F32_INFO], bytes(31)), FileError, "last padding"),
        (gb.gguf([], [F32_INFO, gb.info(b"u", [4])], DATA), FileError, "lies inside t"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_wrong_in_one_place(
    tmp_path: Path, raw: bytes, error: type[TreadleError], message: str
) -> None:
    path = write(tmp_path, raw)
    with pytest.raises(error, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_an_error_says_where(tmp_path: Path) -> None:
    raw = gb.gguf([gb.kv(b"a", gb.U32, bytes(4)), gb.kv(b"the.key", 99, bytes(4))])
    path = write(tmp_path, raw)
    with pytest.raises(FileError) as caught:
        open_gguf(path)
    e = caught.value
    assert (e.path, e.where, e.expected) == (str(path), "the.key", "0 to 12")
    assert e.offset == raw.index(b"the.key") + len(b"the.key")


@pytest.mark.parametrize(
    "raw",
    [
        gb.gguf([], [F32_INFO], bytes(16)),  # the last tensor without its padding
        gb.gguf([], [gb.info(b"s", [])], bytes(4)),  # a scalar
        gb.gguf([], [gb.info(b"e", [0]), F32_INFO], DATA),  # an empty one, at the same offset
        gb.gguf([], [gb.info(b"b", [4], 0, 32), gb.info(b"a", [4])], bytes(64)),  # out of order
        gb.gguf([], [gb.info(b"a", [4], 0, 64)], bytes(96)),  # a gap before
        gb.gguf([gb.kv(b"", gb.U32, bytes(4))], [gb.info(b"", [4])], DATA),  # no names
        gb.gguf([], [gb.info(b"t" * 64, [1, 1, 1, 4])], DATA),
        gb.gguf([], [F32_INFO], bytes(500)),  # more behind
    ],
    ids=["unpadded", "scalar", "empty", "order", "gap", "unnamed", "longest name", "tail"],
)
def test_unusual_but_sound(tmp_path: Path, raw: bytes) -> None:
    g = open_gguf(write(tmp_path, raw))
    assert all(t.data.size == t.n_bytes for t in g.tensors.values())
    assert all(t.blocks.shape == t.shape for t in g.tensors.values())


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(FileError, match="is a folder"):
        open_gguf(tmp_path)
    with pytest.raises(FileError, match="cannot be opened: its name holds a NUL byte"):
        open_gguf("nul\0byte")
    with pytest.raises(FileError, match="'': an empty name"):
        open_gguf("")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "gone.gguf").symlink_to("nowhere")
    for name in ("loop.gguf", "loop.gguf/x.gguf"):
        with pytest.raises(FileError, match="cannot be opened: a loop of symbolic links"):
            open_gguf(tmp_path / name)
    with pytest.raises(FileError, match="a symbolic link to nowhere, which does not exist"):
        open_gguf(tmp_path / "gone.gguf")
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    with pytest.raises(FileError, match="not a regular file"):
        open_gguf(fifo)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, gb.gguf())

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(FileError, match=r"\.gguf: cannot be opened: Permission denied \("):
        open_gguf(path)


def test_more_entries_than_any_model_has(tmp_path: Path) -> None:
    kvs = [gb.kv(b"%x" % i, 0, b"\0") for i in range((1 << 16) + 1)]
    with pytest.raises(UnsupportedError, match="65537 metadata keys"):
        open_gguf(write(tmp_path, gb.gguf(kvs)))


# -- shards -----------------------------------------------------------------------------


def shard(no: int, count: int, n_tensors: int, name: bytes) -> bytes:
    keys = [
        gb.kv(b"split.no", 2, struct.pack("<H", no)),
        gb.kv(b"split.count", 2, struct.pack("<H", count)),
        gb.kv(b"split.tensors.count", 5, struct.pack("<i", n_tensors)),
    ]
    return gb.gguf(keys, [gb.info(name, [4])], bytes([no] * 16))


def write_shards(folder: Path, count: int = 3, n_tensors: int = 3) -> list[Path]:
    return [
        write(folder, shard(i, count, n_tensors, b"t%d" % i), f"m-{i + 1:05d}-of-{count:05d}.gguf")
        for i in range(count)
    ]


def check_shards(g: GGUF) -> None:
    first_bytes = {t.name: int(t.data[0]) for t in g.tensors.values()}
    assert first_bytes == {"t0": 0, "t1": 1, "t2": 2}
    assert g.path.name == "m-00001-of-00003.gguf"
    assert len(g.paths) == 3
    assert g.n_bytes == sum(path.stat().st_size for path in g.paths)


def test_the_shards_of_a_real_model_are_the_model(data: Path) -> None:
    whole = open_gguf(data / "models" / "stories260K.gguf")
    split = open_gguf(data / "models" / "stories260K_split" / "stories260K-00001-of-00003.gguf")
    assert set(split.tensors) == set(whole.tensors)
    for name, tensor in whole.tensors.items():
        assert np.array_equal(split.tensors[name].data, tensor.data)
        assert split.tensors[name].shape == tensor.shape
    assert whole.metadata.keys() <= split.metadata.keys()


@pytest.mark.parametrize("name", ["m-00001-of-00003.gguf", "m.gguf", "m", "."])
def test_ways_to_name_a_split_model(tmp_path: Path, name: str) -> None:
    write_shards(tmp_path)
    check_shards(open_gguf(tmp_path / name))
    check_shards(open_gguf(str(tmp_path / name)))


def test_a_later_shard_names_the_first(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    with pytest.raises(FileError, match=r"is shard 2 of 3 .*m-00001-of-00003\.gguf"):
        open_gguf(paths[1])


def test_a_folder_of_two_models(tmp_path: Path) -> None:
    write_shards(tmp_path)
    write(tmp_path, gb.gguf(), "other.gguf")
    with pytest.raises(FileError, match=r"m-00001-of-00003\.gguf, other\.gguf"):
        open_gguf(tmp_path)


def test_a_missing_shard(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].unlink()
    with pytest.raises(FileError, match="m-00003-of-00003") as caught:
        open_gguf(paths[0])
    assert caught.value.path == str(paths[2])


def test_a_wrong_shard(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].write_bytes(shard(1, 3, 3, b"t2"))
    with pytest.raises(FileError, match="says it is shard 2 of 3"):
        open_gguf(paths[0])


def test_a_shard_of_another_model(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[2].write_bytes(shard(2, 3, 3, b"t1"))
    with pytest.raises(FileError, match="t1: is in m-00002-of-00003"):
        open_gguf(paths[0])


def test_a_wrong_number_of_tensors(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, n_tensors=4)
    with pytest.raises(FileError, match="hold 3 tensors"):
        open_gguf(paths[0])


def test_a_renamed_first_shard(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    renamed = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(FileError, match="cannot be found from its name"):
        open_gguf(renamed)


def test_split_keys_that_are_no_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, gb.gguf([gb.kv(b"split.count", 8, gb.string(b"3"))]))
    with pytest.raises(FileError, match=r"split\.count"):
        open_gguf(path)

"""safetensors against the reference implementation, and all that a stranger's file may do."""

from __future__ import annotations

import json
import mmap
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.errors import FileError
from treadle.files import safetensors
from treadle.files.safetensors import DTYPES, open_safetensors, read_json
from treadle.files.splits import INDEX, SINGLE


def write(path: Path, header: Any, data: bytes = b"", *, n: int | None = None) -> Path:
    """A file with this header (JSON, or bytes as they are), said to be ``n`` bytes long."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if n is None else n).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


TWO = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}
DATA = bytes(range(32))


def test_as_the_reference_implementation(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    rng = np.random.default_rng(1)
    kinds = {
        "F32": "f4",
        "F16": "f2",
        "F64": "f8",
        "I8": "i1",
        "U32": "u4",
        "BOOL": "?",
        "I64": "i8",
    }
    arrays = {
        f"t{i}.{dtype}": rng.integers(0, 2, (i, 3, 2)).astype(kind)
        for i, (dtype, kind) in enumerate(kinds.items())
    }
    arrays["scalar"] = np.array(2.5, np.float32)
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    with open_safetensors(tmp_path / "x.safetensors") as model:
        assert model.metadata == {"format": "np"}
        assert model.n_bytes == (tmp_path / "x.safetensors").stat().st_size
        assert model.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            tensor = model.tensors[name]
            assert tensor.shape == array.shape
            assert tensor.data.tobytes() == array.tobytes()
            assert tensor.dtype == name.partition(".")[2] or name == "scalar"


def test_every_dtype_has_the_reference_size(tmp_path: Path) -> None:
    """The reference reads what we take, and refuses a byte more."""
    from safetensors import SafetensorError, safe_open

    for dtype, bits in DTYPES.items():
        path = write(tmp_path / "x.safetensors", {"a": entry(dtype, [8], 0, bits)}, bytes(bits))
        with safe_open(path, "np") as theirs:
            assert list(theirs.keys()) == ["a"]
        assert open_safetensors(path).tensors["a"].n_bytes == bits
        write(path, {"a": entry(dtype, [8], 0, bits + 1)}, bytes(bits + 1))
        with pytest.raises(FileError, match="data_offsets"):
            open_safetensors(path)
        with pytest.raises(SafetensorError):
            safe_open(path, "np")


def test_nothing_is_copied(tmp_path: Path) -> None:
    path = write(tmp_path / SINGLE, TWO, DATA)
    model = open_safetensors(tmp_path)
    a = model.tensors["a"]
    assert np.shares_memory(a.data, a.file)
    assert isinstance(a.file.base, memoryview | mmap.mmap)
    assert not a.data.flags.writeable
    with path.open("r+b") as f:  # the mapping is shared: what is written to the file is seen
        f.seek(a.offset)
        f.write(b"\xff")
    assert a.data[0] == 0xFF
    view = a.data
    model.close()
    assert view[0] == 0xFF  # a view in use keeps its file


def test_a_sparse_file_costs_no_memory(tmp_path: Path) -> None:
    """16 GB of weights, mapped in no time and no memory."""
    n = 16 << 30
    path = write(tmp_path / SINGLE, {"a": entry("F32", [n // 4], 0, n)})
    head = path.stat().st_size
    os.truncate(path, head + n)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open_safetensors(path) as model:
        assert model.tensors["a"].data[-1] == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KB


# -- shards -----------------------------------------------------------------------------------


def shards(folder: Path, **changes: str) -> Path:
    write(folder / "m-1.safetensors", {"a": entry("U8", [4], 0, 4)}, b"aaaa")
    write(folder / "m-2.safetensors", {"b": entry("U8", [4], 0, 4)}, b"bbbb")
    names = {"a": "m-1.safetensors", "b": "m-2.safetensors"} | changes
    index = folder / INDEX
    index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": names}))
    return index


def test_shards_are_one_model(tmp_path: Path) -> None:
    index = shards(tmp_path)
    for path in (tmp_path, index):
        with open_safetensors(path) as model:
            assert {n: bytes(t.data) for n, t in model.tensors.items()} == {
                "a": b"aaaa",
                "b": b"bbbb",
            }
            assert [p.name for p in model.paths] == ["m-1.safetensors", "m-2.safetensors"]


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "/abs.safetensors",
        "sub/m.safetensors",
        "..",
        "",
        "a\0.safetensors",
        "c:m.safetensors",
        "..\\m.safetensors",
        "config.json",
        None,
        7,
        ["m-1.safetensors"],
    ],
)
def test_an_index_stays_in_its_folder(shard: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "outside.safetensors", {"a": entry("U8", [4], 0, 4)}, b"aaaa")
    shards(tmp_path / "in", a=shard)
    with pytest.raises(FileError, match="in the same folder") as caught:
        open_safetensors(tmp_path / "in")
    assert caught.value.where == "a"


def test_index_and_shards_agree(tmp_path: Path) -> None:
    shards(tmp_path, c="m-2.safetensors")
    with pytest.raises(FileError, match="is missing") as caught:
        open_safetensors(tmp_path)
    assert (caught.value.where, Path(caught.value.path).name) == ("c", "m-2.safetensors")
    shards(tmp_path, b="m-1.safetensors")
    with pytest.raises(FileError, match="b: is missing"):
        open_safetensors(tmp_path)
    shards(tmp_path, c="m-3.safetensors")
    with pytest.raises(FileError, match=r"m-3\.safetensors: cannot be opened"):
        open_safetensors(tmp_path)
    index = shards(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "m-1.safetensors"}}))
    write(tmp_path / "m-1.safetensors", TWO, DATA)
    with pytest.raises(FileError, match="b: is not in"):
        open_safetensors(tmp_path)
    shards(tmp_path)
    write(tmp_path / "m-2.safetensors", TWO, DATA)
    with pytest.raises(FileError, match="as well"):
        open_safetensors(tmp_path)


def test_a_tensor_in_another_shard_than_the_index_says(tmp_path: Path) -> None:
    shards(tmp_path, a="m-2.safetensors", b="m-1.safetensors")
    with pytest.raises(FileError, match=r"is in m-1\.safetensors.*expected m-2"):
        open_safetensors(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "", "{"])
def test_a_bad_index(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FileError, match=INDEX):
        open_safetensors(tmp_path)


def test_which_file_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="without weights"):
        open_safetensors(tmp_path)
    write(tmp_path / "only.safetensors", TWO, DATA)
    assert open_safetensors(tmp_path).paths[0].name == "only.safetensors"
    write(tmp_path / "other.safetensors", TWO, DATA)
    with pytest.raises(FileError, match=r"only\.safetensors, other\.safetensors"):
        open_safetensors(tmp_path)
    write(tmp_path / SINGLE, TWO, DATA)
    assert open_safetensors(tmp_path).paths[0].name == SINGLE


def test_links(tmp_path: Path) -> None:
    """As the hub's cache has them: fine. A loop, or a link to nothing: an error, and not "none"."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs" / "0123", TWO, DATA)
    link = tmp_path / "snapshot" / SINGLE
    link.symlink_to("../blobs/0123")
    assert open_safetensors(tmp_path / "snapshot").tensors.keys() == TWO.keys()
    for target in (SINGLE, "../blobs/gone", "."):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(FileError, match=SINGLE):
            open_safetensors(tmp_path / "snapshot")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FileError, match="cannot be opened"):
        open_safetensors(tmp_path / "a")
    with pytest.raises(FileError, match="cannot be opened"):
        read_json(tmp_path / "a")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(FileError, match="regular file"):
        open_safetensors(tmp_path / SINGLE)
    with pytest.raises(FileError, match="regular file"):
        read_json(tmp_path / SINGLE)


# -- damaged files ----------------------------------------------------------------------------

BIG = 1 << 62
BAD: dict[str, tuple[Any, bytes, str]] = {
    "not JSON": (b"{nothing", b"", "is not JSON"),
    "no object": (b"[]", b"", "begins with"),
    "padded in front": (b" {}", b"", "begins with"),
    "not UTF-8": (b'{"\xff": 1}', b"", "is not JSON"),
    "nested": (b'{"a":' + b"[" * 50_000, b"", "is not JSON"),
    "twice": (b'{"a": 1, "a": 2}', b"", "'a' appears twice"),
    "surrogate": (b'{"\\ud800": {}}', b"", "printable"),
    "metadata": ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    "no dict": ({"a": 3}, b"", "is described by 3"),
    "a key less": ({"a": {"dtype": "F32", "shape": []}}, b"", "is described by"),
    "a key more": ({"a": {**entry("U8", [0], 0, 0), "x": 1}}, b"", "is described by"),
    "dtype": ({"a": entry("Q9", [1], 0, 1)}, b"x", "dtype 'Q9'"),
    "dtype list": ({"a": entry(["F32"], [1], 0, 4)}, b"xxxx", "dtype"),  # type: ignore[arg-type]
    "negative size": ({"a": entry("U8", [-1], 0, 0)}, b"", "shape"),
    "float size": ({"a": entry("U8", [1.0], 0, 1)}, b"x", "shape"),  # type: ignore[list-item]
    "true size": ({"a": entry("U8", [True], 0, 1)}, b"x", "shape"),
    "dims": ({"a": entry("U8", [1] * 65, 0, 1)}, b"x", "shape"),
    "huge size": ({"a": entry("U8", [10**4000], 0, 1)}, b"x", "shape"),
    "overflow": ({"a": entry("F32", [BIG, BIG, 4], 0, 0)}, b"", "data_offsets"),
    "backwards": ({"a": entry("U8", [0], 4, 2)}, b"xxxx", "data_offsets"),
    "three offsets": ({"a": entry("U8", [1], 0, 1) | {"data_offsets": [0] * 3}}, b"x", "data_off"),
    "negative offset": ({"a": entry("U8", [1], -1, 0)}, b"x", "data_offsets"),
    "misshapen": ({"a": entry("F32", [3], 0, 8)}, bytes(8), "expected 12 bytes"),
    "half bytes": ({"a": entry("F4", [3], 0, 1)}, b"x", "data_offsets"),
    "truncated": ({"a": entry("U8", [9], 0, 9)}, b"12345678", "cut short"),
    "out of range": ({"a": entry("U8", [4], BIG, BIG + 4)}, b"1234", "cut short"),
    "overlap": (
        {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)},
        b"123456",
        "lies inside a",
    ),
    "same place": ({n: entry("U8", [4], 0, 4) for n in "ab"}, b"1234", "lies inside a"),
    "gap": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123", "gap after a"),
    "trailing": ({"a": entry("U8", [1], 0, 1)}, b"12", "1 bytes after"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_headers(case: str, tmp_path: Path) -> None:
    header, data, why = BAD[case]
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(FileError, match=r"x\.safetensors") as caught:
        open_safetensors(path)
    assert why in str(caught.value)
    assert caught.value.offset is not None
    str(caught.value).encode()  # no lone surrogates on the way to a terminal


@pytest.mark.parametrize("n", [0, 1, 7, 8])
def test_too_short_for_a_header(n: int, tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(n))
    with pytest.raises(FileError):
        open_safetensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("n", "says"),
    [
        (3, "cut short: the header has 3 bytes, but 2 are left"),
        (1 << 31, "at most 100000000"),
        ((1 << 64) - 1, "at most 100000000"),
    ],
)
def test_header_lengths_that_lie(n: int, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"{}", n=n)
    with pytest.raises(FileError, match=says):
        open_safetensors(path)


def test_a_header_beyond_the_formats_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", b"{}", n=safetensors.MAX_HEADER + 1)
    os.truncate(path, safetensors.MAX_HEADER + 100)
    with pytest.raises(FileError, match="at most 100000000"):
        open_safetensors(path)


def test_every_truncation_of_a_sound_file_is_seen(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.safetensors", TWO, DATA).read_bytes()
    for n in range(len(whole)):
        (tmp_path / "x.safetensors").write_bytes(whole[:n])
        with pytest.raises(FileError):
            open_safetensors(tmp_path / "x.safetensors")


sizes = st.integers(-2, 20) | st.integers(0, 1 << 70)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPES, "X"]),
        "shape": st.lists(sizes, max_size=3),
        "data_offsets": st.lists(sizes, min_size=1, max_size=3),
    }
)
anything = st.recursive(
    st.none() | st.booleans() | sizes | st.floats() | st.text(max_size=3) | entries,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=3), entries | anything, max_size=4),
    data=st.binary(max_size=40),
)
def test_any_header(header: dict[str, Any], data: bytes, tmp_path_factory: Any) -> None:
    accepts(write(tmp_path_factory.getbasetemp() / "any.safetensors", header, data))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(at=st.integers(0, 200), put=st.binary(max_size=9), cut=st.integers(0, 9))
def test_any_damage(at: int, put: bytes, cut: int, tmp_path_factory: Any) -> None:
    path = write(tmp_path_factory.getbasetemp() / "damage.safetensors", TWO, DATA)
    whole = path.read_bytes()
    at %= len(whole) + 1
    path.write_bytes(whole[:at] + put + whole[at + cut :])
    accepts(path)


def accepts(path: Path) -> None:
    """A FileError, or a model all of whose tensors are whole; and what we accept is sound."""
    from safetensors import safe_open

    try:
        model = open_safetensors(path)
    except FileError as e:
        str(e).encode()
        return
    used = 0
    for tensor in model.tensors.values():
        assert len(tensor.data) == tensor.n_bytes
        assert tensor.n_bytes * 8 == int(np.prod(tensor.shape, dtype=object)) * DTYPES[tensor.dtype]
        used += tensor.n_bytes
    assert used == model.n_bytes - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    with safe_open(path, "np") as theirs:
        assert set(theirs.keys()) == set(model.tensors)

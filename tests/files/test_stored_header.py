"""Headers from disk: the same metadata and tensors as those that are read from the file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import WriteTiny
from treadle.files import stored_entries, stored_header
from treadle.files.bundled import START, BundleHeader
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.gguf_header import Header
from treadle.files.gguf_writer import GGUFWriter
from treadle.files.metadata import GGUFArray
from treadle.jit.cache import checked_folder

STRINGS = ["", "a", "b" * 300, "ä\0c", "d" * 70_000, "last"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_PLANS", "1")
    entries = tmp_path / "entries"
    monkeypatch.setattr(stored_entries, "entries_folder", lambda: checked_folder(entries))
    return entries


@pytest.fixture
def path(tmp_path: Path) -> Path:
    writer = GGUFWriter(tmp_path / "model.gguf", alignment=64)
    for name, value in {
        "flag": True,
        "number": 7,
        "real": 1.5,
        "text": "ü",
        "big": 1 << 40,
    }.items():
        writer.add(f"general.{name}", value)
    writer.add("none", np.empty(0, np.float32))
    writer.add("floats", np.arange(5, dtype=np.float64))
    writer.add("bools", np.array([True, False]))
    writer.add("strings", STRINGS)
    writer.add("empty", [""])
    writer.add_tensor("one", (3, 64), "Q8_0", np.arange(3 * 68, dtype=np.uint8))
    writer.add_tensor("two", (), "F32", np.ones(1, np.float32))
    writer.add_tensor("three", (2, 256), "Q8_K", np.zeros(2 * 292, np.uint8))  # no format
    writer.write()
    return writer.path


def values(gguf: GGUF) -> dict[str, Any]:
    return {
        key: [*each] if isinstance(each, GGUFArray) else each for key, each in gguf.metadata.items()
    }


def is_parsed(path: Path) -> bool:
    calls: list[Header] = []
    with pytest.MonkeyPatch.context() as patch:
        read = Header._read

        def counted(self: Header) -> None:
            calls.append(self)
            read(self)

        patch.setattr(Header, "_read", counted)
        open_gguf(path, stored=True)
    return bool(calls)


def check_alike(path: Path) -> None:
    plain = open_gguf(path)
    assert is_parsed(path)
    assert not is_parsed(path)
    found = open_gguf(path, stored=True)
    assert list(found.metadata) == list(plain.metadata)
    assert values(found) == values(plain)
    assert found.types == plain.types
    assert list(found.tensors) == list(plain.tensors)
    for name, tensor in found.tensors.items():
        other = plain.tensors[name]
        assert (tensor.shape, tensor.type_name) == (other.shape, other.type_name)
        assert tensor.format is other.format
        assert tensor.has_codes == (other.format is not None and other.format.codes is not None)
        assert bytes(tensor.data) == bytes(other.data)
    for key, each in found.metadata.items():
        theirs = plain.metadata[key]
        if isinstance(each, GGUFArray) and isinstance(theirs, GGUFArray):
            assert bytes(each.payload) == bytes(theirs.payload)
    about = [
        (g.version, g.alignment, g.n_bytes, g.header_only, g.is_in_place) for g in (found, plain)
    ]
    assert about[0] == about[1]


def test_it_is_the_same(path: Path) -> None:
    check_alike(path)
    strings = open_gguf(path, stored=True).metadata["strings"]
    assert isinstance(strings, GGUFArray)
    assert [*strings] == STRINGS
    assert strings.raws([1, 5]) == [b"a", b"last"]


def test_of_a_model(tiny: WriteTiny) -> None:
    check_alike(tiny())


def test_of_a_bundle(tiny: WriteTiny, tmp_path: Path) -> None:
    model = tiny().read_bytes()
    path = tmp_path / "talk"
    head = BundleHeader("model.gguf", START, len(model), "run", ()).head(b"exit\n")
    path.write_bytes(head + model + bytes(-len(model) % START) + b"PK")
    check_alike(path)


def test_of_shards(tmp_path: Path) -> None:
    for no in range(2):
        writer = GGUFWriter(tmp_path / f"model-0000{no + 1}-of-00002.gguf")
        for key, number in {"no": no, "count": 2, "tensors.count": 2}.items():
            writer.add(f"split.{key}", number)
        writer.add_tensor(f"t{no}", (4,), "F32", np.full(4, no, np.float32))
        writer.write()
    check_alike(tmp_path / "model-00001-of-00002.gguf")


def test_entries_that_do_not_fit(path: Path, folder: Path) -> None:
    """A file that was written again, a damaged entry, and one without a file."""
    assert (is_parsed(path), is_parsed(path)) == (True, False)
    path.write_bytes(path.read_bytes())
    assert (is_parsed(path), is_parsed(path)) == (True, False)
    for entry in folder.iterdir():
        entry.write_bytes(entry.read_bytes()[:-1])
    assert (is_parsed(path), is_parsed(path)) == (True, False)
    found = open_gguf(path)
    path.unlink()
    (file,) = found.mapped_files
    assert stored_header.header_key(file) is None


@pytest.mark.parametrize(
    ("inode", "modified", "changed", "tells"),
    [(7, 5, 0, True), (7, 0, 5, True), (7, 0, 0, False), (0, 5, 5, False)],
)
def test_file_systems_that_do_not_tell_files_apart(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inode: int,
    modified: int,
    changed: int,
    tells: bool,
) -> None:
    """Without inodes, or with times in whole seconds: as in SquashFS, where two images may be alike
    in all that a key has.
    """
    second = 1_700_000_000 * stored_entries.SECOND
    (file,) = open_gguf(path).mapped_files
    about = SimpleNamespace(st_dev=1, st_ino=inode, st_size=len(file))
    about.st_mtime_ns = second + modified
    about.st_ctime_ns = second + changed
    file._state_when_mapped = (1, inode, len(file), about.st_mtime_ns)
    monkeypatch.setattr(stored_entries, "os", SimpleNamespace(stat=lambda path: about))
    assert (stored_entries.identity(file) is not None) == tells


def test_what_is_not_stored(
    path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_gguf(path)  # nobody asked for it
    only = tmp_path / "only.gguf"
    first = min(tensor.offset for tensor in open_gguf(path).tensors.values())
    only.write_bytes(path.read_bytes()[:first])
    assert open_gguf(only, stored=True).header_only
    monkeypatch.setattr(stored_header, "MOST_STRINGS", 3)
    assert is_parsed(path)
    monkeypatch.setenv("TREADLE_PLANS", "0")
    assert is_parsed(path)
    assert [*folder.glob("*")] == []

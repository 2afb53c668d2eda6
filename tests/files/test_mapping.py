"""What is mapped stands in the table that the handler of SIGBUS reads, and changes are noticed."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from treadle.errors import FileError
from treadle.files import mapping
from treadle.files.mapping import FAULTS, MappedFile, Mappings, map_file, mappings_of

N_BYTES = 3 * mmap.PAGESIZE + 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(bytes(range(1, 256)) * (N_BYTES // 255) + bytes(N_BYTES % 255))
    return made


def rows_of(mapped: MappedFile) -> list[tuple[int, ...]]:
    address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    return [tuple(row) for row in FAULTS.tolist() if row[0] == address]


@pytest.mark.slow
def test_a_mapping_has_a_row_as_long_as_it_lasts(path: Path) -> None:
    before = int(np.count_nonzero(FAULTS["begin"]))
    mapped = map_file(path, "a file")
    address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    assert rows_of(mapped) == [(address, address + N_BYTES, 0)]
    view = np.frombuffer(mapped, np.uint8)
    with pytest.raises(BufferError):
        mapped.close()
    assert len(rows_of(mapped)) == 1  # it is still mapped
    del view
    mapped.close()
    mapped.close()
    with map_file(path, "a file") as inside:
        assert len(rows_of(inside)) == 1
    forgotten = map_file(path, "a file")
    del forgotten
    gc.collect()
    assert int(np.count_nonzero(FAULTS["begin"])) <= before


def test_a_file_that_is_mapped_when_python_ends(path: Path) -> None:
    """numpy outlives the mapping's module, whose names are None when the file is dropped."""
    program = f"""
import numpy
from pathlib import Path
from treadle.files import mapping
numpy.kept = mapping, mapping.map_file(Path({str(path)!r}), "a file")
"""
    # Without the line counter, whose own table is None by then.
    env = {name: value for name, value in os.environ.items() if name != "TREADLE_COUNT_LINES"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_more_files_than_rows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are mapped all the same."""
    monkeypatch.setattr(mapping, "_unused", iter([len(FAULTS)]))
    monkeypatch.setattr(mapping, "_freed", [])
    mapped = map_file(path, "a file")
    assert rows_of(mapped) == []
    mapped.check()
    mapped.close()


def test_what_the_handler_notes_is_an_error(path: Path) -> None:
    mapped = map_file(path, "a file")
    mapped.check_unchanged()
    row = next(i for i, found in enumerate(FAULTS.tolist()) if found in rows_of(mapped))
    FAULTS["fault"][row] = FAULTS["begin"][row] + 4096
    with pytest.raises(FileError, match="at byte 4096: cannot be read: its disk or network failed"):
        mapped.check()
    os.truncate(path, 100)
    with pytest.raises(FileError, match=rf"shrank to 100 bytes.*expected {N_BYTES} bytes") as e:
        mapped.check()
    assert e.value.path == str(path)
    mapped.close()
    again = map_file(path, "a file")  # in the same row
    again.check_unchanged()
    again.close()


def test_a_file_that_was_written_to(path: Path) -> None:
    mapped = map_file(path, "a file")
    with path.open("r+b") as f:
        f.write(b"other")
    os.utime(path, ns=(1, 1))  # file systems count in steps, and a test is quick
    mapped.check()
    with pytest.raises(FileError, match="was modified while it was in use"):
        mapped.check_unchanged()


def test_a_name_that_went_to_another_file(path: Path, tmp_path: Path) -> None:
    """The pages are those of the file that was mapped."""
    mapped = map_file(path, "a file")
    fd = mapped.reopen()
    assert fd is not None
    os.close(fd)
    (tmp_path / "new").write_bytes(b"new")
    (tmp_path / "new").replace(path)
    mapped.check_unchanged()
    assert mapped.reopen() is None
    path.unlink()
    mapped.check_unchanged()
    assert mapped.reopen() is None
    assert mapped[:3] == b"\1\2\3"


def test_the_latest_mapping_of_a_path(path: Path, tmp_path: Path) -> None:
    """One that is kept from before the file changed says nothing of what is read now."""
    before = map_file(path, "a file")
    closed = map_file(path, "a file")
    closed.close()
    os.utime(path, ns=(1, 1))
    found = mappings_of([tmp_path / "other", path])
    assert found.files == [before]
    with pytest.raises(FileError):
        found.check(now=True)
    now = map_file(path, "a file")
    found = mappings_of([path])
    assert found.files == [now]
    found.check(now=True)


def test_the_system_is_asked_once_in_a_while(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "EVERY_S", 1e9)
    files = Mappings([map_file(path, "a file")])
    os.utime(path, ns=(1, 1))
    files.check()
    with pytest.raises(FileError, match="was modified"):
        files.check(now=True)
    monkeypatch.setattr(mapping, "EVERY_S", 0.0)
    with pytest.raises(FileError, match="was modified"):
        files.check()
    files.close()
    files.check()

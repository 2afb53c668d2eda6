"""Memory-mapped files: pages are read on first access and shared with other processes.

If a file was truncated after mapping (``truncate``, ``cp`` over it), or its disk fails, a page is
missing and reading it raises SIGBUS. The handler in ``devices/cpu/mapping_faults.py`` supplies
zeros and records the fault in ``FAULTS``. Call ``check`` after using data from a mapping.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError, why
from treadle.system import SYSTEM

# Table of the SIGBUS handler: one row per mapped file. ``end`` is exclusive; ``fault`` is the
# first address that had no page, or 0. A row of zeros is free.
FAULTS = np.zeros(1 << 12, [("begin", "i8"), ("end", "i8"), ("fault", "i8")])
EVERY_S = 1.0  # seconds between two checks of a file's size and modification time

_words = memoryview(FAULTS.view(np.int64))  # type: ignore[arg-type]
_serial, _unused = itertools.count(), itertools.count()
_mapped: WeakValueDictionary[int, MappedFile] = WeakValueDictionary()  # in the order of mapping
_freed: list[int] = []  # free rows; used without a lock, because __del__ must not take one


class MappedFile(mmap.mmap):
    """A read-only mapping of a file. While it is open it has a row in ``FAULTS``, if one is
    free.
    """

    path: Path
    start: int  # offset in the file of the mapping's first byte
    _state_when_mapped: tuple[int, ...]  # the file's ``state_of`` when it was mapped
    _begin: int  # address of the first byte
    _row: int | None = None

    def __new__(cls, fd: int, path: Path, start: int = 0, n_bytes: int = 0) -> MappedFile:
        """Map ``n_bytes`` (0: all) of the open file ``fd`` from byte ``start`` on, a multiple of
        ``mmap.ALLOCATIONGRANULARITY``. Raises OSError if the system refuses, ValueError if the file
        is empty or too short.
        """
        found = state_of(os.fstat(fd))
        self = super().__new__(cls, fd, n_bytes, access=mmap.ACCESS_READ, offset=start)
        self.path = path
        self.start = start
        self._state_when_mapped = found
        self._row = None
        self._begin = int(np.frombuffer(self, np.uint8).ctypes.data)
        self._enter()
        _mapped[next(_serial)] = self
        return self

    @property
    def begin(self) -> int:
        """Address of the first byte."""
        return self._begin

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self._begin + len(self)

    @property
    def state(self) -> tuple[int, ...]:
        """The file's device, inode, size in bytes and modification time in ns, as they were when it
        was mapped.
        """
        return self._state_when_mapped

    def check(self) -> None:
        """Raise FileError if a missing page was read, which gave zeros."""
        if self._row is not None and (fault := _words[3 * self._row + 2]):
            raise self._error(self.start + fault - self._begin)

    def reopen(self) -> int | None:
        """Return a new file descriptor of the file; None if its path is gone or now another
        file's.
        """
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDONLY | SYSTEM.BINARY)
            if state_of(os.fstat(fd))[:2] == self._state_when_mapped[:2]:
                return fd
            os.close(fd)
        return None

    def check_unchanged(self) -> None:
        """Raise FileError if a missing page was read, or if the file was written to since
        mapping.
        """
        self.check()
        if self._is_changed():
            raise self._error()

    def _is_changed(self) -> bool:
        """Return whether the file was written to since mapping. A new file under the same path does
        not count.
        """
        try:
            found = state_of(os.stat(self.path))
        except OSError:  # the name is gone, but the pages stay valid
            return False
        return found[:2] == self._state_when_mapped[:2] and found != self._state_when_mapped

    def _error(self, offset: int | None = None) -> FileError:
        """Return the FileError for this file's present state: shrunk, modified or unreadable.
        ``offset`` is the first byte that could not be read, if any.
        """
        n_bytes = now = self._state_when_mapped[2]
        with contextlib.suppress(OSError, ValueError):
            now = self.size()
        if now < n_bytes:
            what = f"shrank to {now} bytes while it was in use"
        elif offset is None or self._is_changed():
            what = "was modified while it was in use"
        else:
            what = "cannot be read: its disk or network failed"
            return FileError(what, path=self.path, offset=offset)
        return FileError(what, path=self.path, expected=f"{n_bytes} bytes, unchanged")

    def close(self) -> None:
        """Unmap the file. Raises BufferError while numpy views of it exist."""
        self._leave()  # first: other mappings may reuse the addresses at once
        try:
            super().close()
        except BufferError:
            self._enter()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._leave()

    def _enter(self) -> None:
        row = _freed.pop() if _freed else next(_unused)
        if row < len(FAULTS):  # else the file is not registered
            FAULTS[row] = (self._begin, self._begin + len(self), 0)
            self._row = row

    def _leave(self, words: memoryview[int] = _words, freed: list[int] = _freed) -> None:
        """Free the mapping's row of ``FAULTS``.

        The arguments' defaults keep the table alive: at exit, Python sets modules' names to None,
        and some mappings are dropped after that.
        """
        row = self._row
        self._row = None
        if row is not None:
            # The end first: the handler must never see a row that begins at 0 and has an end.
            words[3 * row + 1] = 0
            words[3 * row] = 0
            words[3 * row + 2] = 0
            freed.append(row)


class Mappings:
    """The mapped files of one model, checked and closed together."""

    def __init__(self, files: Iterable[MappedFile]) -> None:
        self.files = list(files)
        self._looked = time.monotonic()

    def check(self, *, now: bool = False) -> None:
        """Raise FileError if a file shrank or was written to.

        Missing pages are checked on every call, in memory. Writes are checked by ``os.stat`` once
        in ``EVERY_S``, or always if ``now``.
        """
        for file in self.files:
            file.check()
        at = time.monotonic()
        if now or at - self._looked >= EVERY_S:
            self._looked = at
            for file in self.files:
                file.check_unchanged()

    def close(self) -> None:
        """Close the files. A file stays mapped until the last view of it is dropped."""
        for file in self.files:
            with contextlib.suppress(BufferError):
                file.close()
        self.files = []


def mappings_of(paths: Iterable[Path]) -> Mappings:
    """Return the open mappings of ``paths``; of a file that is mapped twice, the latest."""
    latest = {file.path: file for file in list(_mapped.values()) if not file.closed}
    return Mappings(latest[path] for path in paths if path in latest)


def map_file(path: Path, expected: str) -> MappedFile:
    """Map a file read-only; of a bundle, map only its model.

    Raises FileError, with the text ``expected``, for a file that is not regular, is empty or cannot
    be opened, and for a damaged bundle.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise FileError("not a regular file", path=path, expected=expected)
        with path.open("rb", buffering=0) as f:
            if os.fstat(f.fileno()).st_size == 0:
                raise FileError("an empty file", path=path, offset=0, expected=expected)
            mapped = MappedFile(f.fileno(), path, *_model_part(f, path))
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name, a file emptied meanwhile
        raise FileError(f"cannot be opened: {why(e)}", path=path, expected=expected) from e
    # Use 2 MB pages where the file system supports them: a cold file loads in two thirds of the
    # time, and decoding reads it a tenth faster.
    SYSTEM.want_huge_pages(mapped)
    return mapped


def _model_part(file: IO[bytes], path: Path) -> tuple[int, int] | tuple[()]:
    """Return the first byte of the model in a bundle and its size; () for any other file, which is
    mapped as a whole. Raises the errors of ``read_bundled``.
    """
    if file.read(2) != b"#!":  # a bundle begins as a script
        return ()
    from treadle.files.bundled import read_bundled

    file.seek(0)
    bundled = read_bundled(file, path)
    return (bundled.start, bundled.n_bytes) if bundled else ()


def resident_pages(mapped: mmap.mmap) -> npt.NDArray[np.bool_]:
    """Return bool [n_pages]: whether each page of a mapped file is in memory. Reads no page.

    Raises OSError if the system cannot tell. Linux reports all pages as resident for a file that
    the caller neither owns nor may write.
    """
    flags = np.zeros(-(-len(mapped) // mmap.PAGESIZE), np.uint8)
    begin = np.frombuffer(mapped, np.uint8).ctypes.data
    SYSTEM.mark_resident(begin, len(mapped), flags.ctypes.data)
    return (flags & 1).view(np.bool_)


def state_of(about: os.stat_result) -> tuple[int, ...]:
    """Return a file's device, inode, size in bytes and modification time in ns."""
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns

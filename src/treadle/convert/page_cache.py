"""Page cache hygiene: a conversion drops the pages that it brought into memory.

The kernel reports which pages of a file were in memory before (``mincore``); only the others are
dropped, so that a model in use by another process keeps its pages. If the kernel cannot tell (not
Linux, or a file of another user), nothing is dropped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from treadle.files.mapping import resident_pages
from treadle.files.tensor import TensorData
from treadle.system import SYSTEM

Advise = Callable[[int, int, int], None]  # file descriptor, first byte, number of bytes
PAGE = mmap.PAGESIZE
SMALL = 1 << 20  # bytes: smaller files are skipped, and smaller ranges gathered
MAX_FILES = 1000


class PageCache:
    """The files of one conversion, and which of their pages were in memory when it began."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[Path, _CachedPages] = {}
        self.add(paths)

    def add(self, paths: Iterable[Path]) -> None:
        """Record the resident pages of more files; files already recorded keep their state."""
        for path in paths:
            if path not in self._files and SYSTEM.DROPS_PAGES:
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    self._files[path] = _CachedPages(path)

    def expect(self, ranges: Iterable[TensorData]) -> None:
        """Tell the kernel which ranges will be read next, so that it may prefetch them."""
        for part in ranges:
            if part.path in self._files:
                _advise(part.path, [(part.offset, part.n_bytes)], SYSTEM.fetch_pages)

    def drop(self, ranges: Iterable[TensorData]) -> None:
        """Drop ranges that have been read and will not be read again: of each file once they are
        ``SMALL`` together, as the kernel lists all mappings of the process for each.
        """
        for part in ranges:
            if part.path in self._files:
                self._files[part.path].release(part.offset, part.n_bytes)

    def close(self) -> None:
        """Drop the remaining pages of every file, read-ahead included."""
        for file in self._files.values():
            file.drop(0, file.n_bytes)
        self._files = {}


def _advise(path: Path, ranges: Iterable[tuple[int, int]], advise: Advise) -> None:
    """Call ``advise(fd, offset, n_bytes)``, a function that advises the kernel, for each range
    (offset, bytes) of a file. A missing file is ignored.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | SYSTEM.BINARY)
        try:
            for offset, n_bytes in ranges:
                advise(fd, offset, n_bytes)
        finally:
            os.close(fd)


def record_page_cache(path: Path) -> PageCache:
    """Record the resident pages of a checkpoint's files. Call it before the first byte is read,
    because reading a header makes the kernel read ahead megabytes.

    A folder stands for its files, a file also for its neighbours with the same suffix (other
    shards).
    """
    folder = path if path.is_dir() else path.parent
    try:
        beside = sorted(p for p in folder.iterdir() if path.is_dir() or p.suffix == path.suffix)
    except OSError:
        beside = []  # opening the checkpoint reports it
    files = (p for p in beside[:MAX_FILES] if p.is_file())
    return PageCache(p for p in files if p.stat().st_size >= SMALL)


class _CachedPages:
    """The page cache of one file: ``resident``, bool [n_pages], is true for pages that were in
    memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._noted: list[tuple[int, int]] = []  # ranges that are not dropped yet: begin, end
        fd = os.open(path, os.O_RDONLY | SYSTEM.BINARY)
        try:
            self.about = os.fstat(fd)
            self.n_bytes = self.about.st_size
            self.resident = np.zeros(0, np.bool_)
            if self.n_bytes:
                with mmap.mmap(fd, self.n_bytes, access=mmap.ACCESS_READ) as mapped:
                    self.resident = resident_pages(mapped)
        finally:
            os.close(fd)

    def release(self, offset: int, n_bytes: int) -> None:
        """Note a range as read, and drop all noted ones once they are ``SMALL`` together."""
        self._noted.append((offset, offset + n_bytes))
        if sum(end - begin for begin, end in self._noted) >= SMALL:
            for begin, end in merged_ranges(self._noted):
                self.drop(begin, end - begin)
            self._noted = []

    def drop(self, offset: int, n_bytes: int) -> None:
        first = offset // PAGE
        last = -(-(offset + n_bytes) // PAGE)
        SYSTEM.unmap_pages(self.about, first * PAGE, last * PAGE)
        flags = np.concatenate(([True], self.resident[first:last], [True])).astype(np.int8)
        edges = np.flatnonzero(np.diff(flags))  # begin and end, alternating, of each run to drop
        runs = ((first + edges) * PAGE).reshape(-1, 2).tolist()
        _advise(self.path, ((lo, hi - lo) for lo, hi in runs), SYSTEM.drop_pages)


def merged_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (begin, end) in order, those that touch or share a page as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin // PAGE <= -(-found[-1][1] // PAGE):
            begin, last = found.pop()
            end = max(end, last)
        found.append((begin, end))
    return found

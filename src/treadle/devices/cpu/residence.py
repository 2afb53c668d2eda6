"""Memory residence of files: bytes in memory or only on disk, and in pages of which size.

Linux keeps what a program wrote or read in pages of 4 KB or a few of them together. A program that
maps a cold file and asks for huge pages, as treadle does, gets pages of 2 MB. When all weights are
read for each token, small pages cost a processor a tenth of its time in address translation.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from treadle.devices.cpu.mapping_faults import guard_mappings
from treadle.errors import FileError
from treadle.files.mapping import MappedFile, map_file, resident_pages
from treadle.machine.memory import MemoryBound, page_bounds
from treadle.machine.topology import CGROUP, PROC
from treadle.system import SYSTEM

HUGE = 2 << 20  # bytes


def resident_bytes(path: Path) -> int | None:
    """Return the bytes of a file that are in memory now; None if the system cannot tell."""
    n_bytes = path.stat().st_size
    if not n_bytes:
        return 0
    with contextlib.suppress(OSError, FileError):
        return min(n_bytes, int(resident_pages(_map(path)).sum()) * mmap.PAGESIZE)
    return None


class Shortage(NamedTuple):
    """A shortage of memory for a model: the model's bytes, the bytes of memory available for them
    (``free_bytes``), and the limit of memory that is the lowest.
    """

    n_bytes: int
    free_bytes: int
    bound: MemoryBound


def shortage(paths: Iterable[Path], cgroup: Path = CGROUP, proc: Path = PROC) -> Shortage | None:
    """Return the memory shortage for a model's files; None if memory holds all of them, or its
    limits or the files' sizes are unknown. Pages of the files that are already in memory count as
    available. ``cgroup``, ``proc``: the system's folders (tests pass others).
    """
    paths = list(paths)
    bounds = page_bounds(cgroup, proc)
    try:
        size = sum(path.stat().st_size for path in paths)
    except OSError:  # relative to another folder, or deleted
        return None
    if all(size <= bound.free_bytes for bound in bounds):
        return None
    resident = sum(resident_bytes(path) or 0 for path in paths)
    rooms = [(bound.free_bytes + min(resident, bound.file_bytes), bound) for bound in bounds]
    for_it, bound = min(rooms, key=lambda room: room[0])
    return Shortage(size, for_it, bound) if size > for_it else None


def huge_bytes(path: Path) -> int | None:
    """Return the bytes of a file that are in memory in pages of 2 MB; None if the system cannot
    tell. Reads nothing from disk.
    """
    if not path.stat().st_size or not PROC.exists():
        return None
    with contextlib.suppress(OSError, FileError):
        mapped = _map(path)
        per = HUGE // mmap.PAGESIZE
        present = resident_pages(mapped)
        for page in range(0, len(present), per):
            if present[page : page + per].all():
                mapped[page * mmap.PAGESIZE]  # faults it in; a huge page is mapped whole
        at = int(np.frombuffer(mapped, np.uint8).ctypes.data)
        for words, sizes in _mappings():
            low, high = (int(word, 16) for word in words[0].split("-"))
            if low <= at < high:
                huge = [sizes[n] for n in ("FilePmdMapped:", "ShmemPmdMapped:") if n in sizes]
                return sum(huge) if huge else None
    return None


def reread(path: Path) -> int | None:
    """Drop a file's pages and read it again from disk, in huge pages if the system can.

    Returns the bytes in huge pages, as ``huge_bytes`` does. Pages that another process has mapped
    stay as they are. Raises OSError and FileError if the file cannot be read.
    """
    with path.open("rb") as file:
        SYSTEM.drop_pages(file.fileno(), 0, 0)
    if path.stat().st_size:
        guard_mappings()
        mapped = _map(path)
        np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE].max()
        mapped.check()
    return huge_bytes(path)


def _map(path: Path) -> MappedFile:
    """Map a file in the way that models' files are mapped; return the mapping."""
    return map_file(path, "a model's file")


def peak_bytes(proc: Path = PROC) -> int | None:
    """Return this process's peak resident memory in bytes; None if the system cannot tell."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return SYSTEM.peak_bytes()


def read_bytes(proc: Path = PROC) -> int | None:
    """Return the bytes that this process has read from disks; None if the system cannot tell."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return None


def mapped_bytes(paths: Iterable[Path], proc: Path = PROC) -> int | None:
    """Return the bytes of ``paths`` that this process has mapped and that are in memory; None if
    the system cannot tell.
    """
    names = {os.path.realpath(path) for path in paths}
    with contextlib.suppress(OSError):
        ours = (sizes for words, sizes in _mappings(proc) if words[5:] and words[5] in names)
        return sum(sizes.get("Rss:", 0) for sizes in ours)
    return None


def _mappings(proc: Path = PROC) -> list[tuple[list[str], dict[str, int]]]:
    """Return this process's mappings from ``smaps``: for each, the words of its first line, and its
    sizes in bytes by name ("Rss:"). Raises OSError.
    """
    found: list[tuple[list[str], dict[str, int]]] = []
    for line in (proc / "self/smaps").read_text("utf-8", "surrogateescape").splitlines():
        words = line.split(None, 5)
        if "-" in words[0]:
            found.append((words, {}))
        elif words[-1] == "kB":
            found[-1][1][words[0]] = int(words[1]) << 10
    return found

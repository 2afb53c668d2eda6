"""Where a file's bytes are now: in memory or on disk, and in pages of which size.

Linux keeps what a program wrote or read in pages of 4 KB or a few of them together, and gives pages
of 2 MB to who maps a cold file and asks for them, as treadle does. Reading all weights for each
token, a processor then spends a tenth of its time on finding the small ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treadle.files.mapping import map_file
from treadle.runtime.sigbus import guard_mappings

HUGE = 2 << 20  # bytes
PROC = Path("/proc")


def resident_bytes(path: Path) -> int | None:
    """Bytes of a file that are in memory now; None where the system does not say."""
    n_bytes = path.stat().st_size
    if not n_bytes:
        return 0
    present = _resident_pages(_map(path))
    return None if present is None else min(n_bytes, int(present.sum()) * mmap.PAGESIZE)


def huge_bytes(path: Path) -> int | None:
    """Bytes of a file that are in memory in pages of 2 MB; None where the system does not say.

    Nothing is read from disk for it.
    """
    if not path.stat().st_size or not sys.platform.startswith("linux"):
        return None
    view = _map(path)
    present = _resident_pages(view)
    if present is None:
        return None
    per = HUGE // mmap.PAGESIZE
    for page in range(0, len(present), per):
        if present[page : page + per].all():
            view[page * mmap.PAGESIZE]  # maps it, and a huge page as a whole
    return _mapped_huge(int(view.ctypes.data))


def read_anew(path: Path) -> int | None:
    """Drop a file's pages and read it from disk again, in huge pages where the system can; how many
    bytes are in such pages then.

    Pages that somebody else has mapped stay as they are. Raises OSError and FileError if the file
    cannot be read.
    """
    with path.open("rb") as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if path.stat().st_size:
        guard_mappings()
        mapped = map_file(path, "a model's file")
        np.frombuffer(mapped, np.uint8)[:: mmap.PAGESIZE].max()
        mapped.check()
    return huge_bytes(path)


def _map(path: Path) -> npt.NDArray[np.uint8]:
    """The file's bytes, mapped as a model's are; the mapping goes with the array."""
    return np.frombuffer(map_file(path, "a model's file"), np.uint8)


def _resident_pages(view: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_] | None:
    """For each page: is it in memory?"""
    if sys.platform == "win32":
        return None
    present = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
    addresses = view.ctypes.data, len(view), present.ctypes.data
    failed = ctypes.CDLL(None).mincore(*(ctypes.c_void_p(address) for address in addresses))
    return None if failed else (present & 1).astype(np.bool_)


def peak_bytes(proc: Path = PROC) -> int | None:
    """The most memory that this process has held at once; None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in (proc / "self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def mapped_bytes(paths: Iterable[Path], proc: Path = PROC) -> int | None:
    """Bytes of files that this process has mapped and are in memory; None as above."""
    names = {os.path.realpath(path) for path in paths}
    try:
        lines = (proc / "self/smaps").read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    inside, total = False, 0
    for line in lines:
        words = line.split(None, 5)
        if "-" in words[0]:
            inside = len(words) == 6 and words[5] in names
        elif inside and words[0] == "Rss:":
            total += int(words[1]) << 10
    return total


def _mapped_huge(address: int) -> int | None:
    """How much of this process' mapping at ``address`` is in huge pages, by the kernel's own
    account.
    """
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return None
    inside, found = False, None
    for line in lines:
        name, _, rest = line.partition(":")
        if "-" in name.split(" ")[0]:
            low, high = (int(word, 16) for word in line.split(" ")[0].split("-"))
            inside = low <= address < high
        elif inside and name in ("FilePmdMapped", "ShmemPmdMapped"):
            found = (found or 0) + (int(rest.split()[0]) << 10)
    return found

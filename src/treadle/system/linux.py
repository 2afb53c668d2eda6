"""Linux: futexes, memfd files, page-cache advice. The rest is POSIX."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what the module signal wraps
import contextlib
import ctypes
import mmap
import os
import platform
import sys
from typing import TYPE_CHECKING

assert sys.platform == "linux"  # the type checker skips the rest elsewhere

from treadle.system.posix import LIBC, Posix, address_of, advise

if TYPE_CHECKING:
    import numpy as np

FUTEX_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
FUTEX_WAIT_PRIVATE = 128
FUTEX_WAKE_PRIVATE = 129
SYS_ARCH_PRCTL = 158
REQUEST_PERMISSION = 0x1023
TILE_DATA = 18
PR_SET_PDEATHSIG = 1
SIGKILL = 9
# Lines of /proc/cpuinfo that say what a CPU can do.
CPU_LINES = "vendor_id", "cpu family", "model", "stepping", "microcode", "flags"
FAILED = ctypes.c_void_p(-1).value
_MAP = ctypes.CFUNCTYPE(
    ctypes.c_void_p,
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)(("mmap", LIBC))
_PROTECT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(
    ("mprotect", LIBC)
)
FIRST_KILLED = "500"  # of 1000; added to a process's share of memory when one is to be killed


def _be_killed_first(more: str) -> None:
    """Set this process's ``oom_score_adj`` to ``more`` ("0" to "1000"): the higher, the sooner the
    kernel kills it when memory runs out.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(more)


class Linux(Posix):
    """Linux ``protocol.System``. Cores and caches are read by ``machine/topology.py``."""

    FUTEX = FUTEX_CALLS.get(platform.machine(), 0)
    SLEEP_POLLS = not FUTEX
    DROPS_PAGES = True
    FORKS = True

    def calls(self) -> dict[str, int]:
        if not self.FUTEX:
            return super().calls()
        wake = {"wake": address_of(LIBC.syscall), "futex": self.FUTEX, "how": FUTEX_WAKE_PRIVATE}
        return super().calls() | wake

    def sleep(self, word: int, seen: int) -> None:
        if not self.FUTEX:
            super().sleep(word, seen)
            return
        LIBC.syscall(
            ctypes.c_long(self.FUTEX),
            ctypes.c_void_p(word),
            ctypes.c_int(FUTEX_WAIT_PRIVATE),
            ctypes.c_int(seen),
            ctypes.c_void_p(None),
            ctypes.c_void_p(None),
            ctypes.c_int(0),
        )

    def affinity(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def end_with_parent(self) -> None:
        LIBC.prctl(ctypes.c_int(PR_SET_PDEATHSIG), ctypes.c_ulong(SIGKILL))
        _be_killed_first(FIRST_KILLED)

    def cpu_features(self) -> set[str]:
        if platform.machine() == "x86_64":
            return set()  # LLVM detects them
        from treadle.system import linux_cpu

        return linux_cpu.features()

    def cpu_description(self) -> str | None:
        if platform.machine() != "x86_64":
            return None
        # The first processor's lines. The kernel writes no more than are read: of 128 processors
        # all would take milliseconds.
        try:
            with open("/proc/cpuinfo", "rb", buffering=0) as file:
                text = file.read(1 << 13).partition(b"\n\n")[0].decode("ascii", "replace")
        except OSError:
            return None
        lines = [line for line in text.splitlines() if line.startswith(CPU_LINES)]
        if not lines:
            return None
        from treadle.system.cpuid import cpuid_text

        return "\n".join([*lines, cpuid_text(self.load_code)])

    def load_code(self, code: bytes, n_fixed: int) -> int | None:
        # Not Python's mmap, whose memory would be freed while threads still run in it at exit.
        n_bytes = max(len(code), 1)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _MAP(None, n_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address in (None, FAILED):
            return None
        ctypes.memmove(address, code, len(code))
        if _PROTECT(address, n_fixed, mmap.PROT_READ | mmap.PROT_EXEC):
            return None
        return int(address)

    def request_tiles(self) -> bool:
        if platform.machine() != "x86_64":  # the call number means something else there
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        return not libc.syscall(SYS_ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)

    def want_huge_pages(self, mapped: mmap.mmap) -> None:
        with contextlib.suppress(OSError, AttributeError):  # a kernel or Python without support
            mapped.madvise(mmap.MADV_HUGEPAGE)

    def expect_random(self, array: np.ndarray) -> None:
        super().expect_random(array)
        advise(array.ctypes.data, array.nbytes, mmap.MADV_NOHUGEPAGE)  # else reads are of 2 MB

    def fetch_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_WILLNEED)

    def drop_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)

    def unmap_pages(self, about: os.stat_result, begin: int, end: int) -> None:
        place = [word.encode() for word in self.name_in_maps(about)]
        with open("/proc/self/maps", "rb") as f:
            lines = f.read().splitlines()
        between = b" ".join(place)
        for line in lines:
            if between not in line:  # nearly all of a thousand
                continue
            fields = line.split(maxsplit=5)
            if fields[3:5] != place or b"w" in fields[1]:
                continue
            low, high = (int(word, 16) for word in fields[0].split(b"-"))
            start = int(fields[2], 16)  # in the file
            lo = max(begin, start)
            hi = min(end, start + high - low)
            if lo < hi:
                advise(low + lo - start, hi - lo, mmap.MADV_DONTNEED)

    def name_in_maps(self, about: os.stat_result) -> tuple[str, str]:
        device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
        return device, str(about.st_ino)

    def memory_file(self) -> int | None:
        if not hasattr(os, "memfd_create"):
            return super().memory_file()
        result = os.memfd_create("treadle-alarm")
        os.set_blocking(result, False)
        return result

    def sigbus(self) -> dict[str, int] | None:
        if hasattr(sys, "getandroidapilevel"):
            return None
        return {  # the layout of glibc and musl, on every architecture
            "number": int(_signal.SIGBUS),
            "n_bytes": 152,
            "flags_off": 136,
            "flags": 0x4800_0004,
            "address_off": 16,
            "map_flags": 0x32,
        }

    def bound_memory(self, more: int) -> None:
        _be_killed_first("1000")
        super().bound_memory(more)

    def mapped_bytes(self) -> int | None:
        with contextlib.suppress(OSError), open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * mmap.PAGESIZE
        return None

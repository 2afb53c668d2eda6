"""Windows: waiting on an address, consoles, byte-range locks; mapped files cannot shrink.

Written from Microsoft's documents; tested with fakes of the calls, never run on Windows. Missing
libraries are tolerated, as when ``TREADLE_SYSTEM`` selects this file on another system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mmap
    import socket

    import numpy as np

    from treadle.system.protocol import WorkerProcesses

FOREVER = 0xFFFF_FFFF  # milliseconds
LOCKED_BYTE = 1 << 40  # beyond every file, since other processes cannot read a locked byte
INPUT = -10  # argument of GetStdHandle
ECHO = 4  # console mode bit
BY_LINES = 2  # console mode bit
# Arguments of IsProcessorFeaturePresent.
ARM_FEATURES = {19: "neon", 34: "lse", 43: "dotprod", 66: "i8mm", 67: "fullfp16", 68: "bf16"}
# GetLogicalProcessorInformationEx's relations
CORES = 0
CACHES = 2
NAME_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def library(name: str) -> Any:
    """Load the system library called ``name``; return None if it is absent."""
    load = getattr(ctypes, "WinDLL", None)
    with contextlib.suppress(OSError):
        return load(name) if load else None
    return None


class Windows:
    """Windows implementation of ``protocol.System``."""

    DROPS_PAGES = RENAMES_OPEN = TIMERS = False
    BINARY: int = getattr(os, "O_BINARY", 0)
    STOP_SIGNALS: tuple[int, ...] = ()
    CONTINUE_SIGNAL: int | None = None

    def __init__(self) -> None:
        self.kernel = library("kernel32")
        self.waiting = library("api-ms-win-core-synch-l1-2-0")
        self.SLEEP_POLLS = self.waiting is None
        self._clock = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(read_clock)
        self._offer = ctypes.CFUNCTYPE(None)(lambda: time.sleep(0))

    # -- threads ----------------------------------------------------------------------------------

    def calls(self) -> dict[str, int]:
        offer = self.kernel.SwitchToThread if self.kernel else self._offer
        found = {"offer": address_of(offer), "clock": address_of(self._clock)}
        if self.waiting is not None:
            found["wake"] = address_of(self.waiting.WakeByAddressAll)
        return found

    def sleep(self, word: int, seen: int) -> None:
        if self.waiting is None:
            time.sleep(0.001)
            return
        value = ctypes.c_int32(seen)
        self.waiting.WaitOnAddress(
            ctypes.c_void_p(word), ctypes.byref(value), ctypes.c_size_t(4), ctypes.c_uint32(FOREVER)
        )

    def register_fork_hooks(
        self, before: Callable[[], object], after: Callable[[], object]
    ) -> None:
        pass  # Windows has no fork

    def after_fork(self, function: Callable[[], object]) -> None:
        pass

    def affinity(self) -> list[int]:
        """Return the numbers of the processors in the process's first group that it may run on, at
        most 64.
        """
        mine = ctypes.c_uint64(0)
        all_of_them = ctypes.c_uint64(0)
        if self.kernel is not None:
            self.kernel.GetProcessAffinityMask(
                self._process(), ctypes.byref(mine), ctypes.byref(all_of_them)
            )
        found = [n for n in range(64) if mine.value >> n & 1]
        return found or list(range(os.cpu_count() or 1))

    # -- other processes --------------------------------------------------------------------------

    FORKS = False

    def end_with_parent(self) -> None:
        pass

    # -- the machine ------------------------------------------------------------------------------

    def cores(self) -> tuple[int, int] | None:
        # After a record's head: flags, then an efficiency class; higher is faster.
        classes = [record[1] for record in self._relations(CORES)]
        return (len(classes), classes.count(max(classes))) if classes else None

    def memory(self) -> tuple[int, int]:
        status = ctypes.create_string_buffer(struct.pack("=II7Q", 64, 0, *[0] * 7), 64)
        if self.kernel is None or not self.kernel.GlobalMemoryStatusEx(status):
            return 0, 0
        _, _, total, available = struct.unpack_from("=IIQQ", status)
        return total, available

    def peak_bytes(self) -> int | None:
        counters = ctypes.create_string_buffer(struct.pack("=II8Q", 72, 0, *[0] * 8), 72)
        ask = getattr(self.kernel, "K32GetProcessMemoryInfo", None)
        if ask is None or not ask(self._process(), counters, ctypes.c_uint32(72)):
            return None
        return int(struct.unpack_from("=IIQ", counters)[2])

    def cache_bytes(self) -> int:
        # After a record's head: level, ways, bytes of a line, total bytes.
        sizes = (struct.unpack_from("=BBHI", record)[3] for record in self._relations(CACHES))
        return max(sizes, default=0)

    def cpu_name(self) -> str:
        with contextlib.suppress(ImportError, OSError):
            registry: Any = import_module("winreg")
            with registry.OpenKey(registry.HKEY_LOCAL_MACHINE, NAME_KEY) as key:
                return str(registry.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        return ""

    def cpu_features(self) -> set[str]:
        if platform.machine() != "ARM64" or self.kernel is None:
            return set()  # LLVM detects them
        has = self.kernel.IsProcessorFeaturePresent
        return {name for number, name in ARM_FEATURES.items() if has(ctypes.c_uint32(number))}

    def fork_workers(self, answer: Callable[[Any], bytes], n: int) -> WorkerProcesses:
        raise OSError("processes cannot be forked on Windows")

    def cpu_description(self) -> str | None:
        return None

    def load_code(self, code: bytes, n_fixed: int) -> int | None:
        return None

    def request_tiles(self) -> bool:
        return False  # untested on Windows

    def _process(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(-1)  # the constant result of GetCurrentProcess

    def _relations(self, relation: int) -> Iterator[bytes]:
        """Yield the records of the kind ``relation`` of GetLogicalProcessorInformationEx, without
        the head (kind and size, 4 bytes each); none if the call is missing.
        """
        ask = getattr(self.kernel, "GetLogicalProcessorInformationEx", None)
        size = ctypes.c_uint32(0)
        if ask is None:
            return
        ask(ctypes.c_int(relation), None, ctypes.byref(size))
        found = ctypes.create_string_buffer(size.value)
        if not ask(ctypes.c_int(relation), found, ctypes.byref(size)):
            return
        at = 0
        while at < size.value:
            _, n_bytes = struct.unpack_from("=II", found, at)
            yield found.raw[at + 8 : at + n_bytes]
            at += n_bytes

    # -- files ------------------------------------------------------------------------------------

    def cache_folder(self) -> Path:
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")

    def other_writer(self, about: os.stat_result) -> str | None:
        return None  # inherited access control lists protect a user's own folders

    def lock(self, fd: int) -> bool:
        try:
            locking: Any = import_module("msvcrt")
        except ImportError as error:
            raise OSError("no locks") from error
        before = os.lseek(fd, 0, os.SEEK_CUR)
        try:
            os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
            locking.locking(fd, locking.LK_NBLCK, 1)
        except PermissionError:
            return False
        finally:
            os.lseek(fd, before, os.SEEK_SET)
        return True

    def write_at(self, fd: int, data: memoryview, at: int) -> int:
        os.lseek(fd, at, os.SEEK_SET)
        return os.write(fd, data)

    def next_data(self, fd: int, offset: int, end: int) -> tuple[int, int]:
        return offset, end

    def allocated(self, about: os.stat_result) -> int:
        return about.st_size  # extending a file allocates its space

    def block_bytes(self, folder: Path) -> int:
        return 0

    def sync_folder(self, folder: Path) -> None:
        pass  # folders cannot be opened

    # -- mapped files and the page cache ----------------------------------------------------------

    def want_huge_pages(self, mapped: mmap.mmap) -> None:
        pass

    def expect_random(self, array: np.ndarray) -> None:
        pass

    def fetch_call(self) -> tuple[int, int] | None:
        return None  # PrefetchVirtualMemory has another signature: it takes a list of ranges

    def mark_resident(self, address: int, n_bytes: int, flags: int) -> None:
        raise OSError("Windows does not report which pages of a file are in memory")

    def fetch_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        pass

    def drop_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        pass

    def unmap_pages(self, about: os.stat_result, begin: int, end: int) -> None:
        pass

    def name_in_maps(self, about: os.stat_result) -> tuple[str, str] | None:
        return None

    # -- signals ----------------------------------------------------------------------------------

    def memory_file(self) -> int | None:
        return None  # a mapping need not show writes to its file at once

    def sigbus(self) -> dict[str, int] | None:
        return None  # a mapped file cannot be truncated on Windows

    def wait_for_end(self) -> None:
        import signal

        ended: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: ended.append(number))
        while not ended:
            time.sleep(0.2)  # Ctrl-C interrupts it at once

    # -- limits of this process -------------------------------------------------------------------

    def end_after(self, seconds: float) -> None:
        pass

    def bound_memory(self, more: int) -> None:
        pass

    def most_files(self) -> int | None:
        return None

    def unix_listener(self, path: str, backlog: int) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Python has no UNIX sockets on Windows")

    def connect_unix(self, path: str) -> socket.socket:
        raise OSError(errno.EAFNOSUPPORT, "Python has no UNIX sockets on Windows")

    def terminal(self, fd: int) -> Console | None:
        if self.kernel is None or not os.isatty(fd):
            return None
        self.kernel.GetStdHandle.restype = ctypes.c_void_p
        handle = ctypes.c_void_p(self.kernel.GetStdHandle(ctypes.c_int(INPUT)))
        mode = ctypes.c_uint32(0)
        if not self.kernel.GetConsoleMode(handle, ctypes.byref(mode)):
            return None
        return Console(self.kernel, handle, mode.value)


class Console:
    """A Windows console, see ``protocol.Terminal``. ``mode`` is its initial mode."""

    def __init__(self, kernel: Any, handle: ctypes.c_void_p, mode: int) -> None:
        self.kernel = kernel
        self.handle = handle
        self.mode = mode

    def show(self, shown: bool, *, lines: bool) -> None:
        mode = self.mode
        if not shown:
            mode &= ~ECHO
            if not lines:
                mode &= ~BY_LINES
        self.kernel.SetConsoleMode(self.handle, ctypes.c_uint32(mode))

    def is_ours(self) -> bool:
        return True


def read_clock(_: int, timespec: int) -> int:
    """Stand in for clock_gettime: write the seconds and nanoseconds of a monotonic clock, 8 bytes
    each, to the address ``timespec``; return 0.
    """
    now = time.perf_counter_ns()
    ctypes.c_int64.from_address(timespec).value = now // 1_000_000_000
    ctypes.c_int64.from_address(timespec + 8).value = now % 1_000_000_000
    return 0


def address_of(function: Any) -> int:
    """Return the address of a C function, or of a Python function wrapped by ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0

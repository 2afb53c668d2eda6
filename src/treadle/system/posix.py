"""POSIX calls that Linux, macOS and the BSDs share; also serves systems without their own file."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what the module signal wraps
import contextlib
import ctypes
import errno
import mmap
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

assert sys.platform != "win32"  # the type checker skips the rest there

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    import numpy as np

    from treadle.system.protocol import Terminal, WorkerProcesses

LIBC = ctypes.CDLL(None)
WRITABLE = 0o022  # by the file's group, and by others


def address_of(function: Any) -> int:
    """Return the address of a C function, or of a Python function wrapped by ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def advise(address: int, n_bytes: int, advice: int) -> None:
    """Call ``madvise`` with ``advice`` for a memory range, extended down to a page boundary; errors
    are ignored.
    """
    early = address % mmap.PAGESIZE
    LIBC.madvise(
        ctypes.c_void_p(address - early), ctypes.c_size_t(n_bytes + early), ctypes.c_int(advice)
    )


class Posix:
    """POSIX implementation of ``protocol.System``; a method whose call POSIX lacks has no effect,
    or reports "unknown".
    """

    SLEEP_POLLS = True
    DROPS_PAGES = False
    RENAMES_OPEN = True
    TIMERS = True
    BINARY = 0
    FORKS = False  # macOS: its libraries may not be used in a forked child
    STOP_SIGNALS: tuple[int, ...] = (int(_signal.SIGTSTP), int(_signal.SIGQUIT))
    CONTINUE_SIGNAL: int | None = int(_signal.SIGCONT)

    # -- threads ----------------------------------------------------------------------------------

    def calls(self) -> dict[str, int]:
        return {
            "offer": address_of(LIBC.sched_yield),
            "clock": address_of(LIBC.clock_gettime),
            "clock_number": time.CLOCK_MONOTONIC,
        }

    def sleep(self, word: int, seen: int) -> None:
        time.sleep(0.001)

    def register_fork_hooks(
        self, before: Callable[[], object], after: Callable[[], object]
    ) -> None:
        os.register_at_fork(before=before, after_in_parent=after)

    def after_fork(self, function: Callable[[], object]) -> None:
        os.register_at_fork(after_in_child=function)

    def affinity(self) -> list[int]:
        return list(range(os.cpu_count() or 1))

    # -- other processes --------------------------------------------------------------------------

    def end_with_parent(self) -> None:
        pass

    # -- the machine ------------------------------------------------------------------------------

    def cores(self) -> tuple[int, int] | None:
        return None

    def memory(self) -> tuple[int, int]:
        return 0, 0

    def peak_bytes(self) -> int | None:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def cache_bytes(self) -> int:
        return 0

    def cpu_name(self) -> str:
        return ""

    def cpu_features(self) -> set[str]:
        return set()

    def fork_workers(self, answer: Callable[[Any], bytes], n: int) -> WorkerProcesses:
        from treadle.system.forked_workers import ForkedWorkers

        return ForkedWorkers(answer, n, self.end_with_parent)

    def cpu_description(self) -> str | None:
        return None

    def load_code(self, code: bytes, n_fixed: int) -> int | None:
        return None

    def request_tiles(self) -> bool:
        return False

    # -- files ------------------------------------------------------------------------------------

    def cache_folder(self) -> Path:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")

    def other_writer(self, about: os.stat_result) -> str | None:
        if about.st_uid != os.getuid():
            return "another user"
        return "others" if about.st_mode & WRITABLE else None

    def lock(self, fd: int) -> bool:
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write_at(self, fd: int, data: memoryview, at: int) -> int:
        return os.pwrite(fd, data, at)

    def next_data(self, fd: int, offset: int, end: int) -> tuple[int, int]:
        here: Any = os  # the type checker knows these constants only on Linux and macOS
        try:
            begin = os.lseek(fd, offset, here.SEEK_DATA)
            stop = os.lseek(fd, begin, here.SEEK_HOLE)
        except OSError as e:
            return (end, end) if e.errno == errno.ENXIO else (offset, end)
        return min(begin, end), min(stop, end)

    def allocated(self, about: os.stat_result) -> int:
        return about.st_blocks * 512

    def block_bytes(self, folder: Path) -> int:
        return os.statvfs(folder).f_frsize

    def sync_folder(self, folder: Path) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    # -- mapped files and the page cache ----------------------------------------------------------

    def want_huge_pages(self, mapped: mmap.mmap) -> None:
        pass

    def expect_random(self, array: np.ndarray) -> None:
        advise(array.ctypes.data, array.nbytes, mmap.MADV_RANDOM)

    def fetch_call(self) -> tuple[int, int] | None:
        return address_of(LIBC.madvise), mmap.MADV_WILLNEED

    def mark_resident(self, address: int, n_bytes: int, flags: int) -> None:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        if mincore(*map(ctypes.c_void_p, (address, n_bytes, flags))):
            raise OSError(ctypes.get_errno(), "mincore")

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
        import tempfile  # fallback: POSIX has no files in memory

        with tempfile.TemporaryFile() as file:
            result = os.dup(file.fileno())
        os.set_blocking(result, False)
        return result

    def sigbus(self) -> dict[str, int] | None:
        return None

    def wait_for_end(self) -> None:
        import signal

        signal.sigwait({signal.SIGINT, signal.SIGTERM})

    # -- limits of this process -------------------------------------------------------------------

    def end_after(self, seconds: float) -> None:
        import signal

        # Ignored and blocked signals are inherited; the default action ends the process.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def bound_memory(self, more: int) -> None:
        import resource

        with contextlib.suppress(OSError, ValueError):  # a system may refuse the limits
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            # The limit is of all memory that is mapped. Where that is unknown there is none: one of
            # ``more`` bytes could be below what is mapped already, and refuse all allocations.
            if (mapped := self.mapped_bytes()) is not None:
                resource.setrlimit(resource.RLIMIT_AS, (mapped + more,) * 2)

    def mapped_bytes(self) -> int | None:
        """Return the bytes that this process maps; None if unknown."""
        return None

    def most_files(self) -> int | None:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # some systems have undocumented limits
            pass
        return soft if soft > 0 else None

    def unix_listener(self, path: str, backlog: int) -> socket.socket:
        import socket

        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.bind(path)
            os.chmod(path, 0o600)  # before it listens: until then nobody can connect
            made.listen(backlog)
        except BaseException:
            made.close()
            raise
        return made

    def connect_unix(self, path: str) -> socket.socket:
        import socket

        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made.connect(path)
        except BaseException:
            made.close()
            raise
        return made

    def terminal(self, fd: int) -> Terminal | None:
        from treadle.system.posix_terminal import open_terminal

        return open_terminal(fd)

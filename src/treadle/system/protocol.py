"""The interface to the operating system. ``posix.py`` implements what most systems share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import socket

    import numpy as np


class Terminal(Protocol):
    """A terminal; an object keeps the mode in which it found it."""

    def show(self, shown: bool, *, lines: bool) -> None:
        """Show what is typed, in the initial mode, if ``shown``; otherwise turn echo off, and
        unless ``lines`` also line buffering, so that each key is delivered at once. No effect if
        the terminal is gone.
        """

    def is_ours(self) -> bool:
        """Return whether this process is in the terminal's foreground (not a shell's background
        job).
        """


class WorkerProcesses(Protocol):
    """Worker processes that call a function ``answer`` for each message; see
    ``forked_workers.py``.
    """

    @property
    def alive(self) -> bool:
        """Whether there are workers, or will be once they are started."""

    def start(self) -> None:
        """Start the workers. Raises OSError if not even one can be started."""

    def wants(self) -> int:
        """Return how many messages to send now: two per worker, less those without an answer."""

    def send(self, number: int, message: Any) -> bool:
        """Queue a message, any object that can be pickled, under a unique ``number``; return False
        if it cannot be sent.
        """

    def wait(self, seconds: float) -> None:
        """Wait until an answer has arrived or a worker has ended, at most ``seconds``."""

    def receive(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield each answer that has arrived, with its message's number first; the answer is None
        where ``answer`` raised an exception, or the message was lost with its worker.
        """

    def close(self) -> None:
        """End the workers. Idempotent."""


class System(Protocol):
    """One operating system; each file of this package implements it in a class."""

    # -- threads ------------------------------------------------------------------------------

    SLEEP_POLLS: bool  # True: ``sleep`` only sleeps for a millisecond: the system has no futex

    def calls(self) -> dict[str, int]:
        """Return addresses of C functions that compiled threads call, and their constant arguments,
        by the names of fields of a job (``devices/cpu/step_loop.py``). Without the field ``wake``,
        threads do not sleep on a word.
        """

    def sleep(self, word: int, seen: int) -> None:
        """Sleep while the 32 bits at the address ``word`` equal ``seen``; may return earlier."""

    def register_fork_hooks(
        self, before: Callable[[], object], after: Callable[[], object]
    ) -> None:
        """Register functions that every fork calls in the parent process: ``before`` just before
        it, and ``after`` just after it.
        """

    def after_fork(self, function: Callable[[], object]) -> None:
        """Register a function to call in every forked child."""

    def affinity(self) -> list[int]:
        """Return the numbers of the processors that this process may run on."""

    # -- other processes ------------------------------------------------------------------------

    FORKS: bool  # whether a process without other threads may fork, and its child go on computing

    def end_with_parent(self) -> None:
        """Ask the system to kill this process when its parent ends, and, if memory runs out, before
        its parent. No effect where the system has no such call.
        """

    # -- the machine; on Linux, ``machine/topology.py`` reads the rest from /sys and /proc --------

    def cores(self) -> tuple[int, int] | None:
        """Return the number of physical cores, and of performance cores among them; None if
        unknown.
        """

    def memory(self) -> tuple[int, int]:
        """Return the machine's total bytes of memory, and the bytes available without swapping; 0
        for one that is unknown.
        """

    def peak_bytes(self) -> int | None:
        """Return the peak resident memory of this process in bytes; None if unknown."""

    def cache_bytes(self) -> int:
        """Return the bytes of the largest CPU cache; 0 if unknown."""

    def cpu_name(self) -> str:
        """Return the processor's name; empty if unknown."""

    def cpu_features(self) -> set[str]:
        """Return features of this CPU that LLVM may not detect, by LLVM's names."""

    def fork_workers(self, answer: Callable[[Any], bytes], n: int) -> WorkerProcesses:
        """Return up to ``n`` workers, not started, that call ``answer(message)``. To be called only
        where ``FORKS`` is true; raises OSError if they cannot be made.
        """

    def cpu_description(self) -> str | None:
        """Return a text that differs between CPUs of different models or features, also between
        emulated ones (as under valgrind); None if unknown.
        """

    def load_code(self, code: bytes, n_fixed: int) -> int | None:
        """Copy machine code and its data to memory; return the address, a multiple of the page
        size, or None if that is not possible. The first ``n_fixed`` bytes can be executed but not
        written, the pages behind them written but not executed. The memory is never freed.
        """

    def request_tiles(self) -> bool:
        """Request permission for Intel's matrix registers (AMX) for all threads of this process;
        return whether it was granted. The system saves 8 KB more for each thread that uses them.
        """

    # -- files --------------------------------------------------------------------------------

    BINARY: int  # flag for every os.open: no translation of line ends

    RENAMES_OPEN: bool  # whether a file can be renamed while it is open

    def cache_folder(self) -> Path:
        """Return the user's folder for caches. Raises RuntimeError without a home folder."""

    def other_writer(self, about: os.stat_result) -> str | None:
        """Return who other than this user can change the file or folder of the stat result
        ``about``: "another user" (the owner) or "others" (with write permission). None for nobody,
        or if permissions work differently.
        """

    def lock(self, fd: int) -> bool:
        """Lock the open file ``fd`` for this process until it is closed; return True, or False if
        another process has locked it. Raises OSError if locks are not supported.
        """

    def write_at(self, fd: int, data: memoryview, at: int) -> int:
        """Write ``data`` at the byte offset ``at`` of a file; return the number of bytes written.
        Raises OSError.
        """

    def next_data(self, fd: int, offset: int, end: int) -> tuple[int, int]:
        """Return the next byte range (begin, end) of a file, within ``offset`` to ``end``, that is
        not a hole; (end, end) if there is none.
        """

    def allocated(self, about: os.stat_result) -> int:
        """Return the bytes that are allocated on disk for the file of the stat result ``about``."""

    def block_bytes(self, folder: Path) -> int:
        """Return the block size of the file system of ``folder``, in bytes: the unit in which files
        can share data (reflinks); 0 if they cannot.
        """

    def sync_folder(self, folder: Path) -> None:
        """Flush a folder's new entries to disk, if the system supports it."""

    # -- mapped files and the page cache --------------------------------------------------------

    DROPS_PAGES: bool  # whether ``drop_pages`` and ``fetch_pages`` have an effect

    def want_huge_pages(self, mapped: mmap.mmap) -> None:
        """Use 2 MB pages for later reads of the mapping, if the system supports it."""

    def expect_random(self, array: np.ndarray) -> None:
        """Declare random access to ``array``, a part of a mapped file: pages are then read without
        read-ahead.
        """

    def fetch_call(self) -> tuple[int, int] | None:
        """Return the address of a C function ``f(address, bytes, number)``, and the ``number`` with
        which the function starts reading pages of a mapped file without waiting; None if there is
        none.
        """

    def mark_resident(self, address: int, n_bytes: int, flags: int) -> None:
        """Write a byte for each page of the mapping at ``address`` to the memory at ``flags``; bit
        0 is set if the page is in memory. Raises OSError if the system cannot tell.
        """

    def fetch_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        """Start reading ``n_bytes`` of a file, from ``offset`` on, into the page cache, without
        waiting.
        """

    def drop_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        """Drop ``n_bytes`` of a file, from ``offset`` on, from the page cache."""

    def unmap_pages(self, about: os.stat_result, begin: int, end: int) -> None:
        """Release the bytes ``begin`` to ``end`` of the file of the stat result ``about`` from this
        process's read-only mappings, which would keep them in memory. Pages accessed later are read
        again, so nothing is lost.
        """

    def name_in_maps(self, about: os.stat_result) -> tuple[str, str] | None:
        """Return the device and the inode of the file of the stat result ``about``, as the system's
        lists of mappings have them; None if it has no such lists.
        """

    # -- signals ------------------------------------------------------------------------------

    STOP_SIGNALS: tuple[int, ...]  # signals from the keyboard that suspend or end a program
    CONTINUE_SIGNAL: int | None  # the signal that a program gets when it continues after a stop

    def memory_file(self) -> int | None:
        """Return a new non-blocking descriptor of a file in memory: a write to it shows at once in
        its mappings. None if the system has none.
        """

    def sigbus(self) -> dict[str, int] | None:
        """Return the C library's signal layout (``SignalLayout`` of
        ``devices/cpu/mapping_faults.py``); None if missing pages of a mapped file raise no signal,
        or the layout is unknown.
        """

    def wait_for_end(self) -> None:
        """Wait for SIGINT or SIGTERM."""

    # -- limits of this process -----------------------------------------------------------------

    TIMERS: bool  # whether ``end_after`` has an effect

    def end_after(self, seconds: float) -> None:
        """Kill the process after ``seconds``, even while C code runs; 0 cancels that."""

    def bound_memory(self, more: int) -> None:
        """Limit this process to ``more`` additional bytes of memory, make it the first to be killed
        if memory runs out, and let it leave no core file. Other POSIX systems than Linux only do
        the last; Windows does nothing.
        """

    def most_files(self) -> int | None:
        """Raise this process's soft limit of open files to the hard limit; return the limit then in
        force, or None if there is no limit.
        """

    # -- sockets --------------------------------------------------------------------------------

    def unix_listener(self, path: str, backlog: int) -> socket.socket:
        """Return a Unix socket that listens at a new file ``path``, which only this user may open;
        ``backlog``: most waiting connections. Raises OSError, also where the system has no such
        sockets.
        """

    def connect_unix(self, path: str) -> socket.socket:
        """Return a socket that is connected to the Unix socket at the file ``path``. Raises
        OSError, also where the system has no such sockets.
        """

    # -- the terminal ---------------------------------------------------------------------------

    def terminal(self, fd: int) -> Terminal | None:
        """Return the terminal of the descriptor ``fd``; None if it is not a terminal."""

"""What treadle asks of an operating system. ``posix.py`` has what works on most of them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np


class Terminal(Protocol):
    """The terminal behind a descriptor, as it was found."""

    def show(self, shown: bool, *, lines: bool) -> None:
        """Show what is typed, as it was found; or do not, and with ``lines`` False give each key as
        it is, not by whole lines. Nothing where it is gone.
        """

    def is_ours(self) -> bool:
        """Whether it listens to this program: behind a shell it listens to the shell."""


class System(Protocol):
    """What a file of this package has, as a class."""

    # -- threads ------------------------------------------------------------------------------

    NAPS: bool  # ``sleep`` is a nap of a millisecond, for nothing here wakes who sleeps on a word

    def calls(self) -> dict[str, int]:
        """C functions that compiled threads call, and numbers that they hand them, as fields of a
        job (``devices/cpu/step_loop.py``). Without ``wake`` nobody sleeps on a word.
        """

    def sleep(self, word: int, seen: int) -> None:
        """Sleep while the 32 bits at ``word`` are ``seen``; it may end without a reason."""

    def around_fork(self, before: Callable[[], object], after: Callable[[], object]) -> None:
        """Call them before and after every fork, in the thread that forks."""

    def after_fork(self, function: Callable[[], object]) -> None:
        """Call it in every forked child."""

    def affinity(self) -> list[int]:
        """The processors that this process may run on."""

    # -- the machine; what Linux' files tell, ``machine/topology.py`` reads ----------------------

    def cores(self) -> tuple[int, int] | None:
        """Physical cores, and those of them that are not slow by design."""

    def memory(self) -> tuple[int, int]:
        """Bytes of memory in all, and bytes that could be had without swapping; 0 for unknown."""

    def peak_bytes(self) -> int | None:
        """The most memory that this process has held at once."""

    def cache_bytes(self) -> int:
        """Size of the largest cache; 0 for unknown."""

    def cpu_name(self) -> str:
        """The processor's own name; empty for unknown."""

    def cpu_features(self) -> set[str]:
        """Features of this CPU that LLVM may not tell of, by LLVM's names."""

    def lends_tiles(self) -> bool:
        """Ask for Intel's matrix registers, for all threads of this process: of those that use
        them the system has to keep 8 KB more.
        """

    # -- files --------------------------------------------------------------------------------

    BINARY: int  # a flag for every os.open: bytes as they are

    RENAMES_OPEN: bool  # a file can be renamed while it is open

    def cache_folder(self) -> Path:
        """Where programs keep what they can make again. Raises RuntimeError without a home."""

    def intruder(self, about: os.stat_result) -> str | None:
        """Who else than this user can change a file or folder: "another user" owns it, or
        "others" may write to it. None for nobody, and where permissions are of another kind.
        """

    def lock(self, fd: int) -> bool:
        """Lock a file for this process until it is closed; False if another process holds it.
        Raises OSError where there are no locks.
        """

    def write_at(self, fd: int, data: memoryview, at: int) -> int:
        """Write at a byte offset; how many bytes were written. Raises OSError."""

    def next_data(self, fd: int, offset: int, end: int) -> tuple[int, int]:
        """The next run of bytes, from ``offset`` on, that is no hole; (end, end) without one."""

    def allocated(self, about: os.stat_result) -> int:
        """Bytes of a file that have their room on the disk."""

    def block_bytes(self, folder: Path) -> int:
        """Bytes of a block of the file system, which files may share; 0: none can be shared."""

    def sync_folder(self, folder: Path) -> None:
        """Bring new names in a folder to the disk, where that can be asked for."""

    # -- mapped files and the page cache --------------------------------------------------------

    DROPS_PAGES: bool  # ``drop_pages`` and ``fetch_pages`` do something

    def want_huge_pages(self, mapped: mmap.mmap) -> None:
        """Have pages that are read from now on come 2 MB at a time, where the system can."""

    def expect_random(self, array: np.ndarray) -> None:
        """Parts of this part of a mapped file, more than memory holds, will be read as they are
        asked for, and nothing around them.
        """

    def fetch_call(self) -> tuple[int, int] | None:
        """A C function, ``f(address, bytes, number)``, and the number with which it asks for pages
        of a mapped file that are read next, without waiting for them.
        """

    def mark_resident(self, address: int, n_bytes: int, flags: int) -> None:
        """Write a byte for each page of a mapping to ``flags``, its bit 0: is it in memory?
        Raises OSError where the system cannot say.
        """

    def fetch_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        """These bytes of a file are read next."""

    def drop_pages(self, fd: int, offset: int, n_bytes: int) -> None:
        """These bytes of a file are not read again."""

    def unmap_pages(self, about: os.stat_result, begin: int, end: int) -> None:
        """Take these bytes of a file out of this process's read-only mappings of it, which would
        keep them in memory. One that is touched again is read again, so nothing is lost.
        """

    # -- signals ------------------------------------------------------------------------------

    STOPS: tuple[int, ...]  # signals of the keyboard that stop or end a program
    GOES_ON: int | None  # the signal of a program that goes on after a stop

    def memory_file(self) -> int | None:
        """A new descriptor of a file that can be mapped and sees what is written to it at once,
        and writes without waiting.
        """

    def sigbus(self) -> dict[str, int] | None:
        """How the C library has signals (``SignalLayout`` of ``devices/cpu/mapping_faults.py``);
        None where none is sent for a mapped file's missing page, or its form is unknown.
        """

    def wait_for_end(self) -> None:
        """Wait until this process is told to end: SIGINT, SIGTERM."""

    # -- limits of this process -----------------------------------------------------------------

    TIMERS: bool  # ``end_after`` does something

    def end_after(self, seconds: float) -> None:
        """Have the process ended in so many seconds, whatever C code it is in; 0: never."""

    def bound_memory(self, more: int) -> None:
        """Let this process take so many bytes more, and be the first to go when there are none."""

    def most_files(self) -> int | None:
        """Files that may be open at once, after that bound was raised; None for no bound."""

    def terminal(self, fd: int) -> Terminal | None:
        """None for what is no terminal."""

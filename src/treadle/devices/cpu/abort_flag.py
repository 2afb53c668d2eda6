"""Abort flag: set by a signal through Python's C handler, polled by compiled code.

Python's own handlers run between two bytecodes, so not during a run, which may take seconds in
compiled code. But the interpreter's C handler writes the signal's number to a descriptor at once
(``signal.set_wakeup_fd``). If that descriptor is a memory file that is also mapped, the write is a
store visible to every thread, and polling needs no waiting thread and no system call.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C module behind signal
import mmap
import os
import threading
from functools import cache

import numpy as np

from treadle.system import SYSTEM

WORD = 8  # bytes that compiled code reads; a ninth signal writes past them


class AbortFlag:
    """Context manager: while it is active, a signal that Python handles writes its number, which is
    not 0, to the 8 bytes at ``address``; they are 0 otherwise. Python's own handler still runs, as
    soon as it can.

    ``address`` is 0 in threads other than the main one, where Python handles no signals, and on a
    system without memory files: there signals are handled after the run.
    """

    __slots__ = ("_usual", "_word", "address")

    def __enter__(self) -> AbortFlag:
        self._word: _FlagBytes | None = None
        self.address = 0
        if threading.current_thread() is threading.main_thread():
            self._word = _word()
        if self._word is not None:
            self.address = self._word.address
            self._usual: int = _signal.set_wakeup_fd(self._word.file)
        return self

    @property
    def is_set(self) -> bool:
        """Whether a signal has arrived since the ``with`` block was entered."""
        return self._word is not None and bool(self._word.value[0])

    def __exit__(self, *_: object) -> None:
        if self._word is None:
            return
        _signal.set_wakeup_fd(self._usual)
        if self._word.value[0]:
            numbers = self._word.drain()
            if self._usual >= 0:  # an event loop waits on it
                os.write(self._usual, numbers)


class _FlagBytes:
    """The flag's bytes, and the memory file that holds them."""

    def __init__(self, file: int) -> None:
        self.file = file
        os.ftruncate(self.file, mmap.PAGESIZE)
        self.value = np.frombuffer(mmap.mmap(self.file, mmap.PAGESIZE), np.int64, 1)
        self.address = int(self.value.ctypes.data)

    def __del__(self) -> None:
        os.close(self.file)

    def drain(self) -> bytes:
        """Return the numbers of the signals that arrived, a byte each, and clear the flag."""
        numbers = self.value.tobytes().rstrip(b"\0")
        self.value[0] = 0
        os.lseek(self.file, 0, os.SEEK_SET)  # the next signal is written at the start
        return numbers


@cache
def _word() -> _FlagBytes | None:
    """Return this process's flag bytes; None if the system has no memory files."""
    file = SYSTEM.memory_file()
    return None if file is None else _FlagBytes(file)


# A forked child must not set its parent's flag.
SYSTEM.after_fork(_word.cache_clear)

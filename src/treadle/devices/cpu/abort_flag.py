"""A word in memory that a signal changes at once, for compiled code to look at.

Python's own handlers run between two bytecodes, so not while a run is in compiled code, which may
take seconds. But the interpreter's C handler writes the signal's number to a descriptor as it comes
(``signal.set_wakeup_fd``). If that descriptor is a file in memory which is mapped as well, the
write is a store that every thread sees: no thread of ours waits, and no system call asks.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what the module signal wraps
import mmap
import os
import threading
from functools import cache

import numpy as np

from treadle.system import SYSTEM

WORD = 8  # bytes that compiled code reads; a ninth signal writes behind them


class AbortFlag:
    """``with Alarm() as alarm``: signals that Python has a handler for change the 8 bytes at
    ``address``, which are 0 until then. Python's handler runs all the same, when it can.

    ``address`` is 0 in other threads than the main one, where Python handles no signals, and on a
    system without files in memory: there they wait for the end of what the block runs.
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
    def rung(self) -> bool:
        """Whether a signal came."""
        return self._word is not None and bool(self._word.value[0])

    def __exit__(self, *_: object) -> None:
        if self._word is None:
            return
        _signal.set_wakeup_fd(self._usual)
        if self._word.value[0]:
            numbers = self._word.take()
            if self._usual >= 0:  # an event loop waits there
                os.write(self._usual, numbers)


class _FlagBytes:
    """The bytes, and the file that they are."""

    def __init__(self, file: int) -> None:
        self.file = file
        os.ftruncate(self.file, mmap.PAGESIZE)
        self.value = np.frombuffer(mmap.mmap(self.file, mmap.PAGESIZE), np.int64, 1)
        self.address = int(self.value.ctypes.data)

    def __del__(self) -> None:
        os.close(self.file)

    def take(self) -> bytes:
        """The signals' numbers; from here on there were none."""
        numbers = self.value.tobytes().rstrip(b"\0")
        self.value[0] = 0
        os.lseek(self.file, 0, os.SEEK_SET)  # where the next one is written
        return numbers


@cache
def _word() -> _FlagBytes | None:
    """The one of this process."""
    file = SYSTEM.memory_file()
    return None if file is None else _FlagBytes(file)


# A forked child must not ring its parent's.
SYSTEM.after_fork(_word.cache_clear)

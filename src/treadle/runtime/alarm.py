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
import sys
import threading
from functools import cache

import numpy as np

WORD = 8  # bytes that compiled code reads; a ninth signal writes behind them


class Alarm:
    """``with Alarm() as alarm``: signals that Python has a handler for change the 8 bytes at
    ``address``, which are 0 until then. Python's handler runs all the same, when it can.

    In other threads than the main one, where Python handles no signals, ``address`` is 0.
    """

    __slots__ = ("_usual", "_word", "address")

    def __enter__(self) -> Alarm:
        self._word: _Word | None = None
        self.address = 0
        if threading.current_thread() is threading.main_thread():
            self._word = _word()
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


class _Word:
    """The bytes, and the file that they are."""

    def __init__(self) -> None:
        self.file = _memory_file()
        os.ftruncate(self.file, mmap.PAGESIZE)
        os.set_blocking(self.file, False)  # Python wants that of a wakeup descriptor
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


def _memory_file() -> int:
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        return os.memfd_create("treadle-alarm")
    import tempfile  # where the system has no files in memory

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@cache
def _word() -> _Word:
    """The one of this process."""
    return _Word()


# A forked child must not ring its parent's.
os.register_at_fork(after_in_child=_word.cache_clear)

"""Computes grammar masks in a background thread while the model runs."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import Protocol

from treadle.errors import ForkedError, GrammarError


class MaskSource(Protocol):
    """The part of ``Matcher`` that computes masks: ``bits``."""

    def bits(self) -> bytes: ...


class AsyncBits:
    """Mask of the next token, computed by a background thread. If the thread has not begun when the
    mask is needed, ``wait`` computes it in the caller's thread.
    """

    __slots__ = ("_bits", "_lock", "_matcher", "_process")

    def __init__(self, matcher: MaskSource) -> None:
        self._matcher: MaskSource | None = matcher  # None once the mask is computed
        self._lock = threading.Lock()
        self._bits: bytes | None = None
        self._process = os.getpid()
        _queue().put(self)

    def wait(self) -> bytes:
        """Return the mask, one bit for each token; b"" if no token may come next (``Matcher.mask``
        then raises the reason). Raises ForkedError if the process was forked during the
        computation.
        """
        if self._bits is not None:
            return self._bits
        if self._lock.locked() and self._process != os.getpid():
            raise ForkedError(
                "the process was forked while a grammar mask was being computed: start this "
                "request again"
            )
        with self._lock:
            if self._bits is None:
                assert self._matcher is not None
                try:
                    self._bits = self._matcher.bits()
                except GrammarError:
                    self._bits = b""
                self._matcher = None
            return self._bits


_QUEUES: dict[int, SimpleQueue[AsyncBits]] = {}  # by process: a forked one has none of the threads


def _queue() -> SimpleQueue[AsyncBits]:
    """Return the queue of this process's mask thread, which is started at the first call. The
    thread runs beside the model, because llguidance releases the GIL.
    """
    found = _QUEUES.get(os.getpid())
    if found is None:
        found = SimpleQueue()
        _QUEUES.clear()
        _QUEUES[os.getpid()] = found
        threading.Thread(target=_work, args=(found,), name="treadle-masks", daemon=True).start()
    return found


def _work(queue: SimpleQueue[AsyncBits]) -> None:
    while True:
        queue.get().wait()

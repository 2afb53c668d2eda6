"""Masks of grammars, computed beside the model."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import Protocol

from treadle.errors import ForkedError, GrammarError


class MaskSource(Protocol):
    """Of a ``Matcher``: which tokens may come next."""

    def bits(self) -> bytes: ...


class LateBits:
    """What may come next in an answer. A thread of its own computes it; who needs it before that
    thread has come to it does so himself.
    """

    __slots__ = ("_lock", "_made", "_matcher", "_process")

    def __init__(self, matcher: MaskSource) -> None:
        self._matcher: MaskSource | None = matcher  # until that is done
        self._lock = threading.Lock()
        self._made: bytes | None = None
        self._process = os.getpid()
        _queue().put(self)

    def wait(self) -> bytes:
        """The bits; none set where the grammar cannot go on, which ``mask`` gives the reason of."""
        if self._made is not None:
            return self._made
        if self._lock.locked() and self._process != os.getpid():
            raise ForkedError(
                "this process was forked while another thread computed what a grammar allows: "
                "ask for the text again"
            )
        with self._lock:
            if self._made is None:
                assert self._matcher is not None
                try:
                    self._made = self._matcher.bits()
                except GrammarError:
                    self._made = b""
                self._matcher = None
            return self._made


_QUEUES: dict[int, SimpleQueue[LateBits]] = {}  # by process: a forked one has none of the threads


def _queue() -> SimpleQueue[LateBits]:
    """What a thread works off, beside the model: llguidance drops the GIL."""
    found = _QUEUES.get(os.getpid())
    if found is None:
        found = SimpleQueue()
        _QUEUES.clear()
        _QUEUES[os.getpid()] = found
        threading.Thread(target=_work, args=(found,), name="treadle-masks", daemon=True).start()
    return found


def _work(queue: SimpleQueue[LateBits]) -> None:
    while True:
        queue.get().wait()

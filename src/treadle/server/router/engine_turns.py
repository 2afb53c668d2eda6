"""Turns of engines that compute at the same time: one step of a scheduler each, with all threads.

The threads of an engine wait for each other after each part of a step by polling. If two engines
run at once on the same cores, a thread polls on a core that the thread it waits for needs. So an
engine takes the turn before a step and gives it back after it. Two file locks make it fair: who
holds ``next`` waits for ``turn``, and who gave the turn back must first get ``next``. The system
frees the locks of an engine that was killed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from treadle.system import SYSTEM

POLL_S = 0.0003
MOST_S = 2.0  # wait for the turn, then compute without it: its holder may hang on a lost disk
NEXT = "next"
TURN = "turn"


class EngineStepLock:
    """Context manager around a step of an engine. At its start it waits for the turn, a file lock
    in ``folder``; after MOST_S seconds the step runs without the turn.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._held: int | None = None

    def __enter__(self) -> None:
        end = time.monotonic() + MOST_S
        first = self._take(NEXT, end)
        if first is None:
            return
        try:
            self._held = self._take(TURN, end)
        finally:
            os.close(first)

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _take(self, name: str, end: float) -> int | None:
        """Return the descriptor of the locked file ``name``, which holds the lock until it is
        closed; None if it is not free before ``end``, or if locks do not work here.
        """
        try:
            fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | SYSTEM.BINARY, 0o600)
        except OSError:  # the router's folder is gone
            return None
        try:
            while not SYSTEM.lock(fd):
                if time.monotonic() > end:
                    os.close(fd)
                    return None
                time.sleep(POLL_S)
        except OSError:  # no locks here
            os.close(fd)
            return None
        return fd

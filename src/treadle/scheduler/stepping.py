"""Threads that wait for answers, and which of them calls the engine: no thread is made for it.

Whoever waits and finds nobody at work steps the scheduler, for everybody; the others sleep until
their own answers have something, or until it is their turn to step. So a lone caller never changes
threads between two tokens, and many share their batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.base.fork_safety import is_held, tell
from treadle.base.interrupts import interrupts_held
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.scheduler.request import Request
    from treadle.scheduler.scheduler import Scheduler

Enough = Callable[[], bool]


class CooperativeStepper:
    """``until(enough, own)`` returns when ``enough()``, which some step makes true, or when the
    request ``own`` is cancelled. Raises TreadleError where a sampler waits for what this step is
    about to write.

    Ctrl-C in a thread that steps undoes the run in hand and is raised in this thread alone. All
    requests but its own are whole, and another thread goes on with them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._turn = threading.Lock()
        self._at_work = 0  # the thread whose turn it is
        self._sleepers: dict[threading.Lock, Enough] = {}  # each waits for its lock
        tell(self)

    def after_fork(self) -> None:
        """In a forked child: the others' texts may be half a step further."""
        if self._at_work != threading.get_ident() and (is_held(self._turn) or self._sleepers):
            self._turn, self._at_work = threading.Lock(), 0
            self._sleepers.clear()
            self.scheduler.engine.lock.lose()

    def until(self, enough: Enough, own: Request) -> None:
        """Step, or wait for others to. What a step or a signal's handler raises comes out."""

        def over() -> bool:
            return own.cancelled or enough()

        try:
            while not over():
                if self._at_work == threading.get_ident():  # a sampler that asks the model
                    if own.looked_at:  # no step gives it an id before this sampler has returned
                        raise TreadleError("a sampler waits for a text that waits for the sampler")
                    with interrupts_held() as held:
                        self.scheduler.step(own, held.allow)
                elif self._step(over, own):
                    break
                else:
                    self._sleep(over)
        except BaseException:
            self._wake(successor=True)
            raise
        if own.cancelled:  # it may have been woken to step
            self._wake(successor=True)

    def step(self) -> tuple[list[Request], bool]:
        """One step by a thread that waits for no text of its own, such as a server's: what the
        scheduler has fed, and whether others have stepped meanwhile.
        """
        others = not self._turn.acquire(blocking=False)
        if others:
            self._turn.acquire()
        try:
            return self.scheduler.step(), others
        finally:
            self._turn.release()
            if self._sleepers:
                self._wake(successor=True)

    def _step(self, over: Enough, own: Request) -> bool:
        """Step until it is over, if nobody else does so."""
        with interrupts_held() as held:
            if not self._turn.acquire(blocking=False):
                return False
            self._at_work = threading.get_ident()
            try:
                while not over():
                    self.scheduler.step(own, held.allow)
                    if self._sleepers:
                        self._wake()
                return True
            finally:
                self._at_work = 0
                self._turn.release()
                self._wake(successor=True)

    def _sleep(self, over: Enough) -> None:
        bell = threading.Lock()
        bell.acquire()
        self._sleepers[bell] = over
        try:
            # Whoever gives the turn back looks for sleepers afterwards: so none is forgotten.
            if self._turn.locked() and not over():
                bell.acquire()
        finally:
            self._sleepers.pop(bell, None)

    def _wake(self, *, successor: bool = False) -> None:
        """Wake those for whom it is over; and one for whom it is not, to step."""
        for bell, over in list(self._sleepers.items()):
            done = over()
            if done or successor:
                successor = successor and done
                if self._sleepers.pop(bell, None) is not None:
                    bell.release()

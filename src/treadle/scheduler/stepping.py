"""Cooperative stepping: there is no engine thread. Of the threads that wait for output, one runs
the scheduler's steps for all.

A waiting thread steps if no other does. The others sleep until their own output has something or it
is their turn to step. So a single caller never switches threads between two tokens, and concurrent
callers share batches. Path of a token: ``Generation.wait`` -> ``step_until`` -> ``Scheduler.step``
-> ``Engine.sample`` -> ``Request.take`` -> ``RequestOutput.push``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.base.fork_safety import is_held, register_after_fork
from treadle.base.interrupts import interrupts_held
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.scheduler.request import Request
    from treadle.scheduler.scheduler import Scheduler

Predicate = Callable[[], bool]


class CooperativeStepper:
    """Runs the scheduler's steps in the threads that wait for output.

    Ctrl-C in the stepping thread undoes the current run and is raised in that thread only. All
    requests except its own stay consistent, and another thread continues with them.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._step_lock = threading.Lock()
        self._stepping_thread = 0  # id of the stepping thread
        self._sleepers: dict[threading.Lock, Predicate] = {}  # each waits for its lock
        register_after_fork(self)

    def after_fork(self) -> None:
        """Reset the locks in a forked child, where other threads' requests may be in the middle of
        a step.
        """
        if self._stepping_thread != threading.get_ident() and (
            is_held(self._step_lock) or self._sleepers
        ):
            self._step_lock = threading.Lock()
            self._stepping_thread = 0
            self._sleepers.clear()
            self.scheduler.engine.lock.mark_lost()

    def step_until(self, is_done: Predicate, own: Request) -> None:
        """Return when steps have made ``is_done()`` true, or when the request ``own`` is cancelled;
        they run in this thread, or in another one while this one sleeps.

        Errors of a step or a signal handler propagate. Raises TreadleError if a sampler waits for a
        token of the step that called it.
        """

        def over() -> bool:
            return own.cancelled or is_done()

        try:
            while not over():
                if self._stepping_thread == threading.get_ident():  # a sampler called the model
                    if own.is_sampling:  # its token comes only after this sampler has returned
                        raise TreadleError(
                            "deadlock: a custom sampler called generate() on the model that is "
                            "waiting for that sampler"
                        )
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

    def step(self, meanwhile: Callable[[], object] | None = None) -> tuple[list[Request], bool]:
        """Run one step from a thread without a request of its own, such as a server's. Return the
        requests that got output, and whether another thread was stepping at the call.

        ``meanwhile``, unless None, is called while another thread steps, and just before the device
        starts a run; see ``Engine.sample``.
        """
        others = not self._step_lock.acquire(blocking=False)
        if others:
            if meanwhile is not None:
                meanwhile()
            self._step_lock.acquire()
        try:
            return self.scheduler.step(meanwhile=meanwhile), others
        finally:
            self._step_lock.release()
            if self._sleepers:
                self._wake(successor=True)

    def _step(self, over: Predicate, own: Request) -> bool:
        """Run steps for the request ``own`` until ``over()`` is true, unless another thread is
        stepping. Return whether this thread stepped.
        """
        with interrupts_held() as held:
            if not self._step_lock.acquire(blocking=False):
                return False
            self._stepping_thread = threading.get_ident()
            try:
                while not over():
                    self.scheduler.step(own, held.allow)
                    if self._sleepers:
                        self._wake()
                return True
            finally:
                self._stepping_thread = 0
                self._step_lock.release()
                self._wake(successor=True)

    def _sleep(self, over: Predicate) -> None:
        """Sleep while another thread steps, until it wakes this one: because ``over()`` is true, or
        because it is this thread's turn to step.
        """
        bell = threading.Lock()
        bell.acquire()
        self._sleepers[bell] = over
        try:
            # Releasing the turn is followed by waking sleepers, so none is missed.
            if self._step_lock.locked() and not over():
                bell.acquire()
        finally:
            self._sleepers.pop(bell, None)

    def _wake(self, *, successor: bool = False) -> None:
        """Wake the threads whose wait is over and, if ``successor``, one other thread to step."""
        for bell, over in list(self._sleepers.items()):
            done = over()
            if done or successor:
                successor = successor and done
                if self._sleepers.pop(bell, None) is not None:
                    bell.release()

"""Locks in a forked child. Only the thread that forked lives on there: a lock that another thread
held is never given back, and what it guards may be half done.
"""

from __future__ import annotations

import threading
from typing import Protocol
from weakref import WeakSet

from treadle.errors import ForkedError
from treadle.system import SYSTEM


class Told(Protocol):
    """Something with locks."""

    def after_fork(self) -> None:
        """Called in a forked child."""


_TOLD: WeakSet[Told] = WeakSet()
_LOCKS: WeakSet[threading.Lock] = WeakSet()


def tell(owner: Told) -> None:
    """From now on its ``after_fork`` is called in every forked child, as long as it lives."""
    _TOLD.add(owner)


def free_lock() -> threading.Lock:
    """A lock that is free in a forked child: for what is whole wherever another thread stopped."""
    made = threading.Lock()
    _LOCKS.add(made)
    return made


class UseLock:
    """An RLock. In a forked child, if another thread held it at the fork, waiting for it raises
    ForkedError. ``use`` and ``advice`` are for the message.
    """

    def __init__(
        self,
        use: str = "used the model",
        advice: str = "load the model in the child, or start the child by spawn and not by fork",
    ) -> None:
        self._lock, self._lost = threading.RLock(), False
        self._why = f"this process was forked while another thread {use}: {advice}"
        tell(self)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lost and blocking:
            raise ForkedError(self._why)
        return not self._lost and self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def lose(self) -> None:
        """For an ``after_fork``: another thread was in the middle of something."""
        self._lost = True

    def after_fork(self) -> None:
        if is_held(self._lock):
            self.lose()


def is_held(lock: threading.Lock | threading.RLock) -> bool:
    """For an ``after_fork``: whether a thread of the parent's held it."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def _after_fork() -> None:
    for lock in _LOCKS:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading and logging do
    for owner in list(_TOLD):
        owner.after_fork()


SYSTEM.after_fork(_after_fork)

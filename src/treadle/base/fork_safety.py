"""Locks in a forked child. Only the thread that forked lives on there: a lock that another thread
held is never given back, and what it guards may be half done.
"""

from __future__ import annotations

import _imp
import _signal  # type: ignore[import-not-found]  # what the module signal wraps
import _thread
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import _bootstrap
from typing import Protocol
from weakref import WeakSet

from treadle.base.fast_dataclass import dataclass
from treadle.base.interrupts import interrupts_held
from treadle.errors import ForkedError
from treadle.system import SYSTEM

WAIT = 2.0
"""Seconds that a fork waits for what other threads have begun, imports and calls of ``uncut``."""
LATER = 0.01
"""Seconds after a fork that signals act which came during it."""


class HasLocks(Protocol):
    """Something with locks."""

    def after_fork(self) -> None:
        """Called in a forked child."""


_TOLD: WeakSet[HasLocks] = WeakSet()
_LOCKS: WeakSet[threading.Lock] = WeakSet()


def tell(owner: HasLocks) -> None:
    """From now on its ``after_fork`` is called in every forked child, as long as it lives."""
    _TOLD.add(owner)


def free_lock() -> threading.Lock:
    """A lock that is free in a forked child: for what is whole wherever another thread stopped."""
    made = threading.Lock()
    _LOCKS.add(made)
    return made


uncut = free_lock()
"""Held in calls of libraries that keep locks of their own, which no child can make free."""


class UseLock(_thread.RLock):  # type: ignore[misc]  # final to typeshed alone
    """An RLock. In a forked child, if another thread held it at the fork, waiting for it raises
    ForkedError. ``use`` and ``advice`` are for the message.

    ``with`` is RLock's own, in C: between taking the lock and the block, or the block and giving it
    back, no signal's handler runs. In a Python ``__enter__`` one may, and what it raises there
    leaves the lock taken for ever.
    """

    def __new__(cls, *_: str) -> UseLock:
        return super().__new__(cls)

    def __init__(
        self,
        use: str = "used the model",
        advice: str = "load the model in the child, or start the child by spawn and not by fork",
    ) -> None:
        self._why = f"this process was forked while another thread {use}: {advice}"
        tell(self)

    def lose(self) -> None:
        """For an ``after_fork``: another thread was in the middle of something."""
        self.__class__ = _LostLock

    def after_fork(self) -> None:
        if is_held(self):
            self.lose()


class _LostLock(UseLock):  # type: ignore[misc]
    """One that nobody gets any more. Who holds it may give it back."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            raise ForkedError(self._why)
        return False

    __enter__ = acquire


def is_held(lock: threading.Lock | threading.RLock) -> bool:
    """For an ``after_fork``: whether a thread of the parent's held it."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


@dataclass(frozen=True, eq=False)
class _Fork:
    """What the thread that forks has taken for it."""

    signals: interrupts_held
    uncut: bool


_forking: dict[int, _Fork] = {}  # by thread


def _before_fork() -> None:
    """Others' imports come to their end, for a module in C that is half made cannot be imported
    anew. A fork in the middle of an import does not wait: others may wait for that import.

    What a signal's handler raised in here, or at the beginning of ``_forked``, Python would print
    and drop, and the locks would never be given back: signals wait till the fork is over.
    """
    mine, signals = threading.get_ident(), interrupts_held()
    signals.__enter__()
    _forking[mine] = _Fork(signals, uncut.acquire(timeout=WAIT))
    end = time.monotonic() + WAIT
    _imp.acquire_lock()  # no import begins
    while (owners := _importing().values()) and mine not in owners and time.monotonic() < end:
        _imp.release_lock()
        time.sleep(0.001)
        _imp.acquire_lock()


def _forked() -> None:
    fork = _forking.pop(threading.get_ident(), None)
    if fork is None:  # a handler that is not held raised before anything was taken
        return
    _imp.release_lock()
    if fork.uncut:
        uncut.release()
    arrived = fork.signals.forget()
    fork.signals.release()
    for number in arrived:
        _thread.start_new_thread(_act, (number,))


def _act(number: int) -> None:
    """Behind other parts' hooks, in which the signal must not act either."""
    time.sleep(LATER)
    _signal.raise_signal(number)


def _after_fork() -> None:
    with suppress(RuntimeError):  # some versions of Python free it
        _imp.release_lock()
    fork = _forking.get(threading.get_ident())
    _forking.clear()
    for lock in _LOCKS:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading and logging do
    for owner in list(_TOLD):
        owner.after_fork()
    _forget_imports()
    if fork is not None:
        fork.signals.forget()  # they were the parent's
        fork.signals.release()


def _forget_imports() -> None:
    """Modules that another thread was still importing are imported anew: Python gives the lock of
    the import back, and none of those of its modules.
    """
    for name, owner in _importing().items():
        if owner != threading.get_ident():
            _module_locks().pop(name, None)
            if owner is not None:  # else its import had not begun, or was over
                sys.modules.pop(name, None)


def _importing() -> dict[str, int | None]:
    """The thread that imports each of the modules whose locks are in use."""
    return {name: getattr(there(), "owner", None) for name, there in [*_module_locks().items()]}


def _module_locks() -> dict[str, Callable[[], object]]:
    return getattr(_bootstrap, "_module_locks", {})


SYSTEM.around_fork(_before_fork, _forked)
SYSTEM.after_fork(_after_fork)

"""Locks in a forked child. Only the forking thread exists there: a lock held by another thread is
never released, and the data that it guards may be inconsistent.
"""

from __future__ import annotations

import _imp
import _signal  # type: ignore[import-not-found]  # the C module behind signal
import _thread
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import _bootstrap
from typing import Protocol
from weakref import WeakSet

from treadle.base.fast_classes import dataclass
from treadle.base.interrupts import interrupts_held
from treadle.errors import ForkedError
from treadle.system import SYSTEM

WAIT = 2.0
"""Seconds that a fork waits for what other threads have begun, imports and calls of
``library_lock``.
"""
LATER = 0.01
"""Seconds after a fork that signals act which came during it."""


class HasLocks(Protocol):
    """An object that repairs its own locks in a forked child."""

    def after_fork(self) -> None:
        """Repair the object's locks, and what they guard; called in every forked child. If another
        thread of the parent held a lock, its data may be inconsistent: either drop the data and
        free the lock, or mark the lock as lost (``UseLock.mark_lost``), so that acquiring it raises
        ForkedError.
        """


_OWNERS: WeakSet[HasLocks] = WeakSet()
_LOCKS: WeakSet[threading.Lock] = WeakSet()


def register_after_fork(owner: HasLocks) -> None:
    """Register ``owner``: its ``after_fork`` is called in every forked child, while the object
    exists.
    """
    _OWNERS.add(owner)


def free_lock() -> threading.Lock:
    """Return a lock that is reset to free in every forked child, for data that is consistent at any
    point.
    """
    result = threading.Lock()
    _LOCKS.add(result)
    return result


library_lock = free_lock()
"""Held in calls of libraries that keep locks of their own, which no child can make free."""


_HARMLESS: WeakSet[threading.Thread] = WeakSet()


def declare_harmless(thread: threading.Thread) -> None:
    """Declare that a thread never holds a lock that a forked child needs: it waits, or stays in
    compiled code.
    """
    _HARMLESS.add(thread)


def may_fork() -> bool:
    """Return whether a child that is forked now may go on computing: the system can fork, and all
    other threads are declared harmless. Threads that Python does not know are not counted, such as
    those of BLAS, which ends them before a fork.
    """
    mine = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not mine]
    return SYSTEM.FORKS and all(thread in _HARMLESS for thread in others)


class UseLock(_thread.RLock):  # type: ignore[misc]  # final only in typeshed
    """An RLock that raises ForkedError in a forked child if another thread held it at the fork.
    ``use`` and ``advice`` are parts of the message.

    ``with`` uses RLock's own methods, in C: no signal handler runs between taking the lock and the
    block, or between the block and the release. In a Python ``__enter__`` a handler could raise and
    leave the lock taken forever.
    """

    def __new__(cls, *_: str) -> UseLock:
        return super().__new__(cls)

    def __init__(
        self,
        use: str = "used the model",
        advice: str = "load the model in the child, or start the child with spawn instead of fork",
    ) -> None:
        self._why = f"this process was forked while another thread {use}: {advice}"
        register_after_fork(self)

    def mark_lost(self) -> None:
        """Mark the lock as lost, in an ``after_fork``: later acquires raise ForkedError, because
        the work of the parent's thread that held it is unfinished.
        """
        self.__class__ = _LostLock

    def after_fork(self) -> None:
        if is_held(self):
            self.mark_lost()


class _LostLock(UseLock):  # type: ignore[misc]
    """A lock marked as lost: a blocking acquire raises ForkedError, another one fails. Its holder
    may release it.
    """

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            raise ForkedError(self._why)
        return False

    __enter__ = acquire


def is_held(lock: threading.Lock | threading.RLock) -> bool:
    """Return whether another thread holds the lock; in an ``after_fork`` that is a thread of the
    parent.
    """
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


@dataclass(frozen=True, eq=False)
class _Fork:
    """State that the forking thread keeps during a fork: its deferred signals, and whether it holds
    ``library_lock``.
    """

    signals: interrupts_held
    library_lock: bool


_forking: dict[int, _Fork] = {}  # by thread


def _before_fork() -> None:
    """Wait up to ``WAIT`` seconds for calls under ``library_lock``, and for other threads' imports,
    because a half-initialised C module cannot be imported again. A fork within an import does not
    wait for imports: others may wait for that one.

    Python would print and drop an exception of a signal handler in here or at the start of
    ``_forked``, and the locks would never be released. So signals are deferred until the fork is
    over.
    """
    mine = threading.get_ident()
    signals = interrupts_held()
    signals.__enter__()
    _forking[mine] = _Fork(signals, library_lock.acquire(timeout=WAIT))
    end = time.monotonic() + WAIT
    _imp.acquire_lock()  # no import can begin
    while (owners := _importing().values()) and mine not in owners and time.monotonic() < end:
        _imp.release_lock()
        time.sleep(0.001)
        _imp.acquire_lock()


def _forked() -> None:
    fork = _forking.pop(threading.get_ident(), None)
    if fork is None:  # a handler of a signal that is not deferred raised before any lock was taken
        return
    _imp.release_lock()
    if fork.library_lock:
        library_lock.release()
    arrived = fork.signals.forget()
    fork.signals.release()
    for number in arrived:
        _thread.start_new_thread(_act, (number,))


def _act(number: int) -> None:
    """Raise signal ``number`` in this process after ``LATER`` seconds: other modules' fork hooks
    must not be interrupted by it. Runs in a thread of its own.
    """
    time.sleep(LATER)
    _signal.raise_signal(number)


def _after_fork() -> None:
    with suppress(RuntimeError):  # some Python versions have released it
        _imp.release_lock()
    fork = _forking.get(threading.get_ident())
    _forking.clear()
    for lock in _LOCKS:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading and logging do
    for owner in list(_OWNERS):
        owner.after_fork()
    _forget_imports()
    if fork is not None:
        fork.signals.forget()  # they were the parent's
        fork.signals.release()


def _forget_imports() -> None:
    """Drop modules that another thread was importing, so that they are imported again: Python
    releases the import lock in a child, but not the module locks.
    """
    for name, owner in _importing().items():
        if owner != threading.get_ident():
            _module_locks().pop(name, None)
            if owner is not None:  # else its import had not begun, or was over
                sys.modules.pop(name, None)


def _importing() -> dict[str, int | None]:
    """Return the id of the importing thread, by module, for each module lock in use; None for a
    lock without an owner.
    """
    return {name: getattr(there(), "owner", None) for name, there in [*_module_locks().items()]}


def _module_locks() -> dict[str, Callable[[], object]]:
    return getattr(_bootstrap, "_module_locks", {})


SYSTEM.register_fork_hooks(_before_fork, _forked)
SYSTEM.after_fork(_after_fork)

"""Sections in which signal handlers are deferred, so that cache bookkeeping is atomic.

Python runs a signal's handler between any two bytecodes of its main thread. An exception of the
handler (Ctrl-C's KeyboardInterrupt, a timeout) is raised there: possibly between taking a page and
counting it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C module behind signal
import threading
from typing import Any

# _signal instead of signal, whose functions look up each handler in an enum and discard an
# exception each time: a tenth of Python's time per token.

# Signals whose handlers commonly raise: Ctrl-C, termination, timeouts.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
HELD = tuple(getattr(_signal, name) for name in _NAMES if hasattr(_signal, name))

Handlers = list[tuple[int, Any]]


def in_main_interpreter() -> bool:
    """Return whether this is Python's main interpreter. Signals cannot be deferred in others, whose
    first thread ``threading`` also calls the main one.
    """
    import ctypes

    here = ctypes.pythonapi.PyInterpreterState_Get
    main = ctypes.pythonapi.PyInterpreterState_Main
    here.restype = main.restype = ctypes.c_void_p
    return bool(here() == main())


class interrupts_held:  # lowercase: reads as a statement about a block
    """Context manager that defers the signals ``HELD`` until its end. Only those with a Python
    handler are deferred, and only in the main thread: in others it does nothing.

    ``run_deferred`` delivers deferred signals at a safe point of the block; ``allow`` makes a
    nested block in which signals are delivered at once.
    """

    __slots__ = ("_arrived", "_usual")

    def __enter__(self) -> interrupts_held:
        self._arrived: Handlers = []
        self._usual: Handlers = []
        if threading.current_thread() is threading.main_thread():
            get = _signal.getsignal
            self._usual = [(number, now) for number in HELD if callable(now := get(number))]
            self.hold()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold(self) -> None:
        """Defer signals from here on: set handlers that only note them."""
        try:
            for number, _ in self._usual:
                _signal.signal(number, self._note)
        except BaseException:  # from a handler that was not deferred yet
            self.release()
            raise

    def release(self) -> None:
        """Restore the handlers and deliver the deferred signals. An exception raised by a handler
        meanwhile is raised after all handlers are restored.
        """
        i = 0
        raised = None
        left = len(self._usual)
        for _ in range(2 * left):  # maximum number of exceptions until all are restored
            try:
                while i < left:
                    _signal.signal(*self._usual[i])
                    i += 1
                break
            except BaseException as error:
                raised = error
        try:
            if raised is not None:
                raise raised
        finally:
            # break the reference cycle of error and frame, which keeps callers' frames alive
            raised = None
            if self._arrived:
                self.run_deferred()

    def forget(self) -> list[int]:
        """Discard the deferred signals; return their numbers."""
        arrived = self._arrived
        self._arrived = []
        return [number for number, _ in arrived]

    def run_deferred(self) -> None:
        """Call the handlers of the deferred signals now, in order of arrival; they usually
        raise.
        """
        if self._arrived:
            number, frame = self._arrived.pop(0)
            try:
                dict(self._usual)[number](number, frame)
            finally:  # deliver the next one, even if this one raises
                self.run_deferred()

    def allow(self) -> interrupts_allowed:
        """Return a context manager, for use in this block, within which signals are delivered at
        once.
        """
        return interrupts_allowed(self)

    def _note(self, number: int, frame: Any) -> None:
        self._arrived.append((number, frame))


class interrupts_allowed:  # lowercase as above
    """Context manager within ``interrupts_held``: delivers deferred signals at its start, and
    signals that arrive in the block at once.
    """

    __slots__ = ("_deferred",)

    def __init__(self, held: interrupts_held) -> None:
        self._deferred = held

    def __enter__(self) -> None:
        self._deferred.release()

    def __exit__(self, *_: object) -> None:
        self._deferred.hold()

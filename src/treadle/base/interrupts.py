"""What happens as a whole or not at all, whatever signal arrives.

Python runs a signal's handler between any two steps of its main thread, and what the handler raises
(Ctrl-C's KeyboardInterrupt, a timeout's exception) is raised there: between a page and its count.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what the module signal wraps
import threading
from typing import Any

# _signal's functions and not signal's, which look every handler up in an enum and throw away an
# exception each time: a tenth of what Python did for a token.

# Those whose handlers programs have raise: Ctrl-C, an end that is asked for, limits of time.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
HELD = tuple(getattr(_signal, name) for name in _NAMES if hasattr(_signal, name))

Handlers = list[tuple[int, Any]]


def in_main_interpreter() -> bool:
    """Whether this is the interpreter that Python began with: signals cannot be held in others,
    whose first thread ``threading`` calls the main one as well.
    """
    import ctypes

    here, main = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_Main
    here.restype = main.restype = ctypes.c_void_p
    return bool(here() == main())


class interrupts_held:  # read as what a block says of itself
    """Signals wait for the end of the block.

    ``let`` is for the places in it where they do no harm, ``allow`` for blocks within it.
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
        """Note signals from here on."""
        try:
            for number, _ in self._usual:
                _signal.signal(number, self._note)
        except BaseException:  # of a handler that was not held yet
            self.release()
            raise

    def release(self) -> None:
        """Give the handlers their signals back, and what has arrived. What one of them raises is
        raised when all have theirs.
        """
        i, raised, left = 0, None, len(self._usual)
        for _ in range(2 * left):  # as often as something may be raised before all are done
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
            raised = None  # or error and frame would hold each other, and what callers' frames hold
            if self._arrived:
                self.let()

    def forget(self) -> list[int]:
        """Signals that have arrived, which do not act any more."""
        arrived, self._arrived = self._arrived, []
        return [number for number, _ in arrived]

    def let(self) -> None:
        """Let signals act now, if any has arrived: mostly this raises an exception."""
        if self._arrived:
            number, frame = self._arrived.pop(0)
            try:
                dict(self._usual)[number](number, frame)
            finally:  # the next one's turn, whatever this one raises
                self.let()

    def allow(self) -> interrupts_allowed:
        """A block in which signals act at once."""
        return interrupts_allowed(self)

    def _note(self, number: int, frame: Any) -> None:
        self._arrived.append((number, frame))


class interrupts_allowed:  # as above
    """Within ``interrupts_held``: a block in which they are not."""

    __slots__ = ("_held",)

    def __init__(self, held: interrupts_held) -> None:
        self._held = held

    def __enter__(self) -> None:
        self._held.release()

    def __exit__(self, *_: object) -> None:
        self._held.hold()

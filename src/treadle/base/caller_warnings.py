"""Warnings about what a caller asked for, told to whoever serves that call.

Python's warnings go to the process; a server has many callers at once, and each must be told of its
own text. ``warnings_to`` says where those of this thread go; elsewhere they are Python's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TOLD: ContextVar[Callable[[str], object] | None] = ContextVar(
    "treadle.base.caller_warnings", default=None
)


def warn(message: str) -> None:
    """Tell a caller something that is no error."""
    tell = _TOLD.get()
    if tell is None:
        warnings.warn(message, UserWarning, stacklevel=3)
    else:
        tell(message)


@contextmanager
def warnings_to(tell: Callable[[str], object]) -> Iterator[None]:
    """Hand the warnings of this thread to ``tell``."""
    before = _TOLD.set(tell)
    try:
        yield
    finally:
        _TOLD.reset(before)

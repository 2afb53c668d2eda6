"""Warnings about a caller's request, routed to that caller.

Python's warnings go to the process, but a server has many concurrent callers, each with its own
warnings. ``warnings_to`` redirects those of the current context (a thread or an asyncio task); by
default they are Python's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_RECEIVER: ContextVar[Callable[[str], object] | None] = ContextVar(
    "treadle.base.caller_warnings", default=None
)


def warn(message: str) -> None:
    """Warn the caller of the current request: by the function that ``warnings_to`` has set, else by
    ``warnings.warn``.
    """
    tell = _RECEIVER.get()
    if tell is None:
        warnings.warn(message, UserWarning, stacklevel=3)
    else:
        tell(message)


@contextmanager
def warnings_to(tell: Callable[[str], object]) -> Iterator[None]:
    """Within the block, pass the message of each warning of this context to ``tell``."""
    before = _RECEIVER.set(tell)
    try:
        yield
    finally:
        _RECEIVER.reset(before)

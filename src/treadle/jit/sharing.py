"""Threads that share one work item of a kernel, as the builder sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from treadle.jit.values import Val


class Sharing(NamedTuple):
    """A thread's view of the ``n`` threads that share a work item."""

    me: Val  # the thread's number
    n: int
    meet: Callable[[], None]  # a barrier: writes before it can be read after it
    total: Callable[[Val], Val]  # the sum of all threads' f32, bitwise equal in each thread

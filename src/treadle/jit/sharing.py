"""Threads that do one item of a kernel together: which of its turns are whose."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from treadle.jit.values import Val


class Sharing(NamedTuple):
    """What one of ``n`` threads knows while its code is built."""

    me: Val  # its number
    n: int
    meet: Callable[[], None]  # all have written what they write; then it can be read
    total: Callable[[Val], Val]  # the sum of all threads' f32, the same bits in each

"""Pause of the cyclic garbage collector while many objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Disable Python's cyclic garbage collector within the block, and enable it at the end, even if
    it was off before. Imports create a hundred thousand objects, none of them garbage: collecting
    takes 9 ms of a start. JSON of five million lists is parsed in a quarter of the time.
    """
    gc.disable()
    try:
        yield
    # always enable: restoring the previous state could disable it forever with two threads
    finally:
        gc.enable()

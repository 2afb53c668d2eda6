"""Pause of the cyclic garbage collector while many objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_process = {"is_ours": False}


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Disable Python's cyclic garbage collector within the block, and enable it at the end, even if
    it was off before. JSON of five million lists is parsed in a quarter of the time.
    """
    gc.disable()
    try:
        yield
    # always enable: restoring the previous state could disable it forever with two threads
    finally:
        gc.enable()


def own_process() -> None:
    """Note that this process runs treadle alone: what it imports stays until its end."""
    _process["is_ours"] = True


@contextmanager
def imports_kept() -> Iterator[None]:
    """Disable the garbage collector within the block, as ``garbage_kept`` does, for imports: they
    create a hundred thousand objects, none of them garbage. In a process of treadle's own
    (``own_process``) no later collection looks at these: the first one would take a twentieth of a
    start.
    """
    with garbage_kept():
        yield
        if _process["is_ours"]:
            gc.freeze()

"""Making many objects without a search for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Importing makes a hundred thousand objects, and none of them garbage: looking for some takes
    9 ms of a start. JSON of five million lists is read in a quarter of the time.
    """
    gc.disable()
    try:
        yield
    finally:  # whatever was before: of two threads in here one would find it disabled for ever
        gc.enable()

"""Masks that a thread of its own computes."""

import os
import threading

import pytest

from treadle.errors import ForkedError
from treadle.grammar.async_mask import AsyncBits


class Held:
    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()

    def bits(self) -> bytes:
        self.began.set()
        assert self.go.wait(60)
        return b"x"


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    """But has what was made before."""
    held = Held()
    pid = os.getpid()
    late = AsyncBits(held)
    assert held.began.wait(60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(ForkedError, match="grammar mask"):
            late.wait()
    held.go.set()
    assert late.wait() == b"x"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        assert late.wait() == b"x"

"""Where the kernels of a test run: in this process, or on an emulated CPU of another kind."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tests.kernels.quick_code import is_made_up, load_quickly
from treadle.jit.kernel import load_kernels

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.spec import Spec

SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Machine(Protocol):
    """What a test asks of the place where its kernels run."""

    def kernel(self, spec: Spec, isa: Isa) -> Callable[..., None]:
        """The kernel as a function of five numbers."""

    def pages(self, n_bytes: int) -> np.ndarray:
        """Whole pages of memory that kernels can use, ``u8 [n_bytes]``."""

    def close_page(self, address: int) -> None:
        """Let a page be neither read nor written."""


class Here:
    """This process."""

    def kernel(self, spec: Spec, isa: Isa) -> Callable[..., None]:
        """Compiled, or from the cache, and linked."""
        if is_made_up(isa):
            return SIGNATURE(load_quickly(spec, isa))
        return SIGNATURE(load_kernels([spec], isa)[spec.name])

    def pages(self, n_bytes: int) -> np.ndarray:
        """A mapping of its own."""
        return np.frombuffer(mmap.mmap(-1, n_bytes), np.uint8)

    def close_page(self, address: int) -> None:
        """By mprotect."""
        if _libc.mprotect(address, mmap.PAGESIZE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")


def chosen() -> Machine:
    """Where this run's kernels go: ``TREADLE_TEST_ROW`` names an emulated row."""
    name = os.environ.get("TREADLE_TEST_ROW")
    if not name:
        return Here()
    from tests.emulated.rows import EMULATED

    return EMULATED[name].guest()

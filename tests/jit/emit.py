"""Small functions in the kernel language, compiled and called: what the tests of jit and isa are
made of.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from treadle.isa.isa import Isa
from treadle.jit import ir
from treadle.jit.builder import Builder
from treadle.jit.compile import Linker, emit_object, is_native
from treadle.jit.types import ptr
from treadle.jit.values import Val

_count = itertools.count()


@lru_cache(maxsize=1)
def _linker() -> Linker:
    return Linker()


def ir_text(isa: Isa, n_args: int, build: Callable[..., None], symbol: str = "f") -> str:
    """The IR of a function of ``n_args`` pointers whose body is ``build(k, *pointers)``."""
    module = ir.Module()
    function = module.function(symbol, ir.VOID, [ptr.ir] * n_args)
    k = Builder(function, isa)
    build(k, *(Val(k, arg, ptr) for arg in function.args))
    k.ret()
    return str(module)


def compiled(isa: Isa, n_args: int, build: Callable[..., None]) -> Callable[..., None]:
    """The same as something that takes numpy arrays."""
    symbol = f"test_{next(_count)}"
    if not is_native(isa):  # of another machine: the arrays are copied there and back
        from tests.emulated.rows import guest_of

        return guest_of(isa).arrays_function(symbol, ir_text(isa, n_args, build, symbol), isa)
    address = _linker().link(symbol, emit_object(ir_text(isa, n_args, build, symbol), isa))
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * n_args)(address)

    def call(*arrays: np.ndarray) -> None:
        assert all(a.flags.c_contiguous for a in arrays)
        function(*(a.ctypes.data for a in arrays))

    return call


def scratch_builder(isa: Isa) -> Builder:
    """A builder whose code nobody runs, for what is to be refused while building."""
    function = ir.Module().function("f", ir.VOID, [])
    return Builder(function, isa)

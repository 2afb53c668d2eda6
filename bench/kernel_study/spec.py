"""Base of the studied kernels: work that can be repeated within machine code."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, i32
from treadle.kernels.spec import Args, Frame, Spec

F16_ROUND = 2.0**-11  # unit roundoff of f16
F32_ROUND = 2.0**-24

Arrays = dict[str, np.ndarray]


class StudyCase(NamedTuple):
    """One call: buffers by name (those that are written start as NaN), ``n`` rounds' worth of work,
    and what must come out, f64, with the largest error that rounding allows.
    """

    arrays: Arrays
    n: int
    expected: Arrays
    bound: Arrays


@dataclass(frozen=True)
class Study(Spec):
    """A kernel whose items are repetitions: item i reads and writes each buffer ``step`` bytes
    behind item i - 1. With steps of 0 the same memory is hot; with steps of a call's bytes it is
    cold.
    """

    args: ClassVar[Args] = Args("x:in y:in out:inout n x_step y_step out_step")

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        """Emit the kernel."""
        with k.loop(frame.end, start=frame.begin) as item:
            x = frame.x + item * frame.x_step
            y = frame.y + item * frame.y_step
            self.body(k, isa, x, y, frame.out + item * frame.out_step, frame.n)

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        """Emit one repetition."""
        raise NotImplementedError

    def case(self, isa: Isa, size: int, rng: np.random.Generator) -> StudyCase:
        """Random inputs of ``size`` values along K, and their results."""
        raise NotImplementedError

    def rounds(self, isa: Isa, size: int) -> int:
        """Iterations of the innermost loop in one repetition."""
        raise NotImplementedError

    def products(self, isa: Isa, size: int) -> int:
        """Multiplications of one repetition (each with an addition, but for ``scale``)."""
        raise NotImplementedError

    @property
    def setting(self) -> str:
        """The fields, for tables."""
        raise NotImplementedError

    def run_ref(self, args: Any, run: Any) -> None:
        """The twin is ``case``."""
        raise NotImplementedError


def halves(shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random f16 in -1..1."""
    return rng.uniform(-1, 1, shape).astype(np.float16)


def unwritten(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """A buffer of NaN."""
    return np.full(shape, np.nan, dtype)


def sum_of_bytes(k: Builder, products: Val) -> Val:
    """The sum of the lanes of i16, as i32: one instruction where the machine widens as it adds."""
    wide: Ty = i32.like(products.ty)
    return k.call(f"llvm.vector.reduce.add.{wide.mangled}", i32, [products.to(i32).ir])

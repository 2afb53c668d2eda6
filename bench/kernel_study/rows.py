"""Studied kernels on two rows of f16: dot product, multiply-add, scaling.

``lmul`` is how many registers a vector fills, ``unroll`` how many vectors a round takes, each with
sums of its own; ``barrier`` keeps the compiler from moving loads from one vector to another.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from bench.kernel_study.spec import F16_ROUND, F32_ROUND, Study, StudyCase, halves, unwritten
from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f16, f32

FACTOR = 0.40625  # of mad and scale: exact in f16


@dataclass(frozen=True)
class RowStudy(Study):
    """A kernel over rows of f16; a round takes ``unroll`` vectors of ``lmul`` registers."""

    lmul: int = 1
    unroll: int = 1
    barrier: bool = False

    def lanes(self, isa: Isa) -> int:
        """f16 values of a vector."""
        return self.lmul * isa.vector_bits // 16

    def rounds(self, isa: Isa, size: int) -> int:
        """Every round takes ``unroll`` vectors."""
        return size // (self.unroll * self.lanes(isa))

    def products(self, isa: Isa, size: int) -> int:
        """One for each value."""
        return size

    @property
    def setting(self) -> str:
        """``LMUL 2 x 2, barrier``."""
        return f"LMUL {self.lmul} x {self.unroll}" + ", barrier" * self.barrier


@dataclass(frozen=True)
class VecDotF16(RowStudy):
    """``out[0] = sum of x[i] * y[i]``: x, y f16 ``[n]``, sums in f32."""

    op: ClassVar[str] = "vec_dot_f16"

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        """Products are widened as they are added, where the machine can."""
        lanes = self.lanes(isa)
        sums = [k.var(k.zero(f32 * lanes)) for _ in range(self.unroll)]
        with k.loop(n, step=lanes * self.unroll) as i:
            for u, total in enumerate(sums):
                at = (i + u * lanes) * 2
                a, b = (
                    isa.widen_f16(k, k.load(p, f16 * lanes, align=2, offset=at)) for p in (x, y)
                )
                total.v = k.fma(a, b, total.v)
                if self.barrier:
                    k.fence()
        whole = sums[0].v
        for total in sums[1:]:
            whole = whole + total.v
        k.store(out, k.sum(whole), align=4)

    def case(self, isa: Isa, size: int, rng: np.random.Generator) -> StudyCase:
        """Error: one rounding for each addition to a lane, and those of the final sum."""
        x = halves(size, rng)
        y = halves(size, rng)
        exact = x.astype(np.float64) * y.astype(np.float64)
        roundings = self.rounds(isa, size) + self.unroll + 12
        bound = roundings * F32_ROUND * np.abs(exact).sum()
        arrays = {"x": x, "y": y, "out": unwritten(1)}
        return StudyCase(arrays, size, {"out": exact.sum()[None]}, {"out": np.array([bound])})


@dataclass(frozen=True)
class Mad(RowStudy):
    """``out[i] += FACTOR * x[i]`` in f16: x, out f16 ``[n]``."""

    op: ClassVar[str] = "mad_f16"

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        """A vector at a time."""
        lanes = self.lanes(isa)
        ty = f16 * lanes
        with k.loop(n, step=lanes * self.unroll) as i:
            for u in range(self.unroll):
                at = (i + u * lanes) * 2
                value = k.load(x, ty, align=2, offset=at)
                old = k.load(out, ty, align=2, offset=at)
                new = k.fma(value, k.splat(FACTOR, ty), old)
                k.store(out, new, align=2, offset=at)
                if self.barrier:
                    k.fence()

    def case(self, isa: Isa, size: int, rng: np.random.Generator) -> StudyCase:
        """Error: of the product and of the sum, where these are not one rounding."""
        x = halves(size, rng)
        out = halves(size, rng)
        part = FACTOR * x.astype(np.float64)
        exact = part + out.astype(np.float64)
        bound = F16_ROUND * (np.abs(part) + np.abs(exact)) * 1.01 + 2.0**-24
        arrays = {"x": x, "y": x[:1].copy(), "out": out}
        return StudyCase(arrays, size, {"out": exact}, {"out": bound})


@dataclass(frozen=True)
class ScaleRow(RowStudy):
    """``out[i] *= FACTOR`` in f16: out f16 ``[n]``."""

    op: ClassVar[str] = "scale_f16"

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        """A vector at a time."""
        lanes = self.lanes(isa)
        with k.loop(n, step=lanes * self.unroll) as i:
            for u in range(self.unroll):
                at = (i + u * lanes) * 2
                old = k.load(out, f16 * lanes, align=2, offset=at)
                k.store(out, old * FACTOR, align=2, offset=at)
                if self.barrier:
                    k.fence()

    def case(self, isa: Isa, size: int, rng: np.random.Generator) -> StudyCase:
        """Error: one rounding."""
        out = halves(size, rng)
        exact = FACTOR * out.astype(np.float64)
        arrays = {"x": out[:1].copy(), "y": out[:1].copy(), "out": out}
        bound = F16_ROUND * np.abs(exact) + 2.0**-24
        return StudyCase(arrays, size, {"out": exact}, {"out": bound})

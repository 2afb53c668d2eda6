"""Studied tiles of matrix products, all sums of a tile in registers.

Along K: a vector holds neighbours of K, and each result is summed up at the end: llama.cpp's tile
for RISC-V. Of rows: a vector holds rows, a token's value is multiplied into all of them, and
nothing is left to sum up.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from bench.kernel_study.spec import F32_ROUND, Study, StudyCase, halves, unwritten
from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import f16, f32


@dataclass(frozen=True)
class StudyTile(Study):
    """``rm`` by ``rn`` sums, vectors of ``lmul`` registers in f32."""

    lanes_are: ClassVar[str]  # what a vector's lanes are: values of K, or rows
    lmul: int = 1
    rm: int = 4
    rn: int = 6
    barrier: bool = False

    def lanes(self, isa: Isa) -> int:
        """f32 values of a vector."""
        return self.lmul * isa.vector_bits // 32

    @property
    def setting(self) -> str:
        """``rows 4 x 6, LMUL 1, barrier``."""
        return f"{self.lanes_are} {self.rm} x {self.rn}, LMUL {self.lmul}" + (
            ", barrier" * self.barrier
        )

    def sums(self, k: Builder, isa: Isa) -> list[list[Var]]:
        """``[rm][rn]`` of them, zero."""
        zero = k.zero(f32 * self.lanes(isa))
        return [[k.var(zero) for _ in range(self.rn)] for _ in range(self.rm)]


@dataclass(frozen=True)
class TileAlongK(StudyTile):
    """``out[i, j] = sum over K of x[i] * y[j]``: x f16 ``[rm, n]``, y f16 ``[rn, n]``."""

    op: ClassVar[str] = "sgemm_along_k"
    lanes_are: ClassVar[str] = "K"

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        """The tokens' vectors stay, rows come one after the other."""
        lanes, sums = self.lanes(isa), self.sums(k, isa)

        def part(base: Val, row: int, i: Val) -> Val:
            return isa.widen_f16(k, k.load(base, f16 * lanes, align=2, offset=(n * row + i) * 2))

        with k.loop(n, step=lanes) as i:
            tokens = [part(y, j, i) for j in range(self.rn)]
            for r, row in enumerate(sums):
                w = part(x, r, i)
                for token, total in zip(tokens, row, strict=True):
                    total.v = k.fma(w, token, total.v)
                if self.barrier:
                    k.fence()
        for r, row in enumerate(sums):
            for j, total in enumerate(row):
                k.store(out, k.sum(total.v), align=4, offset=4 * (r * self.rn + j))

    def rounds(self, isa: Isa, size: int) -> int:
        """A vector of K each."""
        return size // self.lanes(isa)

    def products(self, isa: Isa, size: int) -> int:
        """Return the multiplications of all results together."""
        return self.rm * self.rn * size

    def case(self, isa: Isa, size: int, rng: np.random.Generator) -> StudyCase:
        """Error: a rounding for each addition to a lane, and those of the final sum."""
        x = halves((self.rm, size), rng)
        y = halves((self.rn, size), rng)
        exact = x.astype(np.float64) @ y.astype(np.float64).T
        sizes = np.abs(x).astype(np.float64) @ np.abs(y).astype(np.float64).T
        bound = (self.rounds(isa, size) + 12) * F32_ROUND * sizes
        arrays = {"x": x, "y": y, "out": unwritten(self.rm, self.rn)}
        return StudyCase(arrays, size, {"out": exact}, {"out": bound})


@dataclass(frozen=True)
class TileOfRows(StudyTile):
    """``out[j, i] = sum over K of x[k, i] * y[k, j]``: x f16 ``[n, rm vectors]``, a packed panel; y
    f32 ``[n, rn]``, packed tokens.
    """

    op: ClassVar[str] = "sgemm_of_rows"
    lanes_are: ClassVar[str] = "rows"

    def body(self, k: Builder, isa: Isa, x: Val, y: Val, out: Val, n: Val) -> None:
        """One value of K a round."""
        lanes = self.lanes(isa)
        sums = self.sums(k, isa)
        with k.loop(n) as i:
            rows = [
                self.row(k, isa, x, (i * self.rm + r) * (2 * lanes), lanes) for r in range(self.rm)
            ]
            for j in range(self.rn):
                token = k.splat(self.token(k, y, i, j, n), f32 * lanes)
                for w, row in zip(rows, sums, strict=True):
                    row[j].v = k.fma(w, token, row[j].v)
                if self.barrier:
                    k.fence()
        for r, row in enumerate(sums):
            for j, total in enumerate(row):
                k.store(out, total.v, align=4, offset=4 * lanes * (j * self.rm + r))

    def row(self, k: Builder, isa: Isa, x: Val, at: Val, lanes: int) -> Val:
        """A vector of rows at byte ``at``."""
        return isa.widen_f16(k, k.load(x, f16 * lanes, align=2, offset=at))

    def token(self, k: Builder, y: Val, i: Val, j: int, n: Val) -> Val:
        """Value ``i`` of token ``j``."""
        return k.load(y, f32, align=4, offset=(i * self.rn + j) * 4)

    def rounds(self, isa: Isa, size: int) -> int:
        """A value of K each."""
        return size

    def products(self, isa: Isa, size: int) -> int:
        """Return the multiplications of all results together."""
        return self.rm * self.lanes(isa) * self.rn * size

    def case(self, isa: Isa, size: int, rng: np.random.Generator) -> StudyCase:
        """Error: a rounding for each addition."""
        x = halves((size, self.rm * self.lanes(isa)), rng)
        y = self.tokens(size, rng)
        left = self.by_k(y).astype(np.float64).T
        exact = left @ x.astype(np.float64)
        sizes = np.abs(left) @ np.abs(x).astype(np.float64)
        bound = (size + 2) * F32_ROUND * sizes
        arrays = {"x": x, "y": y, "out": unwritten(*exact.shape)}
        return StudyCase(arrays, size, {"out": exact}, {"out": bound})

    def tokens(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Random tokens, as ``token`` finds them."""
        return rng.uniform(-1, 1, (size, self.rn)).astype(np.float32)

    def by_k(self, y: np.ndarray) -> np.ndarray:
        """Tokens as ``[n, rn]``."""
        return y


@dataclass(frozen=True)
class AttentionProduct(TileOfRows):
    """The same of attention: x is a page of keys or values, f16 ``[n, rm vectors]``; y f32
    ``[rn, n]``, queries or their weights.
    """

    op: ClassVar[str] = "attention"

    def token(self, k: Builder, y: Val, i: Val, j: int, n: Val) -> Val:
        """Queries lie one after the other."""
        return k.load(y, f32, align=4, offset=(n * j + i) * 4)

    def tokens(self, size: int, rng: np.random.Generator) -> np.ndarray:
        """Random queries."""
        return rng.uniform(-1, 1, (self.rn, size)).astype(np.float32)

    def by_k(self, y: np.ndarray) -> np.ndarray:
        """Queries side by side."""
        return y.T

"""The search for super-blocks without minima as a kernel; ``formats/k_signed.py`` is the twin."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.formats.k_search import STEPS
from treadle.formats.k_signed import MORE, Signed
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32
from treadle.kernels.search import (
    Columns,
    SearchKernel,
    inverse,
    or_huge,
    rounded,
    wide_f16,
)
from treadle.record import dataclass


@dataclass(frozen=True)
class SignedSearchKernel(SearchKernel):
    """``w = d * sc * q``."""

    op: ClassVar[str] = "search_signed"
    scales: ClassVar[tuple[str, ...]] = ("d",)
    integers: ClassVar[tuple[str, ...]] = ("sc",)
    beside: ClassVar[tuple[tuple[int, ...], ...]] = ((-1,), (1,))
    beside_steps: ClassVar[tuple[int, ...]] = STEPS
    found: ClassVar[Any] = Signed
    byte: ClassVar[Any] = np.int8

    @property
    def reach(self) -> int:
        reach: int = self.how.top * self.how.half
        return reach

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest code."""
        return -float(self.how.half), self.how.half - 1.0

    # -- each sub-block alone -------------------------------------------------------------------

    def fit(self, k: Builder, c: Columns) -> None:
        # First what makes the largest magnitude -half: weights of one magnitude and sign are then
        # exact.
        points = np.array([self.how.half, *self.how.grid], np.float32)
        table, zero = k.table(points), k.zero(c.ty)
        with k.loop(self.n_sub) as sub:
            least = most = c.load("x", sub * self.length)
            for j in range(1, self.length):
                x = c.load("x", sub * self.length + j)
                least, most = k.min(x, least), k.max(x, most)
            unit = -inverse(k, k.select(most > -least, most, least))
            gain, scale = k.var(zero), k.var(zero)
            with k.loop(len(points)) as i:
                factor = unit * k.splat(k.load(table, f32, offset=i * 4), c.ty)
                self.try_point(k, c, sub, factor, (gain, scale))
            c.store("fit_sc", scale.v, sub)

    def try_point(
        self, k: Builder, c: Columns, sub: Val, factor: Val, best: tuple[Any, Any]
    ) -> None:
        """A point of the grid: codes with either end as the longer one, then least squares."""
        gain, scale = best
        low, high = self.ends
        sums = [[k.var(k.zero(c.ty)) for _ in range(2)] for _ in range(2)]
        for j in range(self.length):
            i = sub * self.length + j
            x = c.load("x", i)
            xw = c.load("xw", i) if self.aware else x
            whole = k.round(x * factor)
            for (lo, hi), (qx, qq) in zip(((low, high), (-high, -low)), sums, strict=True):
                code = k.min(k.max(whole, lo), hi)
                qx.v = k.fma(code, xw, qx.v)
                qq.v = k.fma(code, code * c.load("w", i) if self.aware else code, qq.v)
        for sign, (qx, qq) in zip((1.0, -1.0), sums, strict=True):
            slope = qx.v * inverse(k, qq.v)
            explained = slope * qx.v
            more = explained > gain.v * float(MORE)
            gain.v = k.select(more, explained, gain.v)
            scale.v = k.select(more, slope * sign, scale.v)

    # -- all of them together -------------------------------------------------------------------

    def start_table(self) -> Any:
        return np.array([(self.how.top,), *((start,) for start in self.how.starts)], np.float32)

    def start(self, k: Builder, c: Columns, row: Val) -> None:
        most, least = k.var(k.zero(c.ty)), k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            scale = c.load("fit_sc", sub)
            most.v, least.v = k.max(most.v, scale), k.min(least.v, scale)
        # The largest scale becomes the most negative integer, which there is one more of.
        up = most.v > -least.v
        d = wide_f16(k, k.max(most.v, -least.v), k.splat(k.load(row, f32), c.ty))
        d = k.select(up, -d, d)
        c.store("try_d", d)
        unit, top = inverse(k, d), float(self.how.top)
        with k.loop(self.n_sub) as sub:
            c.store("try_sc", rounded(k, c.load("fit_sc", sub) * unit, -top, top), sub)

    def look(self, k: Builder, c: Columns, source: str, steps: tuple[int, ...]) -> None:
        d, top = c.load("try_d"), float(self.how.top)
        total = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            first = c.load(f"{source}_sc", sub)
            tried = [k.min(k.max(first + float(step), -top), top - 1) for step in steps]
            scales = [or_huge(k, sc * d) for sc in tried]
            errors = self.errors(k, c, sub, [1.0 / scale for scale in scales])
            least, best = k.var(k.zero(c.ty)), k.var(k.zero(c.ty))
            for at, (sc, scale, error) in enumerate(zip(tried, scales, errors, strict=True)):
                error = error * (scale * scale)
                if not at:
                    least.v, best.v = error, sc
                    continue
                less = error < least.v
                least.v = k.select(less, error, least.v)
                best.v = k.select(less, sc, best.v)
            c.store("new_sc", best.v, sub)
            total.v = total.v + least.v
        c.store("new_error", total.v)

    def errors(self, k: Builder, c: Columns, sub: Val, units: list[Val]) -> list[Val]:
        """What rounding to codes costs a sub-block in each of these units, in squared steps."""
        low, high = self.ends
        sums = [k.var(k.zero(c.ty)) for _ in units]
        for j in range(self.length):
            i = sub * self.length + j
            x = c.load("x", i)
            for unit, total in zip(units, sums, strict=True):
                u = x * unit
                off = u - rounded(k, u, low, high)
                weighted = off * c.load("w", i) if self.aware else off
                total.v = k.fma(off, weighted, total.v)
        return [total.v for total in sums]

    def coder(self, k: Builder, c: Columns, sub: Val) -> Any:
        unit = 1.0 / or_huge(k, c.load("best_sc", sub) * c.load("best_d"))
        return lambda i: rounded(k, c.load("x", i) * unit, *self.ends)

    def refit(self, k: Builder, c: Columns) -> None:
        sq_x, sq_sq = k.var(k.zero(c.ty)), k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            code, sc = self.coder(k, c, sub), c.load("best_sc", sub)
            qx, qq = k.var(k.zero(c.ty)), k.var(k.zero(c.ty))
            for j in range(self.length):
                i = sub * self.length + j
                q = code(i)
                qx.v = k.fma(q, c.load("xw" if self.aware else "x", i), qx.v)
                qq.v = k.fma(q, q * c.load("w", i) if self.aware else q, qq.v)
            sq_x.v = sq_x.v + sc * qx.v
            sq_sq.v = sq_sq.v + sc * sc * qq.v
        some = sq_sq.v > 0.0
        c.store("fitted_d", k.select(some, sq_x.v / sq_sq.v, c.load("best_d")))

    def made(self, k: Builder, c: Columns) -> tuple[Val]:
        return (c.load("best_d") + c.load("spoilt"),)

"""Scale search for super-blocks without minimums, as a kernel; ``formats/k_signed.py`` is the
twin.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats.k_search import STEPS
from treadle.formats.k_signed import MORE, Signed
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32
from treadle.kernels.quantize.columns import ScratchColumns, inverse, or_huge, rounded, wide_f16
from treadle.kernels.quantize.k_search import SearchKernel

AT_ONCE = 3  # grid points tried together: their sums are independent


@dataclass(frozen=True)
class SignedSearchKernel(SearchKernel):
    """Search for formats without minimums, with signed scales: ``w = d * sc * q``."""

    op: ClassVar[str] = "search_signed"
    scales: ClassVar[tuple[str, ...]] = ("d",)
    integers: ClassVar[tuple[str, ...]] = ("sc",)
    final_moves: ClassVar[tuple[tuple[int, ...], ...]] = ((-1,), (1,))
    final_steps: ClassVar[tuple[int, ...]] = STEPS
    result_type: ClassVar[Any] = Signed
    byte: ClassVar[Any] = np.int8

    @property
    def reach(self) -> int:
        reach: int = self.how.top * self.how.half
        return reach

    @property
    def ends(self) -> tuple[float, float]:
        return -float(self.how.half), self.how.half - 1.0

    # -- each sub-block alone -------------------------------------------------------------------

    def fit(self, k: Builder, c: ScratchColumns) -> None:
        # First the scale that maps the largest magnitude to -half: weights of one magnitude and
        # sign are then exact.
        points = [float(self.how.half), *self.how.grid]
        most = k.var(k.zero(c.ty))
        least = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            low = high = c.load("x", sub * self.length)
            for j in range(1, self.length):
                x = c.load("x", sub * self.length + j)
                low = k.min(x, low)
                high = k.max(x, high)
            unit = -inverse(k, k.select(high > -low, high, low))
            best = k.var(k.zero(c.ty)), k.var(k.zero(c.ty))
            for outer, group in groupby(points, lambda point: point >= self.ends[1] + 0.5):
                some = [*group]
                at_once = 1 if outer else AT_ONCE
                some += some[-1:] * (-len(some) % at_once)
                table = k.table(np.array(some, np.float32))
                with k.loop(len(some), step=at_once) as i:
                    factors = [
                        unit * k.splat(k.load(table, f32, offset=(i + g) * 4), c.ty)
                        for g in range(at_once)
                    ]
                    self.try_points(k, c, sub, factors, best, outer)
            c.store("fit_sc", best[1].v, sub)
            most.v, least.v = k.max(most.v, best[1].v), k.min(least.v, best[1].v)
        c.store("most_sc", k.select(most.v > -least.v, most.v, least.v))

    def try_points(
        self,
        k: Builder,
        c: ScratchColumns,
        sub: Val,
        factors: list[Val],
        best: tuple[Var, Var],
        outer: bool,
    ) -> None:
        """Try grid points for sub-block ``sub``: round the weights times each of ``factors`` to
        codes, fit the scale by least squares, and keep gain and scale in ``best`` if it explains
        more of the sum of squares. Codes of ``outer`` points may reach the ends of the code range,
        so both signs are tried; for the others both signs give equal results.
        """
        low, high = self.ends
        tries: list[tuple[Val, float, tuple[float, float] | None]] = [
            (factor, sign, ends)
            for factor in factors
            for sign, ends in (
                [(1.0, (low, high)), (-1.0, (-high, -low))] if outer else [(1.0, None)]
            )
        ]
        sums = [(k.var(k.zero(c.ty)), k.var(k.zero(c.ty))) for _ in tries]
        for j in range(self.length):
            i = sub * self.length + j
            x = c.load("x", i)
            xw = c.load("xw", i) if self.aware else x
            whole = {id(factor): k.round(x * factor) for factor in factors}
            for (factor, _, ends), (qx, qq) in zip(tries, sums, strict=True):
                code = whole[id(factor)]
                if ends:
                    code = k.min(k.max(code, ends[0]), ends[1])
                qx.v = k.fma(code, xw, qx.v)
                qq.v = k.fma(code, code * c.load("w", i) if self.aware else code, qq.v)
        gain, scale = best
        for (_, sign, _), (qx, qq) in zip(tries, sums, strict=True):
            slope = qx.v * inverse(k, qq.v)
            explained = slope * qx.v
            more = explained > gain.v * float(MORE)
            gain.v = k.select(more, explained, gain.v)
            scale.v = k.select(more, slope * sign, scale.v)

    # -- all of them together -------------------------------------------------------------------

    def start_table(self) -> Any:
        return np.array([(self.how.top,), *((start,) for start in self.how.starts)], np.float32)

    def start(self, k: Builder, c: ScratchColumns, row: Val) -> None:
        # The largest scale becomes the most negative integer, whose range is larger by one.
        most = c.load("most_sc")
        d = wide_f16(k, k.abs(most), k.splat(k.load(row, f32), c.ty))
        d = k.select(most > 0.0, -d, d)
        c.store("try_d", d)
        unit = inverse(k, d)
        top = float(self.how.top)
        with k.loop(self.n_sub) as sub:
            c.store("try_sc", rounded(k, c.load("fit_sc", sub) * unit, -top, top), sub)

    def look(self, k: Builder, c: ScratchColumns, source: str, steps: tuple[int, ...]) -> None:
        d = c.load("try_d")
        top = float(self.how.top)
        total = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            first = c.load(f"{source}_sc", sub)
            tried = [k.min(k.max(first + float(step), -top), top - 1) for step in steps]
            scales = [or_huge(k, sc * d) for sc in tried]
            errors = self.errors(k, c, sub, [(1.0 / scale, None) for scale in scales])
            least = k.var(k.zero(c.ty))
            best = k.var(k.zero(c.ty))
            for at, (sc, scale, error) in enumerate(zip(tried, scales, errors, strict=True)):
                error = error * (scale * scale)
                if not at:
                    least.v = error
                    best.v = sc
                    continue
                less = error < least.v
                least.v = k.select(less, error, least.v)
                best.v = k.select(less, sc, best.v)
            c.store("new_sc", best.v, sub)
            total.v = total.v + least.v
        c.store("new_error", total.v)

    def coder(self, k: Builder, c: ScratchColumns, sub: Val) -> Any:
        unit = 1.0 / or_huge(k, c.load("best_sc", sub) * c.load("best_d"))
        first = sub * self.length
        return lambda j: rounded(k, c.load("x", first + j) * unit, *self.ends)

    def refit(self, k: Builder, c: ScratchColumns) -> None:
        sq_x = k.var(k.zero(c.ty))
        sq_sq = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            code = self.coder(k, c, sub)
            sc = c.load("best_sc", sub)
            qx = k.var(k.zero(c.ty))
            qq = k.var(k.zero(c.ty))
            for j in range(self.length):
                i = sub * self.length + j
                q = code(j)
                qx.v = k.fma(q, c.load("xw" if self.aware else "x", i), qx.v)
                qq.v = k.fma(q, q * c.load("w", i) if self.aware else q, qq.v)
            sq_x.v = sq_x.v + sc * qx.v
            sq_sq.v = sq_sq.v + sc * sc * qq.v
        some = sq_sq.v > 0.0
        c.store("fitted_d", k.select(some, sq_x.v / sq_sq.v, c.load("best_d")))

    def final_scales(self, k: Builder, c: ScratchColumns) -> tuple[Val]:
        return (c.load("best_d") + c.load("spoilt"),)

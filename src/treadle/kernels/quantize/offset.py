"""Scale search for super-blocks with minimums, as a kernel; ``formats/k_offset.py`` is the twin."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats.k_offset import BESIDE, MORE, Offset
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32, f64
from treadle.kernels.quantize.columns import ScratchColumns, inverse, or_huge, rounded, wide_f16
from treadle.kernels.quantize.k_search import SearchKernel

PARALLEL = 1e-9  # as in the twin: two scales as parallel as this count as one
AT_ONCE = 2  # grid points tried together: their sums are independent


@dataclass(frozen=True)
class OffsetSearchKernel(SearchKernel):
    """Search for formats with scales and minimums: ``w = d * sc * q - dmin * m``."""

    op: ClassVar[str] = "search_offset"
    scales: ClassVar[tuple[str, ...]] = ("d", "dmin")
    integers: ClassVar[tuple[str, ...]] = ("sc", "m")
    final_moves: ClassVar[tuple[tuple[int, ...], ...]] = BESIDE
    final_steps: ClassVar[tuple[int, ...]] = (0,)
    result_type: ClassVar[Any] = Offset
    byte: ClassVar[Any] = np.uint8

    @property
    def reach(self) -> int:
        top: int = self.how.top
        return top

    def sizes(self) -> dict[str, int]:
        """Return the number of vectors of each array in scratch, by name; adds the sub-block
        shifted to start at 0 (``y``, weighted ``yw``), and each super-block's ``sign``.
        """
        more = {"sum_x": self.n_sub, "sign": 1, "y": self.length}
        return super().sizes() | more | ({"yw": self.length} if self.aware else {})

    def weight(self, k: Builder, c: ScratchColumns, sub: Val) -> Val:
        """Return the sum of the importances of sub-block ``sub``; without importances
        its length.
        """
        return c.load("sum_w", sub) if self.aware else k.const(float(self.length), c.ty)

    @property
    def ends(self) -> tuple[float, float]:
        return 0.0, float(self.how.levels)

    # -- each sub-block alone -------------------------------------------------------------------

    def fit(self, k: Builder, c: ScratchColumns) -> None:
        self.face(k, c)
        how = self.how
        grid = [(how.levels + p + q, p) for p, q in how.grid]
        grid += grid[-1:] * (-len(grid) % AT_ONCE)
        points = np.array(grid, np.float32)
        table = k.table(points)
        most = [k.var(k.zero(c.ty)) for _ in self.integers]
        with k.loop(self.n_sub) as sub:
            low, unit, total = self.from_zero(k, c, sub)
            free = low < 0.0
            w = k.select(free, self.weight(k, c, sub), k.const(1.0, c.ty))
            sum_y = k.select(free, total, k.zero(c.ty))
            best = {name: k.var(k.zero(c.ty)) for name in ("gain", "slope", "shift")}
            with k.loop(len(points) // AT_ONCE) as i:
                row = table + i * (8 * AT_ONCE)
                self.try_points(k, c, sub, row, (unit, w, sum_y, free), best)
            found = best["slope"].v, k.max(-(low + best["shift"].v / w), 0.0)
            for name, value, largest in zip(self.integers, found, most, strict=True):
                c.store(f"fit_{name}", value, sub)
                largest.v = k.max(largest.v, value)
        for name, largest in zip(self.integers, most, strict=True):
            c.store(f"most_{name}", largest.v)

    def face(self, k: Builder, c: ScratchColumns) -> None:
        """Negate the super-blocks that are mostly positive, and store the sign: a minimum above 0
        cannot be represented.
        """
        above = k.var(k.zero(c.ty))
        below = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            least, most = self.min_and_max(k, c, sub)
            above.v = above.v + k.max(least, 0.0)
            below.v = below.v + k.max(-most, 0.0)
        sign = k.select(above.v > below.v, k.const(-1.0, c.ty), k.const(1.0, c.ty))
        c.store("sign", sign)
        with k.loop(self.n_sub) as sub:
            total = k.var(k.zero(c.ty))
            for j in range(self.length):
                i = sub * self.length + j
                x = c.load("x", i) * sign
                c.store("x", x, i)
                if self.aware:
                    x = c.load("xw", i) * sign
                    c.store("xw", x, i)
                total.v = total.v + x
            c.store("sum_x", total.v, sub)

    def min_and_max(self, k: Builder, c: ScratchColumns, sub: Val) -> tuple[Val, Val]:
        """Return the smallest and the largest weight of sub-block ``sub``."""
        least = most = c.load("x", sub * self.length)
        for j in range(1, self.length):
            x = c.load("x", sub * self.length + j)
            least = k.min(x, least)
            most = k.max(x, most)
        return least, most

    def from_zero(self, k: Builder, c: ScratchColumns, sub: Val) -> tuple[Val, Val, Val]:
        """Store in y sub-block ``sub`` minus its smallest weight (or minus 0 if that is positive),
        so that sums keep their precision for any offset. Return that weight, 1 / range, and the sum
        of y.
        """
        least, most = self.min_and_max(k, c, sub)
        low = k.min(least, 0.0)
        total = k.var(k.zero(c.ty))
        for j in range(self.length):
            i = sub * self.length + j
            y = c.load("x", i) - low
            c.store("y", y, j)
            if self.aware:
                y = y * c.load("w", i)
                c.store("yw", y, j)
            total.v = total.v + y
        return low, inverse(k, most - low), total.v

    def try_points(
        self,
        k: Builder,
        c: ScratchColumns,
        sub: Val,
        row: Val,
        known: tuple[Val, Val, Val, Val],
        best: dict[str, Var],
    ) -> None:
        """Try the AT_ONCE grid points (factor, shift) at address ``row`` for sub-block ``sub``:
        round the weights to codes, fit the line through them by least squares, and keep it in
        ``best`` ("gain", "slope", "shift") if its gain, the part of the sum of squares that it
        explains, is larger. ``known``: 1 / range, the sum of importances, the sum of y (the weights
        minus the smallest one, as ``from_zero`` stores them), and a mask of the lanes whose offset
        is free; in other lanes the sums are 1 and 0.
        """
        unit, w, sum_y, free = known
        spots = [
            (
                unit * k.splat(k.load(row, f32, offset=8 * g), c.ty),
                k.splat(k.load(row, f32, offset=8 * g + 4), c.ty),
                [k.var(k.zero(c.ty)) for _ in range(3)],
            )
            for g in range(AT_ONCE)
        ]
        for j in range(self.length):
            y = c.load("y", j)
            yw = c.load("yw", j) if self.aware else y
            for factor, p, (qy, qw, qq) in spots:
                code = rounded(k, y * factor - p, *self.ends)
                weighted = code * c.load("w", sub * self.length + j) if self.aware else code
                qy.v = k.fma(code, yw, qy.v)
                qw.v = qw.v + weighted
                qq.v = k.fma(code, weighted, qq.v)
        zero = k.zero(c.ty)
        for _, _, (qy, qw, qq) in spots:
            q = k.select(free, qw.v, zero)
            spread_q = qq.v * w - q * q
            spread_qy = qy.v * w - q * sum_y
            slope = spread_qy * inverse(k, spread_q)
            gain = slope * spread_qy
            more = gain > best["gain"].v * float(MORE)
            found = {"gain": gain, "slope": slope, "shift": sum_y - slope * q}
            for name, value in found.items():
                best[name].v = k.select(more, value, best[name].v)

    # -- all of them together -------------------------------------------------------------------

    def start_table(self) -> Any:
        top = self.how.top
        return np.array([(top - i, top - j) for i, j in self.how.starts], np.float32)

    def start(self, k: Builder, c: ScratchColumns, row: Val) -> None:
        top = float(self.how.top)
        for at, (scale, integer) in enumerate(zip(self.scales, self.integers, strict=True)):
            wanted = k.splat(k.load(row, f32, offset=4 * at), c.ty)
            d = wide_f16(k, c.load(f"most_{integer}"), wanted)
            c.store(f"try_{scale}", d)
            unit = inverse(k, d)
            with k.loop(self.n_sub) as sub:
                v = rounded(k, c.load(f"fit_{integer}", sub) * unit, 0.0, top)
                c.store(f"try_{integer}", v, sub)

    def look(self, k: Builder, c: ScratchColumns, source: str, steps: tuple[int, ...]) -> None:
        d = c.load("try_d")
        dmin = c.load("try_dmin")
        top = float(self.how.top)
        total = k.var(k.zero(c.ty))
        with k.loop(self.n_sub) as sub:
            first_m = c.load(f"{source}_m", sub)
            tried_m = [k.min(k.max(first_m + float(j), 0.0), top) for j in steps]
            least, best_sc, best_m = (k.var(k.zero(c.ty)) for _ in range(3))
            for turn, i in enumerate(steps):
                sc = k.min(k.max(c.load(f"{source}_sc", sub) + float(i), 0.0), top)
                scale = or_huge(k, sc * d)
                unit = 1.0 / scale
                lows = [m * dmin * unit for m in tried_m]
                errors = self.errors(k, c, sub, [(unit, low) for low in lows])
                for at, (m, error) in enumerate(zip(tried_m, errors, strict=True)):
                    error = error * (scale * scale)
                    if not turn and not at:
                        least.v = error
                        best_sc.v = sc
                        best_m.v = m
                        continue
                    less = error < least.v
                    least.v = k.select(less, error, least.v)
                    best_sc.v = k.select(less, sc, best_sc.v)
                    best_m.v = k.select(less, m, best_m.v)
            c.store("new_sc", best_sc.v, sub)
            c.store("new_m", best_m.v, sub)
            total.v = total.v + least.v
        c.store("new_error", total.v)

    def coder(self, k: Builder, c: ScratchColumns, sub: Val) -> Any:
        d = c.load("best_d")
        dmin = c.load("best_dmin")
        unit = 1.0 / or_huge(k, c.load("best_sc", sub) * d)
        low = c.load("best_m", sub) * dmin * unit
        first = sub * self.length
        return lambda j: rounded(k, c.load("x", first + j) * unit + low, *self.ends)

    def refit(self, k: Builder, c: ScratchColumns) -> None:
        names = ("sq_sq", "sq_m", "m_m", "sq_x", "m_x")
        totals = {name: k.var(k.zero(c.ty)) for name in names}
        with k.loop(self.n_sub) as sub:
            code = self.coder(k, c, sub)
            qx, qw, qq = (k.var(k.zero(c.ty)) for _ in range(3))
            for j in range(self.length):
                i = sub * self.length + j
                q = code(j)
                weighted = q * c.load("w", i) if self.aware else q
                qx.v = k.fma(q, c.load("xw" if self.aware else "x", i), qx.v)
                qw.v = qw.v + weighted
                qq.v = k.fma(q, weighted, qq.v)
            sc = c.load("best_sc", sub)
            m = c.load("best_m", sub)
            parts = {
                "sq_sq": sc * sc * qq.v,
                "sq_m": sc * m * qw.v,
                "m_m": m * m * self.weight(k, c, sub),
                "sq_x": sc * qx.v,
                "m_x": m * c.load("sum_x", sub),
            }
            for name, part in parts.items():
                totals[name].v = totals[name].v + part
        # Normal equations of x = d * (sc q) - dmin * m.
        wide = f64 * c.ty.lanes
        sq_sq, sq_m, m_m, sq_x, m_x = (totals[name].v.to(wide) for name in names)
        det = sq_sq * m_m - sq_m * sq_m
        two = det > sq_sq * m_m * PARALLEL  # else one of them is zero, or they are parallel
        d = k.select(two, sq_x * m_m - sq_m * m_x, sq_x) / k.select(two, det, sq_sq)
        dmin = k.select(two, sq_m * sq_x - sq_sq * m_x, -m_x) / k.select(two, det, m_m)
        for name, fitted, there in (("d", d, sq_sq), ("dmin", dmin, m_m)):
            old = c.load(f"best_{name}").to(wide)
            c.store(f"fitted_{name}", k.select(there > 0.0, fitted, old).to(c.ty))

    def final_scales(self, k: Builder, c: ScratchColumns) -> tuple[Val, Val]:
        sign = c.load("sign")
        return c.load("best_d") * sign + c.load("spoilt"), c.load("best_dmin") * sign

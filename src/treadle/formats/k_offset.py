"""The search for super-blocks with minima: ``w = d * sc * q - dmin * m`` (Q2_K, Q4_K, Q5_K).

``sc`` and ``m`` are a sub-block's integers, none below 0. See k_search.py for the method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array
from treadle.formats.k_search import (
    F16_MAX,
    ZERO,
    Columns,
    beside_f16,
    flat,
    near_f16,
    or_huge,
    over,
    pick,
    strips,
    wide_f16,
)

U8Array = npt.NDArray[np.uint8]

ONE = np.float32(1)
STEPS = (0, -1, 1)  # how far a descent looks from each integer
ROUNDS = 2
MORE = np.float32(1 + 3e-6)  # so that of equals the first stays: codes that fit to the last bit
BESIDE = tuple((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
EXACT = ((0.0, 0.0), (0.0, -1.0))  # what fits two values, and three in a row, without a minimum


class Offset(NamedTuple):
    """Super-blocks as numbers, not yet packed."""

    d: F32Array  # [n]
    dmin: F32Array  # [n]
    sc: U8Array  # [n, n_sub]
    m: U8Array  # [n, n_sub]
    q: U8Array  # [n, block]


class State(NamedTuple):
    """What a strip's super-blocks are quantised with, and the error that makes."""

    error: F32Array  # [n]
    d: F32Array  # [n]
    dmin: F32Array  # [n]
    sc: F32Array  # [n_sub * n], whole numbers
    m: F32Array  # [n_sub * n], whole numbers


@dataclass(frozen=True)
class OffsetSearch:
    """One format's: its codes are 0 to ``levels``, its integers 0 to ``top``.

    ``grid`` holds what the fit tries, pairs (p, q): the smallest weight lies p steps below code 0
    and the largest q steps above the last, both of them cut off; or inside, where negative.
    ``starts`` holds pairs (i, j): the largest ``sc`` is about ``top - i``, the largest ``m`` ``top
    - j``.
    """

    n_sub: int
    levels: int
    top: int
    grid: tuple[tuple[float, float], ...]
    starts: tuple[tuple[float, float], ...]

    def run(self, x: F32Array, weights: F32Array | None) -> Offset:
        """The super-blocks of float32 [..., block]; ``weights`` as x, or None.

        A NaN makes ``d`` NaN, and what f16 scales cannot reach makes it infinite.
        """
        x, weights = flat(x, weights)
        n = len(x)
        out = Offset(
            np.empty(n, np.float32),
            np.empty(n, np.float32),
            np.empty((n, self.n_sub), np.uint8),
            np.empty((n, self.n_sub), np.uint8),
            np.empty(x.shape, np.uint8),
        )
        with np.errstate(all="ignore"):
            for part, columns, spoilt in strips(x, weights, self.n_sub, F16_MAX * self.top):
                found = Strip(self, columns).search()
                out.d[part], out.dmin[part] = found.d + spoilt, found.dmin
                out.sc[part], out.m[part], out.q[part] = found.sc, found.m, found.q
        return out


def product(points: npt.NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """What fits few values without loss, then all pairs of these points."""
    return EXACT + tuple((float(p), float(q)) for p in points for q in points)


class Strip:
    """The search over one strip."""

    def __init__(self, how: OffsetSearch, columns: Columns) -> None:
        self.how, self.c = how, columns
        self.levels, self.top = np.float32(how.levels), np.float32(how.top)
        self.sign = self.facing()
        self.w = columns.weight()
        self.sum_x = columns.xw.sum(axis=0)
        self.sum_xx = columns.dot(columns.x, columns.xw)

    def facing(self) -> F32Array:
        """[n]: -1 for super-blocks that are negated, which they are from here on.

        A minimum below 0 can be said, one above cannot: so weights that are mostly positive are
        turned round, and both f16 scales become negative.
        """
        c = self.c
        above = c.total(np.maximum(c.x.min(axis=0), ZERO))
        below = c.total(np.maximum(-c.x.max(axis=0), ZERO))
        sign: F32Array = np.where(above > below, -ONE, ONE)
        if (sign < 0).any():
            c.x *= c.spread(sign)
            if c.w is not None:
                c.xw *= c.spread(sign)
        return sign

    def search(self) -> Offset:
        """The strip's super-blocks, found."""
        c = self.c
        scale, low = self.fit()
        best: State | None = None
        scale_max, low_max = c.largest(scale), c.largest(low)
        for i, j in self.how.starts:
            d = wide_f16(scale_max, self.how.top - i)
            dmin = wide_f16(low_max, self.how.top - j)
            sc = np.minimum(np.rint(scale * c.spread(over(d))), self.top)
            m = np.minimum(np.rint(low * c.spread(over(dmin))), self.top)
            best = self.better(best, self.look(d, dmin, sc, m, (0,)))
        for _ in range(ROUNDS):
            assert best is not None
            d, dmin = (near_f16(a) for a in self.refit(best))
            best = self.better(best, self.look(d, dmin, best.sc, best.m, STEPS))
        assert best is not None
        if c.is_close(best.error, self.sum_xx):
            best = self.polish(best)
        for i, j in BESIDE:
            d, dmin = beside_f16(best.d, i), beside_f16(best.dmin, j)
            best = self.better(best, self.look(d, dmin, best.sc, best.m, (0,)))
        q = c.rows(self.codes(best).astype(np.uint8))
        sc8, m8 = (a.reshape(-1, c.n).T.astype(np.uint8) for a in (best.sc, best.m))
        return Offset(best.d * self.sign, best.dmin * self.sign, sc8, m8, q)

    def polish(self, best: State) -> State:
        """Other integers for the same scales: where codes fit, rounding to f16 is what is left."""
        c, top = self.c, self.how.top
        d, dmin = self.refit(best)
        sc, m = best.sc, best.m
        sc_max, m_max = c.largest(sc), c.largest(m)
        for _ in range(2):
            for i in range(top // 2, top + 1):
                new = near_f16(d * sc_max / np.float32(i))
                new_sc = np.rint(sc * c.spread(np.float32(i) * over(sc_max)))
                best = self.better(best, self.look(new, best.dmin, new_sc, best.m, (0,)))
            for i in range(top // 2, top + 1):
                new = near_f16(dmin * m_max / np.float32(i))
                new_m = np.rint(m * c.spread(np.float32(i) * over(m_max)))
                best = self.better(best, self.look(best.d, new, best.sc, new_m, (0,)))
        return best

    def fit(self) -> tuple[F32Array, F32Array]:
        """[n_sub * n] twice: each sub-block's own best scale and minimum (negated, at least 0)."""
        c = self.c
        low = np.minimum(c.x.min(axis=0), ZERO)
        free = (low < 0).astype(np.float32)  # else the minimum is 0, and the slope all there is
        w = np.where(low < 0, self.w, ONE)
        unit = over(c.x.max(axis=0) - low)
        y = c.x - low  # from 0 up: its sums keep their digits however far off 0 the weights lie
        yw = c.weighted(y).copy()
        sum_y = yw.sum(axis=0) * free
        gain, slope, shift = np.zeros_like(low), np.zeros_like(low), np.zeros_like(low)
        for p, q in self.how.grid:
            np.multiply(y, unit * np.float32(self.how.levels + p + q), out=c.a)
            if p:
                c.a -= np.float32(p)
            code = c.rounded(c.a, ZERO, self.levels)
            qy = c.dot(code, yw)
            weighted = c.weighted(code)
            qw, qq = weighted.sum(axis=0) * free, c.dot(code, weighted)
            # Normal equations of y = slope * code + shift; gain is what the slope explains.
            spread_q, spread_qy = qq * w - qw * qw, qy * w - qw * sum_y
            s = spread_qy * over(spread_q)
            g = s * spread_qy
            more = g > gain * MORE
            gain, slope = pick(more, g, gain), pick(more, s, slope)
            shift = pick(more, sum_y - s * qw, shift)
        return slope, np.maximum(-(low + shift / w), ZERO)

    def look(
        self, d: F32Array, dmin: F32Array, sc: F32Array, m: F32Array, steps: tuple[int, ...]
    ) -> State:
        """The best of all integers ``steps`` away from these, for given f16 scales."""
        c = self.c
        d_all, dmin_all = c.spread(d), c.spread(dmin)
        least: F32Array | None = None
        for i in steps:
            new_sc = np.minimum(np.maximum(sc + np.float32(i), ZERO), self.top)
            scale = or_huge(new_sc * d_all)
            unit, square = ONE / scale, scale * scale
            in_steps = np.multiply(c.x, unit, out=c.b)
            for j in steps:
                new_m = np.minimum(np.maximum(m + np.float32(j), ZERO), self.top)
                low = new_m * dmin_all
                u = np.add(in_steps, low * unit, out=c.a)
                error = c.error(u, ZERO, self.levels) * square
                if least is None:
                    least, best_sc, best_m = error, new_sc, new_m
                else:
                    less = error < least
                    least = np.minimum(error, least)
                    best_sc, best_m = pick(less, new_sc, best_sc), pick(less, new_m, best_m)
        assert least is not None
        return State(c.total(least), d, dmin, best_sc, best_m)

    def codes(self, state: State) -> F32Array:
        """[length, n_sub * n], in scratch ``a``."""
        c = self.c
        unit = ONE / or_huge(state.sc * c.spread(state.d))
        np.add(c.x, state.m * c.spread(state.dmin), out=c.a)
        return c.rounded(np.multiply(c.a, unit, out=c.a), ZERO, self.levels)

    def refit(self, state: State) -> tuple[F32Array, F32Array]:
        """d and dmin [n], not rounded, by least squares from integers and codes."""
        c, sc, m = self.c, state.sc, state.m
        code = self.codes(state)
        qx = c.dot(code, c.xw)
        weighted = c.weighted(code)
        qw, qq = weighted.sum(axis=0), c.dot(code, weighted)
        # Normal equations of x = d * (sc q) - dmin * m.
        sq_sq, sq_m, m_m, sq_x, m_x = (
            c.total(a).astype(np.float64)
            for a in (sc * sc * qq, sc * m * qw, m * m * self.w, sc * qx, m * self.sum_x)
        )
        det = sq_sq * m_m - sq_m * sq_m
        two = det > 1e-9 * sq_sq * m_m  # else one of the two is not there, or they are parallel
        d = np.where(two, sq_x * m_m - sq_m * m_x, sq_x) / np.where(two, det, sq_sq)
        dmin = np.where(two, sq_m * sq_x - sq_sq * m_x, -m_x) / np.where(two, det, m_m)
        d, dmin = np.where(sq_sq > 0, d, state.d), np.where(m_m > 0, dmin, state.dmin)
        return d.astype(np.float32), dmin.astype(np.float32)

    def better(self, best: State | None, new: State) -> State:
        """Of each super-block the one of less error."""
        if best is None:
            return new
        less = new.error < best.error
        every = self.c.spread(less)
        return State(
            np.minimum(new.error, best.error),
            pick(less, new.d, best.d),
            pick(less, new.dmin, best.dmin),
            pick(every, new.sc, best.sc),
            pick(every, new.m, best.m),
        )

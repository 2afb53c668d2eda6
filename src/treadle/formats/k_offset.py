"""Scale search for super-blocks with minimums: ``w = d * sc * q - dmin * m`` (Q2_K, Q4_K, Q5_K).

``sc`` and ``m`` are a sub-block's non-negative integers, ``q`` its codes. See k_search.py for the
method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.formats.format import F32Array
from treadle.formats.k_search import (
    F16_MAX,
    ZERO,
    KSearch,
    KSearchState,
    SuperBlockStrip,
    near_f16,
    or_huge,
    pick,
    wide_f16,
)
from treadle.formats.rounding import inverse

U8Array = npt.NDArray[np.uint8]

ONE = np.float32(1)
MORE = np.float32(1 + 3e-6)  # required gain, so that ties keep the first: an exact fit
BESIDE = tuple((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j)
EXACT = ((0.0, 0.0), (0.0, -1.0))  # fit two values, and three in a row, without a minimum


class Offset(NamedTuple):
    """Quantised super-blocks with minimums, not yet packed: ``w = d * sc * q - dmin * m``."""

    d: F32Array  # [n]
    dmin: F32Array  # [n]
    sc: U8Array  # [n, n_sub]
    m: U8Array  # [n, n_sub]
    q: U8Array  # [n, block]


@dataclass(frozen=True)
class OffsetSearch:
    """Search of one format: codes from 0 to ``levels``, ``sc`` and ``m`` from 0 to ``top``.

    ``grid`` has the pairs (p, q) that the fit of a sub-block tries: the smallest weight lies p
    steps below code 0 and the largest q steps above the last code, so both are clipped (or inside,
    if negative). ``starts`` has pairs (i, j): the largest ``sc`` is about ``top - i``, the largest
    ``m`` about ``top - j``.
    """

    n_sub: int  # sub-blocks of a super-block
    levels: int  # the largest code
    top: int  # the largest integer
    grid: tuple[tuple[float, float], ...]
    starts: tuple[tuple[float, float], ...]

    def run(self, x: F32Array, weights: F32Array | None) -> Offset:
        """Quantise float32 [n, block]; ``weights`` are importances of the same shape, or None."""
        found: Offset = OffsetStrip.run(self, x, weights, F16_MAX * self.top)
        return found


def product(points: npt.NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """Return a ``grid`` for OffsetSearch: the pairs EXACT, then all pairs of numbers of
    ``points``.
    """
    return EXACT + tuple((float(p), float(q)) for p in points for q in points)


class OffsetStrip(KSearch):
    """The search of ``how`` over ``columns``, one strip of super-blocks with minimums."""

    final_moves = BESIDE
    final_steps = (0,)

    def __init__(self, how: OffsetSearch, columns: SuperBlockStrip) -> None:
        super().__init__(how, columns)
        self.levels, self.top = np.float32(how.levels), np.float32(how.top)
        self.sign = self.flip_signs()
        self.w = columns.weight()
        self.sum_x = columns.xw.sum(axis=0)

    def flip_signs(self) -> F32Array:
        """Negate mostly positive super-blocks in place; return signs [n], -1 where negated.

        Only minimums below 0 can be represented. So weights that are mostly positive are negated,
        and both f16 scales become negative.
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

    def starts(self) -> Iterator[tuple[tuple[F32Array, ...], tuple[F32Array, ...]]]:
        """Yield pairs (d, dmin) [n] and (sc, m) [n_sub * n] to start from, one for each pair of
        ``how.starts``: several scales near those that fit the largest sub-blocks.
        """
        c = self.c
        scale, low = self.fit()
        scale_max = c.largest(scale)
        low_max = c.largest(low)
        for i, j in self.how.starts:
            d = wide_f16(scale_max, self.how.top - i)
            dmin = wide_f16(low_max, self.how.top - j)
            sc = np.minimum(np.rint(scale * c.spread(inverse(d))), self.top)
            m = np.minimum(np.rint(low * c.spread(inverse(dmin))), self.top)
            yield (d, dmin), (sc, m)

    def to_blocks(self, best: KSearchState) -> Offset:
        """Return the scales, integers and codes of the best state, with signs restored; they are
        packed later.
        """
        c = self.c
        q = c.rows(self.codes(best).astype(np.uint8))
        sc, m = (a.reshape(-1, c.n).T.astype(np.uint8) for a in best.integers)
        d, dmin = (scale * self.sign for scale in best.scales)
        return Offset(d, dmin, sc, m, q)

    def polish(self, best: KSearchState) -> KSearchState:
        """Try other f16 scales with about the same products ``d * sc`` and ``dmin * m``, to reduce
        the rounding error of f16; return the best state.
        """
        c = self.c
        top = self.how.top
        fitted = self.refit(best)
        integers = best.integers
        largest = [c.largest(a) for a in integers]
        for _ in range(2):
            for at in (0, 1):  # the scale, then the minimum
                for i in range(top // 2, top + 1):
                    scales = list(best.scales)
                    tried = list(best.integers)
                    scales[at] = near_f16(fitted[at] * largest[at] / np.float32(i))
                    tried[at] = np.rint(
                        integers[at] * c.spread(np.float32(i) * inverse(largest[at]))
                    )
                    best = self.better(best, self.try_steps(tuple(scales), tuple(tried), (0,)))
        return best

    def fit(self) -> tuple[F32Array, F32Array]:
        """Return each sub-block's real scale and negated minimum (>= 0) of least error, both [n_sub
        * n], without regard to the other sub-blocks.
        """
        c = self.c
        low = np.minimum(c.x.min(axis=0), ZERO)
        free = (low < 0).astype(np.float32)  # else the minimum is 0, and only the slope is fitted
        w = np.where(low < 0, self.w, ONE)
        unit = inverse(c.x.max(axis=0) - low)
        y = c.x - low  # at least 0: sums stay precise however far the weights are from 0
        yw = c.weighted(y).copy()
        sum_y = yw.sum(axis=0) * free
        gain = np.zeros_like(low)
        slope = np.zeros_like(low)
        shift = np.zeros_like(low)
        for p, q in self.how.grid:
            np.multiply(y, unit * np.float32(self.how.levels + p + q), out=c.a)
            if p:
                c.a -= np.float32(p)
            code = c.rounded(c.a, ZERO, self.levels)
            qy = c.dot(code, yw)
            weighted = c.weighted(code)
            qw = weighted.sum(axis=0) * free
            qq = c.dot(code, weighted)
            # Normal equations of y = slope * code + shift; gain is the error that slope removes.
            spread_q = qq * w - qw * qw
            spread_qy = qy * w - qw * sum_y
            s = spread_qy * inverse(spread_q)
            g = s * spread_qy
            more = g > gain * MORE
            gain = pick(more, g, gain)
            slope = pick(more, s, slope)
            shift = pick(more, sum_y - s * qw, shift)
        return slope, np.maximum(-(low + shift / w), ZERO)

    def try_steps(
        self, scales: tuple[F32Array, ...], integers: tuple[F32Array, ...], steps: tuple[int, ...]
    ) -> KSearchState:
        """Return the state of least error with these f16 scales (d, dmin), and with ``sc`` and
        ``m`` moved by any of ``steps`` in each sub-block.
        """
        c = self.c
        (sc, m) = integers
        d_all, dmin_all = map(c.spread, scales)
        least: F32Array | None = None
        for i in steps:
            new_sc = np.minimum(np.maximum(sc + np.float32(i), ZERO), self.top)
            scale = or_huge(new_sc * d_all)
            unit = ONE / scale
            square = scale * scale
            in_steps = np.multiply(c.x, unit, out=c.b)
            for j in steps:
                new_m = np.minimum(np.maximum(m + np.float32(j), ZERO), self.top)
                low = new_m * dmin_all
                u = np.add(in_steps, low * unit, out=c.a)
                error = c.error(u, ZERO, self.levels) * square
                if least is None:
                    least = error
                    best_sc = new_sc
                    best_m = new_m
                else:
                    less = error < least
                    least = np.minimum(error, least)
                    best_sc = pick(less, new_sc, best_sc)
                    best_m = pick(less, new_m, best_m)
        assert least is not None
        return KSearchState(c.total(least), scales, (best_sc, best_m))

    def codes(self, state: KSearchState) -> F32Array:
        """Return the codes [length, n_sub * n] for the scales and integers of ``state``, in the
        strip's scratch array ``a``.
        """
        c = self.c
        sc, m = state.integers
        d, dmin = state.scales
        unit = ONE / or_huge(sc * c.spread(d))
        np.add(c.x, m * c.spread(dmin), out=c.a)
        return c.rounded(np.multiply(c.a, unit, out=c.a), ZERO, self.levels)

    def refit(self, state: KSearchState) -> tuple[F32Array, ...]:
        """Return the unrounded d and dmin [n] of least error for the state's integers and codes."""
        c = self.c
        (sc, m) = state.integers
        code = self.codes(state)
        qx = c.dot(code, c.xw)
        weighted = c.weighted(code)
        qw = weighted.sum(axis=0)
        qq = c.dot(code, weighted)
        # Normal equations of x = d * (sc q) - dmin * m.
        sq_sq, sq_m, m_m, sq_x, m_x = (
            c.total(a).astype(np.float64)
            for a in (sc * sc * qq, sc * m * qw, m * m * self.w, sc * qx, m * self.sum_x)
        )
        det = sq_sq * m_m - sq_m * sq_m
        two = det > 1e-9 * sq_sq * m_m  # else one term is zero, or the two are parallel
        d = np.where(two, sq_x * m_m - sq_m * m_x, sq_x) / np.where(two, det, sq_sq)
        dmin = np.where(two, sq_m * sq_x - sq_sq * m_x, -m_x) / np.where(two, det, m_m)
        d = np.where(sq_sq > 0, d, state.scales[0])
        dmin = np.where(m_m > 0, dmin, state.scales[1])
        return d.astype(np.float32), dmin.astype(np.float32)

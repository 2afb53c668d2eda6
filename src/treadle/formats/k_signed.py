"""The search for super-blocks without minima: ``w = d * sc * q`` (Q3_K, Q6_K).

``sc`` is a sub-block's integer, and like the codes it has a sign. Codes reach one further below 0
than above, so the sign matters. See k_search.py for the method.
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

I8Array = npt.NDArray[np.int8]

STEPS = (0, -1, 1)  # how far a descent looks from each integer
ROUNDS = 2
MORE = np.float32(1 + 1e-6)  # so that of equals the first stays: codes that fit to the last bit


class Signed(NamedTuple):
    """Super-blocks as numbers, not yet packed."""

    d: F32Array  # [n]
    sc: I8Array  # [n, n_sub]
    q: I8Array  # [n, block]


class State(NamedTuple):
    """What a strip's super-blocks are quantised with, and the error that makes."""

    error: F32Array  # [n]
    d: F32Array  # [n]
    sc: F32Array  # [n_sub * n], whole numbers


@dataclass(frozen=True)
class SignedSearch:
    """One format's: codes from ``-half`` to ``half - 1``, integers from ``-top`` to ``top - 1``.

    ``grid`` holds what the fit tries: the code, not rounded, of the largest magnitude. ``starts``
    the same for the largest scale and its integer.
    """

    n_sub: int
    half: int
    top: int
    grid: tuple[float, ...]
    starts: tuple[float, ...]

    def run(self, x: F32Array, weights: F32Array | None) -> Signed:
        """The super-blocks of float32 [..., block]; ``weights`` as x, or None.

        A NaN makes ``d`` NaN, and what f16 scales cannot reach makes it infinite.
        """
        x, weights = flat(x, weights)
        n = len(x)
        out = Signed(
            np.empty(n, np.float32), np.empty((n, self.n_sub), np.int8), np.empty(x.shape, np.int8)
        )
        reach = F16_MAX * self.top * self.half
        with np.errstate(all="ignore"):
            for part, columns, spoilt in strips(x, weights, self.n_sub, reach):
                found = Strip(self, columns).search()
                out.d[part] = found.d + spoilt
                out.sc[part], out.q[part] = found.sc, found.q
        return out


class Strip:
    """The search over one strip."""

    def __init__(self, how: SignedSearch, columns: Columns) -> None:
        self.how, self.c = how, columns
        self.lo, self.hi = np.float32(-how.half), np.float32(how.half - 1)
        self.sum_xx = columns.dot(columns.x, columns.xw)

    def search(self) -> Signed:
        """The strip's super-blocks, found."""
        c, top = self.c, self.how.top
        scale = self.fit()
        most, least = c.largest(scale), -c.largest(-scale)
        # The largest scale becomes the most negative integer, which there is one more of.
        sign = np.where(most > -least, np.float32(-1), np.float32(1))
        reach = np.maximum(most, -least)
        best: State | None = None
        for start in (float(top), *self.how.starts):
            d = wide_f16(reach, start) * sign
            best = self.better(best, self.look(d, np.rint(scale * c.spread(over(d))), (0,)))
        for _ in range(ROUNDS):
            assert best is not None
            best = self.better(best, self.look(near_f16(self.refit(best)), best.sc, STEPS))
        assert best is not None
        if c.is_close(best.error, self.sum_xx):
            best = self.polish(best)
        for i in (-1, 1):
            best = self.better(best, self.look(beside_f16(best.d, i), best.sc, STEPS))
        q = c.rows(self.codes(best).astype(np.int8))
        sc = best.sc.clip(-top, top - 1).reshape(-1, c.n).T.astype(np.int8)
        return Signed(best.d + ZERO, sc, q)

    def polish(self, best: State) -> State:
        """Other integers for the same scales: where codes fit, rounding to f16 is what is left."""
        c, top = self.c, self.how.top
        d, sc = self.refit(best), best.sc
        largest = c.largest(np.abs(sc))
        for i in range(top // 2, top + 1):
            new_sc = np.rint(sc * c.spread(np.float32(i) * over(largest)))
            best = self.better(best, self.look(near_f16(d * largest / np.float32(i)), new_sc, (0,)))
        return best

    def fit(self) -> F32Array:
        """[n_sub * n]: each sub-block's own best scale."""
        c = self.c
        most, least = c.x.max(axis=0), c.x.min(axis=0)
        unit = -over(pick(most > -least, most, least))  # the largest magnitude becomes -1
        gain, best = np.zeros_like(unit), np.zeros_like(unit)
        # First what makes it -half: weights of one magnitude and sign are then exact.
        for code_of_largest in (float(self.how.half), *self.how.grid):
            rounded = np.multiply(c.x, unit * np.float32(code_of_largest), out=c.e)
            np.rint(rounded, out=rounded)
            for sign in (1, -1):
                lo, hi = (self.lo, self.hi) if sign > 0 else (-self.hi, -self.lo)
                code = np.clip(rounded, lo, hi, out=c.a)
                qx, qq = c.dot(code, c.xw), c.dot(code, c.weighted(code))
                s = qx * over(qq)
                g = s * qx
                more = g > gain * MORE
                gain, best = pick(more, g, gain), pick(more, s * np.float32(sign), best)
        return best

    def look(self, d: F32Array, sc: F32Array, steps: tuple[int, ...]) -> State:
        """The best of all integers ``steps`` away from these, for a given f16 scale."""
        c, top = self.c, np.float32(self.how.top)
        d_all = c.spread(d)
        least: F32Array | None = None
        for i in steps:
            new = np.minimum(np.maximum(sc + np.float32(i), -top), top - 1)
            scale = or_huge(new * d_all)
            u = np.multiply(c.x, np.float32(1) / scale, out=c.a)
            error = c.error(u, self.lo, self.hi) * (scale * scale)
            if least is None:
                least, best_sc = error, new
            else:
                best_sc = pick(error < least, new, best_sc)
                least = np.minimum(error, least)
        assert least is not None
        return State(c.total(least), d, best_sc)

    def codes(self, state: State) -> F32Array:
        """[length, n_sub * n], in scratch ``a``."""
        c = self.c
        scale = or_huge(state.sc * c.spread(state.d))
        np.multiply(c.x, np.float32(1) / scale, out=c.a)
        return c.rounded(c.a, self.lo, self.hi)

    def refit(self, state: State) -> F32Array:
        """d [n], not rounded, by least squares from integers and codes."""
        c, sc = self.c, state.sc
        code = self.codes(state)
        sq_x = c.total(sc * c.dot(code, c.xw))
        sq_sq = c.total(sc * sc * c.dot(code, c.weighted(code)))
        return np.where(sq_sq > 0, sq_x / sq_sq, state.d)

    def better(self, best: State | None, new: State) -> State:
        """Of each super-block the one of less error."""
        if best is None:
            return new
        less = new.error < best.error
        return State(
            np.minimum(new.error, best.error),
            pick(less, new.d, best.d),
            pick(self.c.spread(less), new.sc, best.sc),
        )

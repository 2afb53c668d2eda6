"""Scale search for super-blocks without minimums: ``w = d * sc * q`` (Q3_K, Q6_K).

``sc`` is a sub-block's signed integer, ``q`` its codes. Codes reach one further below 0 than above,
so the sign of ``sc`` matters. See k_search.py for the method.
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
    STEPS,
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

I8Array = npt.NDArray[np.int8]

MORE = np.float32(1 + 1e-6)  # required gain, so that ties keep the first: an exact fit


class Signed(NamedTuple):
    """Quantised super-blocks without minimums, not yet packed: ``w = d * sc * q``."""

    d: F32Array  # [n]
    sc: I8Array  # [n, n_sub]
    q: I8Array  # [n, block]


@dataclass(frozen=True)
class SignedSearch:
    """Search of one format: codes ``-half`` to ``half - 1``, integers ``sc`` ``-top`` to ``top -
    1``.

    ``grid``: unrounded codes that the fit of a sub-block tries for its largest magnitude;
    ``starts``: unrounded integers that are tried for the largest scale, after ``top``.
    """

    n_sub: int  # sub-blocks of a super-block
    half: int
    top: int
    grid: tuple[float, ...]
    starts: tuple[float, ...]

    def run(self, x: F32Array, weights: F32Array | None) -> Signed:
        """Quantise float32 [n, block]; ``weights`` are importances of the same shape, or None."""
        found: Signed = SignedStrip.run(self, x, weights, F16_MAX * self.top * self.half)
        return found


class SignedStrip(KSearch):
    """The search of ``how`` over ``columns``, one strip of super-blocks without minimums."""

    final_moves = ((-1,), (1,))
    final_steps = STEPS

    def __init__(self, how: SignedSearch, columns: SuperBlockStrip) -> None:
        super().__init__(how, columns)
        self.lo, self.hi = np.float32(-how.half), np.float32(how.half - 1)

    def starts(self) -> Iterator[tuple[tuple[F32Array, ...], tuple[F32Array, ...]]]:
        """Yield d [n] and ``sc`` [n_sub * n] to start from: several scales near the one that fits
        the largest sub-block.
        """
        c = self.c
        scale = self.fit()
        most = c.largest(scale)
        least = -c.largest(-scale)
        # The largest scale becomes negative, because integers reach one further below 0.
        sign = np.where(most > -least, np.float32(-1), np.float32(1))
        reach = np.maximum(most, -least)
        for start in (float(self.how.top), *self.how.starts):
            d = wide_f16(reach, start) * sign
            yield (d,), (np.rint(scale * c.spread(inverse(d))),)

    def to_blocks(self, best: KSearchState) -> Signed:
        """Return the scales, integers and codes of the best state; they are packed later."""
        c = self.c
        top = self.how.top
        q = c.rows(self.codes(best).astype(np.int8))
        sc = best.integers[0].clip(-top, top - 1).reshape(-1, c.n).T.astype(np.int8)
        return Signed(best.scales[0] + ZERO, sc, q)

    def polish(self, best: KSearchState) -> KSearchState:
        """Try other f16 scales with about the same products ``d * sc``, to reduce the rounding
        error of f16; return the best state.
        """
        c = self.c
        top = self.how.top
        (d,), (sc,) = self.refit(best), best.integers
        largest = c.largest(np.abs(sc))
        for i in range(top // 2, top + 1):
            new_sc = np.rint(sc * c.spread(np.float32(i) * inverse(largest)))
            new_d = near_f16(d * largest / np.float32(i))
            best = self.better(best, self.try_steps((new_d,), (new_sc,), (0,)))
        return best

    def fit(self) -> F32Array:
        """Return each sub-block's real scale of least error, [n_sub * n], without regard to the
        other sub-blocks.
        """
        c = self.c
        most = c.x.max(axis=0)
        least = c.x.min(axis=0)
        unit = -inverse(pick(most > -least, most, least))  # the largest magnitude becomes -1
        gain = np.zeros_like(unit)
        best = np.zeros_like(unit)
        # The first try maps it to -half: weights of one magnitude and sign are then exact.
        for code_of_largest in (float(self.how.half), *self.how.grid):
            rounded = np.multiply(c.x, unit * np.float32(code_of_largest), out=c.e)
            np.rint(rounded, out=rounded)
            for sign in (1, -1):
                lo, hi = (self.lo, self.hi) if sign > 0 else (-self.hi, -self.lo)
                code = np.clip(rounded, lo, hi, out=c.a)
                qx = c.dot(code, c.xw)
                qq = c.dot(code, c.weighted(code))
                s = qx * inverse(qq)
                g = s * qx
                more = g > gain * MORE
                gain = pick(more, g, gain)
                best = pick(more, s * np.float32(sign), best)
        return best

    def try_steps(
        self, scales: tuple[F32Array, ...], integers: tuple[F32Array, ...], steps: tuple[int, ...]
    ) -> KSearchState:
        """Return the state of least error with this f16 scale (d), and with ``sc`` moved by any of
        ``steps`` in each sub-block.
        """
        c = self.c
        top = np.float32(self.how.top)
        (sc,) = integers
        d_all = c.spread(scales[0])
        least: F32Array | None = None
        for i in steps:
            new = np.minimum(np.maximum(sc + np.float32(i), -top), top - 1)
            scale = or_huge(new * d_all)
            u = np.multiply(c.x, np.float32(1) / scale, out=c.a)
            error = c.error(u, self.lo, self.hi) * (scale * scale)
            if least is None:
                least = error
                best_sc = new
            else:
                best_sc = pick(error < least, new, best_sc)
                least = np.minimum(error, least)
        assert least is not None
        return KSearchState(c.total(least), scales, (best_sc,))

    def codes(self, state: KSearchState) -> F32Array:
        """Return the codes [length, n_sub * n] for the scale and integers of ``state``, in the
        strip's scratch array ``a``.
        """
        c = self.c
        scale = or_huge(state.integers[0] * c.spread(state.scales[0]))
        np.multiply(c.x, np.float32(1) / scale, out=c.a)
        return c.rounded(c.a, self.lo, self.hi)

    def refit(self, state: KSearchState) -> tuple[F32Array, ...]:
        """Return the unrounded d [n] of least error for the state's integers and codes."""
        c = self.c
        (sc,) = state.integers
        code = self.codes(state)
        sq_x = c.total(sc * c.dot(code, c.xw))
        sq_sq = c.total(sc * sc * c.dot(code, c.weighted(code)))
        return (np.where(sq_sq > 0, sq_x / sq_sq, state.scales[0]),)

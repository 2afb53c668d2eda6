"""What the searches for the K formats share: columns of weights, and sums over them.

A super-block is 256 weights, in sub-blocks of 16 or 32. Its scales are small integers times an f16,
so the best one for a sub-block depends on all others, and none of this has a closed form: but the
best f16 for given integers and codes has, and so has the best code for a given scale. The
searches in k_signed.py and k_offset.py try many scales and descend from the best of them:

1. *Fit* each sub-block alone, with a scale of any real value: over a grid of scales, round the
   weights to codes, then find by least squares the scale that these codes deserve.
2. *Start* from several f16 scales near the one that the largest sub-block asks for.
3. *Descend*: least squares for the f16 scales, given codes and integers; then for each sub-block
   the best integers near those it has, measured by the error they really make.

Every error is that of the weights as they will be read, and the best ever seen is kept. numpy
does a strip of super-blocks at a time with each sub-block a column: so sums over a sub-block run
down the first axis, at the speed of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array
from treadle.formats.rounding import relative

SEARCHED_WEIGHTS = 1 << 16  # at once: half a dozen float32 temporaries stay in L2
F16_MAX = 65504.0
ZERO = np.float32(0)
HUGE = np.float32(2.0**30)  # times half, more than f16 scales reach; its square is a float32
LEAST = 1e-4  # the importance of what has none, to the mean
CLOSE = np.float32(1e-5)  # to the sum of squares
STEPS = (0, -1, 1)  # how far a descent looks from each integer
ROUNDS = 2


class SuperBlockStrip:
    """A strip of ``n`` super-blocks: weight i of all sub-blocks is row i of ``x``.

    x, w: float32 [length, n_sub * n]; sub-block j of super-block b is column ``j * n + b``.
    ``w`` is None where all weights count the same.
    """

    def __init__(self, x: F32Array, weights: F32Array | None, n_sub: int) -> None:
        self.n, self.n_sub = len(x), n_sub
        self.length = x.shape[1] // n_sub
        self.x = self.columns(x)
        self.w = None if weights is None else self.columns(weights)
        self.xw = self.x if self.w is None else self.x * self.w
        self.a, self.b, self.e = (np.empty_like(self.x) for _ in range(3))  # scratch

    def columns(self, x: F32Array) -> F32Array:
        """[n, block] -> [length, n_sub * n]; always a copy, for a search may negate it."""
        turned = x.reshape(self.n, self.n_sub, self.length).transpose(2, 1, 0)
        return np.array(turned, order="C").reshape(self.length, -1)

    def rows(self, q: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Undoes ``columns``."""
        turned = q.reshape(self.length, self.n_sub, self.n).transpose(2, 1, 0)
        return np.ascontiguousarray(turned).reshape(self.n, -1)

    def rounded(self, u: F32Array, lo: np.float32, hi: np.float32) -> F32Array:
        """Codes for weights in units of their scale; the result lives in scratch ``a``."""
        return np.clip(np.rint(u, out=self.a), lo, hi, out=self.a)

    def error(self, u: F32Array, lo: np.float32, hi: np.float32) -> F32Array:
        """What rounding ``u`` to codes costs each column, in squared steps; ``u`` is used up."""
        code = np.clip(np.rint(u, out=self.e), lo, hi, out=self.e)
        np.subtract(u, code, out=u)
        if self.w is None:
            return self.dot(u, u)
        return self.dot(np.multiply(u, u, out=u), self.w)

    def dot(self, q: F32Array, y: F32Array) -> F32Array:
        """Sums down the columns; the importance is to be in ``y``."""
        total: F32Array = np.einsum("ij,ij->j", q, y)
        return total

    def weighted(self, q: F32Array) -> F32Array:
        """``q`` times the importance; in scratch ``b``, unless that is 1."""
        return q if self.w is None else np.multiply(q, self.w, out=self.b)

    def weight(self) -> F32Array | np.float32:
        """Each column's importance."""
        return np.float32(self.length) if self.w is None else self.w.sum(axis=0)

    def total(self, a: F32Array) -> F32Array:
        """Sums over the sub-blocks: [n_sub * n] -> [n]."""
        whole: F32Array = a.reshape(self.n_sub, self.n).sum(axis=0)
        return whole

    def is_close(self, error: F32Array, sum_xx: F32Array) -> npt.NDArray[np.bool_]:
        """Which super-blocks are met so well that the f16 scales are what limits them."""
        close: npt.NDArray[np.bool_] = (error > 0) & (error < self.total(sum_xx) * CLOSE)
        return close

    def largest(self, a: F32Array) -> F32Array:
        """Maxima over the sub-blocks: [n_sub * n] -> [n]."""
        whole: F32Array = a.reshape(self.n_sub, self.n).max(axis=0)
        return whole

    def spread(self, a: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """To every sub-block its super-block's: [n] -> [n_sub * n]."""
        return np.tile(a, self.n_sub)


def or_huge(scale: F32Array) -> F32Array:
    """The scale, or where it is 0 one so large that all codes are: their error is then right."""
    return np.where(scale == 0, HUGE, scale)


def near_f16(d: F32Array) -> F32Array:
    """The nearest that an f16 can hold, infinities excepted."""
    return d.clip(-F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)


def wide_f16(largest: F32Array, top: float) -> F32Array:
    """A magnitude that an f16 can hold, such that ``top`` of it about reach ``largest``.

    Where f16 is coarse, for the tiniest weights, the next one up: a scale too large can still be
    taken fewer times, a scale too small (or zero) cannot reach.
    """
    d = (largest / np.float32(top)).clip(0, F16_MAX).astype(np.float16)
    short = d.astype(np.float32) * np.float32(top) < largest * np.float32(0.998)
    step = short & (d < F16_MAX)
    return (d.view(np.uint16) + step.astype(np.uint16)).view(np.float16).astype(np.float32)


def beside_f16(d: F32Array, i: int) -> F32Array:
    """The next f16 away from 0 for ``i = 1``, towards it for ``i = -1``."""
    half = d.astype(np.float16)
    stays = (half == 0) & (i < 0) | (np.abs(half) == F16_MAX) & (i > 0)
    bits = half.view(np.int16) + np.where(stays, np.int16(0), np.int16(i))
    return bits.view(np.float16).astype(np.float32)


def pick(better: npt.NDArray[np.bool_], new: Any, old: Any) -> Any:
    """``new`` where it is better."""
    return np.where(better, new, old)


def strips(
    x: F32Array, weights: F32Array | None, n_sub: int, reach: float
) -> Iterator[tuple[SuperBlockStrip, F32Array]]:
    """Super-blocks float32 [n, block] for a search: columns, and what spoils them.

    The last, [n], is to be added to the scale: 0, or NaN for a super-block with a NaN, or infinity
    for one with that or a weight beyond ``reach``. For the search these super-blocks are zeros.
    """
    step = SEARCHED_WEIGHTS // x.shape[-1]
    for i in range(0, len(x), step):
        part = x[i : i + step]
        top = np.abs(part).max(axis=-1)
        spoilt = np.where(np.isnan(top), top, np.where(top > reach, np.float32(np.inf), ZERO))
        if spoilt.any():
            part = np.where(spoilt[:, None] == 0, part, ZERO)
        w = None if weights is None else relative(weights[i : i + step], LEAST)
        yield SuperBlockStrip(part, w, n_sub), spoilt


class KSearchState(NamedTuple):
    """What a strip's super-blocks are quantised with, and the error that makes."""

    error: F32Array  # [n]
    scales: tuple[F32Array, ...]  # [n] each
    integers: tuple[F32Array, ...]  # [n_sub * n] each, whole numbers


class KSearch:
    """The descent over one strip; a kind of search says where it starts, and what it looks at."""

    beside: tuple[tuple[int, ...], ...]  # moves from f16 scales to others, at last
    beside_steps: tuple[int, ...]  # and how far from the integers it looks then

    def __init__(self, how: Any, columns: SuperBlockStrip) -> None:
        self.how, self.c = how, columns

    @classmethod
    def run(cls, how: Any, x: F32Array, weights: F32Array | None, reach: float) -> Any:
        """The super-blocks of float32 [n, block]; ``weights`` as x, or None.

        A NaN makes ``d`` NaN, and what f16 scales cannot reach, weights beyond ``reach``, infinite.
        """
        parts = []
        with np.errstate(all="ignore"):
            for columns, spoilt in strips(x, weights, how.n_sub, reach):
                found = cls(how, columns).search()
                parts.append(found._replace(d=found.d + spoilt))
        return type(found)(*map(np.concatenate, zip(*parts, strict=True)))

    def search(self) -> Any:
        """The strip's super-blocks, found."""
        best: KSearchState | None = None
        for scales, integers in self.starts():
            best = self.better(best, self.look(scales, integers, (0,)))
        assert best is not None
        for _ in range(ROUNDS):
            scales = tuple(map(near_f16, self.refit(best)))
            best = self.better(best, self.look(scales, best.integers, STEPS))
        close = self.c.is_close(best.error, self.c.dot(self.c.x, self.c.xw))
        if close.any():  # and no other: what stands beside a super-block must not change it
            best = self.better(best, self.polish(best), close)
        for moves in self.beside:
            scales = tuple(map(beside_f16, best.scales, moves))
            best = self.better(best, self.look(scales, best.integers, self.beside_steps))
        return self.made(best)

    def better(
        self, best: KSearchState | None, new: KSearchState, may: npt.NDArray[np.bool_] | bool = True
    ) -> KSearchState:
        """Of each super-block the one of less error, where it may be another."""
        if best is None:
            return new
        less = (new.error < best.error) & may
        every = self.c.spread(less)
        return KSearchState(
            pick(less, new.error, best.error),
            tuple(pick(less, *both) for both in zip(new.scales, best.scales, strict=True)),
            tuple(pick(every, *both) for both in zip(new.integers, best.integers, strict=True)),
        )

    def starts(self) -> Iterable[tuple[tuple[F32Array, ...], tuple[F32Array, ...]]]:
        """Scales and integers to begin with."""
        raise NotImplementedError

    def look(
        self, scales: tuple[F32Array, ...], integers: tuple[F32Array, ...], steps: tuple[int, ...]
    ) -> KSearchState:
        """The best of all integers ``steps`` away from these, for given f16 scales."""
        raise NotImplementedError

    def refit(self, state: KSearchState) -> tuple[F32Array, ...]:
        """The scales, not rounded, by least squares from integers and codes."""
        raise NotImplementedError

    def polish(self, best: KSearchState) -> KSearchState:
        """Other integers for the same scales: where codes fit, rounding to f16 is what is left."""
        raise NotImplementedError

    def made(self, best: KSearchState) -> Any:
        """The super-blocks as numbers, not yet packed."""
        raise NotImplementedError

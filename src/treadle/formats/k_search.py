"""Base of the scale searches of the K formats: strips of super-blocks, and coordinate descent.

A super-block is 256 weights, in sub-blocks of 16 or 32. Its scales are small integers times an f16,
so the best scale of a sub-block depends on all others, and there is no closed form for it. There is
a closed form for the best f16 given integers and codes, and for the best code given a scale. The
searches in k_signed.py and k_offset.py try many scales and descend from the best of them:

1. *Fit* each sub-block alone, with a real scale: for each scale of a grid, round the weights to
   codes, then find by least squares the best scale for these codes.
2. *Start* from several f16 scales near the one that fits the largest sub-block.
3. *Descend*: least squares for the f16 scales, given codes and integers; then for each sub-block
   the best integers near the current ones, by their actual error.

Errors are those of the dequantised weights, and the best state seen is kept. numpy processes a
strip of super-blocks at a time, with each sub-block a column, so that sums over a sub-block run
along the first axis, at the speed of the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.formats.format import F32Array
from treadle.formats.rounding import relative

SEARCHED_WEIGHTS = 1 << 16  # weights at once: half a dozen float32 temporaries stay in L2
F16_MAX = 65504.0
ZERO = np.float32(0)
HUGE = np.float32(2.0**30)  # half of it is beyond f16 scales; its square fits a float32
LEAST = 1e-4  # lowest importance, relative to the mean
CLOSE = np.float32(1e-5)  # relative to the sum of squares
STEPS = (0, -1, 1)  # moves that a descent tries for each integer
ROUNDS = 2


class SuperBlockStrip:
    """Layout of ``n`` super-blocks for a search: row i of ``x`` has weight i of all sub-blocks.

    x, w: float32 [length, n_sub * n], with the ``length`` weights of sub-block j of super-block b
    in column ``j * n + b``. ``w`` has the importances, or is None if all are equal; ``xw`` is ``x *
    w``.
    """

    def __init__(self, x: F32Array, weights: F32Array | None, n_sub: int) -> None:
        self.n = len(x)
        self.n_sub = n_sub
        self.length = x.shape[1] // n_sub
        self.x = self.columns(x)
        self.w = None if weights is None else self.columns(weights)
        self.xw = self.x if self.w is None else self.x * self.w
        self.a, self.b, self.e = (np.empty_like(self.x) for _ in range(3))  # scratch

    def columns(self, x: F32Array) -> F32Array:
        """Convert [n, block] to [length, n_sub * n]; always a copy, since a search may negate
        it.
        """
        turned = x.reshape(self.n, self.n_sub, self.length).transpose(2, 1, 0)
        return np.array(turned, order="C").reshape(self.length, -1)

    def rows(self, q: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert [length, n_sub * n] to [n, block]; the inverse of ``columns``."""
        turned = q.reshape(self.length, self.n_sub, self.n).transpose(2, 1, 0)
        return np.ascontiguousarray(turned).reshape(self.n, -1)

    def rounded(self, u: F32Array, lo: np.float32, hi: np.float32) -> F32Array:
        """Round ``u`` (weights divided by their scale) to codes from ``lo`` to ``hi``; the result
        is the scratch array ``a``.
        """
        return np.clip(np.rint(u, out=self.a), lo, hi, out=self.a)

    def error(self, u: F32Array, lo: np.float32, hi: np.float32) -> F32Array:
        """Return each column's weighted squared error of rounding ``u`` to codes from ``lo`` to
        ``hi``, in units of the scale; overwrites ``u``.
        """
        code = np.clip(np.rint(u, out=self.e), lo, hi, out=self.e)
        np.subtract(u, code, out=u)
        if self.w is None:
            return self.dot(u, u)
        return self.dot(np.multiply(u, u, out=u), self.w)

    def dot(self, q: F32Array, y: F32Array) -> F32Array:
        """Return the sum of ``q * y`` over each column, [n_sub * n]; the caller multiplies one of
        them by the importances.
        """
        total: F32Array = np.einsum("ij,ij->j", q, y)
        return total

    def weighted(self, q: F32Array) -> F32Array:
        """Return ``q`` times the importances, in the scratch array ``b``; ``q`` itself if all
        importances are equal.
        """
        return q if self.w is None else np.multiply(q, self.w, out=self.b)

    def weight(self) -> F32Array | np.float32:
        """Return each column's sum of importances; the number of weights if they are equal."""
        return np.float32(self.length) if self.w is None else self.w.sum(axis=0)

    def total(self, a: F32Array) -> F32Array:
        """Sum over the sub-blocks: [n_sub * n] -> [n]."""
        whole: F32Array = a.reshape(self.n_sub, self.n).sum(axis=0)
        return whole

    def is_close(self, error: F32Array, sum_xx: F32Array) -> npt.NDArray[np.bool_]:
        """Return a mask [n] of super-blocks whose ``error`` [n] is so small that the rounding of
        f16 scales limits it. ``sum_xx``: the weighted squares of each sub-block's weights, [n_sub *
        n].
        """
        close: npt.NDArray[np.bool_] = (error > 0) & (error < self.total(sum_xx) * CLOSE)
        return close

    def largest(self, a: F32Array) -> F32Array:
        """Return maxima over the sub-blocks: [n_sub * n] -> [n]."""
        whole: F32Array = a.reshape(self.n_sub, self.n).max(axis=0)
        return whole

    def spread(self, a: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Repeat a super-block's value for its sub-blocks: [n] -> [n_sub * n]."""
        return np.tile(a, self.n_sub)


def or_huge(scale: F32Array) -> F32Array:
    """Return ``scale``, of each sub-block, with 0 replaced by HUGE, so that all codes of such a
    sub-block become 0.
    """
    return np.where(scale == 0, HUGE, scale)


def near_f16(d: F32Array) -> F32Array:
    """Round ``d`` to the nearest finite f16; return it as f32."""
    return d.clip(-F16_MAX, F16_MAX).astype(np.float16).astype(np.float32)


def wide_f16(largest: F32Array, top: float) -> F32Array:
    """Return an f16 magnitude d, as f32, such that ``top * d`` is about ``largest``.

    Where f16 is coarse, for tiny weights, d is rounded up: if d is too large, integers are smaller,
    but if it is too small (or zero) they cannot reach ``largest``.
    """
    d = (largest / np.float32(top)).clip(0, F16_MAX).astype(np.float16)
    short = d.astype(np.float32) * np.float32(top) < largest * np.float32(0.998)
    step = short & (d < F16_MAX)
    return (d.view(np.uint16) + step.astype(np.uint16)).view(np.float16).astype(np.float32)


def adjacent_f16(d: F32Array, i: int) -> F32Array:
    """Return the f16 neighbour of ``d``, as f32: away from 0 for ``i = 1``, towards 0 for ``i =
    -1``, ``d`` itself for ``i = 0``, and where there is none.
    """
    half = d.astype(np.float16)
    stays = (half == 0) & (i < 0) | (np.abs(half) == F16_MAX) & (i > 0)
    bits = half.view(np.int16) + np.where(stays, np.int16(0), np.int16(i))
    return bits.view(np.float16).astype(np.float32)


def pick(better: npt.NDArray[np.bool_], new: Any, old: Any) -> Any:
    """Return ``new`` where ``better``, else ``old``."""
    return np.where(better, new, old)


def strips(
    x: F32Array, weights: F32Array | None, n_sub: int, reach: float
) -> Iterator[tuple[SuperBlockStrip, F32Array]]:
    """Split super-blocks float32 [n, block] into strips for a search, each with an addend [n] to d.

    The addend is NaN for a super-block with a NaN, infinity for one with an infinity or a weight
    beyond ``reach``, else 0. The search sees zeros in super-blocks whose addend is not 0.
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
    """Scales and integers of a strip's super-blocks, and the resulting error."""

    error: F32Array  # [n]
    scales: tuple[F32Array, ...]  # [n] each
    integers: tuple[F32Array, ...]  # [n_sub * n] each, integral values


class KSearch:
    """Coordinate descent over one strip, ``columns``, with the parameters ``how`` of a format
    (OffsetSearch or SignedSearch). Subclasses define the starts, the error (``try_steps``), the
    refit, the polish and the result (``to_blocks``).
    """

    final_moves: tuple[tuple[int, ...], ...]  # moves to neighbouring f16 scales, tried at the end
    final_steps: tuple[int, ...]  # moves of the integers tried with them

    def __init__(self, how: Any, columns: SuperBlockStrip) -> None:
        self.how = how
        self.c = columns

    @classmethod
    def run(cls, how: Any, x: F32Array, weights: F32Array | None, reach: float) -> Any:
        """Quantise float32 [n, block] with the parameters ``how``; return the named tuple of the
        subclass. ``weights`` are importances of the same shape, or None.

        A NaN makes ``d`` NaN; weights beyond ``reach``, the limit of f16 scales, make it infinite.
        """
        parts = []
        with np.errstate(all="ignore"):
            for columns, spoilt in strips(x, weights, how.n_sub, reach):
                found = cls(how, columns).search()
                parts.append(found._replace(d=found.d + spoilt))
        return type(found)(*map(np.concatenate, zip(*parts, strict=True)))

    def search(self) -> Any:
        """Search the scales, integers and codes of the strip's super-blocks. Return those of least
        error, as ``to_blocks`` returns them.
        """
        best: KSearchState | None = None
        for scales, integers in self.starts():
            best = self.better(best, self.try_steps(scales, integers, (0,)))
        assert best is not None
        for _ in range(ROUNDS):
            scales = tuple(map(near_f16, self.refit(best)))
            best = self.better(best, self.try_steps(scales, best.integers, STEPS))
        close = self.c.is_close(best.error, self.c.dot(self.c.x, self.c.xw))
        if close.any():  # only these: a super-block's result must not depend on its neighbours
            best = self.better(best, self.polish(best), close)
        for moves in self.final_moves:
            scales = tuple(map(adjacent_f16, best.scales, moves))
            best = self.better(best, self.try_steps(scales, best.integers, self.final_steps))
        return self.to_blocks(best)

    def better(
        self, best: KSearchState | None, new: KSearchState, may: npt.NDArray[np.bool_] | bool = True
    ) -> KSearchState:
        """Return for each super-block the state of lower error, ``best`` or ``new``; ``new`` is
        taken only where the mask ``may`` is true, or if ``best`` is None.
        """
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
        """Return pairs (f16 scales, integers) to start from."""
        raise NotImplementedError

    def try_steps(
        self, scales: tuple[F32Array, ...], integers: tuple[F32Array, ...], steps: tuple[int, ...]
    ) -> KSearchState:
        """Return the state of least error with these f16 ``scales``, and ``integers`` moved by any
        of ``steps`` in each sub-block.
        """
        raise NotImplementedError

    def refit(self, state: KSearchState) -> tuple[F32Array, ...]:
        """Return the unrounded scales [n] of least error for the state's integers and codes."""
        raise NotImplementedError

    def polish(self, best: KSearchState) -> KSearchState:
        """Try other f16 scales with about the same products of scale and integer, to reduce the
        rounding error of f16; return the best state.
        """
        raise NotImplementedError

    def to_blocks(self, best: KSearchState) -> Any:
        """Return the scales, integers and codes of the best state as the subclass's named tuple;
        they are packed later.
        """
        raise NotImplementedError

"""Scale search of the IQ formats, and of ik_llama.cpp's with code tables: a scale for the block,
and a step for each sub-block.

A block is ``w = d * step * y``: d is the block's scale, a sub-block's step is one of the *ladder*
(the steps that the format allows; a *rung* is an index into it), and y are values of the codebook.
Given the scale ``t = d * step``, the format's coder finds y for ``x / t``; given y, least squares
finds t. The joint loss has many minima, so the search tries many scales, which a coder's table
makes cheap, and refines the best few.

1. Each sub-block's own scale: for each of a range of scales, encode, fit the scale, keep the best.
2. The block's d, such that steps of it are near the sub-blocks' own scales: for each of a range of
   d, rounded to its type, encode every sub-block at the steps next to its own scale.
3. The best few d: encode carefully, fit d to the codes by least squares, encode again.

Losses are computed with the rounded d, as a reader will dequantise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.formats.format import F32Array
from treadle.formats.nearest import Nearest
from treadle.formats.rounding import relative
from treadle.formats.signs import split_signs

F64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[Any]
# d, steps and codes of a ScaleFit.
Found: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[np.uint8], IntArray]

SEARCHED_WEIGHTS = 1 << 16  # weights at once: a dozen temporaries stay in the L2 cache
N_CAREFUL = 3  # number of best d that are encoded carefully
LEAST = 1e-6  # lowest importance, relative to the mean
TINY = np.float32(1e-30)  # scales below it count as zero; the strip's largest weight is about one


class ScaleFit(NamedTuple):
    """Quantised blocks (or rows, in ik_rows.py), not yet packed."""

    d: npt.NDArray[Any]  # [n], of the coder's ``d_type``
    steps: npt.NDArray[np.uint8]  # [n, sub-blocks]: indices into the ladder
    codes: IntArray  # [n, ...]: the coder's codes
    signs: npt.NDArray[np.uint8]  # [n, block / 8]: empty if codes include signs


@dataclass(frozen=True)
class FormatCoder:
    """A format's codebook and ladder (see above), and the scales to try.

    ``encode(u, weights, careful)``: ``u``, float32 [n, sub], are weights divided by their scale;
    returns codes [n, ...] and their values y, float32 [n, sub]. With ``careful`` it takes the time
    to find the best codes.
    """

    sub: int  # weights that share a step
    ladder: F32Array  # [n_steps], rising evenly
    encode: Callable[[F32Array, F32Array | None, bool], tuple[IntArray, F32Array]]
    scales: F32Array  # tried for a sub-block: fractions of its largest magnitude
    shares: F32Array  # tried for d: fractions of the largest scale of its sub-blocks
    # If set, codes are of magnitudes; eight weights may have any signs, or an even number of minus.
    signs: Literal["", "any", "even"] = ""
    # If ``encode`` is only a table look-up: the code of each cell of width 0.5, centred on 0, and
    # the codes' values. Quantising kernels support only such coders and those with ``points``.
    nearest: npt.NDArray[np.uint8] | None = None
    values: F32Array | None = None
    points: Nearest | None = None  # if ``encode`` is that of a codebook
    d_type: str = "<f2"  # the type of d: f16, or f32 ("<f4")

    def run(self, x: F32Array, weights: F32Array | None) -> ScaleFit:
        """Return for each row of x [n, block] the quantised block w of least ``sum weights * (x -
        w) ** 2``.

        A block with a NaN or an infinity gets a NaN scale. Beyond the range of d's type weights are
        approximated: too large ones are clipped, too small ones become zero.
        """
        weights = None if weights is None else relative(weights, LEAST)
        signs = np.zeros((len(x), 0), np.uint8)
        if self.signs:
            x, signs = split_signs(x, weights, even=self.signs == "even")
        strips = []
        step = max(1, SEARCHED_WEIGHTS // x.shape[1])
        for i in range(0, len(x), step):
            w = None if weights is None else weights[i : i + step]
            with np.errstate(all="ignore"):
                strips.append(fit(x[i : i + step], w, self))
        d, steps, codes = map(np.concatenate, zip(*strips, strict=True))
        return ScaleFit(d, steps, codes, signs)


def fit(x: F32Array, weights: F32Array | None, coder: FormatCoder) -> Found:
    """Quantise a strip, float32 [n, block], with the search ``coder``: return d, steps and codes,
    as in ScaleFit. ``weights``: importances normalised by ``relative``, or None.
    """
    sound: npt.NDArray[np.bool_] = np.asarray(np.isfinite(x).all(axis=-1))
    x = np.where(sound[:, None], x, np.float32(0))
    # Scaled to about one, so that squares do not over- or underflow; a power of two is exact.
    exponent = np.frexp(np.abs(x).max(axis=-1))[1].clip(-120, 120)
    x = x * np.ldexp(np.float32(1), -exponent)[:, None]
    d, steps, codes = ScaleSearch(x, weights, exponent, coder).run()
    d[~sound] = np.nan
    return d, steps, codes


class ScaleTrial(NamedTuple):
    """Encodings at tried scales: item i of each array belongs to sub-block i at its scale, or, in a
    trial by block, to block i at its d.
    """

    loss: F64Array
    d: F64Array  # in units of the strip's x
    steps: IntArray
    codes: IntArray
    y: F32Array


class ScaleSearch:
    """The search over one strip, ``x`` float32 [n, block] of magnitude about one. ``exponent`` [n]:
    the blocks' weights are x times 2 to the power of it.
    """

    def __init__(
        self,
        x: F32Array,
        weights: F32Array | None,
        exponent: npt.NDArray[np.int32],
        coder: FormatCoder,
    ) -> None:
        self.coder = coder
        self.exponent = exponent
        self.shape = len(x), x.shape[1] // coder.sub  # n, sub-blocks
        self.x = x.reshape(-1, coder.sub)
        self.w = None if weights is None else weights.reshape(self.x.shape)

    def run(self) -> Found:
        """Return d, steps and codes of the strip's blocks, as in ScaleFit."""
        own = self.own_scales()
        largest = np.take_along_axis(own, np.abs(own).argmax(axis=1)[:, None], axis=1)[:, 0]
        tried = self.round(largest * self.coder.shares.astype(np.float64)[:, None])
        glances = [self.glance(d, self.nearest_rungs(own, d)) for d in tried]
        losses, steps = (np.array(column) for column in zip(*glances, strict=True))
        each = np.arange(len(largest))
        best: ScaleTrial | None = None
        for i in np.argsort(losses, axis=0)[:N_CAREFUL]:
            trial = self.try_steps(tried[i, each], steps[i, each])
            best = trial if best is None else better(best, trial)
        assert best is not None
        best = better(best, self.try_steps(self.refit(best), best.steps))
        d = np.ldexp(best.d, self.exponent).astype(self.coder.d_type)
        return d, best.steps.astype(np.uint8), best.codes.reshape(len(d), -1)

    def own_scales(self) -> F64Array:
        """Return each sub-block's best unconstrained scale, [n, subs]."""
        reach = np.abs(self.x).max(axis=1)
        most = np.full(len(self.x), -np.inf)
        best = np.zeros(len(self.x))
        for share in self.coder.scales:
            y = self.encode((reach * share)[:, None], careful=False)[1]
            xy = self.dot(self.x, y)
            yy = self.dot(y, y)
            scale = np.where(yy > 0, xy / yy, 0)
            gain = scale * xy
            if self.shape[1] == 1:  # one sub-block: the scale is d itself, so its rounding counts
                scale = self.round(scale)
                gain = -self.loss(scale.astype(np.float32)[:, None], y)
            np.copyto(best, scale, where=gain > most)
            np.maximum(most, gain, out=most)
        return best.reshape(self.shape)

    def nearest_rungs(self, own: F64Array, d: F64Array) -> IntArray:
        """Return the ladder indices [n, subs] of the steps that are nearest to the sub-blocks' own
        scales ``own`` [n, subs], given d [n].
        """
        ladder = self.coder.ladder
        if len(ladder) == 1:
            return np.zeros(self.shape, np.intp)
        at: F64Array = (own * reciprocal(d)[:, None] - ladder[0]) / (ladder[1] - ladder[0])
        rungs: IntArray = np.rint(at.clip(0, len(ladder) - 1)).astype(np.intp)
        return rungs

    def neighbour_rungs(self, rungs: IntArray) -> list[IntArray]:
        """Return three arrays of ladder indices: ``rungs``, and, clipped to the ladder, those one
        below and one above; ``rungs`` alone if the ladder has one step.
        """
        top = len(self.coder.ladder) - 1
        return [(rungs + i).clip(0, top) for i in ((0, -1, 1) if top else (0,))]

    def glance(self, d: F64Array, rungs: IntArray) -> tuple[F64Array, IntArray]:
        """Encode each sub-block quickly at its rung (ladder index), and at the next lower and
        higher ones; return the blocks' losses [n], and the best rungs [n, subs].
        """
        loss = np.full(self.shape, np.inf)
        steps = rungs
        for step in self.neighbour_rungs(rungs):
            t = self.scale(d, step)
            new = self.loss(t, self.encode(t, careful=False)[1]).reshape(self.shape)
            steps = np.where(new < loss, step, steps)
            loss = np.minimum(loss, new)
        return loss.sum(axis=1), steps

    def try_steps(self, d: F64Array, rungs: IntArray) -> ScaleTrial:
        """Encode each sub-block carefully at its rung (ladder index), and at the next lower and
        higher ones; return the best trial, by block.
        """
        best: ScaleTrial | None = None
        for step in self.neighbour_rungs(rungs):
            t = self.scale(d, step)
            codes, y = self.encode(t, careful=True)
            each = np.repeat(d, self.shape[1])
            trial = ScaleTrial(self.loss(t, y), each, step.reshape(-1), codes, y)
            best = trial if best is None else better(best, trial)
        assert best is not None
        loss = best.loss.reshape(self.shape).sum(axis=1)
        return best._replace(loss=loss, d=d, steps=best.steps.reshape(self.shape))

    def refit(self, trial: ScaleTrial) -> F64Array:
        """Return the d [n] of least loss for the trial's codes and steps, rounded to the type
        of d.
        """
        step = self.coder.ladder[trial.steps].astype(np.float64)
        xy = (self.dot(self.x, trial.y).reshape(self.shape) * step).sum(axis=1)
        yy = (self.dot(trial.y, trial.y).reshape(self.shape) * step * step).sum(axis=1)
        return self.round(np.where(yy > 0, xy / yy, trial.d))

    def encode(self, t: F32Array, careful: bool) -> tuple[IntArray, F32Array]:
        """Encode all sub-blocks at scales ``t`` [n * subs, 1]; return codes and values, as the
        coder does.
        """
        return self.coder.encode(self.x * reciprocal(t), self.w, careful)

    def scale(self, d: F64Array, steps: IntArray) -> F32Array:
        """Return the scales ``d * ladder[steps]``, [n * subs, 1]."""
        return (d[:, None] * self.coder.ladder[steps]).astype(np.float32).reshape(-1, 1)

    def loss(self, t: F32Array, y: F32Array) -> F64Array:
        """Return each sub-block's weighted squared error of ``t * y``, [n * subs]."""
        r = self.x - t * y
        return self.dot(r, r)

    def dot(self, a: F32Array, b: F32Array) -> F64Array:
        """Return weighted dot products per sub-block: [n * subs, sub] twice -> [n * subs]."""
        product: F32Array = np.vecdot(a, b if self.w is None else b * self.w)
        return product.astype(np.float64)

    def round(self, d: F64Array) -> F64Array:
        """Round d [..., n], in units of the scaled strip, to a number that d's type has in the
        original units.
        """
        kind = np.dtype(self.coder.d_type)
        most = float(np.finfo(kind).max)
        rounded = np.ldexp(d, self.exponent).clip(-most, most).astype(kind)
        return np.ldexp(rounded.astype(np.float64), -self.exponent)


def better(a: ScaleTrial, b: ScaleTrial) -> ScaleTrial:
    """Return for each item the trial of lower loss; ties take ``a``."""
    wins = b.loss < a.loss

    def pick(old: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[Any]:
        shape = (len(wins), old.size // max(len(wins), 1))
        return np.where(wins[:, None], new.reshape(shape), old.reshape(shape)).reshape(old.shape)

    return ScaleTrial(*map(pick, a, b))


def reciprocal(t: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return 1 / t, and 0 where |t| is below TINY."""
    one = t.dtype.type(1)
    inverse: npt.NDArray[Any] = np.where(np.abs(t) < TINY, t.dtype.type(0), one / t)
    return inverse

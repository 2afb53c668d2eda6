"""Search of ik_llama.cpp's trellis formats: a row's scale, a step of each sub-block, and an index
of each group of 4 or 8 weights, whose values are one of up to 65536 points.

A row is ``w = d * ladder[step] * point[index]``; a *rung* is a value of the ladder. Points are
computed from their indices and have no order, so the nearest one is found by comparing. Space is
cut into cells; each point is listed in the few cells whose centres are nearest to it, and a group
is compared with its own cell's list.

1. Each sub-block alone: the best of some scales (of either sign, unless points are magnitudes),
   with short lists.
2. The row's d: some fractions of its largest scale; each sub-block takes the rung nearest to its
   own scale, with the points as found.
3. The points again, with long lists, at the scales ``d * rung``; then rungs and d for these points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property, dataclass
from treadle.formats.format import F32Array
from treadle.formats.rounding import relative

F64Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.uint32]
IntArray = npt.NDArray[Any]

SUB = 32  # weights of a sub-block
LEAST = 1e-6  # lowest importance, relative to the mean
POINTS = 4096  # points at once, when lists are made
FITS = 2  # of rungs and d to the points found


class TrellisFit(NamedTuple):
    """Quantised rows, not yet packed."""

    d: F32Array  # [n]
    steps: npt.NDArray[np.uint8]  # [n, sub-blocks]: indices into the ladder
    codes: Index  # [n, groups]: indices, counted on from table to table
    negative: npt.NDArray[np.bool_]  # [n, weights]: signs apart; [n, 0] if points have signs


class PointLists(NamedTuple):
    """For each cell of a ``PointCells``, the ``m`` points p that are listed in it; both lists have
    one array for each cell.
    """

    numbers: list[IntArray]  # [m]: the points' numbers
    factors: list[F32Array]  # [1 + dim, m]: -|p|^2 / 2, then the coordinates of p


@dataclass(frozen=True)
class PointCells:
    """Nearest-point search among ``points`` [n, dim], in ``base ** dim`` cells; along each
    coordinate they have about equally many points.

    Each point is listed in the ``short`` cells nearest to it for a quick search, in the ``long``
    nearest ones for a careful search.
    """

    make: Callable[[], F32Array]  # computes the points, on first use
    base: int
    short: int
    long: int

    @cached_property
    def points(self) -> F32Array:
        """All points, float32 [n, dim]."""
        return self.make()

    @cached_property
    def edges(self) -> F32Array:
        """Upper ends of all cells but the last along each coordinate, [base - 1, dim]."""
        shares = np.arange(1, self.base) / self.base
        return np.quantile(self.points, shares, axis=0).astype(np.float32)

    def cell(self, u: F32Array) -> IntArray:
        """Return the cell numbers [n] of ``u``, float32 [n, dim]."""
        found = np.zeros(len(u), np.int16)
        for j in range(u.shape[1]):
            digit = np.searchsorted(self.edges[:, j], u[:, j]).astype(np.int16)
            found += digit * np.int16(self.base**j)
        return found

    @cached_property
    def lists(self) -> tuple[PointLists, PointLists]:
        """The lists of all cells for the quick search, and those for the careful one."""
        points = self.points
        n, dim = points.shape
        n_cells = self.base**dim
        cell = self.cell(points)
        counts = np.bincount(cell, minlength=n_cells)
        sums = np.stack([np.bincount(cell, points[:, j], n_cells) for j in range(dim)])
        centres = (sums / counts.clip(1)).astype(np.float32)
        half = np.square(centres).sum(0) / np.float32(2)
        half[counts == 0] = np.inf
        near = np.empty((n, self.long), np.int16)
        for i in range(0, n, POINTS):
            far = half - points[i : i + POINTS] @ centres
            kth = (self.short - 1, self.long - 1)
            near[i : i + POINTS] = np.argpartition(far, kth, axis=1)[:, : self.long]
        rows = np.empty((n, 1 + dim), np.float32)
        rows[:, 0] = np.square(points).sum(axis=1) * np.float32(-0.5)
        rows[:, 1:] = points

        def listed(each: int) -> PointLists:
            cells = near[:, :each].reshape(-1)
            order = np.argsort(cells, kind="stable")
            ends = np.cumsum(np.bincount(cells, minlength=n_cells))[:-1]
            numbers = np.split(order // each, ends)
            factors = [np.ascontiguousarray(rows.take(i, axis=0).T) for i in numbers]
            return PointLists(numbers, factors)

        return listed(self.short), listed(self.long)

    def nearest(self, u: F32Array, weights: F32Array | None, careful: bool) -> IntArray:
        """Return point numbers [n] for ``u`` [n, dim]: of the points listed in its cell, that of
        least squared error, weighted by ``weights`` [n, dim] if given. ``careful``: use the long
        lists.

        ``sum w (u - p)^2`` is least where ``sum w u p - sum w p^2 / 2`` is largest.
        """
        lists = self.lists[careful]
        cell = self.cell(u)
        order = np.argsort(cell, kind="stable")
        ends = np.cumsum(np.bincount(cell, minlength=self.base ** u.shape[1]))
        if weights is None:
            given = np.empty((len(u), 1 + u.shape[1]), np.float32)
            given[:, 0] = 1
            given[:, 1:] = u.take(order, axis=0)
        else:
            given = np.concatenate([weights, u * weights], axis=1).take(order, axis=0)
        found = np.empty(len(u), np.int64)
        begin = 0
        for i, end in enumerate(ends.tolist()):
            if end > begin:
                factors = lists.factors[i]
                if weights is not None:
                    p = factors[1:]
                    factors = np.concatenate([np.square(p) * np.float32(-0.5), p])
                score = given[begin:end] @ factors
                found[begin:end] = lists.numbers[i].take(score.argmax(axis=1))
            begin = end
        back = np.empty(len(u), np.int64)
        back[order] = found
        return back


@dataclass(frozen=True)
class TrellisSearch:
    """The search for rows of a format; a sub-block chooses one of ``tables``.

    ``magnitudes``: points are magnitudes, and signs are stored apart. ``scales`` are tried for each
    sub-block, in units of its root mean square over that of the points.
    """

    group: int  # weights that share an index
    ladder: tuple[float, ...]  # rising
    tables: tuple[PointCells, ...]
    scales: tuple[float, ...]
    moves: tuple[float, ...]  # tried for d: a row's largest scale / (``end`` + move)
    magnitudes: bool = False

    def run(self, x: F32Array, weights: F32Array | None) -> TrellisFit:
        """Return for each row of x [n, k] the quantised row w of least ``sum weights * (x - w) **
        2``.

        A row with a NaN or an infinity gets a NaN scale.
        """
        weights = None if weights is None else relative(weights, LEAST)
        sound: npt.NDArray[np.bool_] = np.asarray(np.isfinite(x).all(axis=-1))
        x = np.where(sound[:, None], x, np.float32(0))
        # Scaled to about one, so that squares do not over- or underflow; a power of two is exact.
        exponent = np.frexp(np.abs(x).max(axis=-1))[1].clip(-120, 120)
        x = x * np.ldexp(np.float32(1), -exponent)[:, None]
        negative = np.signbit(x) if self.magnitudes else np.zeros((len(x), 0), np.bool_)
        if self.magnitudes:
            x = np.abs(x)
        d, steps, codes = RowSearch(self, x, weights).run()
        with np.errstate(over="ignore"):
            d = np.ldexp(d, exponent).astype(np.float32)
        d[~sound] = np.nan
        return TrellisFit(d, steps.astype(np.uint8), codes.reshape(len(x), -1), negative)

    @property
    def end(self) -> float:
        """The value of the ladder of largest magnitude."""
        return max(self.ladder, key=abs)

    @cached_property
    def midpoints(self) -> F64Array:
        """Middles of neighbouring values of the ladder, [n_steps - 1]."""
        rungs = np.array(self.ladder)
        middles: F64Array = (rungs[1:] + rungs[:-1]) / 2
        return middles

    @cached_property
    def unit(self) -> float:
        """Root mean square of the values of the first table's points."""
        return float(np.sqrt(np.square(self.tables[0].points).mean()))


class SubBlockPoints(NamedTuple):
    """The points chosen for n sub-blocks, and two sums over each sub-block's weights."""

    codes: IntArray  # [n, groups of a sub-block]
    xy: F64Array  # [n]: of weight times point
    yy: F64Array  # [n]: of the point's square

    def replaced(self, where: npt.NDArray[np.bool_], by: SubBlockPoints) -> SubBlockPoints:
        """Return these points, replaced by those of ``by`` in the sub-blocks that the mask
        ``where`` [n] marks.
        """
        return SubBlockPoints(
            np.where(where[:, None], by.codes, self.codes),
            np.where(where, by.xy, self.xy),
            np.where(where, by.yy, self.yy),
        )


class RowSearch:
    """The search of ``how`` over rows ``x`` [n, k] of magnitude about one."""

    def __init__(self, how: TrellisSearch, x: F32Array, weights: F32Array | None) -> None:
        self.how = how
        self.shape = len(x), x.shape[1] // SUB
        self.x = x.reshape(-1, SUB)
        self.w = None if weights is None else weights.reshape(self.x.shape)

    def run(self) -> tuple[F64Array, IntArray, IntArray]:
        """Return d [n], steps [n, sub-blocks] (ladder indices), and codes by sub-block."""
        found = self.fit_sub_blocks()
        d, steps = self.joined(found)
        rungs = np.array(self.how.ladder)
        t = (d[:, None] * rungs[steps]).reshape(-1)
        found = self.encode(t, careful=True)
        for _ in range(FITS):
            steps = self.nearest_rungs(found, d)
            d = self.fit_scale(found, rungs[steps], d)
        return d, steps, found.codes

    def fit_sub_blocks(self) -> SubBlockPoints:
        """Return each sub-block's points at the best of some scales, chosen without regard to the
        row's d.
        """
        square = np.square(self.x, dtype=np.float64)
        total = SUB if self.w is None else self.w.sum(axis=1, dtype=np.float64)
        spread = np.sqrt((square if self.w is None else square * self.w).sum(axis=1) / total)
        best: SubBlockPoints | None = None
        most = np.full(len(self.x), -np.inf)
        for scale in self.how.scales:
            new = self.encode(spread * (scale / self.how.unit), careful=False)
            gain = _ratio(np.square(new.xy), new.yy)
            best = new if best is None else best.replaced(gain > most, new)
            most = np.maximum(most, gain)
        assert best is not None
        return best

    def joined(self, found: SubBlockPoints) -> tuple[F64Array, IntArray]:
        """Return the d [n] of least error for the points ``found``, and the steps [n, sub-blocks],
        as ladder indices.
        """
        own = _ratio(found.xy, found.yy).reshape(self.shape)
        at = np.abs(own).argmax(axis=1)[:, None]
        largest = np.take_along_axis(own, at, axis=1)[:, 0]
        rungs = np.array(self.how.ladder)
        best = np.zeros(len(own))
        most = np.full(len(own), -np.inf)
        for move in self.how.moves:
            steps = self.nearest_rungs(found, largest / (self.how.end + move))
            xy, yy = self.sums(found, rungs[steps])
            gain = _ratio(np.square(xy), yy)
            best = np.where(gain > most, _ratio(xy, yy), best)
            most = np.maximum(gain, most)
        return best, self.nearest_rungs(found, best)

    def nearest_rungs(self, found: SubBlockPoints, d: F64Array) -> IntArray:
        """Return the steps [n, sub-blocks], as ladder indices, of least error for the points
        ``found`` and d [n].
        """
        own = _ratio(found.xy, found.yy).reshape(self.shape)
        steps: IntArray = np.searchsorted(self.how.midpoints, own * _ratio(1.0, d)[:, None])
        return steps

    def sums(self, found: SubBlockPoints, rungs: F64Array) -> tuple[F64Array, F64Array]:
        """Return, for each row, two sums [n]: of weight times value, and of squared values. A value
        is a point times the rung (ladder value) of its sub-block; ``rungs``: [n, sub-blocks].
        """
        xy = (found.xy.reshape(self.shape) * rungs).sum(axis=1)
        return xy, (found.yy.reshape(self.shape) * np.square(rungs)).sum(axis=1)

    def fit_scale(self, found: SubBlockPoints, rungs: F64Array, d: F64Array) -> F64Array:
        """Return the d [n] of least error for the points ``found`` and ``rungs`` (ladder values);
        ``d`` where all values are 0.
        """
        xy, yy = self.sums(found, rungs)
        return np.where(yy > 0, _ratio(xy, yy), d)

    def encode(self, t: F64Array, careful: bool) -> SubBlockPoints:
        """Return the points of least error of every sub-block at its scale ``t``, [n * sub-blocks].
        ``careful``: see ``PointCells.nearest``.
        """
        group = self.how.group
        u = (self.x * _ratio(1.0, t)[:, None]).astype(np.float32).reshape(-1, group)
        w = None if self.w is None else self.w.reshape(u.shape)
        best: SubBlockPoints | None = None
        least = np.full(len(t), np.inf)
        before = 0
        for table in self.how.tables:
            index = table.nearest(u, w, careful)
            y = table.points.take(index, axis=0).reshape(self.x.shape)
            codes = (index + before).reshape(len(t), -1)
            before += len(table.points)
            wy = y if self.w is None else y * self.w
            new = SubBlockPoints(
                codes,
                np.vecdot(self.x, wy).astype(np.float64),
                np.vecdot(y, wy).astype(np.float64),
            )
            # The error, without the part that is the same for all points.
            error = t * (t * new.yy - 2 * new.xy)
            best = new if best is None else best.replaced(error < least, new)
            least = np.minimum(least, error)
        assert best is not None
        return best


def _ratio(a: Any, b: F64Array) -> F64Array:
    """Return a / b, and 0 where b is 0."""
    ratio: F64Array = np.divide(a, b, out=np.zeros(b.shape), where=b != 0)
    return ratio

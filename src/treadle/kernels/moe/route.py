"""Expert routing: each token's experts, and the rows that are multiplied together for them."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64, ptr
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.matmul.matmul import TILE
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Args, Frame, Spec

PADDED = 16  # scores in scratch are padded to a multiple of this many f32
LEAST = 1e-20  # least sum that weights are divided by
LOWEST = -3e38  # below every score, and finite
SOFTMAX = "softmax"
SIGMOID = "sigmoid"
SQRT_SOFTPLUS = "sqrt_softplus"


@dataclass(frozen=True)
class Route(Spec):
    """Choose a token's ``n_used`` experts of ``n`` by their scores, and compute their weights.

    ``p = softmax(scores)``, or the sigmoid of each, or the root of its softplus. The experts with
    the largest ``p + bias`` are chosen, largest first, ties in order. A softmax without bias does
    not change the order, so the scores themselves decide. With groups (of adjacent experts) only
    experts of the best groups are chosen. A group's score is its best expert's, or without a
    softmax the sum of its two best. An expert's weight is ``scale * p``; with ``norm`` a token's
    weights are divided by their sum first. With ``own`` the weight is multiplied by the expert's
    entry in ``scales``.

    ``jitter`` (SparseMixer, arXiv 2409.12136): p differs for each choice: it is the softmax over
    the remaining scores that are near the best one, ``best - score <= 2 jitter max(|score|,
    best)``.

    ``per``: this many adjacent entries are one expert, whose number ``chosen`` holds; numbers may
    repeat.

    ``n_shared`` (Inkling): the scores of this many shared experts, which every token uses, follow
    the others. They take part in the sum that weights are divided by. Their numbers, in order, and
    weights are results as well; with ``own_shared`` these are multiplied by ``shared_scales``.

    ``scores`` f32 ``[N, stride]``, ``chosen`` i32 and ``weights`` f32 ``[N, n_used]``,
    ``shared_chosen`` and ``shared_weights`` ``[N, n_shared]``. Items: tokens.
    """

    op: ClassVar[str] = "route"
    args = Args(
        "scores:in bias:const? scales:const? chosen:out weights:out stride "
        "shared_chosen:out? shared_weights:out? shared_scales:const?"
    )
    n: int
    n_used: int
    gating: str
    norm: bool = False
    scale: float = 1.0
    bias: bool = False
    n_groups: int = 1
    n_groups_used: int = 1
    own: bool = False
    jitter: float = 0.0
    per: int = 1
    n_shared: int = 0
    own_shared: bool = False

    @property
    def needs(self) -> set[str]:
        asked = {
            "bias": self.bias,
            "scales": self.own,
            "shared_chosen": self.n_shared > 0,
            "shared_weights": self.n_shared > 0,
            "shared_scales": self.own_shared,
        }
        return self.args.required | {name for name, on in asked.items() if on}

    @property
    def by_p(self) -> bool:
        """Whether ``p + bias`` decides the choice; else the scores do."""
        return self.bias or self.gating != SOFTMAX

    @property
    def n_best(self) -> int:
        """Number of a group's best experts whose ranks are added up to the group's score."""
        return min(1 if self.gating == SOFTMAX else 2, self.n // self.n_groups)

    def scratch(self, lanes: int) -> int:
        padded = round_up(self.n, PADDED)
        return 4 * (3 * padded + round_up(self.n_groups, PADDED))

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        pitch = 4 * round_up(self.n, PADDED)
        p, rank, spare = (frame.scratch + i * pitch for i in range(3))
        with k.loop(frame.end, start=frame.begin) as token:
            row = frame.scores + token * frame.stride * 4
            if not self.jitter:
                self._probabilities(k, row, p)
            if self.bias:
                map_row(k, self.n, rank, lambda a, b: a + b, p, frame.bias)
            else:
                map_row(k, self.n, rank, lambda a: a, p if self.by_p else row)
            if self.n_groups_used < self.n_groups:
                self._keep_groups(k, rank, spare, spare + pitch)
            total = k.var(k.const(0.0, f32))
            place = token * (4 * self.n_used)
            with k.loop(self.n_used) as s:
                best, top = pop_best(k, rank, self.n)
                weight = (
                    self._best_weight(k, rank, top) if self.jitter else k.load(p + best * 4, f32)
                )
                expert = best // self.per if self.per > 1 else best
                k.store(frame.chosen + place, expert.to(i32), offset=s * 4)
                k.store(frame.weights + place, weight, offset=s * 4)
                total.v = total.v + weight
            shared = [
                gate(k, self.gating, k.load(row, f32, offset=4 * (self.n + i)))
                for i in range(self.n_shared)
            ]
            for weight in shared:
                total.v = total.v + weight
            factor = common_factor(k, self.scale, total.v if self.norm else None)
            with k.loop(self.n_used) as s:
                at = frame.weights + place + s * 4
                weight = k.load(at, f32) * factor
                if self.own:
                    expert = k.load(frame.chosen + place, i32, offset=s * 4).to(i64)
                    weight = weight * k.load(frame.scales + expert * 4, f32)
                k.store(at, weight)
            place = token * (4 * self.n_shared)
            for i, weight in enumerate(shared):
                weight = weight * factor
                if self.own_shared:
                    weight = weight * k.load(frame.shared_scales, f32, offset=4 * i)
                k.store(frame.shared_chosen + place, k.const(i, i32), offset=4 * i)
                k.store(frame.shared_weights + place, weight, offset=4 * i)

    def _probabilities(self, k: Builder, row: Val, p: Val) -> None:
        lanes = k.isa.lanes
        if self.gating != SOFTMAX:
            map_row(k, self.n, p, lambda v: gate(k, self.gating, v), row)
            return
        tops, sums = k.var(k.const(float("-inf"), f32 * lanes)), k.var(k.zero(f32 * lanes))

        def top(c: Val, count: int) -> None:
            v = load_padded(k, row + c * (4 * lanes), count, float("-inf"))
            tops.v = k.max(tops.v, v)

        k.runs(self.n, lanes, top)
        most = k.splat(k.reduce(tops.v, k.max), f32 * lanes)

        def power(c: Val, count: int) -> None:
            v = math.exp(k, load_padded(k, row + c * (4 * lanes), count, float("-inf")) - most)
            k.store_first(p + c * (4 * lanes), v, count)
            sums.v = sums.v + v

        k.runs(self.n, lanes, power)
        share = k.splat(1.0 / k.sum(sums.v), f32 * lanes)
        map_row(k, self.n, p, lambda v: v * share, p)

    def _best_weight(self, k: Builder, rank: Val, top: Val) -> Val:
        """Return the weight of the best expert, whose score is ``top``: its softmax over itself and
        the remaining scores in ``rank`` that are near it (``jitter``).
        """
        ty = f32 * k.isa.lanes
        lanes = k.isa.lanes
        most, sums = k.splat(top, ty), k.var(k.zero(ty))

        def add(c: Val, count: int) -> None:
            v = load_padded(k, rank + c * (4 * lanes), count, float("-inf"))
            far = most - v > k.max(k.abs(v), most) * (2 * self.jitter)
            sums.v = sums.v + k.select(far, k.zero(ty), math.exp(k, v - most))

        k.runs(self.n, lanes, add)
        return 1.0 / (k.sum(sums.v) + 1.0)

    def _keep_groups(self, k: Builder, rank: Val, spare: Val, groups: Val) -> None:
        """Set the rank of experts outside the best groups to minus infinity. ``rank``: each
        expert's ``p + bias``, or its score (``by_p``); ``spare`` and ``groups``: scratch.
        """
        per = self.n // self.n_groups
        map_row(k, self.n, spare, lambda v: v, rank)
        with k.loop(self.n_groups) as g:
            total = k.const(0.0, f32)
            for _ in range(self.n_best):
                total = total + pop_best(k, spare + g * (4 * per), per)[1]
            k.store(groups + g * 4, total)
        for _ in range(self.n_groups_used):
            pop_best(k, groups, self.n_groups)
        with k.loop(self.n_groups) as g:
            left = k.load(groups + g * 4, f32) > LOWEST
            with k.if_(left), k.loop(per) as e:
                k.store(rank + (g * per + e) * 4, k.const(float("-inf"), f32))

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        given = args.scores.reshape(-1, args.stride)[:n, : self.n + self.n_shared].astype(
            np.float64
        )
        scores = given[:, : self.n]
        p = weights_ref(self.gating, scores)
        rank = p if self.by_p else scores
        if self.bias:
            rank = rank + args.bias[: self.n]
        if self.n_groups_used < self.n_groups:
            groups = rank.reshape(n, self.n_groups, -1)
            good = np.sort(groups, -1)[..., -self.n_best :].sum(-1)
            kept = np.argsort(-good, kind="stable")[:, : self.n_groups_used]
            hidden = np.ones((n, self.n_groups, 1), bool)
            np.put_along_axis(hidden[..., 0], kept, False, -1)
            rank = np.where(hidden, -np.inf, groups).reshape(n, -1)
        chosen = np.argsort(-rank, kind="stable")[:, : self.n_used]
        weights = np.take_along_axis(p, chosen, -1)
        if self.jitter:
            weights = self._near_ref(scores, chosen)
        total = weights.sum(-1, keepdims=True)
        shared = weights_ref(self.gating, given[:, self.n :]) if self.n_shared else None
        if shared is not None:
            total = total + shared.sum(-1, keepdims=True)
        factor = self.scale / np.maximum(total, LEAST) if self.norm else self.scale
        if self.own:
            weights = weights * args.scales[chosen]
        args.chosen[: chosen.size] = chosen.ravel() // self.per
        args.weights[: chosen.size] = (weights * factor).ravel()
        if shared is None:
            return
        if self.own_shared:
            shared = shared * args.shared_scales[: self.n_shared]
        args.shared_chosen[: shared.size] = np.tile(np.arange(self.n_shared), n)
        args.shared_weights[: shared.size] = (shared * factor).ravel()

    def _near_ref(self, scores: Any, chosen: Any) -> Any:
        """Return the weight of each chosen expert as ``_best_weight`` computes it, in the order of
        the choices.
        """
        left = scores.copy()
        weights = np.zeros(chosen.shape)
        for s, best in enumerate(chosen.T):
            top = np.take_along_axis(scores, best[:, None], -1)
            far = top - scores > np.maximum(np.abs(scores), top) * (2 * self.jitter)
            weights[:, s] = 1 / np.exp(np.where(far, -np.inf, left - top)).sum(-1)
            np.put_along_axis(left, best[:, None], -np.inf, -1)
        return weights


def common_factor(k: Builder, scale: float, total: Val | None) -> Val:
    """Return the factor of all weights of a token: ``scale``, divided by ``total``, the sum of the
    weights, if given.
    """
    factor = k.const(scale, f32)
    return factor if total is None else factor / k.max(total, LEAST)


def gate(k: Builder, gating: str, score: Val) -> Val:
    """Return the weight of one score for gatings that look at one score only: SIGMOID or
    SQRT_SOFTPLUS.
    """
    if gating == SIGMOID:
        return math.sigmoid(k, score)
    assert gating == SQRT_SOFTPLUS, gating
    return k.sqrt(math.softplus(k, score))


def weights_ref(gating: str, scores: np.ndarray) -> np.ndarray:
    """Return the weights p of all experts from ``scores``, float64 ``[N, n]``; the numpy twin of
    the gating named ``gating``.
    """
    if gating == SIGMOID:
        return np.asarray(1 / (1 + np.exp(-scores)))
    if gating == SQRT_SOFTPLUS:
        return np.asarray(np.sqrt(np.logaddexp(scores, 0.0)))
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(p / p.sum(-1, keepdims=True))


@dataclass(frozen=True)
class RouteByToken(Spec):
    """Choose a token's experts by its id, from ``table`` i32 ``[n_vocab, n_used]``, and compute
    their weights by their scores as ``Route`` does (DeepSeek V4, 2026). ``gating`` is not a
    softmax. Items: tokens.
    """

    op: ClassVar[str] = "route_by_token"
    args = Args("scores:in table:const chosen:out weights:out stride")
    n: int
    n_used: int
    gating: str
    norm: bool = False
    scale: float = 1.0

    def scratch(self, lanes: int) -> int:
        return 4 * round_up(self.n, PADDED)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        assert self.gating != SOFTMAX
        tokens = frame.run("tokens", ptr)
        p = frame.scratch
        with k.loop(frame.end, start=frame.begin) as n:
            scores = frame.scores + n * frame.stride * 4
            map_row(k, self.n, p, lambda v: gate(k, self.gating, v), scores)
            token = k.load(tokens, i32, offset=n * 4).to(i64)
            row = frame.table + token * (4 * self.n_used)
            place = n * (4 * self.n_used)
            total = k.var(k.const(0.0, f32))
            with k.loop(self.n_used) as s:
                expert = k.load(row, i32, offset=s * 4)
                weight = k.load(p, f32, offset=expert.to(i64) * 4)
                k.store(frame.chosen + place, expert, offset=s * 4)
                k.store(frame.weights + place, weight, offset=s * 4)
                total.v = total.v + weight
            factor = common_factor(k, self.scale, total.v if self.norm else None)
            with k.loop(self.n_used) as s:
                at = frame.weights + place + s * 4
                k.store(at, k.load(at, f32) * factor)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        scores = args.scores.reshape(-1, args.stride)[:n, : self.n].astype(np.float64)
        chosen = args.table.reshape(-1, self.n_used)[run.tokens[:n]]
        weights = np.take_along_axis(weights_ref(self.gating, scores), chosen.astype(np.int64), -1)
        if self.norm:
            weights = weights / np.maximum(weights.sum(-1, keepdims=True), LEAST)
        args.chosen[: chosen.size] = chosen.ravel()
        args.weights[: chosen.size] = (weights * self.scale).ravel()


def pop_best(k: Builder, at: Val, n: int) -> tuple[Val, Val]:
    """Return the index and the value of the largest of ``n`` f32 at ``at``, the first of equals,
    and overwrite it with minus infinity.
    """
    lanes = k.isa.lanes
    ty = f32 * lanes
    places = i32 * lanes
    best, place = k.var(k.const(float("-inf"), ty)), k.var(k.zero(places))  # in each lane

    def look(c: Val, count: int) -> None:
        v = load_padded(k, at + c * (4 * lanes), count, float("-inf"))
        better = v > best.v
        here = k.splat((c * lanes).to(i32), places) + k.const(range(lanes), places)
        best.v, place.v = k.select(better, v, best.v), k.select(better, here, place.v)

    k.runs(n, lanes, look)
    top = k.reduce(best.v, k.max)
    among = k.select(best.v.eq(k.splat(top, ty)), place.v, k.const(n, places))
    first = k.reduce(among, k.min).to(i64)
    k.store(at + first * 4, k.const(float("-inf"), f32))
    return first, top


def load_padded(k: Builder, at: Val, count: int, rest: float) -> Val:
    """Load ``count`` f32 into a vector, and fill its other lanes with ``rest``."""
    ty = f32 * k.isa.lanes
    v = k.load_first(at, ty, count)
    if count == ty.lanes:
        return v
    return k.select(k.const(range(ty.lanes), i32.like(ty)) < count, v, k.const(rest, ty))


def blocks_most(n_choices: int, n_experts: int, block: int) -> int:
    """Return an upper bound of the tiles, or blocks, of ``block`` rows that ``n_choices`` choices
    of ``n_experts`` experts need.
    """
    return min(n_experts, n_choices) + n_choices // block


@dataclass(frozen=True)
class Sort(Spec):
    """Sort the batch's *choices* (``n_used`` for each token) by expert, so that an expert's choices
    are consecutive rows. An expert's rows begin at a multiple of ``block``; the rest of its last
    block repeats that block's first row. Experts with at most ``over`` choices, or more than
    ``upto`` if given, are left out.

    ``tiles``: their number, i64, then TILE records: at most ``most`` rows of one expert, without
    repeated rows. ``rows``: the number of blocks, i64, then each row's token, i32. ``places`` i32:
    for each choice that is not left out, its row plus ``first``. One item.
    """

    op: ClassVar[str] = "sort"
    args = Args("chosen:in tiles:out rows:out places:out first")
    n: int  # experts
    n_used: int
    block: int
    most: int  # a multiple of ``block``
    over: int = 0
    upto: int = 0

    def scratch(self, lanes: int) -> int:
        return 8 * self.n

    def is_in(self, n: Val) -> Val:
        """Return whether an expert with ``n`` choices is included, as a run-time value."""
        return (n > self.over) & (n <= self.upto) if self.upto else n > self.over

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        n_choices = frame.run("n_tokens") * self.n_used
        cursor = frame.scratch
        with k.loop(self.n) as e:
            k.store(cursor + e * 8, k.i64(0))

        def at(choice: Val) -> Val:
            return cursor + k.load(frame.chosen + choice * 4, i32).to(i64) * 8

        with k.loop(n_choices) as choice:
            k.store(at(choice), k.load(at(choice), i64) + 1)
        n_tiles = k.var(k.i64(0))
        row = k.var(k.i64(0))
        with k.loop(self.n) as e:
            n = k.load(cursor + e * 8, i64)
            n = k.select(self.is_in(n), n, k.i64(0))
            k.store(cursor + e * 8, k.select(n > 0, row.v, k.i64(-1)))
            with k.loop(n, step=self.most) as first:
                tile = frame.tiles + (8 + n_tiles.v * TILE.itemsize)
                for i, v in enumerate((e, row.v + first, k.min(n - first, self.most))):
                    k.store(tile, v, offset=8 * i)
                n_tiles.v = n_tiles.v + 1
            row.v = row.v + (n + (self.block - 1)) // self.block * self.block
        k.store(frame.tiles, n_tiles.v)
        k.store(frame.rows, row.v // self.block)
        tokens = frame.rows + 8
        with k.loop(n_choices) as choice:
            place = k.load(at(choice), i64)
            with k.if_(place >= 0):
                token = (choice // self.n_used).to(i32)
                k.store(tokens + place * 4, token)
                k.store(frame.places + choice * 4, (frame.first + place).to(i32))
                # Fill the rest of the block; the expert's next rows overwrite it.
                with k.if_((place % self.block).eq(0)), k.loop(self.block, start=1) as j:
                    k.store(tokens + (place + j) * 4, token)
                k.store(at(choice), place + 1)

    def run_ref(self, args: Any, run: Any) -> None:
        chosen = args.chosen[: int(run["n_tokens"]) * self.n_used]
        tiles = []
        tokens = []
        row = 0
        for e in range(self.n):
            choices = np.flatnonzero(chosen == e)
            if not self.over < len(choices) <= (self.upto or len(choices)):
                continue
            args.places[choices] = args.first + row + np.arange(len(choices))
            for first in range(0, len(choices), self.most):
                tiles.append((e, row + first, min(len(choices) - first, self.most)))
            filled = round_up(len(choices), self.block)
            tokens += (choices // self.n_used).tolist()
            if filled > len(choices):
                spare = choices[len(choices) // self.block * self.block] // self.n_used
                tokens += [int(spare)] * (filled - len(choices))
            row += filled
        args.tiles[: 1 + 3 * len(tiles)] = [len(tiles), *np.array(tiles, np.int64).ravel()]
        args.rows[:2].view(np.int64)[0] = row // self.block
        args.rows[2 : 2 + row] = tokens

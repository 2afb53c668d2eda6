"""GPU routing: a warp chooses a token's experts; a thread for each expert sorts the rows by
expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import ThreadBlock, convert_spec, plus
from treadle.devices.cuda.launch_args import MOST_THREADS, PerBlock
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import f32, i32, i64
from treadle.kernels.matmul.matmul import TILE
from treadle.kernels.moe.route import SOFTMAX, Route, Sort, common_factor, gate
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step

WARP = 32


class RoutedExpert(NamedTuple):
    """A candidate expert, as lanes exchange it: its rank (the score that it is chosen by), index
    and probability.
    """

    rank: Val
    expert: Val  # i32
    p: Val


@dataclass(frozen=True)
class SimtRoute(PerBlock, Route):
    """GPU kernel of ``Route``, with at most 32 groups, and 32 experts for a token. Items: tokens.

    A lane has every 32nd expert, one group of experts, and later one of the chosen experts.
    """

    op: ClassVar[str] = "simt_route"

    @property
    def threads(self) -> int:
        return WARP

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = ThreadBlock(k, isa, self.threads)
        token = frame.begin
        row = frame.scores + token * frame.stride * 4
        scores = []
        lowest = k.const(float("-inf"), f32)
        for first in range(0, self.n, WARP):
            at = block.lane + first
            score = k.load(row + k.min(at, self.n - 1) * 4, f32, align=4)
            scores.append(k.select(at < self.n, score, lowest))
        p = scores if self.jitter else self._shares(block, scores)
        ranks = p if self.by_p else scores
        if self.bias:
            ranks = [
                rank + k.load(frame.bias + k.min(at, self.n - 1) * 4, f32, align=4)
                for rank, at in self._places(block, ranks)
            ]
        if self.n_groups_used < self.n_groups:
            ranks = self._of_best_groups(block, ranks)
        left = [
            k.var(k.select(at < self.n, rank, lowest)) for rank, at in self._places(block, ranks)
        ]
        mine = k.var(k.const(0.0, f32))
        chosen = k.var(k.const(0, i32))
        total = k.var(k.const(0.0, f32))
        with k.loop(self.n_used) as s:
            best = self._pop_best(block, left, p)
            here = block.lane.eq(s)
            share = best.p
            if self.jitter:
                share = self._emit_best_weight(block, left, best.rank)
            mine.v = k.select(here, share, mine.v)
            chosen.v = k.select(here, best.expert, chosen.v)
            total.v = total.v + share
        factor = common_factor(k, self.scale, total.v if self.norm else None)
        with k.if_(block.lane < self.n_used):
            made = mine.v * factor
            place = (token * self.n_used + block.lane) * 4
            if self.own:
                made = made * k.load(frame.scales + chosen.v.to(i64) * 4, f32, align=4)
            expert = chosen.v // self.per if self.per > 1 else chosen.v
            k.store(frame.chosen + place, expert, align=4)
            k.store(frame.weights + place, made, align=4)

    def _places(self, block: ThreadBlock, values: list[Val]) -> list[tuple[Val, Val]]:
        """Return each of ``values``, which this lane has by expert, with the index of the
        expert.
        """
        return [(v, block.lane + WARP * i) for i, v in enumerate(values)]

    def _shares(self, block: ThreadBlock, scores: list[Val]) -> list[Val]:
        """Emit the probabilities of a lane's experts from their ``scores``, by softmax or another
        function (``gating``).
        """
        k = block.k
        if self.gating != SOFTMAX:
            return [gate(k, self.gating, score) for score in scores]
        top = scores[0]
        for score in scores[1:]:
            top = k.max(top, score)
        top = block.reduce_warp(top, k.max)
        powers = [math.exp(k, score - top) for score in scores]
        total = powers[0]
        for power in powers[1:]:
            total = total + power
        share = 1.0 / block.reduce_warp(total, plus)
        return [power * share for power in powers]

    def _emit_best_weight(self, block: ThreadBlock, left: list[Var], top: Val) -> Val:
        """Emit the softmax weight, in 0..1, of the best expert, of score ``top``, among itself and
        the experts that remain in ``left`` with a score within the jitter of ``top``.
        """
        k = block.k
        total = k.const(0.0, f32)
        for rank in left:
            v = rank.v
            none = k.const(0.0, f32)
            far = top - v > k.max(k.abs(v), top) * (2 * self.jitter)
            total = total + k.select(far, none, math.exp(k, v - top))
        return 1.0 / (block.reduce_warp(total, plus) + 1.0)

    def _of_best_groups(self, block: ThreadBlock, ranks: list[Val]) -> list[Val]:
        """Emit the ranks of a lane's experts, with minus infinity for experts in groups that are
        not among the ``n_groups_used`` best.
        """
        k = block.k
        per = self.n // self.n_groups
        lowest = block.k.const(float("-inf"), f32)
        good = k.var(lowest)  # score of the group with this lane's number
        with k.loop(self.n_groups) as g:
            first = second = lowest
            for rank, at in self._places(block, ranks):
                v = k.select((at // per).eq(g), rank, lowest)
                first, second = k.max(first, v), k.max(second, k.min(first, v))
            lanes = WARP // 2
            while lanes:
                a, b = (block.simt.shuffle(k, v, lanes) for v in (first, second))
                first, second = k.max(first, a), k.max(k.min(first, a), k.max(second, b))
                lanes //= 2
            whole = first + second if self.n_best == 2 else first
            good.v = k.select(block.lane.eq(g), whole, good.v)
        kept = k.var(k.const(0, i32))  # one bit per group
        with k.loop(self.n_groups_used):
            best = self._pop_best(block, [good], [lowest])
            kept.v = kept.v | (k.const(1, i32) << best.expert)
        return [
            k.select(((kept.v >> (at // per).to(i32)) & 1).eq(1), rank, lowest)
            for rank, at in self._places(block, ranks)
        ]

    def _pop_best(self, block: ThreadBlock, left: list[Var], p: list[Val]) -> RoutedExpert:
        """Emit: return the warp's expert of the highest rank in ``left``, and set that rank to
        minus infinity; of equal ones, the first. ``p``: the probabilities of the lane's experts.
        """
        k = block.k
        best = RoutedExpert(k.const(float("-inf"), f32), k.const(0, i32), p[0])
        for (share, at), rank in zip(self._places(block, p), left, strict=True):
            better = rank.v > best.rank
            best = RoutedExpert(
                k.select(better, rank.v, best.rank),
                k.select(better, at.to(i32), best.expert),
                k.select(better, share, best.p),
            )
        lanes = WARP // 2
        while lanes:
            other = RoutedExpert(*(block.simt.shuffle(k, v, lanes) for v in best))
            first = other.rank.eq(best.rank) & (other.expert < best.expert)
            better = (other.rank > best.rank) | first
            best = RoutedExpert(*(k.select(better, a, b) for a, b in zip(other, best, strict=True)))
            lanes //= 2
        for i, rank in enumerate(left):
            taken = best.expert.eq((block.lane + WARP * i).to(i32))
            rank.v = k.select(taken, k.const(float("-inf"), f32), rank.v)
        return best


@dataclass(frozen=True)
class SimtSort(PerBlock, Sort):
    """GPU kernel of ``Sort``: each thread has one expert; it reads the choices of all tokens, and
    keeps those of its expert. One item.
    """

    op: ClassVar[str] = "simt_sort"

    @property
    def threads(self) -> int:
        return round_up(self.n, WARP)

    @property
    def shared_bytes(self) -> int:
        return 8 * self.threads  # each expert's number of choices

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = ThreadBlock(k, isa, self.threads)
        n_choices = frame.run("n_tokens") * self.n_used
        tid = block.tid
        tokens = frame.rows + 8

        def is_mine(choice: Val) -> Val:
            return k.load(frame.chosen + choice * 4, i32, align=4).to(i64).eq(tid)

        count = k.var(k.i64(0))
        with k.loop(n_choices) as choice:
            count.v = count.v + k.select(is_mine(choice), k.i64(1), k.i64(0))
        count.v = k.select(self.is_in(count.v), count.v, k.i64(0))
        k.store(block.shared + tid * 8, count.v, align=8)
        block.simt.barrier(k)
        row = k.var(k.i64(0))
        n_tiles = k.var(k.i64(0))

        def filled(n: Val) -> Val:
            return (n + (self.block - 1)) // self.block * self.block

        with k.loop(tid) as e:
            n = k.load(block.shared + e * 8, i64, align=8)
            row.v = row.v + filled(n)
            n_tiles.v = n_tiles.v + (n + (self.most - 1)) // self.most
        with k.loop(count.v, step=self.most) as first:
            tile = frame.tiles + (8 + n_tiles.v * TILE.itemsize)
            for i, v in enumerate((tid, row.v + first, k.min(count.v - first, self.most))):
                k.store(tile, v, offset=8 * i, align=8)
            n_tiles.v = n_tiles.v + 1
        end = row.v + filled(count.v)
        with k.if_(tid.eq(self.n - 1)):
            k.store(frame.tiles, n_tiles.v, align=8)
            k.store(frame.rows, end // self.block, align=8)
        last = k.var(k.const(0, i32))  # the token that pads the last block
        with k.loop(n_choices) as choice, k.if_(is_mine(choice) & (count.v > 0)):
            token = (choice // self.n_used).to(i32)
            k.store(tokens + row.v * 4, token, align=4)
            k.store(frame.places + choice * 4, (frame.first + row.v).to(i32), align=4)
            last.v = k.select((row.v % self.block).eq(0), token, last.v)
            row.v = row.v + 1
        with k.loop(end, start=row.v) as place:
            k.store(tokens + place * 4, last.v, align=4)


def swap_route(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a route step with SimtRoute; None, to keep the CPU's kernel, for more than 32 groups
    or chosen experts, and for routers that also score shared experts (``Route.n_shared``).
    """
    assert isinstance(step.spec, Route)
    fits = max(step.spec.n_used, step.spec.n_groups) <= WARP and not step.spec.n_shared
    return replace(step, spec=convert_spec(SimtRoute, step.spec)) if fits else None


def swap_sort(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a sort step with SimtSort; None, to keep the CPU's kernel, for more experts than a
    block has threads.
    """
    assert isinstance(step.spec, Sort)
    return (
        replace(step, spec=convert_spec(SimtSort, step.spec))
        if step.spec.n <= MOST_THREADS
        else None
    )

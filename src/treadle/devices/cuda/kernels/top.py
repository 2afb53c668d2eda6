"""GPU top-logits kernels: a block for each slice of a row, and one for each row that merges its
slices.

A thread has N_TOP adjacent values of a slice, or the candidates of one slice. The block finds the
N_TOP-th largest key bit by bit, by counting the keys that reach a trial value. Equal keys are taken
in order, which is that of the threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import ThreadBlock, convert_spec, plus
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import f32, f64, i32, i64, ptr, u32
from treadle.kernels.elementwise.top_logits import (
    IDS,
    KEY_INF,
    LEAST_KEY,
    LOWEST,
    MAX,
    PADDING_ID,
    PARTIAL,
    SLICE,
    SLICE_ROWS,
    JoinTop,
    TopLogitsKernel,
    to_float,
    to_key,
)
from treadle.kernels.run_state import N_TOP, RESULT, SAMPLED, TOTAL
from treadle.kernels.spec import Frame, load_record

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step

THREADS = SLICE_ROWS  # of a block; each has N_TOP keys
WIDTH = 4  # keys that it loads at once
WORD = 32  # values covered by one word of a mask
# Shared memory: two alternating areas for counts; each thread's counts or sums; the chosen keys.
ROOM = 4 * 2 * THREADS // 32
EACH = 2 * ROOM
CHOSEN = EACH + 8 * THREADS
SHARED = CHOSEN + 8 * N_TOP


class SampledRecord(NamedTuple):
    """The fields of a SAMPLED record, a row of logits to be searched."""

    row: Val  # number of the row
    mask: Val  # offset of the bit mask of allowed ids in the run's inputs; 0 if there is none
    only: Val  # whether only the largest logit is wanted
    total: Val  # whether the sum of exponentials is wanted


def load_sampled(k: Builder, frame: Frame, i: Val) -> SampledRecord:
    """Emit the loads of the fields of the run's i-th SAMPLED record; return them."""
    record = load_record(k, frame.run("sampled", ptr) + i * SAMPLED.itemsize, SAMPLED)
    return SampledRecord(record["row"], record["mask"], record["first"] > 0, record["total"] > 0)


class _TopBlock(ThreadBlock):
    """A block whose threads have N_TOP keys (logits as ordered integers) each, in ``keys``,
    ``WIDTH`` per vector.
    """

    def __init__(self, k: Builder, isa: Isa) -> None:
        super().__init__(k, isa, THREADS)
        never = k.const(LEAST_KEY, i32 * WIDTH)
        self.keys: list[Var] = [k.var(never) for _ in range(N_TOP // WIDTH)]

    def count(self, reaches: Callable[[Val], Val]) -> Val:
        """Emit the number of this thread's keys that satisfy ``reaches``, which maps a vector of
        keys to a mask.
        """
        k = self.k
        one = k.const(1, i32 * WIDTH)
        total = k.zero(i32 * WIDTH)
        for key in self.keys:
            total = total + k.select(reaches(key.v), one, k.zero(one.ty))
        return k.sum(total)

    def largest(self) -> Val:
        """Emit the block's largest key."""
        k = self.k
        top = self.keys[0].v
        for key in self.keys[1:]:
            top = k.max(top, key.v)
        return self.reduce_block([k.reduce(top, k.max)], k.max, self.shared)[0]

    def smallest_kept_key(self) -> Val:
        """Emit the N_TOP-th largest key of the block; the search treats keys as unsigned
        numbers.
        """
        k = self.k
        bits = self.k.var(self.k.const(0, u32))
        with k.loop(32) as b:
            trial = bits.v | (k.const(1 << 31, u32) >> b.to(u32))
            limit = k.splat((trial ^ (1 << 31)).bits(i32), i32 * WIDTH)
            n = self.count(lambda key: key >= limit)
            room = self.shared + (b + 1) % 2 * ROOM
            enough = self.reduce_block([n], plus, room)[0] >= N_TOP
            bits.v = k.select(enough, trial, bits.v)
        return (bits.v ^ (1 << 31)).bits(i32)

    def choose(self, looked: SampledRecord, id_at: Callable[[Val], Val], to: Val) -> Val:
        """Emit: write the N_TOP largest keys of the block to ``to`` in their original order, and
        their ids IDS bytes further on; return the largest key.

        If ``looked.only``, only the keys that equal the largest are written. ``id_at`` returns the
        id of this thread's i-th key.
        """
        k = self.k
        top = self.largest()
        last = k.select(looked.only, top, self.smallest_kept_key())
        above = k.splat(last, i32 * WIDTH)
        more = self.count(lambda key: key > above)
        ties = self.count(lambda key: key.eq(above))
        with k.if_(self.tid < N_TOP):
            k.store(to + self.tid * 4, k.const(LEAST_KEY, i32))
            k.store(to + self.tid * 4, k.const(PADDING_ID, i32), offset=IDS)
        here = self.shared + self.tid * 8 + EACH
        k.store(here, more)
        k.store(here, ties, offset=4)
        # Uses the area that the last trial did not; its barrier also orders the stores above.
        all_more = self.reduce_block([more], plus, self.shared + ROOM)[0]
        more_before = k.var(k.const(0, i32))
        ties_before = k.var(k.const(0, i32))
        with k.loop(self.tid) as t:
            other = self.shared + t * 8 + EACH
            more_before.v = more_before.v + k.load(other, i32)
            ties_before.v = ties_before.v + k.load(other, i32, offset=4)
        wanted = N_TOP - all_more  # of the keys equal to the last
        place = k.var(more_before.v + k.min(ties_before.v, wanted))
        left = k.var(k.max(wanted - ties_before.v, k.const(0, i32)))
        with k.if_(more + k.min(ties, left.v) > 0):
            for i in range(N_TOP):
                key = k.extract(self.keys[i // WIDTH].v, i % WIDTH)
                tie = key.eq(last) & (left.v > 0)
                with k.if_((key > last) | tie):
                    at = to + place.v.to(i64) * 4
                    k.store(at, key)
                    k.store(at, id_at(k.i64(i)), offset=IDS)
                    place.v = place.v + 1
                    left.v = left.v - k.select(tie, k.const(1, i32), k.const(0, i32))
        self.simt.barrier(k)
        return top

    def sum_up(self, value: Val) -> Val:
        """Emit the sum of ``value`` over the threads, in f64; only the first thread gets it."""
        k = self.k
        here = self.shared + EACH
        k.store(here + self.tid * 8, value)
        self.simt.barrier(k)
        total = k.var(k.const(0.0, f64))
        with k.if_(self.tid.eq(0)), k.loop(THREADS) as t:
            total.v = total.v + k.load(here + t * 8, f64)
        return total.v


class _PerTopBlock(PerBlock):
    """Mixin: a kernel with one ``_TopBlock`` per item."""

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def shared_bytes(self) -> int:
        return SHARED


@dataclass(frozen=True)
class SimtTop(_PerTopBlock, TopLogitsKernel):
    """GPU kernel of ``TopLogitsKernel``. Items: SAMPLED records x slices."""

    op: ClassVar[str] = "simt_top"

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = _TopBlock(k, isa)
        item = frame.begin
        n_slices = (frame.n + (SLICE - 1)) // SLICE
        looked = load_sampled(k, frame, item // n_slices)
        start = item % n_slices * SLICE + block.tid * N_TOP
        row = frame.x + (looked.row * frame.stride + start) * 4
        self._load(block, row, frame.n - start)
        with k.if_(looked.mask.eq(0).eq(0)):
            self._rule_out(block, frame.block + looked.mask + start // 8, frame.n - start)
        out = frame.out + item * PARTIAL.itemsize
        top = block.choose(looked, lambda i: (start + i).to(i32), out)
        highest = k.max(to_float(k, top), LOWEST)
        with k.if_(block.tid.eq(0)):
            k.store(out, highest, offset=MAX)
        with k.if_(looked.total):
            part = k.zero(f32 * WIDTH)
            for key in block.keys:
                part = part + math.exp(k, to_float(k, key.v) - k.splat(highest, part.ty))
            total = block.sum_up(k.sum(part.to(f64)))
            with k.if_(block.tid.eq(0)):
                k.store(out, total, offset=TOTAL)

    def _load(self, block: _TopBlock, row: Val, n: Val) -> None:
        """Emit: load this thread's first ``n`` logits, at the address ``row``, as keys; keys past
        them stay at the lowest, LEAST_KEY.
        """
        k = block.k
        index = block.k.const(range(WIDTH), i32 * WIDTH)
        for i, key in enumerate(block.keys):
            with k.if_(n > i * WIDTH):
                found = to_key(k, k.load(row, f32 * WIDTH, offset=4 * WIDTH * i, align=4 * WIDTH))
                here = index < k.splat(k.min(n - i * WIDTH, k.i64(WIDTH)).to(i32), index.ty)
                key.v = k.select(here, found, key.v)

    def _rule_out(self, block: _TopBlock, mask: Val, n: Val) -> None:
        """Emit: set this thread's first ``n`` keys to LEAST_KEY where their bit in ``mask`` (an
        address) is 0, except the keys of NaN and +infinity, which signal an error.
        """
        k = block.k
        ty = i32 * WIDTH
        for i, key in enumerate(block.keys):
            at, bit = divmod(i * WIDTH, WORD)
            with k.if_(n > i * WIDTH):
                word = k.splat(k.load(mask, u32, offset=4 * at), u32 * WIDTH)
                bits = k.const([1 << bit + j for j in range(WIDTH)], word.ty)
                ruled_out = (word & bits).eq(0) & (key.v < KEY_INF)
                key.v = k.select(ruled_out, k.const(LEAST_KEY, ty), key.v)


@dataclass(frozen=True)
class SimtJoinTop(_PerTopBlock, JoinTop):
    """GPU kernel of ``JoinTop``. Items: SAMPLED records."""

    op: ClassVar[str] = "simt_top_join"

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        block = _TopBlock(k, isa)
        item = frame.begin
        size = PARTIAL.itemsize
        n_slices = (frame.n + (SLICE - 1)) // SLICE
        looked = load_sampled(k, frame, item)
        source = frame.partials + item * n_slices * size
        mine = source + block.tid * size
        with k.if_(block.tid < n_slices):
            for i, key in enumerate(block.keys):
                key.v = k.load(mine, i32 * WIDTH, offset=4 * WIDTH * i, align=4 * WIDTH)
        chosen = block.shared + CHOSEN
        out = frame.out + item * RESULT.itemsize

        def id_at(i: Val) -> Val:
            return k.load(mine + i * 4, i32, offset=IDS)

        top = block.choose(looked, id_at, chosen)
        with k.if_(block.tid < N_TOP):
            own = k.load(chosen + block.tid * 4, i32)
            rank = k.var(k.i64(0))
            with k.loop(N_TOP) as other:
                its = k.load(chosen + other * 4, i32)
                before = (its > own) | (its.eq(own) & (other < block.tid))
                rank.v = rank.v + k.select(before, k.i64(1), k.i64(0))
            k.store(out + rank.v * 4, to_float(k, own))
            k.store(out + rank.v * 4, k.load(chosen + block.tid * 4, i32, offset=IDS), offset=IDS)
        with k.if_(looked.total & block.tid.eq(0)):
            highest = k.max(to_float(k, top), LOWEST)
            total = k.var(k.const(0.0, f64))
            with k.loop(n_slices) as slice_:
                part = source + slice_ * size
                gain = math.exp(k, k.load(part, f32, offset=MAX) - highest)
                total.v = total.v + k.load(part, f64, offset=TOTAL) * gain.to(f64)
            k.store(out, total.v, offset=TOTAL)


def swap_top(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return a top-logits step with SimtTop."""
    return replace(step, spec=convert_spec(SimtTop, step.spec))


def swap_join(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return the step that joins top logits with SimtJoinTop."""
    return replace(step, spec=convert_spec(SimtJoinTop, step.spec))

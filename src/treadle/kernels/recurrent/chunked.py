"""Recurrences by chunks of 32 tokens on matrix registers.

``S`` is the state before a chunk, ``left[t]`` the product of the decays up to token t, and
``left[t, s]`` of those after token s up to t. Token s adds ``key_s new_s^T``, and token t's output
is::

    left[t] query_t S + sum over s <= t of left[t, s] (query_t key_s) new_s

(Dao and Gu, 2024; Yang and others, 2024). With the update of the state, that is three products on
matrix registers. Products of queries and keys are common to a group of heads, and computed before
(``chunk_keys.py``). Register operands are bf16, as in products of many tokens; states and sums are
f32.

Chunks are aligned to a run's rows. At the ends of a sequence they contain tokens of others, which
get rate 0 and decay 1. Sequences with few tokens are processed one token at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import ClassVar, NamedTuple

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32
from treadle.kernels.activation_layout import BLOCK, in_bf16
from treadle.kernels.matmul.matrix import EDGE, NEXT_LEVEL, REGISTER, SIDE
from treadle.kernels.matmul.matrix_registers import paired, turn
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.chunk_keys import (
    CHUNK,
    DOTS,
    PITCH,
    ChunkKeys,
    load_pair,
    multiply_block,
    sums,
)
from treadle.kernels.recurrent.rules import Delta, Mamba2
from treadle.kernels.recurrent.scan import Scan, ScanItem
from treadle.kernels.run_state import LINE, round_up
from treadle.kernels.spec import Frame

FEW = 8  # fewest tokens of a sequence for chunks; fewer are faster one by one
TY = f32 * SIDE
# Remaining decays below this count as zero. The product of two others is then never denormal, which
# would be a hundred times slower.
SMALLEST_UPDATE = 2.0**-63
HALVES = range(CHUNK // SIDE)


class ChunkScratch(NamedTuple):
    """Byte offsets in scratch, after the registers' configuration and the state. In bf16: the state
    (``narrow``); the update of each token (``new``); the update decayed to the chunk's end
    (``decayed``); the weights of tokens for each other. In f32: the outputs (``outputs``). With
    ``solves``: the keys' products with the state and with each other, and the updates. Then for
    each token: the first rate, the decay since the chunk's start, and the decay until its end.
    """

    narrow: int
    new: int
    decayed: int
    weights: int
    outputs: int
    state_products: int
    key_products: int
    added: int
    first: int
    decay_before: int
    decay_after: int
    end: int


@dataclass(frozen=True)
class Chunked(Scan):
    """Base of the recurrences by chunks. The argument ``chunks`` is the output of ``ChunkKeys`` for
    this run. Items: sequences x heads x 32 columns.
    """

    state_at: ClassVar[int] = LINE
    solves: ClassVar[bool] = False

    @property
    def needs(self) -> set[str]:
        return super().needs | {"chunks"}

    @property
    def staged(self) -> bool:
        return True

    @property
    def keys(self) -> ChunkKeys:
        """The spec of the kernel that wrote ``chunks``."""
        return ChunkKeys(self.n_state, self.n_group, self.solves)

    @property
    def places(self) -> ChunkScratch:
        register = 2 * REGISTER
        solved = DOTS if self.solves else 0
        sizes = [self.n_state * 2 * CHUNK, *[register] * 3, DOTS, *[solved] * 3]
        start = self.state_at + self.n_state * PITCH
        return ChunkScratch(*accumulate([*sizes, *[PITCH] * 3], initial=start))

    def scratch(self, lanes: int) -> int:
        return self.places.end

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        matrix = isa.matrix
        assert matrix is not None, isa.name
        matrix.begin(k, frame.scratch)
        ty = f32 * min(isa.lanes, self.tile)
        with (
            self._items(k, frame, ty) as here,
            k.if_else(here.n_tokens < FEW) as (few, many),
        ):
            with few:
                self._one_by_one(k, frame, here, ty, 0)
            with many:
                last = (here.token + here.n_tokens + (CHUNK - 1)) // CHUNK
                with k.loop(last, start=here.token // CHUNK) as c:
                    chunk = (c * self.n_group + here.group) * self.keys.n_bytes
                    Chunk(k, self, frame, here, c * CHUNK, frame.chunks + chunk).run()
        matrix.end(k)


class Chunk:
    """Emits one chunk: 32 columns of a head's state, and the 32 tokens from row ``first`` on."""

    def __init__(
        self,
        k: Builder,
        spec: Chunked,
        frame: Frame,
        here: ScanItem,
        first: Val,
        chunk: Val,
    ) -> None:
        assert k.isa.matrix is not None, k.isa.name
        self.k = k
        self.matrix = k.isa.matrix
        self.spec = spec
        self.chunk = chunk
        self.at = spec.places
        self.scratch = frame.scratch
        self.begin = k.max(here.token - first, k.i64(0))
        self.end = k.min(here.token + here.n_tokens - first, k.i64(CHUNK))
        # Addresses for the chunk's first token; LLVM would load arguments in every iteration.
        self.stride, self.rates_stride, self.out_stride = (
            stride * 4 for stride in (frame.stride, frame.rates_stride, frame.out_stride)
        )
        self.values = frame.x + (first * self.stride + (frame.values + here.column) * 4)
        self.rates = frame.rates + (first * self.rates_stride + here.head * 4)
        self.out = frame.out + (first * self.out_stride + here.column * 4)
        skip = spec.skip(k, frame, here)
        self.skip = None if skip is None else k.splat(skip, TY)

    def run(self) -> None:
        self._rates()
        self._narrow_state()
        self._products("see", self._multiply_state)
        if self.spec.solves:
            self._solve()
        self._add()
        k = self.k
        whole = (self.end - self.begin).eq(CHUNK)
        with k.if_else(whole) as (yes, no):
            with yes:
                self._add_updates(self.out, self.out_stride)
            with no:
                seen = self.scratch + self.at.outputs
                self._add_updates(seen, k.i64(PITCH))
                with k.loop(self.end, start=self.begin) as t:
                    for j, v in enumerate(self._rows(seen + t * PITCH)):
                        k.store(self.out + t * self.out_stride, v, offset=LINE * j)

    def _value(self, t: Val) -> list[Val]:
        """Return token ``t``'s 32 values (its columns of the head); if the token belongs to another
        sequence, those of this sequence's nearest token.
        """
        row = self.k.max(self.begin, self.k.min(t, self.end - 1))
        return self._rows(self.values + row * self.stride)

    def _number(self, place: int, t: Val) -> Val:
        """Load token ``t``'s f32 from the array at byte offset ``place`` in scratch."""
        return self.k.load(self.scratch + place + t * 4, f32)

    def _scale_row(self, place: int, t: Val, row: list[Val]) -> list[Val]:
        """Multiply ``row`` by token ``t``'s f32 from the array at byte offset ``place``."""
        by = self.k.splat(self._number(place, t), TY)
        return [v * by for v in row]

    def _rows(self, at: Val) -> list[Val]:
        """Load the 32 f32 at ``at``, as two vectors."""
        return [self.k.load(at, TY, offset=LINE * j) for j in HALVES]

    def _prefetch_value(self, t: Val, j: Val) -> None:
        """Prefetch line ``j`` of the value of token ``t`` of the next chunk: rows are far apart. A
        core has few outstanding misses, so prefetches are spread over the chunk.
        """
        at = self.values + ((t + CHUNK) * self.stride + j * LINE)
        self.k.prefetch(at, NEXT_LEVEL)

    def _prefetch_output(self, t: Val, j: int) -> None:
        """Prefetch line ``j`` of the output of token ``t`` of the next chunk, for writing."""
        at = self.out + ((t + CHUNK) * self.out_stride + j * LINE)
        self.k.prefetch(at, NEXT_LEVEL, write=True)

    def _rates(self) -> None:
        """Store each token's first rate and decays, and the weights of tokens for each other: token
        t's row has the weight of each earlier token's update in t's output (with ``solves`` also in
        its update). Rows of the first 16 tokens have no weights for the last 16.
        """
        k = self.k
        at = self.at
        scratch = self.scratch
        zero = k.const(0.0, f32)
        one = k.const(1.0, f32)
        since = k.var(one)
        left = [k.var(k.zero(TY)) for _ in HALVES]
        pad = 4 * round_up(self.spec.n_head, COLUMNS)
        iota = k.const(range(SIDE), i32 * SIDE)
        places: list[tuple[int, int | None]] = [(self.spec.keys.query_products_off, None)]
        if self.spec.solves:
            places.append((self.spec.keys.key_products_off, at.key_products))
        for half in HALVES:
            with k.loop(SIDE * (half + 1), start=SIDE * half) as t:
                self._prefetch_output(t, 0)
                own = (t >= self.begin) & (t < self.end)
                row = k.max(self.begin, k.min(t, self.end - 1))
                rates = self.rates + row * self.rates_stride
                first = k.select(own, k.load(rates, f32), zero)
                decay = self._flush_tiny(k.select(own, k.load(rates, f32, offset=pad), one))
                since.v = self._flush_tiny(since.v * decay)
                k.store(scratch + at.first + t * 4, first)
                k.store(scratch + at.decay_before + t * 4, since.v)
                keep = k.splat(decay, TY)
                for j in range(half + 1):
                    left[j].v = self._flush_tiny(left[j].v * keep)
                last = iota.eq(k.splat((t - SIDE * half).to(i32), iota.ty))
                left[half].v = k.select(last, k.const(1.0, TY), left[half].v)
                for source, to in places:
                    seen = self._rows(self.chunk + source + t * PITCH)[: half + 1]
                    weights = [s * var.v for s, var in zip(seen, left, strict=False)]
                    weights += [k.zero(TY)] * (1 - half)
                    if to is None:
                        line = in_bf16(k, k.concat(*weights), 1)[0]
                        k.store(scratch + at.weights + t * LINE, line)
                    else:
                        for j, v in enumerate(weights[: half + 1]):
                            k.store(scratch + to + t * PITCH, v, offset=LINE * j)
        for j, var in enumerate(left):
            k.store(scratch + at.decay_after, var.v, offset=LINE * j)
        turn(k, "weights", scratch + at.weights, 2)

    def _flush_tiny(self, v: Val) -> Val:
        """Return ``v``, or zero where it is below SMALLEST_UPDATE."""
        return self.k.select(v < SMALLEST_UPDATE, self.k.zero(v.ty), v)

    def _narrow_state(self) -> None:
        """Store the state in bf16 (``narrow``), and multiply the f32 state by the whole chunk's
        decay.
        """
        k = self.k
        state = self.scratch + self.spec.state_at
        keep = k.splat(self._number(self.at.decay_before, k.i64(CHUNK - 1)), TY)
        narrow = self.scratch + self.at.narrow
        ask = -(-2 * CHUNK // (self.spec.n_state // 2))
        with k.loop(self.spec.n_state // BLOCK) as b, k.loop(SIDE) as pair:
            for more in range(ask):
                line = (b * SIDE + pair) * ask + more
                self._prefetch_value(line // 2, line % 2)
            at = state + (b * BLOCK + pair * 2) * PITCH
            rows = [self._rows(at + j * PITCH) for j in range(2)]
            to = narrow + (b * (2 * REGISTER) + pair * LINE)
            for h, (even, odd) in enumerate(zip(*rows, strict=True)):
                k.store(to, paired(k, even, odd), offset=h * REGISTER)
            for j, row in enumerate(rows):
                for h, v in enumerate(row):
                    k.store(at, v * keep, offset=j * PITCH + h * LINE)

    def _solve(self) -> None:
        """Compute the update of each token (``added``): its first rate times its value less the
        product of its key with the state and with the updates of earlier tokens. Four tokens at a
        time, in f32.
        """
        k = self.k
        at = self.at
        scratch = self.scratch
        n = 4
        with k.loop(CHUNK, step=n) as start:
            tokens = [start + i for i in range(n)]
            rows = []
            for t in tokens:
                known = self._scale_row(
                    at.decay_before, t, self._rows(scratch + at.state_products + t * PITCH)
                )
                both = zip(self._value(t), known, strict=True)
                rows.append([k.var(v - seen) for v, seen in both])
            among = [scratch + at.key_products + t * PITCH for t in tokens]
            with k.loop(start) as s:
                new = self._rows(scratch + at.added + s * PITCH)
                for row, weights in zip(rows, among, strict=True):
                    by = k.splat(-k.load(weights + s * 4, f32), TY)
                    for var, v in zip(row, new, strict=True):
                        var.v = k.fma(v, by, var.v)
            solved: list[list[Val]] = []
            for i, t in enumerate(tokens):
                vectors = [var.v for var in rows[i]]
                for at_s, new in enumerate(solved):
                    by = k.splat(-k.load(among[i] + (start + at_s) * 4, f32), TY)
                    vectors = [k.fma(v, by, x) for v, x in zip(new, vectors, strict=True)]
                solved.append(self._scale_row(at.first, t, vectors))
                for j, x in enumerate(solved[-1]):
                    k.store(scratch + at.added + t * PITCH, x, offset=LINE * j)

    def _add(self) -> None:
        """Store for each token its update of the state (``new``), the update decayed to the chunk's
        end (``decayed``), and its output from the state before the chunk (``outputs``).
        """
        k = self.k
        at = self.at
        scratch = self.scratch
        with k.loop(CHUNK // 2) as pair:
            new = []
            kept = []
            for t in (pair * 2, pair * 2 + 1):
                self._prefetch_output(t, 1)
                row = scratch + t * PITCH
                seen = self._scale_row(at.decay_before, t, self._rows(row + at.outputs))
                if self.spec.solves:
                    new.append(self._rows(row + at.added))
                else:
                    value = self._value(t)
                    new.append(self._scale_row(at.first, t, value))
                if self.skip is not None:
                    seen = [k.fma(v, self.skip, y) for v, y in zip(value, seen, strict=True)]
                for j, y in enumerate(seen):
                    k.store(row + at.outputs, y, offset=LINE * j)
                kept.append(self._scale_row(at.decay_after, t, new[-1]))
            for place, both in ((at.new, new), (at.decayed, kept)):
                for h, (even, odd) in enumerate(zip(*both, strict=True)):
                    to = scratch + place + pair * LINE
                    k.store(to, paired(k, even, odd), offset=h * REGISTER)

    # -- products -------------------------------------------------------------------------------

    def _products(self, name: str, build: Callable[..., None], *more: Val) -> None:
        """Emit ``build(k, scratch, chunk, *more)`` as the function ``name``, in which matrix
        registers may be used (``MatrixUnit.scope``).
        """
        self.matrix.scope(self.k, name, (self.scratch, self.chunk, *more), build)

    def _multiply_state(self, k: Builder, scratch: Val, chunk: Val) -> None:
        """Store the products of queries (and with ``solves`` of keys) with the state."""
        keys = self.spec.keys
        both = [(0, self.at.outputs)]
        if self.spec.solves:
            both.append((keys.keys_off, self.at.state_products))
        for source, to in both:
            left = chunk + source, REGISTER, keys.rows_bytes // 2
            right = scratch + self.at.narrow, 2 * REGISTER, REGISTER
            multiply_block(k, self.spec.n_state // BLOCK, left, right, scratch + to)

    def _add_updates(self, out: Val, stride: Val) -> None:
        """Add the products of queries with the updates to the outputs, 32 rows at ``out``,
        ``stride`` bytes apart; and add the updates to the state.
        """

        def multiply(k: Builder, scratch: Val, chunk: Val, out: Val, stride: Val) -> None:
            for c, place in enumerate(sums(scratch + self.at.outputs, PITCH)):
                self.matrix.load(k, c, place, PITCH)
            load_pair(k, 4, scratch + self.at.weights, REGISTER)
            load_pair(k, 6, scratch + self.at.new, REGISTER)
            self.matrix.dots_bf16(k)
            for c, place in enumerate(sums(out, stride)):
                self.matrix.store(k, c, place, stride)
            load_pair(k, 6, scratch + self.at.decayed, REGISTER)
            with k.loop(self.spec.n_state // EDGE) as b:
                keys = chunk + (b * (2 * REGISTER) + self.spec.keys.transposed_off)
                load_pair(k, 4, keys, REGISTER)
                state = sums(scratch + (b * (PITCH * EDGE) + self.spec.state_at), PITCH)
                for c, place in enumerate(state):
                    self.matrix.load(k, c, place, PITCH)
                self.matrix.dots_bf16(k)
                for c, place in enumerate(state):
                    self.matrix.store(k, c, place, PITCH)

        self._products("learn", multiply, out, stride)


@dataclass(frozen=True)
class ChunkedMamba2(Chunked, Mamba2):
    """Mamba-2's recurrence (``Mamba2``) by chunks."""

    op: ClassVar[str] = "mamba2_chunks"


@dataclass(frozen=True)
class ChunkedDelta(Chunked, Delta):
    """The gated delta rule (``Delta``) by chunks."""

    op: ClassVar[str] = "delta_chunks"
    solves: ClassVar[bool] = True

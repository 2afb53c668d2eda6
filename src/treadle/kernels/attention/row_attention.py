"""Attention to rows: one row a token within a window, and one row for each unit of earlier tokens
(DeepSeek V4, 2026). A row is key and value of all heads.

An item is one token and some of its heads. It unpacks rows to f32, a block at a time, for all of
these heads, and keeps an online softmax of each head in a lane. A query's order of sums does not
depend on the rest of the batch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, f32, i32, i64
from treadle.kernels.attention.indexer import Choose
from treadle.kernels.attention.page_layout import PageLayout
from treadle.kernels.attention.row_pages import (
    RowKernel,
    TokenPlace,
    place_of,
    rows_ref,
    token_places,
)
from treadle.kernels.reduce import reduce_all
from treadle.kernels.spec import Args, Frame, whole_rows, widest

BLOCK_ROWS = 16  # rows that are unpacked together
MOST_HEADS = 8  # heads whose products are computed together: their sums stay in registers
SCORED = 512  # rows that an item of scores has


def unpack_row(
    k: Builder, page: PageLayout, place: TokenPlace, row: Val, unit: int, to: Val, *pool: Any
) -> None:
    """Load row number ``row`` of a sequence's pool in which ``unit`` tokens share a row, and store
    it as f32 ``[head_dim]`` at ``to``. ``pool``: number of the pool, its address, bytes of a page,
    and the layer's byte offset.
    """
    side = page.keys
    number, at = place_of(row, unit)
    home = place.page_address(number, *pool)
    width = widest(k.isa.lanes, side.fmt.run if side.fmt.scaled else side.dims)
    with k.loop(side.dims, step=width) as d:
        k.store(to, side.load_values(k, home, at, d, width), offset=d * 4)


def dots(k: Builder, queries: Val, pitch: int, n: int, row: Val, dims: int, stat: Ty) -> Val:
    """Return the inner products of ``n`` queries, ``pitch`` bytes apart, with ``row``, f32
    ``[dims]``: query h's in lane h of a vector of type ``stat``.
    """
    width = widest(k.isa.lanes, dims)
    ty = f32 * width
    sums = [k.var(k.zero(ty)) for _ in range(n)]
    with k.loop(dims, step=width) as d:
        x = k.load(row, ty, offset=d * 4)
        for h, total in enumerate(sums):
            total.v = k.fma(k.load(queries, ty, offset=d * 4 + h * pitch), x, total.v)
    return across(k, [total.v for total in sums], operator.add, stat)


def across(k: Builder, vectors: list[Val], op: Callable[[Val, Val], Val], stat: Ty) -> Val:
    """Reduce ``vectors[i]`` by ``op`` to one value, in lane i of a vector of type ``stat``."""
    n = stat.lanes
    vectors = vectors + vectors[:1] * (n - len(vectors))
    at_once = min(vectors[0].ty.lanes, n)
    if at_once == 1:
        return k.concat(*vectors)
    found = [
        k.split(reduce_all(k, vectors[at : at + at_once], op), at_once)[0]
        for at in range(0, n, at_once)
    ]
    return k.concat(*found)


def heads_together(n_head: int) -> int:
    """Return the number of heads that an item processes: the largest divisor of ``n_head`` that is
    at most MOST_HEADS.
    """
    return next(n for n in range(min(n_head, MOST_HEADS), 0, -1) if n_head % n == 0)


def lane_per_head(n: int) -> Ty:
    """Return the type of an f32 vector with a lane for each of ``n`` heads: a power of two, at
    least 4.
    """
    return f32 * max(4, 1 << (n - 1).bit_length())


@dataclass(frozen=True)
class RowAttention(RowKernel):
    """Compute the attention of each token's ``n_head`` queries to the rows of the last ``window``
    tokens, and to the rows of the complete units (of ``unit`` tokens) up to its own position.
    Items: tokens x groups of heads.

    With ``top``, a token attends only to the units in its row of ``chosen``, i32 ``[N,
    chosen_stride]``: their number, then their row numbers. With ``block`` all tokens of a sequence
    in the batch see each other, and the ``window`` tokens before the first of them. ``sinks``: for
    each head a score of a key without a value.
    """

    op: ClassVar[str] = "row_attention"
    args = Args(
        "qkv:in sinks:const pool:const units:const? chosen:in? out:out stride out_stride "
        "page_bytes layer_off units_page_bytes:? units_layer_off:? chosen_stride:?"
    )
    kv: str  # formats of keys and values, as in ``kv_formats``
    n_head: int
    head_dim: int
    window: int
    pool: int = 0  # number of the page pool
    unit: int = 0  # 0: there are none
    units: int = 0  # number of the pool with the units' rows
    top: int = 0
    block: bool = False

    @property
    def needs(self) -> set[str]:
        asked = {"units", "units_page_bytes", "units_layer_off"} if self.unit else set()
        return self.args.required | asked | ({"chosen", "chosen_stride"} if self.top else set())

    @property
    def compile_ms(self) -> float:
        return 120.0

    @property
    def heads(self) -> int:
        """Number of heads in an item."""
        return heads_together(self.n_head)

    @property
    def n_groups(self) -> int:
        return self.n_head // self.heads

    @property
    def stat(self) -> Ty:
        """Type of the vector with a lane for each head of an item."""
        return lane_per_head(self.heads)

    @property
    def page(self) -> PageLayout:
        return self.page_of(1)

    def scratch(self, lanes: int) -> int:
        rows = 4 * (BLOCK_ROWS + self.heads) * self.head_dim
        return rows + BLOCK_ROWS * self.stat.n_bytes + 256

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        end = n_before + n_tokens
        n_rows = min(end, n_tokens - 1 + self.window)
        n_seen = sum(min(p + 1, self.window) for p in range(n_before, end))
        if self.block:
            n_rows = min(n_before, self.window) + n_tokens
            n_seen = n_tokens * n_rows
        if self.unit:
            most = self.top or end
            n_rows += min(end // self.unit, most * n_tokens)
            n_seen += sum(min((p + 1) // self.unit, most) for p in range(n_before, end))
        return n_rows * self.row_bytes, 4 * n_seen * self.n_head * self.head_dim

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as index:
            _Item(k, self, frame, index // self.n_groups, index % self.n_groups).run()

    def run_ref(self, args: Any, run: Any) -> None:
        dims = self.head_dim
        n = int(run["n_tokens"])
        width = self.n_head * dims
        q_all = args.qkv.reshape(-1, args.stride)[:n, :width].astype(np.float64)
        out = args.out.reshape(-1, args.out_stride)
        units = token_places(run, self.units) if self.unit else []
        spans = [
            (int(part["position"]), int(part["n_tokens"]))
            for part in run.parts
            for _ in range(int(part["n_tokens"]))
        ]
        for i, (row, own, pages) in enumerate(token_places(run, self.pool)):
            recent = np.arange(max(0, own + 1 - self.window), own + 1)
            if self.block:
                first, n_own = spans[i]
                recent = np.arange(max(0, first - self.window), first + n_own)
            at = args.pool, args.page_bytes, args.layer_off
            keys = rows_ref(self.page_of(1), at, pages, recent, 1)
            if self.unit:
                which = np.arange((own + 1) // self.unit)
                if self.top:
                    listed = args.chosen[row * args.chosen_stride :][: args.chosen_stride]
                    which = listed[1 : 1 + int(listed[0])].astype(np.int64)
                at = args.units, args.units_page_bytes, args.units_layer_off
                more = rows_ref(self.page_of(self.unit), at, units[i][2], which, self.unit)
                keys = np.concatenate([keys, more])
            q = q_all[row].reshape(self.n_head, dims)
            score = q @ keys.T
            sinks = args.sinks[: self.n_head].astype(np.float64)
            most = np.maximum(score.max(-1), sinks)
            p = np.exp(score - most[:, None])
            total = p.sum(-1) + np.exp(sinks - most)
            out[row, :width] = (p @ keys / total[:, None]).ravel()


class _Item:
    """Emits the attention of one token and some of its heads."""

    def __init__(
        self, k: Builder, spec: RowAttention, frame: Frame, token: Val, group: Val
    ) -> None:
        self.k = k
        self.spec = spec
        self.frame = frame
        self.token = token
        self.place = TokenPlace(k, frame, token)
        dims = spec.head_dim
        first = group * spec.heads
        self.q = frame.qkv + (token * frame.stride + first * dims) * 4
        self.out = frame.out + (token * frame.out_stride + first * dims) * 4
        self.rows = frame.scratch
        self.o = self.rows + 4 * BLOCK_ROWS * dims
        self.p = self.o + 4 * spec.heads * dims
        self.width = widest(k.isa.lanes, dims)
        sinks = k.load_first(frame.sinks + first * 4, spec.stat, spec.heads)
        self.m = k.var(sinks * math.LOG2_E)
        self.total = k.var(k.const(1.0, spec.stat))

    def run(self) -> None:
        k = self.k
        spec = self.spec
        frame = self.frame
        with k.loop(spec.heads * spec.head_dim, step=self.width) as d:
            k.store(self.o, k.zero(f32 * self.width), offset=d * 4)
        n_keys = self.place.position + 1
        pool = spec.pool, frame.pool, frame.page_bytes, frame.layer_off
        stop = self.place.stop if spec.block else n_keys
        start = k.max((self.place.first if spec.block else n_keys) - spec.window, 0)
        self._run(start, stop, lambda row: row, 1, pool)
        if spec.unit:
            pool = spec.units, frame.units, frame.units_page_bytes, frame.units_layer_off
            listed = None
            n_rows = n_keys // spec.unit
            if spec.top:
                listed = frame.chosen + self.token * (frame.chosen_stride * 4)
                n_rows = k.load(listed, i32).to(i64)

            def number(row: Val) -> Val:
                if listed is None:
                    return row
                return k.load(listed, i32, offset=row * 4 + 4).to(i64)

            self._run(k.i64(0), n_rows, number, spec.unit, pool)
        inverse = 1.0 / self.total.v
        for h in range(spec.heads):
            gain = k.splat(k.extract(inverse, h), f32 * self.width)
            with k.loop(spec.head_dim, step=self.width) as d:
                at = d * 4 + h * spec.head_dim * 4
                k.store(self.out, k.load(self.o, gain.ty, offset=at) * gain, offset=at)

    def _run(
        self, start: Val, stop: Val, number: Callable[[Val], Val], unit: int, pool: tuple[Any, ...]
    ) -> None:
        """Add the pool's rows ``number(i)``, i from ``start`` to ``stop - 1``, to the online
        softmax, BLOCK_ROWS at a time. ``unit``, ``pool``: as in ``unpack_row``.
        """
        k = self.k
        page = self.spec.page_of(unit)
        row_bytes = 4 * self.spec.head_dim
        with k.loop(stop, start=start, step=BLOCK_ROWS) as first:
            n = k.min(stop - first, BLOCK_ROWS)
            with k.loop(n) as j:
                to = self.rows + j * row_bytes
                unpack_row(k, page, self.place, number(first + j), unit, to, *pool)
            self._block(n)

    def _block(self, n: Val) -> None:
        """Add the first ``n`` unpacked rows in scratch to the online softmax."""
        k = self.k
        spec = self.spec
        stat = spec.stat
        dims = spec.head_dim
        top = k.var(self.m.v)
        with k.loop(n) as j:
            row = self.rows + j * (4 * dims)
            score = dots(k, self.q, 4 * dims, spec.heads, row, dims, stat) * math.LOG2_E
            k.store(self.p, score, offset=j * stat.n_bytes)
            top.v = k.max(top.v, score)
        correction = math.exp2(k, self.m.v - top.v)
        self.m.v = top.v
        total = k.var(self.total.v * correction)
        with k.loop(n) as j:
            weight = math.exp2(k, k.load(self.p, stat, offset=j * stat.n_bytes) - top.v)
            k.store(self.p, weight, offset=j * stat.n_bytes)
            total.v = total.v + weight
        self.total.v = total.v
        ty = f32 * self.width
        gains = [k.splat(k.extract(correction, h), ty) for h in range(spec.heads)]
        with k.loop(dims, step=self.width) as d:
            at = [d * 4 + h * dims * 4 for h in range(spec.heads)]
            sums = [k.var(k.load(self.o, ty, offset=o) * g) for o, g in zip(at, gains, strict=True)]
            with k.loop(n) as j:
                row = k.load(self.rows, ty, offset=j * (4 * dims) + d * 4)
                for h, each in enumerate(sums):
                    weight = k.load(self.p, f32, offset=j * stat.n_bytes + 4 * h)
                    each.v = k.fma(k.splat(weight, ty), row, each.v)
            for o, each in zip(at, sums, strict=True):
                k.store(self.o, each.v, offset=o)


# -- the choice of rows ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RowScores(RowKernel):
    """Compute an indexer's scores of the rows of complete units (of ``unit`` tokens) that a query
    sees, f32 ``[N, scores_stride]``: the sum over heads of ``weight * max(0, q . row)``, times
    ``scale``.

    A query that sees at most ``top`` rows needs no choice: its scores are not written. Items:
    tokens x ``slices``, each of SCORED rows.
    """

    op: ClassVar[str] = "row_scores"
    args = Args(
        "q:in weights:in pool:const scores:out stride weights_stride weights_column scores_stride "
        "page_bytes layer_off"
    )
    kv: str  # formats of keys and values, as in ``kv_formats``
    n_head: int
    head_dim: int
    unit: int
    top: int
    slices: int
    scale: float = 1.0
    pool: int = 0  # number of the page pool

    @property
    def compile_ms(self) -> float:
        return 60.0

    def scratch(self, lanes: int) -> int:
        return 4 * self.head_dim + 256

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        end = n_before + n_tokens
        if end // self.unit <= self.top:
            return 0, 0
        n_seen = sum((p + 1) // self.unit for p in range(n_before, end))
        return end // self.unit * self.row_bytes, 2 * n_seen * self.n_head * self.head_dim

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        n = heads_together(self.n_head)
        stat = lane_per_head(n)
        pitch = 4 * self.head_dim
        row = frame.scratch
        pool = self.pool, frame.pool, frame.page_bytes, frame.layer_off
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.slices
            place = TokenPlace(k, frame, token)
            n_rows = (place.position + 1) // self.unit
            first = item % self.slices * SCORED
            q = frame.q + token * (frame.stride * 4)
            weights = frame.weights + (token * frame.weights_stride + frame.weights_column) * 4
            out = frame.scores + token * (frame.scores_stride * 4)
            last = k.select(n_rows > self.top, k.min(n_rows, first + SCORED), k.i64(0))
            with k.loop(last, start=first) as number:
                unpack_row(k, self.page, place, number, self.unit, row, *pool)
                total = k.var(k.zero(stat))
                with k.loop(self.n_head // n) as group:
                    queries = q + group * (n * pitch)
                    products = dots(k, queries, pitch, n, row, self.head_dim, stat)
                    weight = k.load_first(weights + group * (4 * n), stat, n)
                    total.v = k.fma(k.max(products, 0.0), weight, total.v)
                k.store(out, k.sum(total.v) * self.scale, offset=number * 4)

    def run_ref(self, args: Any, run: Any) -> None:
        q_all = args.q.reshape(-1, args.stride)
        weights = args.weights.reshape(-1, args.weights_stride)[:, args.weights_column :]
        scores = whole_rows(args.scores.reshape(-1), args.scores_stride)
        for row, own, pages in token_places(run, self.pool):
            n_rows = (own + 1) // self.unit
            if n_rows <= self.top:
                continue
            at = args.pool, args.page_bytes, args.layer_off
            keys = rows_ref(self.page, at, pages, np.arange(n_rows), self.unit)
            q = q_all[row, : self.n_head * self.head_dim].astype(np.float64)
            products = np.maximum(q.reshape(self.n_head, -1) @ keys.T, 0.0)
            w = weights[row, : self.n_head].astype(np.float64)
            scores[row, :n_rows] = w @ products * self.scale


@dataclass(frozen=True)
class RowChoice(Choose):
    """Choose the ``top`` rows of complete units with the largest scores for each query: ``chosen``
    becomes i32 ``[N, chosen_stride]``, their number, then their row numbers, ascending; all rows if
    there are at most ``top``. ``scores [N, scores_stride]`` (of ``RowScores``) are read, and used
    as scratch. Items: tokens.
    """

    op: ClassVar[str] = "choose_rows"

    def units(self, n_keys: Any) -> Any:
        return n_keys // self.unit

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as token:
            n_rows = self.units(self._position(k, frame, token) + 1)
            scores = frame.scores + token * (frame.scores_stride * 4)
            listed = frame.chosen + token * (frame.chosen_stride * 4)
            with k.if_else(n_rows <= self.top) as (every, some):
                with every:
                    k.store(listed, n_rows.to(i32))
                    with k.loop(n_rows) as i:
                        k.store(listed, i.to(i32), offset=i * 4 + 4)
                with some:
                    self._flag(k, isa, scores, n_rows)
                    n = k.var(k.i64(0))
                    with k.loop(n_rows) as i, k.if_(k.load(scores, i32, offset=i * 4) > 0):
                        k.store(listed, i.to(i32), offset=n.v * 4 + 4)
                        n.v = n.v + 1
                    k.store(listed, n.v.to(i32))

    def run_ref(self, args: Any, run: Any) -> None:
        scores = whole_rows(args.scores.reshape(-1), args.scores_stride)
        chosen = whole_rows(args.chosen.reshape(-1), args.chosen_stride)
        for row, own, _ in token_places(run, 0):
            n_rows = (own + 1) // self.unit
            found = np.arange(n_rows)
            if n_rows > self.top:
                order = np.argsort(-scores[row, :n_rows].astype(np.float32), kind="stable")
                found = np.sort(order[: self.top])
            chosen[row, 0] = len(found)
            chosen[row, 1 : 1 + len(found)] = found

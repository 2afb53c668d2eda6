"""gemv: a few tokens times rows read straight from the file's blocks.

Decoding is bound by reading the weights once, so nothing is packed. mr rows are processed together
and share each load of x::

    bytes, every 32 values: sum[r][t] += f32(dot(code[r], x[t]) + comp[t]) * d_w[r] * d_x[t]
    q16, every 256 values:  sum[r][t] += (sum of f32(dot(code[r], x[t])) * d_w[r]) * d_x[t]
    floats, every vector:   sum[r][t] += w[r] * x[t]

Accumulators are vectors along K; their lanes are added up at the end of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, reduce
from operator import add
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64
from treadle.kernels.activation_layout import BLOCK, BYTES, ActivationLayout
from treadle.kernels.format_blocks import BlockAddress
from treadle.kernels.matmul.gemv_int16 import GemvInt16
from treadle.kernels.matmul.gemv_q8 import Q8, accumulators, prepared_bytes
from treadle.kernels.matmul.gemv_spans import kind_of
from treadle.kernels.matmul.matmul import (
    EACH,
    ONCE,
    TILE,
    Matmul,
    Segment,
    finish,
    n_strips,
    pick_segment,
    tiles_of,
)
from treadle.kernels.prefetch import Neighbours, PrefetchRuns
from treadle.kernels.spec import Args, Frame, load_record, parts

Dot = Callable[[list[BlockAddress], Neighbours | PrefetchRuns], list[list[Val]]]
ROW_ORDER_FIELDS = "mr", "ahead", "spans"  # fields for the order in which rows are read
GROUPED = 4  # rows of an expert that are multiplied together
ITEM_ROWS = 16  # rows an item: at 1 KB a row or more, far above the cost of claiming an item


@dataclass(frozen=True)
class Gemv(Matmul):
    """Product for at most ``nr`` tokens. Items: ITEM_ROWS rows each.

    The ``mr`` rows processed together are adjacent. With ``ahead`` an item range is instead cut
    into ``mr`` runs of rows, read side by side, each prefetched ``ahead`` bytes early.

    With experts it multiplies one row of x for one row of y at a time: ``tiles`` has the expert of
    each row of y, and each ``tokens`` consecutive rows of y come from the same row of x. With heads
    it multiplies one head at a time.
    """

    op: ClassVar[str] = "gemv"
    ahead: int = 0
    spans: bool = False  # 256 values of K at a time; ``gemv_spans.py``

    def layout(self) -> ActivationLayout:
        return ActivationLayout(self.act, self.k, sub=self.sub if self.act in BYTES else BLOCK)

    def rows_per_item(self, lanes: int) -> int:
        return ITEM_ROWS

    def scratch(self, lanes: int) -> int:
        return self.nr * prepared_bytes(self.k, BYTES[self.act]) if self.act in BYTES else 0

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        stride = self.layout().row_bytes

        def tokens_of(x: Val) -> list[Val]:
            """Return the addresses of nr tokens; the last one stands in for missing ones."""
            last = self.n_rows(frame) - 1
            return [x + k.min(k.i64(t), last) * stride for t in range(self.nr)]

        if not self.experts and not self.heads:
            self._multiply(k, frame, tokens_of(frame.x), frame.begin, frame.end)
            return
        # One row of y, with its expert, after the other; or one head.
        with self._groups_in_range(k, frame) as (row, begin, end):
            if self.heads:
                tokens = tokens_of(frame.x + row * frame.x_pitch)
                self._multiply(k, frame, tokens, begin, end, row)
            else:
                token = frame.x + row // frame.tokens * stride
                expert = k.load(frame.tiles + row * 4, i32).to(i64)
                self._multiply(k, frame, [token], begin, end, expert, [row])

    @contextmanager
    def _groups_in_range(self, k: Builder, frame: Frame) -> Iterator[tuple[Val, Val, Val]]:
        """Loop over the rows of y, tiles or heads that the item range touches; yield each one's
        number and its range of strips (ITEM_ROWS rows of W).
        """
        strips = n_strips(k, frame, self, self.rows_per_item(k.isa.lanes))
        all_of_them = (frame.end + (strips - 1)) // strips
        with k.loop(all_of_them, start=frame.begin // strips) as one:
            first = one * strips
            yield one, k.max(frame.begin - first, 0), k.min(frame.end - first, strips)

    def _multiply(
        self,
        k: Builder,
        frame: Frame,
        tokens: list[Val],
        begin: Val,
        end: Val,
        expert: Val | None = None,
        into: list[Val] | None = None,
    ) -> None:
        """Multiply strips ``begin`` to before ``end`` of W (of ``expert``, or of a head) by the
        rows of x at the addresses ``tokens``, and store to the rows ``into`` of y; None:
        consecutive rows from the first on.
        """
        y = self.rows_of_y(frame, into)
        kind = kind_of(self.fmt, k.isa, self.k) if self.spans else None
        dot: Dot
        if self.act in BYTES:
            dot = (kind or Q8)(k, self, tokens, frame.scratch).dot
        elif self.act == "q16":
            dot = GemvInt16(k, self, tokens).dot
        else:
            dot = partial(_dot_floats, k, self, tokens)
        if self.ahead:
            self._walk_runs(k, frame, y, dot, begin, end, expert)
            return
        with k.loop(end, start=begin) as item:
            seg = pick_segment(k, frame, self, item, ITEM_ROWS, expert)
            with k.loop(ITEM_ROWS, step=self.mr) as r:
                here = seg.rows.offset_by(r)
                with k.if_(here.first < here.m):
                    mine = k.min((end - item) * ITEM_ROWS - r, here.m - here.first)
                    rows = [here.row(k, i) for i in range(self.mr)]
                    n_blocks = self.k // self.fmt.block
                    ahead = Neighbours(k, rows, mine, n_blocks, far=kind is None)
                    to = [here.first + i for i in range(self.mr)]
                    self._store(k, frame, y, seg, to, dot(rows, ahead))

    def rows_of_y(self, frame: Frame, rows: list[Val] | None) -> list[Val]:
        """Return the addresses of ``rows`` of y; if None, only that of the first row."""
        return [frame.y] if rows is None else [frame.y + row * (frame.stride * 4) for row in rows]

    def _walk_runs(
        self,
        k: Builder,
        frame: Frame,
        y: list[Val],
        dot: Dot,
        begin: Val,
        end: Val,
        expert: Val | None,
    ) -> None:
        """Multiply strips ``begin`` to before ``end`` of W (of ``expert``, or of a head) as ``mr``
        runs of rows side by side, segment by segment. ``dot`` computes the products of ``mr`` rows;
        ``y``: as in ``_store``. The last run may be shorter: its last row is then multiplied again,
        with the same result.
        """
        item = k.var(begin)
        with k.loop(self.segments), k.if_(item.v < end):
            seg = pick_segment(k, frame, self, item.v, ITEM_ROWS, expert)
            left = seg.rows.m - seg.rows.first
            n = k.min((end - item.v) * ITEM_ROWS, left)
            each = (n + (self.mr - 1)) // self.mr

            def runs(j: Val | int) -> tuple[list[Val], list[BlockAddress], PrefetchRuns]:
                """Return the ``j``-th row of each run, its address, and the prefetches for it."""
                to = [seg.rows.first + k.min(each * i + j, n - 1) for i in range(self.mr)]
                rows = [seg.rows.weights.row(row, self.k) for row in to]
                n_blocks = self.k // self.fmt.block
                return to, rows, PrefetchRuns(k, rows, each - j, n_blocks, self.ahead)

            runs(0)[2].start()
            with k.loop(each) as j:
                to, rows, ahead = runs(j)
                self._store(k, frame, y, seg, to, dot(rows, ahead))
            item.v = item.v + (n + (ITEM_ROWS - 1)) // ITEM_ROWS

    def met_ref(self, args: Any, run: Any) -> list[tuple[int, np.ndarray, np.ndarray]]:
        if not self.experts:
            return super().met_ref(args, run)
        choices = np.arange(int(run[self.count]) * self.experts)
        return [
            (int(args.tiles[choice]), np.array([choice // args.tokens]), np.array([choice]))
            for choice in choices
        ]

    def _store(
        self,
        k: Builder,
        frame: Frame,
        y: list[Val],
        seg: Segment,
        rows: list[Val],
        sums: list[list[Val]],
    ) -> None:
        """Store ``sums[row][token]`` of ``rows`` of W to y, times the segment's factor, plus its
        bias and the residual. ``y``: the address of each token's row of y; or one address, from
        which the tokens' rows are consecutive.
        """
        stride = frame.stride * 4
        for row, made in zip(rows, sums, strict=True):
            at = (seg.column + row) * 4
            for t, total in enumerate(made):
                total = finish(k, seg, total, row)
                if self.residual:
                    total = total + k.load(frame.residual + stride * t, f32, offset=at)
                to = y[t] if len(y) > 1 else y[0] + stride * t
                k.store(to, total, offset=at)


@dataclass(frozen=True)
class GroupGemv(Gemv):
    """gemv for experts with few rows: at most ``nr`` (``GROUPED``) rows of one tile at a time.

    Row r of ``tiles`` is row ``first`` + r of y. Its row of x is r or, with ``of_tokens``, its
    token's, from ``sources`` as ``Sort`` writes it. Tiles of one and of two rows read W in the
    order of the gemv for that many tokens: fields that begin with ``one`` and ``two``.
    """

    op: ClassVar[str] = "gemv_groups"
    args = Args(f"{ONCE} sources:in? first", EACH)
    of_tokens: bool = False
    one_mr: int = 1
    one_ahead: int = 0
    one_spans: bool = False
    two_mr: int = 1
    two_ahead: int = 0
    two_spans: bool = False

    @property
    def needs(self) -> set[str]:
        return super().needs | ({"sources"} if self.of_tokens else set())

    @classmethod
    def from_gemvs(cls, one: Gemv, two: Gemv, most: Gemv) -> GroupGemv:
        """Return the GroupGemv with the fields of ``most``, and the row order of ``one`` and
        ``two`` for one and two rows.
        """
        given: dict[str, Any] = {field.name: getattr(most, field.name) for field in fields(Gemv)}
        for name, other in (("one", one), ("two", two)):
            given |= {f"{name}_{own}": getattr(other, own) for own in ROW_ORDER_FIELDS}
        return cls(**given)

    def gemv_for(self, n: int) -> Gemv:
        """Return the gemv that multiplies ``n`` rows of x, 1 to ``nr``, in the row order for that
        number.
        """
        given = {field.name: getattr(self, field.name) for field in fields(Gemv)}
        if name := {1: "one", 2: "two"}.get(n):
            given |= {own: getattr(self, f"{name}_{own}") for own in ROW_ORDER_FIELDS}
        return Gemv(**{**given, "nr": n})

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        stride = self.layout().row_bytes
        counts = (1, 2, self.nr)
        with self._groups_in_range(k, frame) as (tile, begin, end):
            at = load_record(k, frame.tiles + (8 + tile * TILE.itemsize), TILE)
            for fewer, most in zip((0, *counts), counts, strict=False):
                with k.if_((at["n"] > fewer) & (at["n"] <= most)):
                    last = at["n"] - 1  # the last row is repeated
                    rows = [at["first"] + k.min(k.i64(i), last) for i in range(most)]
                    sources = [self._source(k, frame, row) for row in rows]
                    tokens = [frame.x + source * stride for source in sources]
                    into = [frame.first + row for row in rows]
                    self.gemv_for(most)._multiply(k, frame, tokens, begin, end, at["expert"], into)

    def _source(self, k: Builder, frame: Frame, row: Val) -> Val:
        """Return the number of the row of x that belongs to row ``row`` of ``tiles``."""
        if not self.of_tokens:
            return row
        return k.load(frame.sources + (8 + row * 4), i32).to(i64)

    def met_ref(self, args: Any, run: Any) -> list[tuple[int, np.ndarray, np.ndarray]]:
        return [
            (expert, args.sources[2 + rows] if self.of_tokens else rows, args.first + rows)
            for expert, rows in tiles_of(args.tiles)
        ]


def _dot_floats(
    k: Builder,
    spec: Gemv,
    tokens: list[Val],
    rows: list[BlockAddress],
    ahead: Neighbours | PrefetchRuns,
) -> list[list[Val]]:
    """Return the products f32 ``[row][token]`` of ``rows`` of float weights with the tokens at the
    addresses ``tokens``; ``ahead`` prefetches the weights. Several vectors of each row at a time
    have accumulators of their own, so that no addition waits for the previous one.
    """
    fmt = spec.fmt
    lanes = k.isa.lanes
    assert fmt.load is not None
    load = fmt.load
    depth = max(1, 8 // (spec.mr * spec.nr))
    sums = [accumulators(k, spec, lanes) for _ in range(depth)]
    step = lanes * depth

    def run(c: Val, count: int) -> None:
        if count == step:
            ahead.fetch(c, step)
        for u, (first, n) in enumerate(parts(count, lanes)):
            at = c * step + first
            xs = [k.load(token, f32 * lanes, offset=at * 4) for token in tokens]
            for r, row in enumerate(rows):
                (here,) = row.block(at).parts
                w = load(k, k.isa, here, lanes, n)
                for t in range(spec.nr):
                    sums[u][r][t].v = k.fma(w, xs[t], sums[u][r][t].v)

    k.runs(spec.k, step, run)

    def total(r: int, t: int) -> Val:
        return k.sum(reduce(add, (some[r][t].v for some in sums)))

    return [[total(r, t) for t in range(spec.nr)] for r in range(spec.mr)]

"""Attention by warps: each warp takes every WARPS-th page of an item's keys, with its own online
softmax. At the end the warps' results are merged.

A lane computes the score of one key of the page, as pages store keys transposed, then some dims of
the values. So only the softmax's sums cross lanes. The warp of a page depends only on the page's
position in the sequence: a query's sums depend neither on its tile nor on an item's first key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.attention_tile import TileAttention, fits
from treadle.devices.cuda.kernels.block import ThreadBlock, convert_spec, plus
from treadle.devices.cuda.kernels.norm import aligned
from treadle.devices.cuda.launch_args import PerBlock
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import f32, i32
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.work_item import LOWEST, AttentionItem
from treadle.kernels.run_state import ITEM, PAGE
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.plan.plan import Plan, Step

WARPS = 4
SUMS = 64  # most f32 sums of a thread: more would spill
MOST_ROWS = 8  # most rows of a thread
MOST_SHARED = 48 << 10  # bytes of shared memory that a launch may use without an attribute


@dataclass(frozen=True)
class SimtAttention(PerBlock, Attention):
    """GPU kernel of ``Attention``, with f32 queries. Items: work items of the run x groups of
    heads; a block computes one.
    """

    op: ClassVar[str] = "simt_attention"

    @property
    def threads(self) -> int:
        return 32 * WARPS

    @property
    def columns(self) -> int:
        """Dims of a value that each lane of a warp computes."""
        return -(-self.dims_v // 32)

    @property
    def rows_per_block(self) -> int:
        """Query rows that a block processes together."""
        n = max(1, min(self.rows, MOST_ROWS, SUMS // self.columns))
        while n > 1 and self.bytes_of(n) > MOST_SHARED:
            n -= 1
        return n

    def bytes_of(self, n: int) -> int:
        """Return the bytes of shared memory for ``n`` query rows: the queries, the weights of a
        page's keys, and the warps' results.
        """
        return 4 * n * (self.head_dim + WARPS * (PAGE + self.dims_v + 2))

    @property
    def shared_bytes(self) -> int:
        return self.bytes_of(self.rows_per_block)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        items = frame.block + self._load_run_field(frame, "attn_items", "attn_few")
        n_items = self._load_run_field(frame, "n_attn_items", "n_attn_few")
        index = frame.begin
        at = items + index % n_items * ITEM.itemsize
        block = ThreadBlock(k, isa, self.threads)
        item = AttentionItem(k, isa, self, frame, at, index // n_items)
        for first in range(0, self.rows, self.rows_per_block):
            if first:
                block.simt.barrier(k)
            ItemRows(self, block, item, first, min(self.rows_per_block, self.rows - first)).run()


class ItemRows:
    """Builds the code for ``n`` query rows of an attention item, from row ``first`` on. A row is
    one head of one token.
    """

    def __init__(
        self, spec: SimtAttention, block: ThreadBlock, item: AttentionItem, first: int, n: int
    ) -> None:
        self.spec = spec
        self.block = block
        self.item = item
        self.k = block.k
        self.rows = [divmod(first + r, spec.heads) for r in range(n)]  # token, head
        self.first = first
        self.q = block.shared
        self.p = self.q + 4 * n * spec.head_dim
        self.p = self.p + block.warp * (4 * n * PAGE)
        self.results = self.q + 4 * n * (spec.head_dim + WARPS * PAGE)
        self.row_bytes = 4 * (spec.dims_v + 2)  # O, m and l, laid out like a partial result
        # A lane has runs of ``width`` dims, 32 lanes side by side. A latent value's dims are rows
        # of the page's keys: single ones, of several keys at once.
        wide = () if spec.latent else (4, 2)
        self.width = next((w for w in wide if spec.dims_v % (32 * w) == 0), 1)
        self.slopes = [item.slope(g, f32 * 1) for _, g in self.rows if spec.alibi]

    def run(self) -> None:
        k = self.k
        spec = self.spec
        item = self.item.item
        n = len(self.rows)
        self._load_queries()
        self.block.simt.barrier(k)
        m = [k.var(k.const(LOWEST, f32)) for _ in range(n)]
        total = [k.var(k.const(0.0, f32)) for _ in range(n)]  # over this lane's keys
        n_vectors = -(-spec.dims_v // (32 * self.width))
        o = [[k.var(k.zero(f32 * self.width)) for _ in range(n_vectors)] for _ in range(n)]
        start = item["key_begin"] // PAGE
        last = (item["key_end"] + (PAGE - 1)) // PAGE
        mine = start + ((self.block.warp - start) & (WARPS - 1))
        with k.loop(last, start=mine, step=WARPS) as page:
            home = self.item.page(page)
            for r, score in enumerate(self._scores(home, page * PAGE)):
                top = k.max(m[r].v, self.block.reduce_warp(score, k.max))
                correction = math.exp2(k, m[r].v - top)
                weight = math.exp2(k, score - top)
                m[r].v = top
                total[r].v = k.fma(total[r].v, correction, weight)
                for part in o[r]:
                    part.v = part.v * k.splat(correction, part.ty)
                k.store(self.p + self.block.lane * 4, weight, offset=4 * r * PAGE, align=4)
            self.block.simt.warp_barrier(k)
            n_keys = k.min(item["key_end"] - page * PAGE, PAGE)
            if spec.latent:
                self._add_latent(home, n_keys, o)
            else:
                self._add_values(home + spec.page.v_off, n_keys, o)
            self.block.simt.warp_barrier(k)
        self._store_partial(m, total, o)
        self.block.simt.barrier(k)
        self._join()

    def _load_queries(self) -> None:
        k = self.k
        spec = self.spec
        block = self.block
        factor = 1.0 if spec.softcap else math.LOG2_E  # capped scores are scaled later
        for r, (t, g) in enumerate(self.rows):
            row = self.item.query(t, g)
            with k.loop(spec.head_dim, start=block.tid, step=block.n_threads) as d:
                q = k.load(row + d * 4, f32, align=4) * factor
                k.store(self.q + d * 4, q, offset=4 * r * spec.head_dim, align=4)

    def _scores(self, home: Val, first: Val) -> list[Val]:
        """Emit the scores of this lane's key with each of the n rows, f32 [n], times log2(e), as
        weights are powers of two; -infinity if the key is masked. ``home``: address of the page;
        ``first``: position of its first key.
        """
        k = self.k
        spec = self.spec
        lane = self.block.lane
        fmt = spec.page.keys.fmt
        dims = spec.head_dim
        sums = [k.var(k.const(0.0, f32)) for _ in self.rows]
        step = 4 if dims % 4 == 0 else 1

        def dots(begin: Val, end: Val, into: list[Var]) -> None:
            with k.loop(end, start=begin, step=step) as d:
                keys = [
                    fmt.load(k, k.isa, home + ((d + i) * PAGE + lane) * fmt.n_bytes, 1)
                    for i in range(step)
                ]
                for r, row in enumerate(into):
                    at = self.q + d * 4 + 4 * r * dims
                    q = k.load(at, f32 * step, align=4 * step)
                    for i, key in enumerate(keys):
                        row.v = k.fma(k.extract(q, i), k.extract(key, 0), row.v)

        if fmt.scaled:
            scales = home + spec.page.keys.codes_bytes
            with k.loop(dims // BLOCK) as b:
                part = [k.var(k.const(0.0, f32)) for _ in self.rows]
                dots(b * BLOCK, (b + 1) * BLOCK, part)
                d_k = k.load(scales + (b * PAGE + lane) * 4, f32, align=4)
                for row, of_block in zip(sums, part, strict=True):
                    row.v = k.fma(of_block.v, d_k, row.v)
        else:
            dots(k.i64(0), k.i64(dims), sums)
        key = first + lane
        return [self._masked(row.v, key, r) for r, row in enumerate(sums)]

    def _masked(self, score: Val, key: Val, r: int) -> Val:
        k = self.k
        spec = self.spec
        item = self.item
        t = self.rows[r][0]
        here = item.item["position"] + item.token(t)
        seen = (key >= item.item["key_begin"]) & (key < item.item["key_end"])
        if spec.causal:
            seen = seen & (key <= here)
        elif spec.window:
            seen = seen & (key < here + spec.window)
        if spec.window:
            seen = seen & (key > here - spec.window)
        if spec.softcap:
            score = math.tanh(k, score * (1 / spec.softcap)) * (spec.softcap * math.LOG2_E)
        if spec.alibi:
            far = k.abs((key - here).to(i32)).to(f32)
            score = score - k.extract(self.slopes[r], 0) * far
        if spec.reach:
            number = item.relative_biases(self.rows[r][1], key - here, 1)
            score = k.fma(k.extract(number, 0), k.const(math.LOG2_E, f32), score)
        if spec.rel_extent:
            number = item.rel_logits(t, self.rows[r][1], key - here, 1)
            score = k.fma(k.extract(number, 0), k.const(math.LOG2_E, f32), score)
        return k.select(seen, score, k.const(float("-inf"), f32))

    def _column(self, vector: int) -> Val:
        """Emit the index of the first dim in this lane's ``vector``-th vector of a value; past the
        end, that of the last vector.
        """
        at = (self.block.lane + 32 * vector) * self.width
        return self.k.min(at, self.spec.dims_v - self.width)

    def _add_values(self, home: Val, n_keys: Val, o: list[list[Var]]) -> None:
        """Emit: add P V (softmax weights by values) of a page to the sums ``o`` [row][vector].
        ``home``: address of the page's values. Only the first ``n_keys`` are read: later ones are
        undefined.
        """
        k = self.k
        spec = self.spec
        width = self.width
        fmt = spec.page.values.fmt
        dims = spec.dims_v
        scales = home + spec.page.values.codes_bytes
        columns = [self._column(i) for i in range(len(o[0]))]

        def add(j: Val, n: int) -> None:
            weights = self._weights(j, n)
            for i in range(n):
                for c, column in enumerate(columns):
                    at = home + ((j + i) * dims + column) * fmt.n_bytes
                    v = fmt.load(k, k.isa, at, width)
                    if fmt.scaled:
                        at = scales + ((j + i) * (dims // BLOCK) + column // BLOCK) * 4
                        v = v * k.splat(k.load(at, f32, align=4), v.ty)
                    for row, weight in zip(o, weights, strict=True):
                        row[c].v = k.fma(k.splat(k.extract(weight, i), v.ty), v, row[c].v)

        self._loop_keys(n_keys, add)

    def _add_latent(self, home: Val, n_keys: Val, o: list[list[Var]]) -> None:
        """Emit: add P V of a page to the sums ``o``, like ``_add_values``, where values are the
        first dims of the keys (latent attention), which are stored transposed. ``home``: address of
        the page.
        """
        k = self.k
        spec = self.spec
        fmt = spec.page.keys.fmt
        scales = home + spec.page.keys.codes_bytes

        def add(j: Val, n: int) -> None:
            weights = self._weights(j, n)
            for c in range(len(o[0])):
                column = self._column(c)
                v = fmt.load(k, k.isa, home + (column * PAGE + j) * fmt.n_bytes, n)
                if fmt.scaled:
                    at = scales + (column // BLOCK * PAGE + j) * 4
                    v = v * k.load(at, v.ty, align=4 * n)
                for row, weight in zip(o, weights, strict=True):
                    for i in range(n):
                        key, gain = (k.splat(k.extract(x, i), f32 * 1) for x in (v, weight))
                        row[c].v = k.fma(gain, key, row[c].v)

        self._loop_keys(n_keys, add)

    def _weights(self, j: Val, n: int) -> list[Val]:
        """Emit the softmax weights of ``n`` keys from the j-th of the page on, f32 * n for each
        row, from shared memory.
        """
        return [
            self.k.load(self.p + j * 4, f32 * n, offset=4 * r * PAGE, align=4 * n)
            for r in range(len(self.rows))
        ]

    def _loop_keys(self, n_keys: Val, add: Callable[[Val, int], None]) -> None:
        """Emit loops over the first ``n_keys`` keys of a page, in order: they call ``add(j, n)``
        for the ``n`` keys from the j-th on, four at a time, then singly.
        """
        k = self.k
        fours = n_keys // 4 * 4
        with k.loop(fours, step=4) as j:
            add(j, 4)
        with k.loop(n_keys, start=fours) as j:
            add(j, 1)

    def _store_partial(self, m: list[Var], total: list[Var], o: list[list[Var]]) -> None:
        """Emit: store this warp's results of each row in shared memory: the sums ``o``, the maximum
        ``m``, and the sum ``total`` of the softmax weights.
        """
        k = self.k
        spec = self.spec
        for r in range(len(self.rows)):
            at = self.results + (self.block.warp * len(self.rows) + r) * self.row_bytes
            for c, part in enumerate(o[r]):
                first = (self.block.lane + 32 * c) * self.width
                with k.if_(first < spec.dims_v):
                    for i in range(self.width):
                        k.store(at + (first + i) * 4, k.extract(part.v, i), align=4)
            whole = self.block.reduce_warp(total[r].v, plus)
            with k.if_(self.block.lane.eq(0)):
                k.store(at, m[r].v, offset=4 * spec.dims_v, align=4)
                k.store(at, whole, offset=4 * spec.dims_v + 4, align=4)

    def _join(self) -> None:
        """Emit: merge the warps' results, and store those of the item in memory; a thread computes
        every n_threads-th value.
        """
        k = self.k
        spec = self.spec
        n = len(self.rows)
        dims = self.spec.dims_v
        for r, (t, g) in enumerate(self.rows):
            parts = [self.results + (w * n + r) * self.row_bytes for w in range(WARPS)]
            tops = [k.load(part, f32, offset=4 * dims, align=4) for part in parts]
            lowest, start = self.item.sink(g)
            m = lowest
            for top in tops:
                m = k.max(m, top)
            gains = [math.exp2(k, top - m) for top in tops]
            total = start * math.exp2(k, lowest - m) if spec.sinks else start
            for part, gain in zip(parts, gains, strict=True):
                total = k.fma(k.load(part, f32, offset=4 * dims + 4, align=4), gain, total)
            whole = self.item.item["partial"] < 0
            factor = k.select(whole, 1.0 / total, k.const(1.0, f32))
            # A partial record begins like a result's row: with O.
            to = k.select(whole, self.item.result(t, g), self.item.partial(self.first + r))
            with k.loop(dims, start=self.block.tid, step=self.block.n_threads) as d:
                o = k.const(0.0, f32)
                for part, gain in zip(parts, gains, strict=True):
                    o = k.fma(k.load(part + d * 4, f32, align=4), gain, o)
                k.store(to + d * 4, o * factor, align=4)
            first = self.block.tid.eq(0)
            with k.if_(first & (self.item.item["partial"] >= 0)):
                k.store(to, m, offset=4 * dims, align=4)
                k.store(to, total, offset=4 * dims + 4, align=4)


def swap(step: Step, plan: Plan, isa: Isa) -> Step | None:
    """Return an attention step with TileAttention, or with SimtAttention where that does not fit;
    None, to keep the CPU's kernel, for spans, chosen keys, matrix tiles (``spec.matrix``), pages in
    packed formats, and unaligned rows.
    """
    spec = step.spec
    assert isinstance(spec, Attention)
    packed = spec.page.keys.fmt.packed or spec.page.values.fmt.packed
    if spec.spans or spec.chosen or spec.matrix or packed or not aligned(step):
        return None
    many = isa.simt is not None and fits(spec, isa.simt)
    return replace(step, spec=convert_spec(TileAttention if many else SimtAttention, spec))

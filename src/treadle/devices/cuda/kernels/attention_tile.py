"""Prefill attention on tensor cores (Dao, "FlashAttention-2", 2023).

A warp has 16 query rows, and all warps of a block walk the same keys, one page at a time, while the
next page is loaded.

Queries and weights are rounded to the pages' type, f16 or bf16; pages of q8_0 become f16. Sums are
f32. Pages store keys by dims and values by keys: both are read as transposed matrices.

A value of over 128 dims has more sums than a thread has registers. Then two warps share the same
rows, each with half of the dims, and both compute the scores. The queries are in shared memory
then, which leaves no space for a second page.
"""

from __future__ import annotations

from typing import ClassVar

from treadle.base.fast_classes import dataclass
from treadle.devices.cuda.kernels.block import ThreadBlock
from treadle.devices.cuda.launch_args import PerBlock
from treadle.isa.isa import Simt
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import f32, i8, i32, u32
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.page_layout import PageSide
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.work_item import AttentionItem
from treadle.kernels.run_state import ITEM, PAGE
from treadle.kernels.spec import Frame

ROWS = 16  # of a warp
PAD = 16  # bytes after each row in shared memory: puts a matrix's rows in different banks
WIDE = 128  # most dims of a value that one warp sums


def fits(spec: Attention, simt: Simt) -> bool:
    """Return whether TileAttention supports the spec's head sizes, number of rows, page format and
    biases on a GPU with the limits ``simt``.
    """
    dims = spec.head_dim, spec.dims_v // split_of(spec.dims_v)
    sizes = not any(d % ROWS or d > simt.tile_dims for d in dims)
    kinds = {spec.page.keys.fmt, spec.page.values.fmt}
    pages = len(kinds) == 1 and not any(fmt.name == "f32" or fmt.packed for fmt in kinds)
    pages = pages and not spec.latent
    plain = not (spec.alibi or spec.reach or spec.rel_extent)
    return sizes and pages and plain and ROWS <= spec.rows <= simt.tile_rows


def split_of(dims_v: int) -> int:
    """Return the number of warps that share the dims of a value: 1 or 2."""
    return 1 if dims_v <= WIDE else 2


@dataclass(frozen=True)
class TileAttention(PerBlock, Attention):
    """GPU kernel of ``Attention`` by matrix instructions. Items: work items of the run x groups of
    heads; a block computes one.
    """

    op: ClassVar[str] = "simt_tile_attention"

    @property
    def threads(self) -> int:
        return 32 * -(-self.rows // ROWS) * split_of(self.dims_v)

    @property
    def columns(self) -> int:
        """Dims of a value that a warp computes."""
        return self.dims_v // split_of(self.dims_v)

    @property
    def key_pitch(self) -> int:
        """Bytes between two dims of a page's keys in shared memory."""
        return 2 * PAGE + PAD

    @property
    def value_pitch(self) -> int:
        """Bytes between the values of two keys in shared memory."""
        return 2 * self.dims_v + PAD

    @property
    def stage_bytes(self) -> int:
        return self.head_dim * self.key_pitch + PAGE * self.value_pitch

    @property
    def shared_bytes(self) -> int:
        queries = self.threads // 64 * ROWS * self.query_pitch if self.wide else 0
        return self.stages * self.stage_bytes + queries

    @property
    def wide(self) -> bool:
        return self.columns < self.dims_v

    @property
    def stages(self) -> int:
        """Number of pages that shared memory holds."""
        return 1 if self.wide else 2

    @property
    def query_pitch(self) -> int:
        """Bytes between two query rows in shared memory."""
        return 2 * self.head_dim + PAD

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        items = frame.block + self._load_run_field(frame, "attn_items", "attn_few")
        n_items = self._load_run_field(frame, "n_attn_items", "n_attn_few")
        at = items + frame.begin % n_items * ITEM.itemsize
        block = ThreadBlock(k, isa, self.threads)
        CudaAttentionTile(
            self, block, AttentionItem(k, isa, self, frame, at, frame.begin // n_items)
        ).run()


class LaneRow:
    """One of the two query rows that a lane works on: token and head, running maximum and sum."""

    def __init__(self, spec: TileAttention, item: AttentionItem, r: Val) -> None:
        k = item.k
        self.r = k.min(r, spec.rows - 1)
        self.inside = r < spec.rows
        self.token = self.r // spec.heads
        self.head = self.r % spec.heads
        self.here = item.item["position"] + item.token(self.token)
        self.inside = self.inside & (self.token < item.item["n_tokens"])
        m, total = item.sink(self.head)
        self.m, self.total = k.var(m), k.var(total)


class CudaAttentionTile:
    """Builds the code by which a block of threads computes one attention item."""

    def __init__(self, spec: TileAttention, block: ThreadBlock, item: AttentionItem) -> None:
        self.spec = spec
        self.block = block
        self.item = item
        self.k = block.k
        self.narrow_bf16 = spec.kv == "bf16"
        simt = block.simt
        self.mma = simt.mma_bf16 if self.narrow_bf16 else simt.mma_f16
        n_parts = split_of(spec.dims_v)
        self.part = block.warp % n_parts
        lane = block.lane
        first = block.warp // n_parts * ROWS
        self.pair = lane % 4 * 2  # the first of the lane's two columns of 8
        self.rows = [LaneRow(spec, item, first + lane // 4 + i) for i in (0, 8)]
        self.end = item.item["key_end"]
        self.q = block.shared + spec.stages * spec.stage_bytes + first * spec.query_pitch

    def run(self) -> None:
        k = self.k
        spec = self.spec
        simt = self.block.simt
        queries: list[list[Val]] = []
        if spec.wide:
            self._store_queries()
        else:
            queries = [self._query(dim) for dim in range(0, spec.head_dim, 16)]
        o = [
            [k.var(k.const(0.0, f32)) for _ in range(4)] for _ in range(spec.columns // 8)
        ]  # per 8 columns: two of the first row, two of the second
        if spec.sinks:  # a row's sum is spread over four lanes: count the sink once
            for row in self.rows:
                one = k.select(self.pair.eq(0), row.total.v, k.const(0.0, f32))
                row.total.v = one
        start = self.item.item["key_begin"] // PAGE
        last = (self.end + (PAGE - 1)) // PAGE
        ahead = spec.stages - 1
        if ahead:
            self._load_page(start, self._stage(k.i64(0)))
            simt.commit(k)
        with k.loop(last, start=start) as page:
            with k.if_(page + ahead < last):
                self._load_page(page + ahead, self._stage(page + ahead - start))
            simt.commit(k)
            simt.wait(k, ahead)
            simt.barrier(k)
            stage = self._stage(page - start)
            weights = self._weights(page * PAGE, self._scores(queries, stage), o)
            self._add_values(weights, stage + spec.head_dim * spec.key_pitch, o)
            simt.barrier(k)  # the stage is free for another page
        self._store(o)

    def _stage(self, n: Val) -> Val:
        return self.block.shared + n % self.spec.stages * self.spec.stage_bytes

    def _narrow(self, a: Val, b: Val) -> Val:
        """Emit two f32 values rounded to the pages' 16-bit type, as one u32, ``a`` in the lower
        half.
        """
        k = self.k
        both = k.insert(k.insert(k.zero(f32 * 2), a, 0), b, 1)
        narrow = k.isa.narrow_bf16 if self.narrow_bf16 else k.isa.narrow_f16
        return narrow(k, both).bits(u32 * 1)

    def _query(self, dim: Val | int) -> list[Val]:
        """Emit 16 dims, from ``dim`` on, of the warp's 16 query rows, as the left operand of a
        matrix instruction.
        """
        k = self.k
        result = []
        factor = 1.0 if self.spec.softcap else math.LOG2_E  # capped scores are scaled later
        places = [self.item.query(row.token, row.head) + self.pair * 4 for row in self.rows]
        for at in (0, 8):
            for place in places:
                q = k.load(place + dim * 4, f32 * 2, offset=4 * at, align=8) * factor
                result.append(k.extract(self._narrow(k.extract(q, 0), k.extract(q, 1)), 0))
        return result

    def _store_queries(self) -> None:
        """Emit: store the warp's query rows in shared memory. Of two warps with the same rows, the
        first one stores them.
        """
        k = self.k
        pitch = self.spec.query_pitch
        to = self.q + self.block.lane // 4 * pitch + self.pair * 2
        with k.if_(self.part.eq(0)), k.loop(self.spec.head_dim, step=16) as dim:
            for i, part in enumerate(self._query(dim)):
                k.store(to + i % 2 * 8 * pitch + dim * 2, part, offset=i // 2 * 16, align=4)

    def _load_page(self, page: Val, stage: Val) -> None:
        """Emit: load the keys and values of page number ``page`` of the sequence into shared memory
        at the address ``stage``, 16 bytes per thread at a time.

        Values of keys past the last one are undefined, so they become zeros.
        """
        k = self.k
        spec = self.spec
        home = self.item.page(page)
        n_keys = self.end - page * PAGE
        step = self.block.n_threads
        pieces = PAGE // 8  # of 8 keys
        with k.loop(spec.head_dim * pieces, start=self.block.tid, step=step) as i:
            dim = i // pieces
            key = i % pieces * 8
            to = stage + dim * spec.key_pitch + key * 2
            scale = dim // BLOCK * PAGE + key, 8  # f32, one for each key
            self._load_piece(home, spec.page.keys, dim * PAGE + key, to, scale)
        values = stage + spec.head_dim * spec.key_pitch
        pieces = spec.dims_v // 8
        with k.loop(PAGE * pieces, start=self.block.tid, step=step) as i:
            key = i // pieces
            dim = i % pieces * 8
            to = values + key * spec.value_pitch + dim * 2
            with k.if_else(key < n_keys) as (there, nothing):
                with there:
                    scale = key * (spec.dims_v // BLOCK) + dim // BLOCK, 1  # one for all 8
                    part = home + spec.page.v_off
                    self._load_piece(part, spec.page.values, key * spec.dims_v + dim, to, scale)
                with nothing:
                    k.store(to, k.zero(i32 * 4), align=16)

    def _load_piece(
        self, part: Val, side: PageSide, at: Val, to: Val, scale: tuple[Val, int]
    ) -> None:
        """Emit: copy 8 numbers of a page, from the ``at``-th of ``part`` (address of the keys or
        values, in the format ``side``) on, to ``to`` in shared memory. ``scale``: the index of
        their first scale, and the number of scales, 1 or 8 (q8_0 pages only).
        """
        k = self.k
        if not side.fmt.scaled:
            self.block.simt.copy_async(k, to, part + at * 2)
            return
        first, n = scale
        d = k.load(part + side.codes_bytes + first * 4, f32 * n, align=4 * n)
        d = k.splat(k.extract(d, 0), f32 * 8) if n == 1 else d
        codes = k.load(part + at, i8 * 8, align=8).to(f32)
        k.store(to, k.isa.narrow_f16(k, codes * d), align=16)

    def _matrices(self, at: Val, pitch: int) -> list[Val]:
        """Emit the right operands of two matrix instructions, transposed: 16 rows of 16 columns,
        from the address ``at`` on, with ``pitch`` bytes between rows.
        """
        lane = self.block.lane
        place = at + lane % 16 * pitch + lane // 16 * 16
        return self.block.simt.load_matrix_t(self.k, place)

    def _scores(self, queries: list[list[Val]], keys: Val) -> list[list[Val]]:
        """Emit the scores Q K^T of a page, for each group of 8 keys this lane's four f32 in the
        layout of ``mma``. ``queries``: left operands for each 16 dims; ``keys``: the page's address
        in shared memory.
        """
        k = self.k
        spec = self.spec
        lane = self.block.lane
        sums = [[k.const(0.0, f32)] * 4 for _ in range(PAGE // 8)]
        place = self.q + lane % 16 * spec.query_pitch + lane // 16 * 16
        for step in range(spec.head_dim // 16):
            q = self.block.simt.load_matrix(k, place + 32 * step) if spec.wide else queries[step]
            rows = keys + step * 16 * spec.key_pitch
            for n in range(0, len(sums), 2):
                b = self._matrices(rows + n * 16, spec.key_pitch)
                for i in range(2):
                    sums[n + i] = self.mma(k, sums[n + i], q, b[2 * i : 2 * i + 2])
        return sums

    def _weights(self, first: Val, scores: list[list[Val]], o: list[list[Var]]) -> list[list[Val]]:
        """Emit the softmax weights 2**(S - m) of a page, 16 keys at a time, as left operands;
        rescale ``o`` and the rows' sums to the new maximum m. ``first``: position of the page's
        first key; ``scores``: S, from ``_scores``.
        """
        k = self.k
        weights: list[list[Val]] = [[] for _ in scores]
        for h, row in enumerate(self.rows):
            seen = [
                self._masked(part[2 * h + i], first + (8 * n + i) + self.pair, row)
                for n, part in enumerate(scores)
                for i in range(2)
            ]
            top = seen[0]
            for score in seen[1:]:
                top = k.max(top, score)
            for lanes in (1, 2):
                top = k.max(top, self.block.simt.shuffle(k, top, lanes))
            top = k.max(row.m.v, top)
            correction = math.exp2(k, row.m.v - top)
            row.m.v = top
            total = row.total.v * correction
            for n in range(len(scores)):
                a, b = (math.exp2(k, score - top) for score in seen[2 * n : 2 * n + 2])
                total = total + (a + b)
                weights[n].append(k.extract(self._narrow(a, b), 0))
            row.total.v = total
            for part in o:
                for i in (2 * h, 2 * h + 1):
                    part[i].v = part[i].v * correction
        return [weights[n] + weights[n + 1] for n in range(0, len(weights), 2)]

    def _masked(self, score: Val, key: Val, row: LaneRow) -> Val:
        k = self.k
        spec = self.spec
        seen = (key >= self.item.item["key_begin"]) & (key < self.end)
        if spec.causal:
            seen = seen & (key <= row.here)
        elif spec.window:
            seen = seen & (key < row.here + spec.window)
        if spec.window:
            seen = seen & (key > row.here - spec.window)
        if spec.softcap:
            score = math.tanh(k, score * (1 / spec.softcap)) * (spec.softcap * math.LOG2_E)
        return k.select(seen, score, k.const(float("-inf"), f32))

    def _add_values(self, weights: list[list[Val]], values: Val, o: list[list[Var]]) -> None:
        """Emit: add P V (``weights`` by ``values``, an address in shared memory) of a page to the
        sums ``o``.
        """
        k = self.k
        spec = self.spec
        pitch = self.spec.value_pitch
        for step, p in enumerate(weights):
            rows = values + step * 16 * pitch + self.part * (2 * spec.columns)
            for n in range(0, len(o), 2):
                b = self._matrices(rows + n * 16, pitch)
                for i in range(2):
                    part = o[n + i]
                    made = self.mma(k, [v.v for v in part], p, b[2 * i : 2 * i + 2])
                    for v, new in zip(part, made, strict=True):
                        v.v = new

    def _store(self, o: list[list[Var]]) -> None:
        k = self.k
        spec = self.spec
        whole = self.item.item["partial"] < 0
        for h, row in enumerate(self.rows):
            total = row.total.v
            for lanes in (1, 2):
                total = total + self.block.simt.shuffle(k, total, lanes)
            with k.if_(row.inside):
                factor = k.select(whole, 1.0 / total, k.const(1.0, f32))
                to = k.select(
                    whole, self.item.result(row.token, row.head), self.item.partial(row.r)
                )
                for n, part in enumerate(o):
                    for i in range(2):
                        at = to + (8 * n + i) * 4 + self.pair * 4 + self.part * (4 * spec.columns)
                        k.store(at, part[2 * h + i].v * factor, align=4)
                with k.if_((self.pair + self.part).eq(0) & (self.item.item["partial"] >= 0)):
                    k.store(to, row.m.v, offset=4 * spec.dims_v, align=4)
                    k.store(to, total, offset=4 * spec.dims_v + 4, align=4)

"""Attention over pages of keys and values, with an online softmax (Milakov and Gimelshein, 2018).

A tile of queries (tokens x the heads that share one key/value head) walks its keys SPAN pages at a
time::

    S = log2(e) Q K^T, masked;  m' = max(m, rowmax S);  P = 2**(S - m');  c = 2**(m - m')
    l = l c + rowsum P;  O = O c + P V;  m = m'          at the end: out = O / l

A long history is cut into runs of SPLIT keys, each an item of its own, so that every core has work
while decoding; ``Merge`` joins their (O, m, l). The cuts depend on positions alone, so the thread
count never changes a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from treadle.jit import math
from treadle.jit.types import boolean, f32, i32, i64, ptr
from treadle.kernels.act import BLOCK
from treadle.kernels.fold import fold_all
from treadle.kernels.kv import PAGE, PageLayout
from treadle.kernels.spec import Frame, Spec, widest

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val, Var

SPAN = 4  # pages whose scores are kept: what is done for each row is done for so many keys
SPLIT = 512  # keys of one item while decoding
ITEM_FIELDS = "token n_tokens position key_begin key_end pages partial pad"
ITEM = np.dtype([(name, "i8") for name in ITEM_FIELDS.split()])
QKV, POOL, OUT, PARTIALS, STRIDE, OUT_STRIDE, PAGE_BYTES, LAYER_OFF = range(8)  # arguments
LOWEST = -1e30  # below every score, and finite: LOWEST - LOWEST is 0 where inf - inf is NaN


@dataclass(frozen=True)
class Attention(Spec):
    """``tokens`` query tokens a tile. Arguments: ``qkv, pool, out, partials, stride, out_stride,
    page_bytes, layer_off``.

    ``partials`` is f32 ``[n_partials, n_groups, rows, head_dim + 2]`` (O, then m and l). Items:
    work items x head groups.
    """

    op: ClassVar[str] = "attention"
    kv: str
    n_head: int
    n_head_kv: int
    head_dim: int
    tokens: int
    window: int = 0
    local: bool = False
    softcap: float = 0.0  # scores become ``softcap * tanh(score / softcap)``

    @property
    def page(self) -> PageLayout:
        return PageLayout(self.kv, self.n_head_kv, self.head_dim)

    @property
    def heads(self) -> int:
        """Query heads a tile takes from one group: all that share a key head, or the largest part
        of at most 16.
        """
        shared = self.n_head // self.n_head_kv
        return next(n for n in range(min(shared, 16), 0, -1) if shared % n == 0)

    @property
    def n_groups(self) -> int:
        return self.n_head // self.heads

    @property
    def rows(self) -> int:
        return self.tokens * self.heads

    @property
    def partial_values(self) -> int:
        """f32 values of one item's partial results, all groups."""
        return self.n_groups * self.rows * (self.head_dim + 2)

    @property
    def scratch(self) -> int:
        return 4 * self.rows * (2 * self.head_dim + SPAN * PAGE) + 256

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        """Every visible key and its value once, for the tiles of a batch find them in cache; a
        multiplication and an addition for each value of each that a query sees.
        """
        end = n_before + n_tokens
        reach = self.window or end
        n_keys = min(end, n_tokens - 1 + reach)
        n_seen = sum(min(reach, position + 1) for position in range(n_before, end))
        n_bytes = n_keys * self.page.layer_bytes // PAGE
        return n_bytes, 4 * n_seen * self.n_head * self.head_dim

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        suffix = "_local" if self.local else "_global"
        items = frame.run(f"attn_items{suffix}", ptr)
        n_items = frame.run("n_attn_items" + suffix.replace("_global", ""))
        with k.loop(frame.end, start=frame.begin) as index:
            # One group after the other: its keys and values stay in cache from tile to tile.
            item = items + index % n_items * ITEM.itemsize
            _Tile(k, isa, self, frame, item, index // n_items).run()

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        qkv, pool, out, partials, stride, out_stride, page_bytes, layer_off = arrays[:8]
        items = run.attn_items_local if self.local else run.attn_items_global
        dims, per = self.head_dim, self.n_head // self.n_head_kv
        q_all, out_all = qkv.reshape(-1, stride), out.reshape(-1, out_stride)
        for item, pages in items:
            first, last = int(item["key_begin"]), int(item["key_end"])
            keys = np.arange(first // PAGE * PAGE, -(-last // PAGE) * PAGE)
            for head in range(self.n_head):
                cached = [
                    self.page.read_ref(
                        self.page.head_ref(pool, int(pages[p]), page_bytes, layer_off, head // per)
                    )
                    for p in range(first // PAGE, -(-last // PAGE))
                ]
                keep = (keys >= first) & (keys < last)
                kk = np.concatenate([c[0] for c in cached])[keep]
                vv = np.concatenate([c[1] for c in cached])[keep]
                for t in range(int(item["n_tokens"])):
                    token, pos = int(item["token"]) + t, int(item["position"]) + t
                    q = q_all[token, head * dims : (head + 1) * dims].astype(np.float64)
                    score = kk @ q
                    if self.softcap:
                        score = self.softcap * np.tanh(score / self.softcap)
                    kept = keys[keep]
                    hidden = kept > pos
                    if self.window:
                        hidden |= kept <= pos - self.window
                    score = np.where(hidden, -np.inf, score)
                    m = max(score.max(), LOWEST)
                    p = np.exp(score - m)
                    if item["partial"] < 0:
                        out_all[token, head * dims : (head + 1) * dims] = p @ vv / p.sum()
                    else:
                        shape = (-1, self.n_groups, self.rows, dims + 2)
                        group, member = divmod(head, self.heads)
                        row = partials[: partials.size // self.partial_values * self.partial_values]
                        row = row.reshape(shape)[
                            int(item["partial"]), group, t * self.heads + member
                        ]
                        row[:dims], row[dims], row[dims + 1] = p @ vv, m * math.LOG2_E, p.sum()


class _Tile:
    """One item and one group of heads."""

    def __init__(
        self, k: Builder, isa: Isa, spec: Attention, frame: Frame, item: Val, group: Val
    ) -> None:
        self.k, self.isa, self.spec, self.frame, self.group = k, isa, spec, frame, group
        assert ITEM.fields is not None
        at = {name: int(field[1]) for name, field in ITEM.fields.items()}
        self.item = {name: k.load(item, i64, offset=off, align=8) for name, off in at.items()}
        self.pages = k.load(item, ptr, offset=at["pages"], align=8)
        rows, dims = spec.rows, spec.head_dim
        self.q = frame.scratch
        self.o = self.q + 4 * rows * dims
        self.p = self.o + 4 * rows * dims
        self.stat = f32 * max(4, 1 << (rows - 1).bit_length())  # a lane for each row's m and l

    def run(self) -> None:
        k = self.k
        self._load_queries()
        m, total = k.var(k.const(LOWEST, self.stat)), k.var(k.zero(self.stat))
        begin, end = self.item["key_begin"], self.item["key_end"]
        last = (end + (PAGE - 1)) // PAGE
        with k.loop(last, start=begin // PAGE, step=SPAN) as first:
            n_pages = k.min(last - first, SPAN)
            tops = self._vectors(LOWEST)
            with k.loop(n_pages) as i:
                self._scores(self._page(first + i), (first + i) * PAGE, i * (PAGE * 4), tops)
            correction = self._softmax(m, total, n_pages, tops)
            self._values(first, n_pages, correction)
        self._store(m.v, total.v)

    def _page(self, p: Val) -> Val:
        """Where the sequence's p-th page keeps this layer and head."""
        k, spec = self.k, self.spec
        page_bytes, layer_off = self.frame.int(PAGE_BYTES), self.frame.int(LAYER_OFF)
        head = self.group * spec.heads // (spec.n_head // spec.n_head_kv) * spec.page.head_bytes
        page = k.load(self.pages, i64, offset=p * 8, align=8) * page_bytes
        return self.frame.ptr(POOL) + (layer_off + head) + page

    def _vectors(self, value: float) -> list[Var]:
        """One for each row."""
        ty = f32 * self.isa.lanes
        return [self.k.var(self.k.const(value, ty)) for _ in range(self.spec.rows)]

    def _token(self, t: int) -> Val:
        """Token ``t`` of the tile; past its end, the last one again."""
        return self.k.min(self.k.i64(t), self.item["n_tokens"] - 1)

    def _rows(self) -> list[tuple[int, int, int]]:
        return [
            (t * self.spec.heads + g, t, g)
            for t in range(self.spec.tokens)
            for g in range(self.spec.heads)
        ]

    def _load_queries(self) -> None:
        """The tile's queries side by side in scratch, and zeros for its output."""
        k, dims = self.k, self.spec.head_dim
        width = widest(self.isa.lanes, dims)
        stride = self.frame.int(STRIDE) * 4
        factor = 1.0 if self.spec.softcap else math.LOG2_E  # capped scores are scaled later
        for r, t, g in self._rows():
            row = self.frame.ptr(QKV) + (self.item["token"] + self._token(t)) * stride
            row = row + (self.group * self.spec.heads + g) * (dims * 4)
            with k.loop(dims, step=width) as d:
                q = k.load(row, f32 * width, offset=d * 4) * factor
                k.store(self.q, q, offset=d * 4 + r * dims * 4)
                k.store(self.o, k.zero(f32 * width), offset=d * 4 + r * dims * 4)

    def _scores(self, home: Val, key: Val, at: Val, tops: list[Var]) -> None:
        """P = masked Q K^T of one page, kept ``at`` bytes into the span's; raises ``tops``."""
        k, isa, spec = self.k, self.isa, self.spec
        fmt, lanes, dims = spec.page.fmt, isa.lanes, spec.head_dim
        vectors = PAGE // lanes
        at_once = max(1, min(vectors, (isa.regs - 6) // spec.rows))
        while vectors % at_once:
            at_once -= 1
        for first in range(0, vectors, at_once):
            columns = range(first, first + at_once)
            sums = [[k.var(k.zero(f32 * lanes)) for _ in columns] for _ in range(spec.rows)]

            def dots(
                start: Val, count: int, into: list[list[Var]], columns: range = columns
            ) -> None:
                with k.loop(start + count, start=start) as d:
                    keys = [
                        fmt.load(k, isa, home + (d * PAGE + c * lanes) * fmt.n_bytes, lanes)
                        for c in columns
                    ]
                    for r, row in enumerate(into):
                        q = k.splat(k.load(self.q, f32, offset=d * 4 + r * dims * 4), f32 * lanes)
                        for c, key_ in enumerate(keys):
                            row[c].v = k.fma(q, key_, row[c].v)

            if fmt.scaled:
                scales = home + spec.page.codes_bytes
                with k.loop(dims // BLOCK) as b:
                    part = [[k.var(k.zero(f32 * lanes)) for _ in columns] for _ in range(spec.rows)]
                    dots(b * BLOCK, BLOCK, part)
                    for i, c in enumerate(columns):
                        d_k = k.load(scales, f32 * lanes, offset=(b * PAGE + c * lanes) * 4)
                        for r in range(spec.rows):
                            sums[r][i].v = k.fma(part[r][i].v, d_k, sums[r][i].v)
            else:
                dots(k.i64(0), dims, sums)
            for i, c in enumerate(columns):
                self._mask_and_store(key, at, c * lanes, [row[i].v for row in sums], tops)

    def _mask_and_store(
        self, key: Val, at: Val, column: int, rows: list[Val], tops: list[Var]
    ) -> None:
        k, lanes = self.k, self.isa.lanes
        iota = k.const(range(column, column + lanes), i32 * lanes)
        position = k.splat(key.to(i32), iota.ty) + iota
        begin = k.splat(self.item["key_begin"].to(i32), iota.ty)
        end = k.splat(self.item["key_end"].to(i32), iota.ty)
        inside = (position >= begin) & (position < end)
        lowest = k.const(float("-inf"), f32 * lanes)
        for r, t, _ in self._rows():
            here = k.splat((self.item["position"] + self._token(t)).to(i32), iota.ty)
            seen = inside & (position <= here)
            if self.spec.window:
                seen = seen & (position > here - self.spec.window)
            assert seen.ty.scalar == boolean
            score = rows[r]
            if self.spec.softcap:
                cap = self.spec.softcap
                score = math.tanh(k, score * (1 / cap)) * (cap * math.LOG2_E)
            score = k.select(seen, score, lowest)
            tops[r].v = k.max(tops[r].v, score)
            k.store(self.p + at, score, offset=4 * (r * SPAN * PAGE + column))

    def _softmax(self, m: Var, total: Var, n_pages: Val, tops: list[Var]) -> Val:
        """P = 2**(S - m'); updates m and l, returns the correction of what was summed before."""
        k, lanes = self.k, self.isa.lanes
        old = m.v
        new = k.max(old, self._of_rows([top.v for top in tops], k.max))
        m.v = new
        correction = math.exp2(k, old - new)
        shifts = [k.splat(k.extract(new, r), f32 * lanes) for r in range(self.spec.rows)]
        lines = self._vectors(0.0)
        with k.loop(n_pages * PAGE, step=PAGE) as i:
            for r, shift in enumerate(shifts):
                for c in range(0, PAGE, lanes):
                    place = self.p + i * 4
                    offset = 4 * (r * SPAN * PAGE + c)
                    part = math.exp2(k, k.load(place, shift.ty, offset=offset) - shift)
                    k.store(place, part, offset=offset)
                    lines[r].v = lines[r].v + part
        sums = self._of_rows([line.v for line in lines], operator.add)
        total.v = k.fma(total.v, correction, sums)
        return correction

    def _of_rows(self, vectors: list[Val], op: Callable[[Val, Val], Val]) -> Val:
        """Each row's vector folded to one value, in the row's lane of a ``stat``."""
        k, lanes = self.k, self.isa.lanes
        vectors = vectors + vectors[:1] * (self.stat.lanes - len(vectors))
        at_once = min(lanes, self.stat.lanes)
        folded = [
            k.split(fold_all(k, vectors[at : at + at_once], op), at_once)[0]
            for at in range(0, self.stat.lanes, at_once)
        ]
        return k.concat(*folded)

    def _values(self, first: Val, n_pages: Val, correction: Val) -> None:
        """O = O c + P V. Keys past the last one are not read: what lies there may be anything."""
        k, isa, spec = self.k, self.isa, self.spec
        width = widest(isa.lanes, BLOCK if spec.page.fmt.scaled else spec.head_dim)
        vectors = spec.head_dim // width
        at_once = max(1, min(vectors, (isa.regs - 6) // spec.rows))
        while vectors % at_once:
            at_once -= 1
        with k.loop(vectors, step=at_once) as column:
            places = [
                [(column + i) * (4 * width) + r * spec.head_dim * 4 for i in range(at_once)]
                for r in range(spec.rows)
            ]
            sums = [
                [
                    k.var(
                        k.load(self.o, f32 * width, offset=place)
                        * k.splat(k.extract(correction, r), f32 * width)
                    )
                    for place in row
                ]
                for r, row in enumerate(places)
            ]
            with k.loop(n_pages) as i:
                page = self._page(first + i) + spec.page.v_off
                n_keys = k.min(self.item["key_end"] - (first + i) * PAGE, PAGE)
                self._add_page(page, n_keys, self.p + i * (PAGE * 4), column, sums)
            for row, line in zip(places, sums, strict=True):
                for place, total in zip(row, line, strict=True):
                    k.store(self.o, total.v, offset=place)

    def _add_page(self, home: Val, n_keys: Val, p: Val, column: Val, sums: list[list[Var]]) -> None:
        """One page's P V, in the vectors of V from ``column`` on."""
        k, spec = self.k, self.spec
        fmt, dims, width = spec.page.fmt, spec.head_dim, sums[0][0].ty.lanes
        scales = home + spec.page.codes_bytes
        with k.loop(n_keys) as j:
            values = []
            for i in range(len(sums[0])):
                start = (column + i) * width
                v = fmt.load(k, self.isa, home + (j * dims + start) * fmt.n_bytes, width)
                if fmt.scaled:
                    at = (j * (dims // BLOCK) + start // BLOCK) * 4
                    v = v * k.splat(k.load(scales, f32, offset=at), v.ty)
                values.append(v)
            for r, row in enumerate(sums):
                weight = k.load(p, f32, offset=j * 4 + r * SPAN * PAGE * 4)
                for total, v in zip(row, values, strict=True):
                    total.v = k.fma(k.splat(weight, v.ty), v, total.v)

    def _store(self, m: Val, total: Val) -> None:
        k, spec, dims = self.k, self.spec, self.spec.head_dim
        width = widest(self.isa.lanes, dims)
        partial = self.item["partial"]
        with k.if_else(partial < 0) as (whole, part):
            with whole:
                inverse = 1.0 / total
                for r, t, g in self._rows():
                    row = (
                        self.frame.ptr(OUT)
                        + (self.item["token"] + self._token(t)) * self.frame.int(OUT_STRIDE) * 4
                    )
                    row = row + (self.group * spec.heads + g) * (dims * 4)
                    factor = k.splat(k.extract(inverse, r), f32 * width)
                    with k.loop(dims, step=width) as d:
                        o = k.load(self.o, factor.ty, offset=d * 4 + r * dims * 4)
                        k.store(row, o * factor, offset=d * 4)
            with part:
                record = (partial * spec.n_groups + self.group) * (spec.rows * (dims + 2) * 4)
                for r in range(spec.rows):
                    row = self.frame.ptr(PARTIALS) + (record + r * (dims + 2) * 4)
                    with k.loop(dims, step=width) as d:
                        k.store(
                            row,
                            k.load(self.o, f32 * width, offset=d * 4 + r * dims * 4),
                            offset=d * 4,
                        )
                    k.store(row, k.extract(m, r), offset=dims * 4)
                    k.store(row, k.extract(total, r), offset=dims * 4 + 4)

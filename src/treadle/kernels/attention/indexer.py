"""The indexer of sparse attention: a small attention without values that scores cached keys, and
the choice of the keys that a query sees (DeepSeek-V3.2, 2025).

``IndexStore`` rotates an indexer's queries and stores its keys, ``IndexScores`` scores them, and
``Choose`` writes a bit for each key, which ``Attention`` reads (``Queries.chosen``). A query that
sees few keys has no scores: all of them are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64, ptr, u32
from treadle.kernels.attention.page_layout import PagedKernel
from treadle.kernels.attention.rope import rotate_pairs, turned
from treadle.kernels.attention.work_item import Queries
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.run_state import ITEM, PAGE, PART, WORD_BYTES, numbered, run_offset
from treadle.kernels.spec import Args, Frame, Spec, f32_values, load_record, whole_rows

EVERY = 0xFFFFFFFF  # a page's keys, one bit each


@dataclass(frozen=True)
class IndexStore(PagedKernel):
    """Rotate an indexer's queries and keys by their positions, and store the keys in their pages.

    ``q`` is f32 ``[N, stride]``: ``n_head`` heads of ``head_dim`` from column 0 on, rotated in
    place. ``key`` has one key a token, from column ``k_column`` on. In both, ``rope_dims`` dims
    from dim ``first`` on are rotated, in pairs of ``style``. With ``back`` a key is rotated twice:
    first by the constant table of cosines and sines in the argument ``back``, then by its position.
    Items: tokens.
    """

    op: ClassVar[str] = "index_store"
    args = Args(
        "q:inout? key:in back:const? pool:const stride:? k_stride k_column page_bytes layer_off"
    )
    latent = True  # pages have no values
    style: str  # pairs of dims that rotate together: "norm" or "neox" (``RopeStore``)
    kv: str  # formats of keys and values, as in ``kv_formats``
    n_head: int  # 0: no queries
    head_dim: int
    rope_dims: int  # 0: no rotation
    first: int = 0
    pool: int = 0  # number of the page pool
    table: int = 0  # number of the rope table
    n_head_kv: int = 1
    head_dim_v: int = 0
    back: bool = False

    @property
    def needs(self) -> set[str]:
        asked = {"q", "stride"} if self.n_head else set()
        return self.args.required | asked | ({"back"} if self.back else set())

    def scratch(self, lanes: int) -> int:
        return 4 * (self.head_dim + 64)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        tables = frame.run(numbered("rope", self.table), ptr) if self.rope_dims else None
        kv_indices = frame.run(numbered("kv_indices", self.pool), ptr)
        tmp = frame.scratch
        with k.loop(frame.end, start=frame.begin) as n:
            table = None if tables is None else tables + n * (self.rope_dims * 4)
            with k.loop(self.n_head) as head:
                x = frame.q + n * (frame.stride * 4) + head * (self.head_dim * 4)
                self._rotate_head(k, x, table)
            row = frame.key + (n * frame.k_stride + frame.k_column) * 4
            map_row(k, self.head_dim, tmp, lambda v: v, row)
            if self.back:
                self._pairs(k, tmp, frame.back)
            self._rotate_head(k, tmp, table)
            kv_index = k.load(kv_indices, n.ty, offset=n * 8)
            home = frame.pool + (kv_index // PAGE * frame.page_bytes + frame.layer_off)
            self.page.keys.store(k, tmp, home, kv_index % PAGE)

    def _rotate_head(self, k: Builder, x: Val, table: Val | None) -> None:
        """Rotate one head ``x`` in place: by position if there is a rope ``table``, then by the
        Hadamard matrix if the page format needs it.
        """
        if table is not None:
            self._pairs(k, x, table)
        if self.page.keys.fmt.rotated:
            from treadle.kernels.attention.hadamard import rotate  # rarely needed

            rotate(k, x, x, self.head_dim)

    def _pairs(self, k: Builder, x: Val, table: Val) -> None:
        at = x + self.first * 4
        rotate_pairs(k, self.style, self.rope_dims // 2, at, at, table, lambda v, i: v)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        rotated: Callable[[np.ndarray], np.ndarray] = np.asarray
        if self.page.keys.fmt.rotated:
            from treadle.kernels.attention.hadamard import rotate_ref as rotated

        part = slice(self.first, self.first + self.rope_dims)

        def placed(x: np.ndarray) -> np.ndarray:
            y = x.astype(np.float64)
            if self.rope_dims:
                y[..., part] = turned(
                    y[..., part], run.rope(self.table, self.rope_dims), self.style
                )
            return rotated(y)

        if self.n_head:
            width = self.n_head * self.head_dim
            q = args.q.reshape(-1, args.stride)[:n, :width]
            q[:] = placed(q.reshape(n, self.n_head, -1)).reshape(n, width)
        rows = f32_values(args.key).reshape(-1, args.k_stride)[:n]
        keys = rows[:, None, args.k_column : args.k_column + self.head_dim].astype(np.float64)
        if self.back:
            table = args.back[: self.rope_dims].reshape(1, 2, -1)
            keys[..., part] = turned(keys[..., part], table, self.style)
        keys = placed(keys)[:, 0]
        for i, kv_index in enumerate(run.kv_indices(self.pool)[:n]):
            home = args.pool, int(kv_index) // PAGE, args.page_bytes, args.layer_off, 0
            self.page.write_ref(self.page.head_ref(*home), int(kv_index) % PAGE, keys[i], keys[i])


@dataclass(frozen=True)
class KeySelection(Spec):
    """The selection of the units of keys that a query attends to.

    A unit is ``unit`` consecutive keys. A query sees ``top`` units: those with the largest scores,
    a unit's score being that of its best key; of equal scores, the earliest. The ``local`` last
    units win before all others. If only ``whole`` units compete, the keys of the last, incomplete
    one are seen as well.
    """

    top: int
    unit: int = 1
    local: int = 0
    whole: bool = False

    def units(self, n_keys: Any) -> Any:
        """Return the number of units of ``n_keys`` keys that compete to be chosen; an incomplete
        last unit counts unless only ``whole`` ones compete.
        """
        return (n_keys if self.whole else n_keys + (self.unit - 1)) // self.unit


@dataclass(frozen=True)
class IndexScores(Queries):
    """Compute an indexer's scores of cached keys, f32 ``[N, planes, scores_stride]``: the sum over
    heads of ``weight * max(0, q . k)``, times ``scale``. With ``apart`` each head has a plane of
    its own, of ``scale * q . k``; else there is one plane. Without ``weighted`` all weights are 1.
    With ``whole`` only the last key of each unit of ``unit`` keys has a score.

    Keys that a query does not see score -inf. A query that sees at most ``top`` units
    (``KeySelection.units``) needs no choice: its scores are not written. Items: the pool's
    attention work items.
    """

    op: ClassVar[str] = "index_scores"
    args = Args(
        "qkv:in weights:in? pool:const scores:out stride weights_stride:? weights_column:?"
        " scores_stride page_bytes layer_off few"
    )
    scale: float = 1.0
    weighted: bool = True
    apart: bool = False
    top: int = 0
    unit: int = 1
    whole: bool = False

    @property
    def needs(self) -> set[str]:
        asked = {"weights", "weights_stride", "weights_column"}
        return self.args.required | (asked if self.weighted else set())

    @property
    def selection(self) -> KeySelection:
        return KeySelection(self.top, self.unit, whole=self.whole)

    @property
    def planes(self) -> int:
        return self.n_head if self.apart else 1

    @property
    def compile_ms(self) -> float:
        return 100.0

    def scratch(self, lanes: int) -> int:
        return 4 * self.rows * (self.head_dim + 2 * PAGE) + 256

    def history(self, n_before: int, n_tokens: int) -> tuple[int, int]:
        """Return the bytes of the cached keys, each read once, and the operations of all queries on
        the keys that they see; zeros if no query needs a choice.
        """
        end = n_before + n_tokens
        if self.selection.units(end) <= self.top:
            return 0, 0
        n_seen = sum(p + 1 for p in range(n_before, end))
        return end * self.page.layer_bytes // PAGE, 2 * n_seen * self.n_head * self.head_dim

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        from treadle.kernels.attention.index_tile import IndexTile

        many, few = (run_offset(numbered(name, self.pool)) for name in ("attn_items", "attn_few"))
        at = frame.block + frame.few * (few - many)
        items = frame.block + k.load(at, i64, align=8, offset=many)
        with k.loop(frame.end, start=frame.begin) as index:
            IndexTile(k, isa, self, frame, items + index * ITEM.itemsize, k.i64(0)).run()

    def run_ref(self, args: Any, run: Any) -> None:
        dims = self.head_dim
        q_all = args.qkv.reshape(-1, args.stride)
        out = whole_rows(args.scores, args.scores_stride)
        out = out.reshape(-1, self.planes, args.scores_stride)
        for item, pages in run.attn_items(self.pool, few=bool(args.few)):
            first = int(item["key_begin"]) // PAGE
            last = -(-int(item["key_end"]) // PAGE)
            keys = np.arange(first * PAGE, last * PAGE)
            found = [
                self.page.read_ref(
                    self.page.head_ref(args.pool, int(page), args.page_bytes, args.layer_off, 0)
                )[0]
                for page in pages[first:last]
            ]
            kk = np.concatenate(found)
            for t in range(int(item["n_tokens"])):
                token, own = int(item["token"]) + t, int(item["position"]) + t
                if self.selection.units(own + 1) <= self.top:
                    continue
                q = q_all[token, : self.n_head * dims].astype(np.float64).reshape(-1, dims)
                with np.errstate(invalid="ignore", over="ignore"):
                    score = (q @ kk.T) * self.scale
                if not self.apart:
                    w = np.ones(self.n_head)
                    if self.weighted:
                        row = args.weights.reshape(-1, args.weights_stride)[token]
                        w = row[args.weights_column :][: self.n_head].astype(np.float64)
                    with np.errstate(invalid="ignore"):
                        score = (w @ np.maximum(score, 0.0))[None]
                hidden = keys > own
                if self.whole:
                    hidden |= keys % self.unit != self.unit - 1
                out[token, :, first * PAGE : last * PAGE] = np.where(hidden, -np.inf, score) + 0.0


@dataclass(frozen=True)
class Choose(KeySelection):
    """Choose the keys that each query attends to, by the rules of ``KeySelection``.

    ``chosen`` becomes bits ``[N, planes, chosen_stride]``, one word of PAGE bits for each page.
    ``scores [N, planes, scores_stride]`` (of ``IndexScores``) are read, and used as scratch; a
    plane has a choice of its own. Words past the query's own page are not written. Items: tokens x
    planes.
    """

    op: ClassVar[str] = "choose"
    args = Args("scores:inout chosen:out scores_stride chosen_stride")
    planes: int = 1
    dense: bool = False  # scores are those of units, not of keys

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            own = self._position(k, frame, item // self.planes)
            n_keys = own + 1
            scores = frame.scores + item * (frame.scores_stride * 4)
            chosen = frame.chosen + item * (frame.chosen_stride * WORD_BYTES)
            n_units = self.units(n_keys)
            with k.if_else(n_units <= self.top) as (every, some):
                with every, k.loop(own // PAGE + 1) as page:
                    _store_word(k, chosen, page, own, k.const(EVERY, u32))
                with some:
                    if self.unit > 1 and not self.dense:
                        self._best_of_units(k, scores, n_keys, n_units)
                    if self.local:
                        first = k.max(n_units - self.local, 0)
                        with k.loop(n_units, start=first) as u:
                            k.store(scores, k.const(float("inf"), f32), offset=u * 4)
                    self._flag(k, isa, scores, n_units)
                    self._write(k, isa, scores, chosen, own, n_units)

    def _position(self, k: Builder, frame: Frame, token: Val) -> Val:
        """Return the position in its sequence of ``token``, a row of the batch."""
        parts = frame.run("parts", ptr)
        found = k.var(k.i64(0))
        with k.loop(frame.run("n_parts")) as i:
            part = load_record(k, parts + i * PART.itemsize, PART)
            place = token - part["token"]
            inside = (place >= 0) & (place < part["n_tokens"])
            found.v = k.select(inside, part["position"] + place, found.v)
        return found.v

    def _best_of_units(self, k: Builder, scores: Val, n_keys: Val, n_units: Val) -> None:
        """Replace the first ``n_units`` values of ``scores``, which has a score for each of
        ``n_keys`` keys, by the largest score of each unit.
        """
        with k.loop(n_units) as u:
            start = u * self.unit
            best = k.var(k.const(float("-inf"), f32))
            with k.loop(k.min(n_keys, start + self.unit), start=start) as at:
                best.v = k.max(best.v, k.load(scores, f32, offset=at * 4))
            k.store(scores, best.v, offset=u * 4)

    def _flag(self, k: Builder, isa: Isa, scores: Val, n_units: Val) -> None:
        """Replace each of ``n_units`` scores by 1, i32, if its unit is chosen, else by 0.

        A binary search over the bits of u32 ranks finds the ``top``-th largest: a bit of the
        threshold is kept if at least ``top`` ranks reach it. Of units equal to the threshold the
        first are chosen.
        """
        ty = u32 * isa.lanes
        iota = k.const(range(isa.lanes), i32 * isa.lanes)
        least = k.var(k.const(0, u32))
        with k.loop(32) as i:
            bit = k.const(1, u32) << (31 - i).to(u32)
            asked = least.v | bit
            n = k.var(k.zero(i32 * isa.lanes))
            with k.loop(n_units, step=isa.lanes) as u:
                rank = _rank(k, k.load(scores, f32 * isa.lanes, offset=u * 4))
                inside = iota < k.splat((n_units - u).to(i32), iota.ty)
                as_large = inside & (rank >= k.splat(asked, ty))
                n.v = n.v + k.select(as_large, k.const(1, n.ty), k.zero(n.ty))
            enough = k.sum(n.v) >= self.top
            least.v = k.select(enough, asked, least.v)
        n_larger = k.var(k.const(0, i32))
        with k.loop(n_units) as u:
            larger = _rank(k, k.load(scores, f32, offset=u * 4)) > least.v
            n_larger.v = n_larger.v + k.select(larger, k.const(1, i32), k.const(0, i32))
        left = k.var(self.top - n_larger.v)
        with k.loop(n_units) as u:
            rank = _rank(k, k.load(scores, f32, offset=u * 4))
            taken = rank.eq(least.v) & (left.v > 0)
            left.v = left.v - k.select(taken, k.const(1, i32), k.const(0, i32))
            flag = k.select((rank > least.v) | taken, k.const(1, i32), k.const(0, i32))
            k.store(scores, flag, offset=u * 4)

    def _write(self, k: Builder, isa: Isa, flags: Val, chosen: Val, own: Val, n_units: Val) -> None:
        """Write the words of ``chosen`` for the pages up to the query's own position ``own``, from
        ``flags``, 1 or 0 for each of ``n_units`` units.
        """
        with k.loop(own // PAGE + 1) as page:
            if self.unit == 1:
                lanes = isa.lanes
                bits = k.zero(i32 * lanes)
                for c in range(0, PAGE, lanes):
                    flag = k.load(flags, bits.ty, offset=page * (PAGE * 4) + c * 4)
                    shift = k.const(range(c, c + lanes), bits.ty)
                    bits = bits | ((flag & 1) << shift)
                word = k.reduce(bits, lambda a, b: a | b).bits(u32)
            else:
                made = k.var(k.const(0, u32))
                with k.loop(PAGE) as i:
                    unit = (page * PAGE + i) // self.unit
                    flag = k.load(flags, u32, offset=k.min(unit, n_units - 1) * 4)
                    # Behind the units that compete are keys of the last, incomplete one.
                    bit = k.select(unit < n_units, flag, k.const(1, u32))
                    made.v = made.v | (bit << i.to(u32))
                word = made.v
            _store_word(k, chosen, page, own, word)

    def run_ref(self, args: Any, run: Any) -> None:
        scores = whole_rows(args.scores, args.scores_stride)
        words = whole_rows(args.chosen, args.chosen_stride)
        for part in run.parts:
            for t in range(int(part["n_tokens"])):
                own = int(part["position"]) + t
                for plane in range(self.planes):
                    row = (int(part["token"]) + t) * self.planes + plane
                    seen = self.seen(np.asarray(scores[row], np.float32), own)
                    whole = np.zeros(-(-len(seen) // PAGE) * PAGE, bool)
                    whole[: len(seen)] = seen
                    packed = np.packbits(whole, bitorder="little").view("<u4")
                    words[row, : len(packed)] = packed

    def seen(self, scores: np.ndarray, own: int) -> np.ndarray:
        """Return which keys up to the query's position ``own`` it attends to, bool ``[own + 1]``;
        ``scores``: the query's scores of these keys.
        """
        n_keys = own + 1
        n_units = int(self.units(n_keys))
        if n_units <= self.top:
            return np.ones(n_keys, bool)
        best = np.array(scores[:n_units])
        if not self.dense:
            each = np.full(n_units * self.unit, -np.inf, np.float32)
            n = min(n_keys, len(each))
            each[:n] = scores[:n]
            best = each.reshape(n_units, self.unit).max(-1)
        if self.local:
            best[max(0, n_units - self.local) :] = np.inf
        flags = np.zeros(n_units, bool)
        flags[np.argsort(-best, kind="stable")[: self.top]] = True
        wide = flags.repeat(self.unit)
        if self.whole:
            wide = np.concatenate([wide, np.ones(self.unit, bool)])
        return np.asarray(wide[:n_keys])


def _rank(k: Builder, x: Val) -> Val:
    """Map f32 scores ``x`` to u32 numbers that compare as the scores do."""
    bits = x.bits(i32.like(x.ty))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).bits(u32.like(x.ty)) ^ 0x80000000


def _store_word(k: Builder, chosen: Val, page: Val, own: Val, word: Val) -> None:
    """Store ``word`` in ``chosen`` as that of page number ``page``, with the bits of keys after
    position ``own``, the query's, cleared.
    """
    n_later = k.max((page + 1) * PAGE - (own + 1), 0)
    seen = k.const(EVERY, u32) >> k.min(n_later, PAGE - 1).to(u32)
    k.store(chosen, word & seen, offset=page * WORD_BYTES)

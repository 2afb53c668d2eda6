"""Base of the attention tiles: a work item's queries and keys, and their addresses.

The tiles (``vector_tile.py``, ``wide.py``) take their shape from a ``Queries`` spec.
``paged.Attention`` chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Operand, Val
from treadle.jit.types import Ty, f32, i32, i64
from treadle.kernels.attention.page_layout import PagedKernel
from treadle.kernels.attention.relative_bias import row_values
from treadle.kernels.attention.relative_logits import farthest, relative_values
from treadle.kernels.run_state import ITEM, PAGE, WORD_BYTES
from treadle.kernels.spec import Frame, load_record

SPAN = 4  # pages whose scores are kept at a time; work per row is done once for all of them
WORD_DIMS = 8  # products of 16-bit numbers need head dims that are a multiple of this
LOWEST = -1e30  # below every log2(e) S, but finite: inf - inf would be NaN


@dataclass(frozen=True)
class Queries(PagedKernel):
    """Common fields of the attention kernels: tiles of ``tokens`` query tokens times the query
    heads of one group, and which keys they see: with ``causal`` none after their own, with
    ``window`` only the last so many.
    """

    kv: str  # formats of keys and values, as in ``kv_formats``
    n_head: int
    n_head_kv: int
    head_dim: int
    tokens: int
    window: int = 0
    pool: int = 0  # number of the page pool
    softcap: float = 0.0  # scores become ``softcap * tanh(score / softcap)``
    matrix: bool = False  # on matrix registers: dims a multiple of 32, many rows
    head_dim_v: int = 0  # dims of a value; 0: head_dim
    causal: bool = True
    sinks: bool = False  # each head has one more score, for a key without a value
    latent: bool = False  # a value is its key's first dims
    alibi: float = 0.0  # 2**-alibi is the last slope for a power of two of heads; 0.0: none
    words: bool = False  # products of 16-bit numbers, in vectors: many rows
    reach: int = 0  # biases by distance up to this: see ``relative_bias.py``; 0: none
    spans: bool = False  # queries also see keys up to their item's ``sees``
    # Choices of keys that a query has (``indexer.py``), one for each group of heads; 0: all.
    chosen: int = 0
    # Biases of each query by distance up to this (``relative_logits.py``); 0: none.
    rel_extent: int = 0

    @property
    def heads(self) -> int:
        """Query heads of one group, which a tile processes together: all that share a key head, or
        the largest divisor of that number that is at most 16.
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
    def row_lanes(self) -> int:
        """Lanes of a vector with a lane for each row of a tile: a power of two, at least 4."""
        return max(4, 1 << (self.rows - 1).bit_length())

    @property
    def partial_values(self) -> int:
        """Number of f32 values in one item's partial results, over all groups."""
        return self.n_groups * self.rows * (self.dims_v + 2)


def alibi_slopes(n_head: int, alibi: float) -> np.ndarray:
    """Return each head's ALiBi slope, f64 ``[n_head]``: the amount that a key's score loses per
    token of distance (Press et al., 2022). ``alibi``: -log2 of the last slope, for a power of two
    of heads. Other numbers of heads: those past the largest power of two take every second slope of
    twice as many.
    """
    n = 1 << (n_head.bit_length() - 1)
    slopes = [-(h + 1) / n if h < n else -(2 * (h - n) + 1) / (2 * n) for h in range(n_head)]
    return np.asarray(np.exp2(alibi * np.array(slopes)))


class AttentionItem:
    """Base of the tiles: one work item and one group of heads. Rows are the item's tokens times the
    group's heads; in methods ``t`` is a token's number in the item, ``g`` a head's number in the
    group, and ``r`` a row's number.
    """

    def __init__(
        self, k: Builder, isa: Isa, spec: Queries, frame: Frame, item: Val, group: Val
    ) -> None:
        self.k = k
        self.isa = isa
        self.spec = spec
        self.frame = frame
        self.group = group
        self.item = load_record(k, item, ITEM)
        self.pages = item + self.item["pages"]

    def page(self, p: Val) -> Val:
        """Return the address of the sequence's ``p``-th page, at this layer and the group's key
        head.
        """
        k = self.k
        spec = self.spec
        page_bytes = self.frame.page_bytes
        layer_off = self.frame.layer_off
        head = self.group * spec.heads // (spec.n_head // spec.n_head_kv) * spec.page.head_bytes
        page = k.load(self.pages, i64, offset=p * 8, align=8) * page_bytes
        return self.frame.pool + (layer_off + head) + page

    def token(self, t: Operand) -> Val:
        """Return ``t``, clamped to the item's last token."""
        return self.k.min(self.k.val(t, i64), self.item["n_tokens"] - 1)

    def last_seen(self, own: Val) -> Val:
        """Return the last position that a causal query at position ``own`` sees: with ``spans`` the
        item's ``sees`` if that is later, else ``own``.
        """
        return self.k.max(own, self.item["sees"]) if self.spec.spans else own

    def query(self, t: Operand, g: Operand) -> Val:
        """Return the address of token ``t``'s query for the group's ``g``-th head, f32
        ``[head_dim]``.
        """
        row = (self.item["token"] + self.token(t)) * (self.frame.stride * 4)
        head = self.group * self.spec.heads + g
        return self.frame.qkv + row + head * (self.spec.head_dim * 4)

    def each_dim(
        self, per: int, step: int, query: Callable[[Val], None], result: Callable[[Val], None]
    ) -> None:
        """Emit ``query(d)`` for all dims of a query and ``result(d)`` for all dims of a result, in
        one loop as far as both extend. ``d`` counts in units of ``per`` dims, in steps of ``step``.
        """
        ends = self.spec.head_dim // per, self.spec.dims_v // per
        with self.k.loop(min(ends), step=step) as d:
            query(d)
            result(d)
        for end, emit in zip(ends, (query, result), strict=True):
            if end > min(ends):
                with self.k.loop(end, start=min(ends), step=step) as d:
                    emit(d)

    def result(self, t: Operand, g: Operand) -> Val:
        """Return the address of token ``t``'s result for the group's ``g``-th head, f32
        ``[dims_v]``.
        """
        row = (self.item["token"] + self.token(t)) * (self.frame.out_stride * 4)
        head = self.group * self.spec.heads + g
        return self.frame.out + row + head * (self.spec.dims_v * 4)

    def sink(self, g: Operand) -> tuple[Val, Val]:
        """Return the initial m and l (``paged.py``) of the group's ``g``-th head: log2(e) times its
        sink's score and 1, or LOWEST and 0 without a sink. An item that is a part of a split
        history has no sink: ``Merge`` adds it.
        """
        k = self.k
        lowest = k.const(LOWEST, f32)
        none = k.const(0.0, f32)
        if not self.spec.sinks:
            return lowest, none
        place = self.frame.sinks + (self.group * self.spec.heads + g) * 4
        whole = self.item["partial"] < 0
        score = k.load(place, f32) * math.LOG2_E
        return k.select(whole, score, lowest), k.select(whole, k.const(1.0, f32), none)

    def choice(self, t: Operand, page: Val) -> Val:
        """Return the word of the indexer's choice for token ``t`` and the ``page``-th page, i32: a
        bit for each key.
        """
        spec = self.spec
        which = self.group * spec.heads // (spec.n_head // spec.chosen)
        row = (self.item["token"] + self.token(t)) * spec.chosen + which
        words = self.frame.chosen + row * (self.frame.chosen_stride * WORD_BYTES)
        return self.k.load(words, i32, offset=page * WORD_BYTES)

    def slope(self, g: Operand, ty: Ty) -> Val:
        """Return the ALiBi slope of the group's ``g``-th head times log2(e), in all lanes of a
        ``ty``.
        """
        k = self.k
        n = 1 << (self.spec.n_head.bit_length() - 1)
        head = (self.group * self.spec.heads + g).to(i32).to(f32)
        first = (head + 1.0) * (-1.0 / n)
        behind = (head - n) * (-1.0 / n) - 0.5 / n
        power = k.select(head < float(n), first, behind) * self.spec.alibi
        return math.exp2(k, k.splat(power, ty)) * math.LOG2_E

    def relative_biases(self, g: Operand, distance: Val, n: int) -> Val:
        """Return the relative biases (``relative_bias.py``) of ``n`` consecutive keys, f32, for the
        group's ``g``-th head. ``distance``: first key - query, i64.
        """
        k = self.k
        end = self.spec.reach + PAGE
        head = self.group * self.spec.heads + g
        row = self.frame.distances + head * (row_values(self.spec.reach) * 4)
        first = k.max(k.min(distance, end - n), -end) + end
        return k.load(row + first * 4, f32 * n, align=4)

    def rel_logits(self, t: Operand, g: Operand, distance: Val, n: int) -> Val:
        """Return the relative logits (``relative_logits.py``) of ``n`` consecutive keys, f32, for
        token ``t``'s query of the group's ``g``-th head. ``distance``: first key - query, i64.
        """
        k = self.k
        reach = self.spec.rel_extent
        head = self.group * self.spec.heads + g
        row = (self.item["token"] + self.token(t)) * self.spec.n_head + head
        begin = farthest(reach)
        place = k.max(k.min(distance, begin + relative_values(reach) - n), begin) - begin
        at = self.frame.rel_logits + (row * relative_values(reach) + place) * 4
        return k.load(at, f32 * n, align=4)

    def partial(self, r: Operand) -> Val:
        """Return the address of row ``r``'s partial result, f32 ``[dims_v + 2]``: O, m, l. Only for
        an item that is a part of a split history.
        """
        spec = self.spec
        row_bytes = (self.spec.dims_v + 2) * 4
        record = (self.item["partial"] * spec.n_groups + self.group) * (spec.rows * row_bytes)
        return self.frame.partials + (record + self.k.val(r, i64) * row_bytes)

"""What every attention kernel knows of a work item: which queries, which keys, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.jit.types import i64, ptr
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Operand, Val
    from treadle.kernels.attention import Attention

SPAN = 4  # pages whose scores are kept: what is done for each row is done for so many keys
SPLIT = 512  # keys of one item while decoding
ITEM_FIELDS = "token n_tokens position key_begin key_end pages partial pad"
ITEM = np.dtype([(name, "i8") for name in ITEM_FIELDS.split()])
QKV, POOL, OUT, PARTIALS, STRIDE, OUT_STRIDE, PAGE_BYTES, LAYER_OFF = range(8)  # arguments
LOWEST = -1e30  # below every score, and finite: LOWEST - LOWEST is 0 where inf - inf is NaN


class Item:
    """One item and one group of heads; rows are its tokens times the group's heads."""

    def __init__(
        self, k: Builder, isa: Isa, spec: Attention, frame: Frame, item: Val, group: Val
    ) -> None:
        self.k, self.isa, self.spec, self.frame, self.group = k, isa, spec, frame, group
        assert ITEM.fields is not None
        at = {name: int(field[1]) for name, field in ITEM.fields.items()}
        self.item = {name: k.load(item, i64, offset=off, align=8) for name, off in at.items()}
        self.pages = k.load(item, ptr, offset=at["pages"], align=8)

    def page(self, p: Val) -> Val:
        """Where the sequence's p-th page keeps this layer and head."""
        k, spec = self.k, self.spec
        page_bytes, layer_off = self.frame.int(PAGE_BYTES), self.frame.int(LAYER_OFF)
        head = self.group * spec.heads // (spec.n_head // spec.n_head_kv) * spec.page.head_bytes
        page = k.load(self.pages, i64, offset=p * 8, align=8) * page_bytes
        return self.frame.ptr(POOL) + (layer_off + head) + page

    def token(self, t: Operand) -> Val:
        """Token ``t`` of the tile; past its end, the last one again."""
        return self.k.min(self.k.val(t, i64), self.item["n_tokens"] - 1)

    def query(self, t: Operand, g: Operand) -> Val:
        """Where token t's query of the group's g-th head is."""
        row = (self.item["token"] + self.token(t)) * (self.frame.int(STRIDE) * 4)
        head = self.group * self.spec.heads + g
        return self.frame.ptr(QKV) + row + head * (self.spec.head_dim * 4)

    def result(self, t: Operand, g: Operand) -> Val:
        """Where its result goes."""
        row = (self.item["token"] + self.token(t)) * (self.frame.int(OUT_STRIDE) * 4)
        head = self.group * self.spec.heads + g
        return self.frame.ptr(OUT) + row + head * (self.spec.head_dim * 4)

    def partial(self, r: Operand) -> Val:
        """Where row ``r`` goes, where the item is a part of a history."""
        spec, row_bytes = self.spec, (self.spec.head_dim + 2) * 4
        record = (self.item["partial"] * spec.n_groups + self.group) * (spec.rows * row_bytes)
        return self.frame.ptr(PARTIALS) + (record + self.k.val(r, i64) * row_bytes)

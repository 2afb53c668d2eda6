"""Attention of plain states, with a norm of what it gives, in models whose other layers have theirs
before (OLMo Hybrid).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.mixers.attention import ATTENTION

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """``norm(attention(h))``; the norm is called as the one before the FFN of other layers."""
    y = ATTENTION.build(g, i, h)
    return g.norm(f"L{i}.attn.post_norm", y, f"blk.{i}.post_attention_norm")


ATTENTION_BEHIND = replace(
    ATTENTION,
    before="",
    after="",
    build=build,
    rows=tuple(row for row in ATTENTION.rows if not row.name.startswith("attn_norm.")),
)

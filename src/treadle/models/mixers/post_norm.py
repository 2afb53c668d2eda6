"""Attention with a norm after it and none before, in models whose other layers have input norms
(OLMo Hybrid).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.mixers.attention import ATTENTION

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``norm(attention(h))`` of layer ``i``. The norm's tensor has the name that the norm
    before the FFN has in other layers.
    """
    y = ATTENTION.build(g, i, h)
    return g.norm(f"L{i}.attn.post_norm", y, f"blk.{i}.post_attention_norm")


ATTENTION_POST_NORM = replace(
    ATTENTION,
    before="",
    after="",
    build=build,
    rows=tuple(row for row in ATTENTION.rows if not row.name.startswith("attn_norm.")),
)

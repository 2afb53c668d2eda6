"""One matrix instead of attention (Nemotron 51B): tokens are not mixed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.structure import Sublayer, with_bias

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return the product of ``h`` with the layer's ``attn_output`` matrix, which replaces attention
    in this layer.
    """
    return g.linear(f"L{i}.attn.output", h, f"blk.{i}.attn_output")


LINEAR = Sublayer(
    label="attn",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(*with_bias("attn_norm", "n_embd"), *with_bias("attn_output", "n_embd", "n_embd")),
    sizes=lambda layer: {},
)

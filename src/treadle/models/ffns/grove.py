"""Experts with small ones that neighbours share (GroveMoE's adjugate experts): each chosen expert
also uses its small one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.experts import EXPERTS
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sizes


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``sum w[e] (expert[e](h) + scale * chunk[e // per](h))`` over a token's experts e in
    layer ``i``: w are the router's weights, ``chunk`` the small experts, each of which ``per``
    neighbouring experts share, and ``scale`` their factor (``Experts.chunk_scale``).
    """
    at = f"L{i}.ffn"
    scores = g.linear(f"{at}.router", h, f"blk.{i}.ffn_gate_inp")
    made = g.call("experts", at, h, scores, layer=i)
    return g.call("experts", f"{at}.chunks", h, scores, made, layer=i, chunks=True)


def _sizes(layer: Layer) -> Sizes:
    at = layer.experts
    assert at is not None
    return {**EXPERTS.sizes(layer), "n_chunk": at.n // at.per_chunk, "n_ff_chunk": at.n_ff_chunk}


EXPERTS_GROVE = replace(
    EXPERTS,
    build=build,
    rows=(
        *(row for row in EXPERTS.rows if not row.name.endswith(("shexp.weight", "shexp.bias"))),
        TensorRow("ffn_gate_chexps.weight", ("n_chunk", "n_ff_chunk", "n_embd")),
        TensorRow("ffn_up_chexps.weight", ("n_chunk", "n_ff_chunk", "n_embd")),
        TensorRow("ffn_down_chexps.weight", ("n_chunk", "n_embd", "n_ff_chunk")),
    ),
    sizes=_sizes,
)

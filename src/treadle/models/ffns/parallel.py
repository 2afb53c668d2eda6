"""Experts in parallel to a dense FFN (Gemma 4): each has its own norms, and so has their sum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns import FUSED_EXPERTS
from treadle.models.ffns.experts import EXPERTS, EXPERTS_FUSED
from treadle.models.ffns.gated import GATED, feed
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sizes


def build(g: Ops, i: int, x: Rows) -> Rows:
    """Return ``norm(ffn(norm(x))) + norm(experts(norm(x)))`` for the states ``x`` before any norm,
    with different weights for each norm; the router has a further norm.
    """
    at = f"L{i}.ffn"
    blk = f"blk.{i}"
    h = g.norm(f"{at}.norm", x, f"{blk}.ffn_norm")
    dense = feed(g, i, h, f"{at}.dense")
    dense = g.norm(f"{at}.dense.post_norm", dense, f"{blk}.post_ffw_norm_1")
    scale = x.width**-0.5
    h = g.norm(f"{at}.router.norm", x, f"{blk}.ffn_gate_inp_norm", scale=scale)
    scores = g.linear(f"{at}.router", h, f"{blk}.ffn_gate_inp")
    h = g.norm(f"{at}.experts.norm", x, f"{blk}.pre_ffw_norm_2")
    mixed = g.call("experts", at, h, scores, layer=i)
    return g.add(dense, g.norm(f"{at}.experts.post_norm", mixed, f"{blk}.post_ffw_norm_2"))


def _sizes(layer: Layer) -> Sizes:
    return {**GATED.sizes(layer), **EXPERTS.sizes(layer)}


_SAME = {row.name for row in EXPERTS.rows}
_MORE = (
    *(row for row in GATED.rows if row.name not in _SAME),
    TensorRow("ffn_gate_inp_norm.weight", ("n_embd",)),
    TensorRow("pre_ffw_norm_2.weight", ("n_embd",)),
    TensorRow("post_ffw_norm_1.weight", ("n_embd",)),
    TensorRow("post_ffw_norm_2.weight", ("n_embd",)),
)
EXPERTS_BESIDE, EXPERTS_FUSED_BESIDE = (
    replace(each, before="", build=build, rows=(*each.rows, *_MORE), sizes=_sizes)
    for each in (EXPERTS, EXPERTS_FUSED)
)
BESIDE = {"experts": "experts_beside", FUSED_EXPERTS: "experts_gate_up_beside"}

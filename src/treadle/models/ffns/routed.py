"""Gated experts in a space of smaller width (Kimi K3, 2026): the router and the shared experts read
the states themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.experts import BEFORE, EXPERTS, SHARED, expert_rows, shared_expert
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``up(norm(sum w[e] expert[e](down(h))))`` over a token's experts e, with the router's
    weights w, plus the shared experts' result. ``down`` and ``up`` are the matrices to the experts'
    width and back; the norm and the shared experts are optional.
    """
    at = f"L{i}.ffn"
    blk = f"blk.{i}.ffn"
    scores = g.linear(f"{at}.router", h, f"{blk}_gate_inp")
    inner = g.linear(f"{at}.routed_down", h, f"{blk}_routed_down")
    inner = g.call("experts", at, inner, scores, layer=i)
    if g.has(f"{blk}_routed_norm.weight"):
        inner = g.norm(f"{at}.routed_norm", inner, f"{blk}_routed_norm")
    result = g.linear(f"{at}.routed_up", inner, f"{blk}_routed_up")
    if not g.has(f"{blk}_up_shexp.weight"):
        return result
    return g.add(shared_expert(g, i, f"{at}.shared", h)[0], result)


EXPERTS_ROUTED = replace(
    EXPERTS,
    build=build,
    rows=(
        *BEFORE,
        TensorRow("ffn_routed_down.weight", ("n_latent", "n_embd")),
        *expert_rows("ffn_gate_exps", "n_ff_exp", "n_latent"),
        *expert_rows("ffn_up_exps", "n_ff_exp", "n_latent"),
        *expert_rows("ffn_down_exps", "n_latent", "n_ff_exp"),
        TensorRow("ffn_routed_norm.weight", ("n_latent",), optional=True),
        TensorRow("ffn_routed_up.weight", ("n_embd", "n_latent")),
        *(row for row in SHARED if row.name != "ffn_gate_inp_shexp.weight"),
    ),
)

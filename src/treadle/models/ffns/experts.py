"""A mixture of experts: many feed-forward networks, of which each token has a few, and perhaps one
more that every token has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.gated import GATED, NORMS_AFTER, NORMS_BEFORE
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """``sum w[e] down[e](act(gate[e](h)) * up[e](h))`` over a token's experts e, and the shared
    one's.
    """
    at, blk, fn = f"L{i}.ffn", f"blk.{i}.ffn", g.config.arch.activation
    scores, shared = g.linear(f"{at}.router", h, f"{blk}_gate_inp"), []
    if g.has(f"{blk}_up_shexp.weight"):
        names = [f"{blk}_gate_shexp", f"{blk}_up_shexp"]
        gate, up = g.linears(f"{at}.shared.gate_up", h, names)
        made = g.gated(f"{at}.shared.{fn}", gate, up, fn)
        shared.append(g.linear(f"{at}.shared.down", made, f"{blk}_down_shexp"))
        if g.has(f"{blk}_gate_inp_shexp.weight"):
            shared.append(g.linear(f"{at}.shared.router", h, f"{blk}_gate_inp_shexp"))
    return g.call("experts", at, h, scores, *shared, layer=i)


def _sizes(layer: Layer) -> Sizes:
    experts = layer.experts
    assert experts is not None
    return {
        "one": 1,
        "n_expert": experts.n,
        "n_ff_exp": experts.n_ff,
        "n_gate_up_exp": 2 * experts.n_ff,
        "n_ff_shexp": experts.n_ff_shared,
    }


def _of_each(stem: str, *shape: str) -> tuple[TensorRow, TensorRow]:
    """A matrix for each expert, and its bias."""
    bias = TensorRow(f"{stem}.bias", ("n_expert", shape[0]), optional=True)
    return TensorRow(f"{stem}.weight", ("n_expert", *shape)), bias


_BEFORE = (
    *NORMS_BEFORE,
    TensorRow("ffn_gate_inp.weight", ("n_expert", "n_embd")),
    TensorRow("ffn_gate_inp.bias", ("n_expert",), optional=True),
    TensorRow("exp_probs_b.bias", ("n_expert",), optional=True),  # chooses and does not weigh
)
_BEHIND = (
    *_of_each("ffn_down_exps", "n_embd", "n_ff_exp"),
    TensorRow("ffn_gate_inp_shexp.weight", ("one", "n_embd"), optional=True),
    TensorRow("ffn_gate_shexp.weight", ("n_ff_shexp", "n_embd"), optional=True),
    TensorRow("ffn_up_shexp.weight", ("n_ff_shexp", "n_embd"), optional=True),
    TensorRow("ffn_down_shexp.weight", ("n_embd", "n_ff_shexp"), optional=True),
    *NORMS_AFTER,
)
EXPERTS = replace(
    GATED,
    build=build,
    rows=(
        *_BEFORE,
        *_of_each("ffn_gate_exps", "n_ff_exp", "n_embd"),
        *_of_each("ffn_up_exps", "n_ff_exp", "n_embd"),
        *_BEHIND,
    ),
    sizes=_sizes,
)
EXPERTS_FUSED = replace(
    EXPERTS,
    rows=(*_BEFORE, *_of_each("ffn_gate_up_exps", "n_gate_up_exp", "n_embd"), *_BEHIND),
)

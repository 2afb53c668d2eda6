"""Mixture of experts: many FFNs, of which each token uses a few, and perhaps a shared one that
every token uses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns import LATENT_EXPERTS
from treadle.models.ffns.gated import GATED, NORMS_AFTER, NORMS_BEFORE
from treadle.models.ops import TensorSlice
from treadle.models.structure import Sizes, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows, TensorName


# treadle's own name of a tensor of Nomic's BERT, which llama.cpp's converter omits.
SUM_BIAS = "exps_bias"


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``sum w[e] down[e](act(gate[e](h)) * up[e](h))`` over a token's experts e, with the
    router's weights w, plus the shared expert's result if layer ``i`` has one.

    PLAIN_EXPERTS: without gate, ``down[e](act(up[e](h)))``. LATENT_EXPERTS: also without gate,
    between two products to a smaller width and back.
    """
    at = f"L{i}.ffn"
    blk = f"blk.{i}.ffn"
    scores = g.linear(f"{at}.router", h, f"{blk}_gate_inp")
    shared = shared_expert(g, i, f"{at}.shared", h) if g.has(f"{blk}_up_shexp.weight") else []
    if g.config.layers[i].ffn != LATENT_EXPERTS:
        result = g.call("experts", at, h, scores, *shared, layer=i)
        if g.has(f"{blk}_{SUM_BIAS}.weight"):
            result = g.add_rows(f"{at}.bias", result, f"{blk}_{SUM_BIAS}", by="first")
        return result
    inner = g.linear(f"{at}.latent_down", h, f"{blk}_latent_down")
    inner = g.call("experts", at, inner, scores, layer=i)
    result = g.linear(f"{at}.latent_up", inner, f"{blk}_latent_up")
    return g.add(shared[0], result) if shared else result


def shared_expert(g: Ops, i: int, at: str, h: Rows) -> list[Rows]:
    """Return a list of the shared expert's result for ``h`` in layer ``i`` and, if the file has a
    matrix for it, the score ``[N, 1]`` whose sigmoid weighs that result. ``at``: prefix of the
    labels of its steps.
    """
    layer = g.config.layers[i]
    blk = f"blk.{i}.ffn"
    fn = layer.activation or g.config.arch.activation
    experts = layer.experts
    assert experts is not None
    if g.config.arch.gated:
        names: list[TensorName] = [f"{blk}_gate_shexp", f"{blk}_up_shexp"]
        n = experts.n_ff_shared
        if experts.shared_fused:
            names = [TensorSlice(f"{blk}_up_shexp", first, n) for first in (0, n)]
        gate, up = g.linears(f"{at}.gate_up", h, names)
        made = g.gated(f"{at}.{fn}", gate, up, fn)
    else:
        made = g.activate(f"{at}.{fn}", g.linear(f"{at}.up", h, f"{blk}_up_shexp"), fn)
    rows = [g.linear(f"{at}.down", made, f"{blk}_down_shexp")]
    if g.has(f"{blk}_gate_inp_shexp.weight"):
        rows.append(g.linear(f"{at}.router", h, f"{blk}_gate_inp_shexp"))
    return rows


def _sizes(layer: Layer) -> Sizes:
    experts = layer.experts
    assert experts is not None
    return {
        "one": 1,
        "n_expert": experts.n,
        "n_ff_exp": experts.n_ff,
        "n_gate_up_exp": 2 * experts.n_ff,
        "n_ff_shexp": experts.n_ff_shared,
        "n_up_shexp": experts.n_ff_shared * (2 if experts.shared_fused else 1),
        "n_latent": experts.n_latent,
    }


def expert_rows(stem: str, *shape: str) -> tuple[TensorRow, TensorRow]:
    """Return the tensor rows of the matrices of all experts, ``[n_expert, *shape]``, and of their
    optional biases, ``[n_expert, shape[0]]``. ``stem``: the tensors' name without its suffix.
    """
    bias = TensorRow(f"{stem}.bias", ("n_expert", shape[0]), optional=True)
    return TensorRow(f"{stem}.weight", ("n_expert", *shape)), bias


BEFORE = (
    *NORMS_BEFORE,
    TensorRow("ffn_gate_inp.weight", ("n_expert", "n_embd")),
    TensorRow("ffn_gate_inp.bias", ("n_expert",), optional=True),
    TensorRow("exp_probs_b.bias", ("n_expert",), optional=True),  # affects choice, not weights
)
SHARED = (
    TensorRow("ffn_gate_inp_shexp.weight", ("one", "n_embd"), optional=True),
    *with_bias("ffn_gate_shexp", "n_ff_shexp", "n_embd", optional=True),
    *with_bias("ffn_up_shexp", "n_up_shexp", "n_embd", optional=True),
    *with_bias("ffn_down_shexp", "n_embd", "n_ff_shexp", optional=True),
    *NORMS_AFTER,
)
_DOWN_AND_SHARED = (
    *expert_rows("ffn_down_exps", "n_embd", "n_ff_exp"),
    TensorRow(f"ffn_{SUM_BIAS}.weight", ("n_embd",), optional=True),  # of the weighted sum
    TensorRow("ffn_down_exps.scale", ("n_expert",), optional=True),  # factor of experts' weights
    *SHARED,
)
EXPERTS = replace(
    GATED,
    build=build,
    rows=(
        *BEFORE,
        *expert_rows("ffn_gate_exps", "n_ff_exp", "n_embd"),
        *expert_rows("ffn_up_exps", "n_ff_exp", "n_embd"),
        *_DOWN_AND_SHARED,
    ),
    sizes=_sizes,
    unread=frozenset({"exp_probs_b_vl.bias"}),  # of the router, for the tokens of pictures
)
EXPERTS_FUSED = replace(
    EXPERTS,
    rows=(*BEFORE, *expert_rows("ffn_gate_up_exps", "n_gate_up_exp", "n_embd"), *_DOWN_AND_SHARED),
)
EXPERTS_PLAIN = replace(
    EXPERTS, rows=(*BEFORE, *expert_rows("ffn_up_exps", "n_ff_exp", "n_embd"), *_DOWN_AND_SHARED)
)
EXPERTS_LATENT = replace(
    EXPERTS,
    rows=(
        *BEFORE,
        *with_bias("ffn_latent_down", "n_latent", "n_embd"),
        *expert_rows("ffn_up_exps", "n_ff_exp", "n_latent"),
        *expert_rows("ffn_down_exps", "n_latent", "n_ff_exp"),
        *with_bias("ffn_latent_up", "n_embd", "n_latent"),
        *SHARED,
    ),
)

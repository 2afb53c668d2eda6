"""FFNs with a short convolution after them (Inkling): ``x + convolution(x)``, where x is the FFN's
result times a factor of the layer.

The router also scores the shared experts, which every token uses. They take no part in the choice
of the others, but the weights of chosen and shared experts are normalised together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.ffns.experts import EXPERTS
from treadle.models.ffns.gated import GATED, feed
from treadle.models.mixers.relative import convolved
from treadle.models.structure import Sizes, TensorRow

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``x + convolution(x)``, where x is a gated FFN's result for ``h`` times the factor
    ``ffn_gscale`` of layer ``i``.
    """
    return _convolve_output(g, i, feed(g, i, h, f"L{i}.ffn"))


def build_experts(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``x + convolution(x)``, where x is the weighted sum of a token's experts for ``h``
    times the factor ``ffn_gscale`` of layer ``i``.
    """
    at = f"L{i}.ffn"
    scores = g.linear(f"{at}.router", h, f"blk.{i}.ffn_gate_inp")
    return _convolve_output(g, i, g.call("experts", at, h, scores, layer=i))


def _convolve_output(g: Ops, i: int, x: Rows) -> Rows:
    return convolved(g, i, f"L{i}.ffn", x, "mlp", gain=f"blk.{i}.ffn_gscale.weight")


def _n_conv(layer: Layer) -> Sizes:
    assert layer.state is not None
    return {"n_conv": layer.state.n_conv}


def _sizes(layer: Layer) -> Sizes:
    at = layer.experts
    assert at is not None
    more = {"n_shared": at.n_shared, "n_scores": at.n + at.n_shared}
    return {**EXPERTS.sizes(layer), **_n_conv(layer), **more}


_CONVOLUTION = (
    TensorRow("ffn_gscale.weight", ("one",)),
    TensorRow("shortconv_mlp.weight", ("n_embd", "n_conv")),
)
GATED_CONVOLVED = replace(
    GATED,
    build=build,
    after="",
    after_sum="",
    rows=(
        TensorRow("ffn_norm.weight", ("n_embd",)),
        TensorRow("ffn_gate.weight", ("n_ff", "n_embd")),
        TensorRow("ffn_up.weight", ("n_ff", "n_embd")),
        TensorRow("ffn_down.weight", ("n_embd", "n_ff")),
        *_CONVOLUTION,
    ),
    sizes=lambda layer: {**GATED.sizes(layer), **_n_conv(layer)},
)
EXPERTS_CONVOLVED = replace(
    EXPERTS,
    build=build_experts,
    after="",
    after_sum="",
    rows=(
        TensorRow("ffn_norm.weight", ("n_embd",)),
        TensorRow("ffn_gate_inp.weight", ("n_scores", "n_embd")),
        TensorRow("exp_probs_b.bias", ("n_expert",), optional=True),
        TensorRow("ffn_gate_exps.weight", ("n_expert", "n_ff_exp", "n_embd")),
        TensorRow("ffn_up_exps.weight", ("n_expert", "n_ff_exp", "n_embd")),
        TensorRow("ffn_down_exps.weight", ("n_expert", "n_embd", "n_ff_exp")),
        TensorRow("ffn_gate_shexp.weight", ("n_shared", "n_ff_exp", "n_embd")),
        TensorRow("ffn_up_shexp.weight", ("n_shared", "n_ff_exp", "n_embd")),
        TensorRow("ffn_down_shexp.weight", ("n_shared", "n_embd", "n_ff_exp")),
        *_CONVOLUTION,
    ),
    sizes=_sizes,
    unread=frozenset(),
)

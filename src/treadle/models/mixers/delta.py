"""Gated delta net (Yang and others, 2024) of Qwen 3.5 and Qwen3-Next: a head's state maps keys to
values. For each token it decays, and is corrected by the error of its prediction of the value.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.mixers.mamba2 import sizes_of, state_of
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``out(norm(y) * silu(z))``: y is each token's query times the state, z a projection of
    ``h``. Kinds of layers, by ``Layer.mixer``:

    GROUPED: one matrix makes beta (size of the correction) and alpha (of which the decay is made),
    side by side for each key head; neighbouring value heads share a key head. SIGMOID: neighbours
    share a key head too, and ``2 sigmoid(z)`` replaces ``silu(z)``. In others value head ``j`` uses
    key head ``j`` modulo the number of key heads.
    """
    layer = g.config.layers[i]
    at = f"L{i}.delta"
    blk = f"blk.{i}.ssm"
    state = state_of(layer)
    names = [f"blk.{i}.attn_qkv", f"blk.{i}.attn_gate"]
    grouped = layer.mixer == GROUPED
    if grouped:
        qkv, z, both = g.linears(f"{at}.in", h, [*names, f"{blk}_ba"])
        beta, alpha = g.halves(f"{at}.ba", both, state.n_group)
    else:
        names += [f"{blk}_beta", f"{blk}_alpha"]
        qkv, z, beta, alpha = g.linears(f"{at}.in", h, names)
    qkv = g.call("convolution", f"{at}.conv", qkv, layer=i, weight=f"{blk}_conv1d")
    rates = g.call("rates", f"{at}.rates", alpha, beta, a=f"{blk}_a", bias=f"{blk}_dt.bias")
    sigmoid = layer.mixer == SIGMOID
    y = g.call("delta", f"{at}.scan", qkv, rates, layer=i, grouped=grouped or sigmoid)
    norm = f"{blk}_norm.weight"
    if sigmoid:
        y = g.call("normed_gate", f"{at}.gate", y, z, layer=i, norm=norm, gain=SIGMOID_GAIN)
    else:
        y = g.call("silu_gate", f"{at}.gate", y, z, layer=i, norm=norm, groups=state.n_head)
    return g.linear(f"{at}.out", y, f"{blk}_out")


def _sizes(layer: Layer) -> Sizes:
    state = state_of(layer)
    return {**sizes_of(layer), "n_values_dim": state.head_dim, "n_ba": 2 * state.n_head}


GROUPED = "delta_grouped"
SIGMOID = "delta_sigmoid"
SIGMOID_GAIN = 2.0
_BEFORE = (
    *with_bias("attn_norm", "n_embd"),
    TensorRow("attn_qkv.weight", ("n_channels", "n_embd")),
    TensorRow("attn_gate.weight", ("n_inner", "n_embd")),
)
_AFTER = (
    TensorRow("ssm_conv1d.weight", ("n_channels", "n_conv")),
    TensorRow("ssm_dt.bias", ("n_ssm_head",)),
    TensorRow("ssm_a", ("n_ssm_head",)),
    TensorRow("ssm_norm.weight", ("n_values_dim",)),
    TensorRow("ssm_out.weight", ("n_embd", "n_inner")),
    TensorRow("post_attention_norm.weight", ("n_embd",), optional=True),
)
DELTA = Sublayer(
    label="delta",
    before="attn_norm",
    after="post_attention_norm",
    after_sum="",
    build=build,
    rows=(
        *_BEFORE,
        TensorRow("ssm_beta.weight", ("n_ssm_head", "n_embd")),
        TensorRow("ssm_alpha.weight", ("n_ssm_head", "n_embd")),
        *_AFTER,
    ),
    sizes=_sizes,
    memory=lambda layer: (StateSpec("delta", (), state_of(layer).n_values),),
)
DELTA_GROUPED = replace(
    DELTA, rows=(*_BEFORE, TensorRow("ssm_ba.weight", ("n_ba", "n_embd")), *_AFTER)
)

"""OLMo Hybrid's gated delta net: corrections may be up to twice the prediction error, so that
eigenvalues can be negative (Grazzi and others, 2025); queries, keys and values have a matrix each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.mixers.kda import convolved
from treadle.models.mixers.mamba2 import sizes_of, state_of
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``out(norm(y) * silu(gate))``: y is each token's query times the state, ``gate`` a
    projection of ``h``. Neighbouring value heads share a key head.
    """
    state = state_of(g.config.layers[i])
    at = f"L{i}.delta"
    blk = f"blk.{i}.ssm"
    names = [f"blk.{i}.attn_{name}" for name in ("q", "k", "v", "gate")]
    *qkv, gate, beta, alpha = g.linears(f"{at}.in", h, [*names, f"{blk}_beta", f"{blk}_alpha"])
    q, k, v = convolved(g, i, at, qkv)
    rates = {"a": f"{blk}_a", "bias": f"{blk}_dt.bias", "most": state.beta_most}
    both = g.call("rates", f"{at}.rates", alpha, beta, **rates)
    y = g.call("delta_apart", f"{at}.scan", q, k, v, both, layer=i, grouped=True)
    norm = f"{blk}_norm.weight"
    y = g.call("silu_gate", f"{at}.gate", y, gate, layer=i, norm=norm, groups=state.n_head)
    return g.linear(f"{at}.out", y, f"{blk}_out")


def _sizes(layer: Layer) -> Sizes:
    state = state_of(layer)
    return {**sizes_of(layer), "n_keys": state.n_keys, "n_values_dim": state.head_dim}


_WIDTHS = (("q", "n_keys"), ("k", "n_keys"), ("v", "n_inner"))
DELTA_SIGNED = Sublayer(
    label="delta",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        *with_bias("attn_norm", "n_embd"),
        *(TensorRow(f"attn_{name}.weight", (width, "n_embd")) for name, width in _WIDTHS),
        TensorRow("attn_gate.weight", ("n_inner", "n_embd")),
        TensorRow("ssm_beta.weight", ("n_ssm_head", "n_embd")),
        TensorRow("ssm_alpha.weight", ("n_ssm_head", "n_embd")),
        *(TensorRow(f"ssm_conv1d_{name}.weight", (width, "n_conv")) for name, width in _WIDTHS),
        TensorRow("ssm_dt.bias", ("n_ssm_head",)),
        TensorRow("ssm_a", ("n_ssm_head",)),
        TensorRow("ssm_norm.weight", ("n_values_dim",)),
        TensorRow("ssm_out.weight", ("n_embd", "n_inner")),
        TensorRow("post_attention_norm.weight", ("n_embd",), optional=True),  # before the FFN
    ),
    sizes=_sizes,
    memory=lambda layer: (StateSpec("delta", (), state_of(layer).n_values),),
)

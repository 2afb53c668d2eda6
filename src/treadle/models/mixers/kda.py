"""Kimi Delta Attention (Kimi Team, 2025): the delta rule with a decay for each channel of a head's
key. Decays are a low-rank product of the token's states; with a bound, a plain product (Ling 3).
Gates of the result are a low-rank product too, or a plain one (Kimi K3).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.config import StateSpec
from treadle.models.mixers.mamba2 import sizes_of, state_of
from treadle.models.structure import Sizes, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows


def build(g: Ops, i: int, h: Rows) -> Rows:
    """Return ``output(norm(y) * sigmoid(g_b(g_a(h))))``, where y is each token's query times the
    state of layer ``i``. ``g_a`` and ``g_b`` are the gate's two matrices of low rank; in files with
    a single matrix ``g`` the gate is ``sigmoid(g(h))``.
    """
    at = f"L{i}.kda"
    blk = f"blk.{i}.ssm"
    names = [f"blk.{i}.attn_{name}" for name in "qkv"]
    whole = g.has(f"{blk}_g.weight")
    names += [f"{blk}_{name}" for name in ("f_a", "g" if whole else "g_a", "beta")]
    *qkv, decay, gate, beta = g.linears(f"{at}.in", h, names)
    q, k, v = convolved(g, i, at, qkv)
    floor = state_of(g.config.layers[i]).floor
    if g.has(f"{blk}_f_b.weight"):
        decay = g.linear(f"{at}.f_b", decay, f"{blk}_f_b")
    if g.has(f"{blk}_g_b.weight"):
        gate = g.linear(f"{at}.g_b", gate, f"{blk}_g_b")
    # Rates are below 0 in files with low-rank decays, as without a bound.
    sign = -1.0 if floor and g.has(f"{blk}_f_b.weight") else 1.0
    most = state_of(g.config.layers[i]).beta_most
    given = {"a": f"{blk}_a", "bias": f"{blk}_dt.bias", "floor": floor, "sign": sign, "most": most}
    rates = g.call("channel_rates", f"{at}.rates", decay, beta, **given)
    y = g.call("channel_delta", f"{at}.scan", q, k, v, rates, layer=i)
    y = g.call("normed_gate", f"{at}.gate", y, gate, layer=i, norm=f"{blk}_norm.weight")
    return g.linear(f"{at}.output", y, f"blk.{i}.attn_output")


def convolved(g: Ops, i: int, at: str, qkv: Sequence[Rows]) -> list[Rows]:
    """Return the queries, keys and values ``qkv`` after a short convolution of layer ``i`` each.
    ``at``: prefix of the labels of the steps.
    """
    result: list[Rows] = []
    before = 0
    for name, x in zip("qkv", qkv, strict=True):
        weight = f"blk.{i}.ssm_conv1d_{name}"
        label = f"{at}.conv_{name}"
        result.append(g.call("part_convolution", label, x, layer=i, weight=weight, before=before))
        before += x.width
    return result


def _sizes(layer: Layer) -> Sizes:
    return {**sizes_of(layer), "head_dim": state_of(layer).head_dim}


KDA = Sublayer(
    label="kda",
    before="attn_norm",
    after="",
    after_sum="",
    build=build,
    rows=(
        *with_bias("attn_norm", "n_embd"),
        *(TensorRow(f"attn_{name}.weight", ("n_inner", "n_embd")) for name in "qkv"),
        *(TensorRow(f"ssm_conv1d_{name}.weight", ("n_inner", "one", "n_conv")) for name in "qkv"),
        TensorRow("ssm_f_a.weight", ("head_dim", "n_embd")),
        TensorRow("ssm_f_b.weight", ("n_inner", "head_dim")),
        TensorRow("ssm_beta.weight", ("n_ssm_head", "n_embd")),
        TensorRow("ssm_a", ("one", "n_ssm_head", "one")),
        TensorRow("ssm_dt.bias", ("n_inner",)),
        TensorRow("ssm_g_a.weight", ("head_dim", "n_embd")),
        *with_bias("ssm_g_b", "n_inner", "head_dim"),
        TensorRow("ssm_norm.weight", ("head_dim",)),
        *with_bias("attn_output", "n_embd", "n_inner"),
    ),
    sizes=_sizes,
    memory=lambda layer: (StateSpec("kda", (), state_of(layer).n_values),),
)
_LOW_RANK = ("ssm_f_", "ssm_g_", "ssm_a")
KDA_FLOORED = replace(  # a bound of low-rank decays
    KDA,
    rows=(
        *(row for row in KDA.rows if row.name != "ssm_a"),
        TensorRow("ssm_a", ("n_ssm_head",)),
    ),
)
KDA_BOUNDED = replace(
    KDA,
    rows=(
        *(row for row in KDA.rows if not row.name.startswith(_LOW_RANK)),
        TensorRow("ssm_f_a.weight", ("n_inner", "n_embd")),
        TensorRow("ssm_g_a.weight", ("n_inner", "n_embd")),
        TensorRow("ssm_a", ("n_ssm_head", "one")),
    ),
)
KDA_WHOLE = replace(  # a whole matrix of gates; decays of low rank, perhaps with a bound
    KDA_FLOORED,
    rows=(
        *(row for row in KDA_FLOORED.rows if not row.name.startswith("ssm_g_")),
        TensorRow("ssm_g.weight", ("n_inner", "n_embd")),
    ),
)

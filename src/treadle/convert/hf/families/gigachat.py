"""Family row of GigaChat 3.5 (``models/graphs/gigachat.py``): DeepSeek V3's latent attention and
experts, Qwen3-Next's gated delta net, and gates of all norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES, head_rules
from treadle.convert.hf.families.experts import PACKED_EXPERTS, scores
from treadle.convert.hf.families.qwen import cut_qkvz
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import Names
from treadle.convert.sources.derived_tensors import (
    DerivationRule,
    Rows,
    decay,
    flat,
    same,
    taps,
)
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.limits import LIMIT, SHARED_LIMIT
from treadle.models.graphs.recurrence import FLAGS

_V3 = DEEPSEEK_FAMILIES["deepseek_v3"]
_FULL = "full_attention"


def _flags(keys: MetadataReader, n_layer: int) -> list[bool]:
    """Return a flag per layer: true for a recurrent state, false for attention."""
    found = keys.get("full_attention_layers")
    if found is None and isinstance(kinds := keys.get("layer_types"), list):
        found = [i for i, kind in enumerate(kinds) if kind == _FULL]
    if not isinstance(found, list) or not {*map(type, found)} <= {int}:
        what = "is missing" if found is None else f"is {found!r:.60}"
        keys.fail("full_attention_layers", what, "a list of layers")
    if not {*found} <= {*range(n_layer)}:
        keys.fail("full_attention_layers", f"is {found!r:.60}", f"layers from 0 to {n_layer - 1}")
    return [i not in found for i in range(n_layer)]


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    eps = keys.get("linear_attn_o_norm_eps")
    if eps is not None and eps != keys.number("rms_norm_eps", lo=0.0):
        keys.refuse("linear_attn_o_norm_eps", "treadle supports only the value of rms_norm_eps")
    n_v = keys.integer("linear_num_value_heads")
    limit = f32(keys.number("swiglu_limit", 0.0, lo=0.0))
    made = {
        **_V3.more(keys, n_layer),
        "expert_shared_feed_forward_length": (
            keys.integer("moe_intermediate_size") * keys.integer("n_shared_experts")
        ),
        "ssm.conv_kernel": keys.integer("linear_conv_kernel_dim"),
        "ssm.state_size": keys.integer("linear_key_head_dim"),
        "ssm.group_count": keys.integer("linear_num_key_heads"),
        "ssm.time_step_rank": n_v,
        "ssm.inner_size": keys.integer("linear_value_head_dim") * n_v,
        FLAGS: _flags(keys, n_layer),
    }
    if limit:
        made |= {key: [limit] * n_layer for key in (LIMIT, SHARED_LIMIT)}
    return made


def _beta_alpha(rows: Rows, n_k: int, which: int) -> Rows:
    """Return the rows of beta (``which`` = 0) or alpha (1) of all heads, from a matrix that has,
    for each of ``n_k`` key heads, the rows of beta and then those of alpha.
    """
    heads = rows.reshape(n_k, 2, -1, rows.shape[-1])
    return heads[:, which].reshape(-1, rows.shape[-1])


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    n_k, n_v = (keys.integer(f"linear_num_{of}_heads") for of in ("key", "value"))
    d_k, d_v = (keys.integer(f"linear_{of}_head_dim") for of in ("key", "value"))
    if n_v % n_k:
        keys.fail("linear_num_value_heads", f"is {n_v}", f"a multiple of {n_k}")
    cut = partial(cut_qkvz, n_k=n_k, sizes=(d_k, d_k, *[n_v // n_k * d_v] * 2))
    at = "self_attn."
    qkvz = {
        f"{at}qkv.weight": partial(cut, parts=(0, 1, 2)),
        f"{at}z.weight": partial(cut, parts=(3,)),
    }
    both = {
        f"{at}{name}.weight": partial(_beta_alpha, n_k=n_k, which=i)
        for i, name in enumerate(("beta", "alpha"))
    }
    return (
        *head_rules(keys),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        DerivationRule((f"{at}in_proj_qkvz.weight",), qkvz, side="B"),
        DerivationRule((f"{at}in_proj_ba.weight",), both, side="B"),
        DerivationRule((f"{at}conv1d.weight",), {f"{at}taps.weight": taps}),
        DerivationRule((f"{at}out_proj.weight",), {f"{at}out.weight": same}, side="B"),
        DerivationRule((f"{at}dt_bias",), {f"{at}dt.bias": flat}),
        DerivationRule((f"{at}A_log",), {f"{at}decay.weight": decay}, floats=True),
        *PACKED_EXPERTS,
    )


_NORMS = {
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
}
_NAMES: Names = {
    **_V3.names,
    **_NORMS,
    **{
        f"{name}.gate_{which}_projection": f"{stem}_gate_{which}"
        for name, stem in _NORMS.items()
        for which in ("up", "down")
    },
    "self_attn.gate_proj": "attn_gate",
    "self_attn.qkv": "attn_qkv",
    "self_attn.z": "attn_gate",
    "self_attn.beta": "ssm_beta",
    "self_attn.alpha": "ssm_alpha",
    "self_attn.taps": "ssm_conv1d",
    "self_attn.dt": "ssm_dt",
    "self_attn.decay": "ssm_a",
    "self_attn.norm": "ssm_norm",
    "self_attn.out": "ssm_out",
}
GIGACHAT_FAMILIES = {
    "gigachat3_5": Family(
        "gigachat35",
        {
            **_V3.defaults,
            "vocab_size": 128256,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 64,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 1536,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "max_position_embeddings": 131072,
            "rope_theta": 100000.0,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 32,
            "linear_num_value_heads": 64,
            "swiglu_limit": 10.0,
        },
        _NAMES,
        {"head_dim": "qk_rope_head_dim"},
        paired=True,
        norm_shift=1.0,
        unshifted=(),
        only={
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "norm_type": "ZeroCenteredGatedNorm",
            "layernorm_type": "pre_post",
            "layernorm_gating_weight": 2.0,
            "gated_attention": True,
            "use_mla_scaling_factor": True,
            "use_shared_expert_sigmoid": False,
            "linear_attention_type": "Qwen3NextGatedDeltaNet",
            "linear_gating_type": "gated_rmsnorm_sigmoid_zero_centered",
            "linear_sigmoid_gate_scale": 2.0,
            "linear_use_legacy_qkvz_layout": False,
        },
        experts=True,
        derived=_rules,
        more=_keys,
        extra_layers=_V3.extra_layers,
    ),
}

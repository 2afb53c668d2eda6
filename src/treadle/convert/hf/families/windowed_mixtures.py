"""Family rows of models with experts and a window in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.families.mixtures import (
    GRANITE_DEFAULTS,
    GRANITE_SCALES,
    PACKED_EXPERTS,
    scores,
)
from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule, same
from treadle.files.keys import MetadataReader
from treadle.models.archs import EXPERTS_GATING, EXPERTS_NORM, ROPE_PATTERN
from treadle.models.graphs.positions import by_period

SINKS = DerivationRule(("self_attn.sinks",), {"self_attn.sinks.weight": same})


def first_of_four(keys: MetadataReader, n_layer: int) -> Windowed:
    """Put the window in all layers but the first of each four."""
    return by_period(-4, n_layer)


# -- Granite ----------------------------------------------------------------------------------


def _granite_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the layers with RoPE: those with a base, which must be the same in all of them."""
    key = "layer_rope_theta"
    older = keys.get("no_rope_layers")
    bases = keys.get(key)
    if bases is None:
        flags = [True] * n_layer
        made = {}
    else:
        numbers = isinstance(bases, list) and all(type(base) in (int, float) for base in bases)
        if not numbers or len(bases) != n_layer or any(base and base <= 1 for base in bases):
            keys.fail(key, f"is {bases!r:.60}", f"{n_layer} RoPE bases, 0 for a layer without RoPE")
        flags = [bool(base) for base in bases]
        own = {base for base in bases if base}
        if len(own) > 1:
            keys.refuse(key, f"has {len(own)} bases: treadle supports one for all layers with RoPE")
        made = {"rope.freq_base": f32(own.pop())} if own else {}
    if older is not None and [bool(flag) for flag in older] != flags:
        keys.refuse("no_rope_layers", f"transformers ignores it, and {key} differs")
    return {**made, ROPE_PATTERN: flags}


def _granite_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for experts as in transformers' memory; older files say input_linear."""
    at = "block_sparse_moe"
    return (
        SINKS,
        DerivationRule((f"{at}.experts.gate_up_proj",), {f"{at}.input_linear.weight": same}),
        DerivationRule((f"{at}.experts.down_proj",), {f"{at}.output_linear.weight": same}),
    )


_GRANITE: Names = {
    **LLAMA,
    "self_attn.sinks": "attn_sinks",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.input_linear": "ffn_gate_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "shared_mlp.input_linear": "ffn_up_shexp",  # fused with its gate, which comes first
    "shared_mlp.output_linear": "ffn_down_shexp",
}

# -- Cohere -----------------------------------------------------------------------------------

_CHOSEN_ALONE = 3  # llama.cpp's number of softmax over the chosen experts
_RMS = "attention.layer_norm_rms_epsilon"


def _cohere_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of either norm and two FFN widths; a layer without window has RoPE if it is
    dense.
    """
    width = keys.integer("intermediate_size")
    dense = leading_dense(keys, n_layer, 0)
    shared = keys.integer("num_shared_experts", 0, lo=0)
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    period = "prefix_dense_sliding_window_pattern"
    if dense and keys.integer(period, 1, lo=0) != 1:
        keys.refuse(
            period, f"is {keys.get(period)}: treadle supports only 1, RoPE in all dense layers"
        )
    result: dict[str, Any] = {
        _RMS: None,
        "attention.layer_norm_epsilon": f32(keys.number("layer_norm_eps", lo=0.0, hi=1.0)),
        "expert_feed_forward_length": width,
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": width * shared,
        "leading_dense_block_count": dense,
    }
    if keys.get("rms_norm_eps") is not None:
        result[_RMS] = f32(keys.number("rms_norm_eps", lo=0.0, hi=1.0))
        del result["attention.layer_norm_epsilon"]
    if keys.get("prefix_dense_intermediate_size") is not None:
        result["feed_forward_length"] = keys.integer("prefix_dense_intermediate_size")
    chosen_by = keys.text("expert_selection_fn", "softmax")
    if chosen_by not in ("softmax", "sigmoid"):
        keys.refuse(
            "expert_selection_fn", f"{chosen_by!r:.60}: treadle supports softmax and sigmoid"
        )
    if chosen_by == "softmax":
        result[EXPERTS_GATING] = _CHOSEN_ALONE
    return result


def _cohere_windows(keys: MetadataReader, n_layer: int) -> Windowed:
    """Put the window in all but the last of each four layers, counted after the dense layers."""
    dense = leading_dense(keys, n_layer, 0)
    period = keys.integer("sliding_window_pattern", 4)
    return [False] * dense + by_period(period, n_layer - dense)


# -- Hunyuan ----------------------------------------------------------------------------------


def _hunyuan_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    shared = keys.integer("num_shared_experts", 1, lo=0)
    return {
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": shared * keys.integer("moe_intermediate_size"),
        "leading_dense_block_count": leading_dense(keys, n_layer, 1),
        EXPERTS_NORM: True,
    }


def leading_dense(keys: MetadataReader, n_layer: int, usual: int) -> int:
    """Return the number of leading layers without experts."""
    kinds = keys.get("mlp_layer_types")
    if kinds is None:
        usual = min(usual, n_layer)
        return keys.integer("first_k_dense_replace", usual, lo=0, hi=n_layer)
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("mlp_layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (n_layer - dense):
        keys.refuse("mlp_layer_types", "treadle supports only dense layers first, then sparse ones")
    return dense


def _all_sparse(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    if leading_dense(keys, n_layer, 0):
        keys.refuse("mlp_layer_types", "dense layers are not supported in this architecture")
    return {}


# -- Laguna -----------------------------------------------------------------------------------

_LAGUNA_ROPE = {
    "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def _laguna_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys; heads may differ per layer, and layers with a window rotate another share of
    a head.
    """
    n_head = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim")
    heads = keys.get("num_attention_heads_per_layer") or [n_head] * n_layer
    if not isinstance(heads, list) or len(heads) != n_layer:
        keys.fail("num_attention_heads_per_layer", f"is {heads!r:.60}", f"a list of {n_layer}")
    rope = keys.within("rope_parameters")
    local = rope.within("sliding_attention") if rope else None
    share = local.number("partial_rotary_factor", 1.0, lo=0.0, hi=1.0) if local else 1.0
    return {
        "attention.head_count": heads,
        "rope.dimension_count_swa": int(head_dim * share),
        "leading_dense_block_count": leading_dense(keys, n_layer, 1),
        EXPERTS_NORM: True,
    }


_LAGUNA: Names = {**LLAMA_EXPERTS, "self_attn.g_proj": "attn_gate"}

_HUNYUAN: Names = {
    **LLAMA_EXPERTS,
    "mlp.router.gate": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
}
_MELLUM_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# -- the rows ---------------------------------------------------------------------------------

WINDOWED: dict[str, Family] = {
    "granite_swa": Family(
        "granite_swa",
        {
            **{key: it for key, it in GRANITE_DEFAULTS.items() if "experts" not in key},
            "rms_norm_eps": 1e-5,
            "vocab_size": 100352,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "sliding_window": 128,
        },
        _GRANITE,
        windowed=first_of_four,
        copied=GRANITE_SCALES,
        derived=lambda keys: (SINKS,),
        more=_granite_keys,
    ),
    "granitemoe_swa": Family(
        "granite_swa",
        {**GRANITE_DEFAULTS, "sliding_window": 128, "shared_intermediate_size": 0},
        _GRANITE,
        windowed=first_of_four,
        copied=GRANITE_SCALES,
        experts=True,
        derived=_granite_rules,
        more=_granite_keys,
    ),
    "cohere2_moe": Family(
        "cohere2moe",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 256000,
            "head_dim": 128,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        LLAMA_EXPERTS,
        {"rms_norm_eps": "layer_norm_eps"},
        windowed=_cohere_windows,
        paired=True,
        copied={"logit_scale": "logit_scale"},
        only={"shared_expert_combination_strategy": "average"},
        experts=True,
        derived=lambda keys: PACKED_EXPERTS,
        more=_cohere_keys,
    ),
    "mellum": Family(
        "mellum",
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vocab_size": 98304,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_parameters": _MELLUM_ROPE,
            "sliding_window": 1024,
            "intermediate_size": 7168,
            "moe_intermediate_size": 896,
            "num_local_experts": 64,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        LLAMA_EXPERTS,
        windowed=lambda keys, n_layer: [False] * n_layer,
        own_local_rope=True,
        experts=True,
        derived=lambda keys: PACKED_EXPERTS,
        more=_all_sparse,
    ),
    "hy_v3": Family(
        "hy_v3",
        {
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "vocab_size": 120832,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 11158840.0,
            "intermediate_size": 13312,
            "moe_intermediate_size": 1536,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "router_scaling_factor": 2.826,
        },
        _HUNYUAN,
        copied={"router_scaling_factor": "expert_weights_scale"},
        experts=True,
        derived=lambda keys: (
            scores("mlp.expert_bias", "mlp.score"),
            scores("mlp.e_score_correction_bias", "mlp.score"),
            *PACKED_EXPERTS,
        ),
        extra_layers="num_nextn_predict_layers",
        more=_hunyuan_keys,
    ),
    "laguna": Family(
        "laguna",
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_parameters": _LAGUNA_ROPE,
            "partial_rotary_factor": None,
            "sliding_window": 512,
            "intermediate_size": 8192,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_routed_scaling_factor": 1.0,
        },
        _LAGUNA,
        windowed=lambda keys, n_layer: [False] * n_layer,
        own_local_rope=True,
        copied={"moe_routed_scaling_factor": "expert_weights_scale"},
        only={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
        experts=True,
        derived=lambda keys: (
            scores("mlp.experts.e_score_correction_bias", "mlp.score"),
            scores("mlp.gate.e_score_correction_bias", "mlp.score"),
            *PACKED_EXPERTS,
        ),
        more=_laguna_keys,
    ),
}

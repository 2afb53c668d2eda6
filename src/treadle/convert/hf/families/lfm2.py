"""Family rows of LFM 2: dense models and mixtures."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, Names, experts_123
from treadle.convert.hf.windows import has_attention
from treadle.convert.sources.derived_tensors import DerivationRule, same, taps
from treadle.files.keys import MetadataReader


def _conv_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    kinds = keys.get("layer_types")
    given = keys.get("full_attn_idxs")
    whole = isinstance(given, list) and all(type(i) is int for i in given)
    if given is not None and not whole:
        keys.fail("full_attn_idxs", f"is {given!r:.60}", "a list of layers")
    flags = (
        has_attention(keys, n_layer)
        if kinds is not None
        else [i in (given or range(n_layer)) for i in range(n_layer)]
    )
    n_head_kv = keys.integer("num_key_value_heads", 8)
    return {
        "attention.head_count_kv": [n_head_kv if flag else 0 for flag in flags],
        "shortconv.l_cache": keys.integer("conv_L_cache", 3),
    }


def _dense_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {**_conv_keys(keys, n_layer), "feed_forward_length": _dense_width(keys)}


def _dense_width(keys: MetadataReader) -> int:
    """Return the FFN's width: two thirds of the given one, rounded up to whole blocks."""
    width = keys.integer("block_ff_dim", keys.integer("intermediate_size", 12288))
    if keys.flag("block_auto_adjust_ff_dim", True):
        factor = keys.number("block_ffn_dim_multiplier", 1.0, lo=0.0)
        of = keys.integer("block_multiple_of", 256)
        width = -(-int(factor * int(2 * width / 3)) // of) * of
    return width


_NAMES: Names = {
    **LLAMA,
    "embedding_norm": "output_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.taps": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    **experts_123("feed_forward."),
}
_RULES = (
    DerivationRule(("conv.conv.weight",), {"conv.taps.weight": taps}),
    DerivationRule(("feed_forward.expert_bias",), {"feed_forward.score.bias": same}),
)
_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "intermediate_size": 12288,
    "tie_word_embeddings": True,
}

LFM2_FAMILIES: dict[str, Family] = {
    "lfm2": Family(
        "lfm2",
        _DEFAULTS,
        _NAMES,
        {"rms_norm_eps": "norm_eps"},
        only={"conv_bias": False},
        derived=lambda keys: _RULES,
        more=_dense_keys,
    ),
    "lfm2_moe": Family(
        "lfm2moe",
        {
            **_DEFAULTS,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        _NAMES,
        {"rms_norm_eps": "norm_eps"},
        only={"conv_bias": False},
        experts=True,
        derived=lambda keys: _RULES,
        more=_conv_keys,
    ),
}

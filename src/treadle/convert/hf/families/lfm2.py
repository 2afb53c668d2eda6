"""Family rows of LFM 2, dense models and mixtures, and of LFM 3."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, Names, experts_123
from treadle.convert.hf.windows import has_attention
from treadle.convert.sources.derived_tensors import DerivationRule, same, taps
from treadle.files.metadata import POSITION_MAX, MetadataReader
from treadle.models.archs import PATTERN, WINDOW


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


def _kinds(keys: MetadataReader, n_layer: int) -> list[str]:
    """Return each layer's kind in LFM 3: "conv", "sliding_attention" or "full_attention". By
    default layers 2, 4, 6 .. (from 0) have attention, in turn full and with a window; the others
    are convolutions.
    """
    known = ("conv", "sliding_attention", "full_attention")
    kinds = keys.get("layer_types")
    if kinds is None:
        every = {0: "sliding_attention", 2: "full_attention"}
        return [every.get(i % 4, "conv") if i else "conv" for i in range(n_layer)]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    for kind in kinds:
        if kind not in known:
            keys.refuse("layer_types", f"{kind!r:.60}: treadle supports {', '.join(known)}")
    return kinds


def _third_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    kinds = _kinds(keys, n_layer)
    n_head_kv = keys.integer("num_key_value_heads")
    found: dict[str, Any] = {
        "attention.head_count_kv": [0 if kind == "conv" else n_head_kv for kind in kinds],
        "shortconv.l_cache": keys.integer("conv_L_cache"),
    }
    local = [kind == "sliding_attention" for kind in kinds]
    if any(local):
        if keys.values.get("sliding_window", 0) is None:
            keys.refuse("sliding_window", "is null, but some layers have a RoPE base of their own")
        found[WINDOW] = keys.integer("sliding_window", hi=POSITION_MAX)
        found[PATTERN] = local
    return found


def _dense_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    return {**_conv_keys(keys, n_layer), "feed_forward_length": _dense_width(keys)}


def _dense_width(keys: MetadataReader) -> int:
    """Return the FFN's width: with ``block_auto_adjust_ff_dim``, two thirds of the given one,
    rounded up to a multiple of ``block_multiple_of``.
    """
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
_NAMES_3: Names = {
    **_NAMES,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    **dict.fromkeys(("self_attn.g_proj", "self_attn.gate_proj"), "attn_gate"),
    "post_operator_norm": "post_attention_norm",
    "post_ffn_norm": "post_ffw_norm",
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
    "lfm3": Family(
        "lfm3",
        {
            "rms_norm_eps": 1e-5,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "partial_rotary_factor": None,
            "vocab_size": 128000,
            "hidden_size": 2048,
            "intermediate_size": 7680,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 128000,
            "conv_L_cache": 7,
            "sliding_window": 256,
            "tie_word_embeddings": True,
        },
        _NAMES_3,
        {"rms_norm_eps": "norm_eps"},
        own_local_rope=True,
        only={
            "conv_bias": False,
            "attention_bias": False,
            "use_attention_gate": True,
            "use_sandwich_norm": True,
        },
        derived=lambda keys: _RULES,
        more=_third_keys,
    ),
}

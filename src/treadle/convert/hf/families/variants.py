"""Family rows of models that compute like another family, with their own key names, sizes or
windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.gemma import GEMMAS
from treadle.convert.hf.families.gemma4 import GEMMA4
from treadle.convert.hf.families.gpt_like import CLASSICS
from treadle.convert.hf.families.mamba2 import (
    STATE,
    STATE_DEFAULTS,
    state_keys,
    state_names,
    state_rules,
)
from treadle.convert.hf.families.mixtures import GRANITE_SCALES
from treadle.convert.hf.families.windowed_mixtures import first_of_four
from treadle.convert.hf.family import PAIRS, Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.keys import MetadataReader
from treadle.models.load import ROPE_KEY

_COMMON = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# -- keys -------------------------------------------------------------------------------------


def all_layers(keys: MetadataReader, n_layer: int) -> Windowed:
    """Put the window in all layers if none are listed."""
    return [True] * n_layer


def _helium_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key for a Llama whose folders have GGUF's row order, which adapters depend on."""
    return {ROPE_KEY: PAIRS}


def _clova_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return Granite's scales; but logits are multiplied, and the attention scale may be the
    default.
    """
    scale = keys.number("logits_scaling", lo=1e-9)
    result: dict[str, Any] = {"logit_scale": f32(1.0 / scale)}
    n_head = keys.integer("num_attention_heads")
    usual = keys.integer("head_dim", max(1, keys.integer("hidden_size") // n_head)) ** -0.5
    if keys.get("attention_multiplier") is not None:
        given = keys.number("attention_multiplier", lo=0.0)
        result |= {} if math.isclose(given, usual) else {"attention.scale": f32(given)}
    return result


def _bamba_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys; attention layers are listed, all others are recurrent."""
    listed = keys.get("attn_layer_indices") or []
    kinds = keys.get("layers_block_type")
    if not isinstance(listed, list) or not all(type(i) is int for i in listed):
        keys.fail("attn_layer_indices", f"is {listed!r:.60}", "a list of layers")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == n_layer):
        keys.fail("layers_block_type", f"is {kinds!r:.60}", f"a list of {n_layer}")
    if keys.integer("mamba_n_groups") != 1:
        what = "transformers normalises all groups together, treadle each group separately"
        keys.refuse("mamba_n_groups", f"is {keys.get('mamba_n_groups')}: {what}")
    n_head_kv = keys.integer("num_key_value_heads", 0, lo=0) or keys.integer("num_attention_heads")
    n_inner = keys.integer("mamba_expand") * keys.integer("hidden_size")
    return {
        "attention.head_count_kv": [n_head_kv if i in listed else 0 for i in range(n_layer)],
        **state_keys(keys, n_inner, *STATE),
    }


def _bamba_rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return state_rules("mamba", keys.integer("mamba_n_groups"))


# -- names ------------------------------------------------------------------------------------

_CLOVA: Names = {**LLAMA, "post_norm1": "post_attention_norm", "post_norm2": "post_ffw_norm"}
_BAMBA: Names = {
    **LLAMA,
    "final_layernorm": "output_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    **state_names("mamba"),
}
_FLEX: Names = {
    **LLAMA_EXPERTS,
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

# -- the rows ---------------------------------------------------------------------------------

_UNIFIED = {
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
}

MORE: dict[str, Family] = {
    "helium": Family(
        "llama",
        {
            **_COMMON,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100000.0,
            "vocab_size": 48000,
            "num_key_value_heads": 20,
            "head_dim": 128,
            "max_position_embeddings": 4096,
        },
        paired=True,
        more=_helium_keys,
    ),
    "ministral": Family(
        "llama",
        {
            **_COMMON,
            "rms_norm_eps": 1e-6,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windowed=all_layers,
    ),
    "cwm": Family(
        "llama",
        {
            **_COMMON,
            "rope_theta": 1e6,
            "vocab_size": 128256,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "sliding_window": 8192,
            "rope_parameters": _CWM_ROPE,
        },
        windowed=first_of_four,
    ),
    "iquestcoder": Family(
        "llama",
        {
            **_COMMON,
            "vocab_size": 76800,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
        },
        only={"clip_qkv": None, "use_sliding_window": False},
    ),
    "vaultgemma": replace(GEMMAS["gemma2"], arch="vaultgemma"),
    "hyperclovax": Family(
        "granite",
        {
            **_COMMON,
            "rms_norm_eps": 1e-6,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        _CLOVA,
        copied={
            key: GRANITE_SCALES[key] for key in ("embedding_multiplier", "residual_multiplier")
        },
        more=_clova_keys,
    ),
    "gpt-sw3": CLASSICS["gpt2"],
    "bamba": Family(
        "granitehybrid",
        {
            **_COMMON,
            **STATE_DEFAULTS,
            "vocab_size": 128000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "partial_rotary_factor": 0.5,
        },
        _BAMBA,
        derived=_bamba_rules,
        more=_bamba_keys,
    ),
    "flex_olmo": Family(
        "flex_olmo",
        {
            **_COMMON,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "num_experts_per_tok": 5,
            "num_experts": 7,
            "norm_topk_prob": False,
        },
        _FLEX,
        experts=True,
    ),
    "gemma4_unified_text": replace(
        GEMMA4["gemma4_text"], defaults={**GEMMA4["gemma4_text"].defaults, **_UNIFIED}
    ),
}

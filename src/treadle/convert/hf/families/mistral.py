"""Family rows of Mistral: dense models, Mixtral, Mistral 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES
from treadle.convert.hf.families.defaults import COMMON, COMMON_EPS_5
from treadle.convert.hf.families.experts import PACKED_EXPERTS
from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import MINISTRAL_ROPE
from treadle.convert.hf.tensor_names import LLAMA, experts_123
from treadle.convert.hf.windows import every_layer
from treadle.files.metadata import MetadataReader
from treadle.models.archs import TEMPERATURE_LENGTH

# -- Mistral 4 ------------------------------------------------------------------------------------

_V2 = DEEPSEEK_FAMILIES["deepseek_v2"]
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return Mistral 4's keys of latent attention, experts, and RoPE. Raises UnsupportedError for
    several expert groups: transformers ranks a group by its two best experts, treadle by one.
    """
    if keys.integer("n_group", 1) != 1:
        keys.refuse("n_group", "treadle supports only one group of experts in this architecture")
    made = _V2.more(keys, n_layer)
    rope = keys.within("rope_parameters")
    made["rope.dimension_count"] = keys.integer("qk_rope_head_dim")  # in JSON a share of a head
    original = "original_max_position_embeddings"
    if rope is not None and rope.get("llama_4_scaling_beta") and rope.get(original) is not None:
        made[TEMPERATURE_LENGTH] = rope.integer(original)
    return made


def _all_layers(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: all, unless ``layer_types`` lists others."""
    return [True] * n_layer


MISTRAL_FAMILIES: dict[str, Family] = {
    "mistral": Family(
        "llama",
        {
            **COMMON,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windowed=every_layer,
    ),
    "ministral3": Family(
        "mistral3",
        {
            **COMMON_EPS_5,
            "vocab_size": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": MINISTRAL_ROPE,
        },
        windowed=every_layer,
    ),
    "mixtral": Family(
        "llama",
        {
            **COMMON_EPS_5,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {**LLAMA, **experts_123("block_sparse_moe.")},
        windowed=every_layer,
        experts=True,
    ),
    "mistral4": replace(
        _V2,
        arch="mistral4",
        defaults={
            **_V2.defaults,
            "vocab_size": 131072,
            "max_position_embeddings": 1048576,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": None,
            "rope_parameters": _ROPE,
        },
        words={},
        only={"rope_interleave": True},
        derived=lambda keys: (*_V2.derived(keys), *PACKED_EXPERTS),
        more=_keys,
    ),
    "ministral": Family(
        "llama",
        {
            **COMMON_EPS_5,
            "rms_norm_eps": 1e-6,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windowed=_all_layers,
    ),
}

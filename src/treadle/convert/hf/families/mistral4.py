"""Mistral 4: DeepSeek V2's tensors, softmax routing, and an attention temperature."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.deepseek import LATENTS
from treadle.convert.hf.families.mixtures import PACKED_EXPERTS
from treadle.convert.hf.family import Family
from treadle.files.keys import MetadataReader
from treadle.models.archs import TEMPERATURE_LENGTH

_V2 = LATENTS["deepseek_v2"]
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
    """Return the keys. With softmax, transformers ranks groups by their two best experts, treadle
    by one, so only one group is supported.
    """
    if keys.integer("n_group", 1) != 1:
        keys.refuse("n_group", "treadle supports only one group of experts in this architecture")
    result = _V2.more(keys, n_layer)
    rope = keys.within("rope_parameters")
    result["rope.dimension_count"] = keys.integer("qk_rope_head_dim")  # in JSON a share of a head
    original = "original_max_position_embeddings"
    if rope is not None and rope.get("llama_4_scaling_beta") and rope.get(original) is not None:
        result[TEMPERATURE_LENGTH] = rope.integer(original)
    return result


MISTRAL4: dict[str, Family] = {
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
}

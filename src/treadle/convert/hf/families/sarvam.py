"""Family rows of Sarvam: a mixture like Ling 2, and one with latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.bailing import BAILING_V2
from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES
from treadle.convert.hf.family import Family
from treadle.files.metadata import MetadataReader

# Sarvam 30B, in transformers: the second version's tensors, other keys for counts.
_MIXTURE = replace(
    BAILING_V2,
    defaults={
        "rms_norm_eps": 1e-6,
        "rope_theta": 8e6,
        "tie_word_embeddings": False,
        "vocab_size": 262144,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": None,
        "intermediate_size": 8192,
        "moe_intermediate_size": 1024,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
)

_V3 = DEEPSEEK_FAMILIES["deepseek_v3"]


def _sarvam(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return DeepSeek V3's keys for a Sarvam model; its first folders name the number of shared
    experts in a key of their own.
    """
    made = _V3.more(keys, n_layer)
    if keys.get("num_shared_experts") is not None:
        made["expert_shared_count"] = keys.integer("num_shared_experts", lo=0)
    return made


SARVAM_FAMILIES: dict[str, Family] = {
    "sarvam_moe": _MIXTURE,
    "sarvam_mla": replace(
        _V3,
        defaults={
            **_V3.defaults,
            "vocab_size": 262144,
            "q_lora_rank": None,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        more=_sarvam,
    ),
}

"""Family row of Mellum."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.experts import PACKED_EXPERTS, leading_dense
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.files.metadata import MetadataReader


def _all_sparse(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    if leading_dense(keys, n_layer, 0):
        keys.refuse("mlp_layer_types", "dense layers are not supported in this architecture")
    return {}


_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

MELLUM_FAMILIES: dict[str, Family] = {
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
            "rope_parameters": _ROPE,
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
}

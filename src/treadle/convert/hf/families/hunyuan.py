"""Family rows of Hunyuan: dense models, mixtures, and the text part of its vision model."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.families.experts import PACKED_EXPERTS, count_of, leading_dense, scores
from treadle.convert.hf.families.multimodal import sections
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import HUNYUAN, HUNYUAN_EXPERTS, LLAMA_EXPERTS, Names
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM

# -- the first mixtures ---------------------------------------------------------------------------


def _expert_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return expert widths, which llama.cpp requires; by default they equal the FFN's. Expert
    weights are normalised and not scaled, whatever other keys say.
    """
    n_ff = keys.integer("intermediate_size")
    own = "moe_intermediate_size"
    return {
        "expert_feed_forward_length": n_ff if keys.get(own) is None else count_of(keys, own),
        "expert_shared_feed_forward_length": n_ff,
        EXPERTS_NORM: True,
        "expert_weights_scale": None,
    }


# -- Hunyuan 3 ------------------------------------------------------------------------------------


def _v3_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    shared = keys.integer("num_shared_experts", 1, lo=0)
    return {
        "expert_shared_count": shared,
        "expert_shared_feed_forward_length": shared * keys.integer("moe_intermediate_size"),
        "leading_dense_block_count": leading_dense(keys, n_layer, 1),
        EXPERTS_NORM: True,
    }


_V3_NAMES: Names = {
    **LLAMA_EXPERTS,
    "mlp.router.gate": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
}

HUNYUAN_FAMILIES: dict[str, Family] = {
    "hunyuan_v1_dense": Family(
        "hunyuan-dense",
        {**COMMON_EPS_5, "vocab_size": 290943, "max_position_embeddings": 2048},
        HUNYUAN,
    ),
    "hunyuan_v1_moe": Family(
        "hunyuan-moe",
        {
            **COMMON_EPS_5,
            "vocab_size": 290943,
            "max_position_embeddings": 2048,
            "num_experts": 1,
            "moe_topk": 1,
        },
        HUNYUAN_EXPERTS,
        only={"use_cla": False, "use_mla": False, "moe_layer_num_skipped": 0},
        experts=True,
        more=_expert_keys,
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
        _V3_NAMES,
        copied={"router_scaling_factor": "expert_weights_scale"},
        experts=True,
        derived=lambda keys: (
            scores("mlp.expert_bias", "mlp.score"),
            scores("mlp.e_score_correction_bias", "mlp.score"),
            *PACKED_EXPERTS,
        ),
        extra_layers="num_nextn_predict_layers",
        more=_v3_keys,
    ),
    "hunyuan_vl_text": Family(
        "hunyuan_vl",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 290943,
            "max_position_embeddings": 2048,
        },
        HUNYUAN,
        more=sections(16, 16, 16, 16),
    ),
}

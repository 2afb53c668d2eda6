"""Family rows of ERNIE 4.5: the dense models and the mixtures."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.families.experts import always, scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS

ERNIE_FAMILIES: dict[str, Family] = {
    "ernie4_5": Family(
        "ernie4_5",
        {
            **COMMON_EPS_5,
            "vocab_size": 103424,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        paired=True,
    ),
    "ernie4_5_moe": Family(
        "ernie4_5-moe",
        {
            **COMMON_EPS_5,
            "vocab_size": 103424,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_interval": 1,
        },
        LLAMA_EXPERTS,
        paired=True,
        only={"moe_norm_min": 1e-12},  # minimum of the weights' sum, which is never smaller
        experts=True,
        derived=always(scores("mlp.moe_statics.e_score_correction_bias", "mlp.score")),
    ),
}

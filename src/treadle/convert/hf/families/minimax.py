"""Family row of MiniMax M2."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.families.experts import always, scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, experts_123

MINIMAX_FAMILIES: dict[str, Family] = {
    "minimax_m2": Family(
        "minimax-m2",
        {
            **COMMON,
            "vocab_size": 200064,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196608,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": None,
        },
        {**LLAMA, **experts_123("block_sparse_moe.")},
        experts=True,
        derived=always(
            scores("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.score")
        ),
    ),
}

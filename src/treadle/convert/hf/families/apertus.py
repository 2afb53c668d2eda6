"""Family row of Apertus."""

from __future__ import annotations

from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA
from treadle.models.graphs.apertus import NUMBERS

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

APERTUS_FAMILIES: dict[str, Family] = {
    "apertus": Family(
        "apertus",
        {
            **COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "vocab_size": 131072,
            "max_position_embeddings": 65536,
            "rope_parameters": _ROPE,
        },
        {**LLAMA, "attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        activation="xielu",
        numbers={f"mlp.act_fn.{key.partition('.')[2]}": key for key in NUMBERS},
    ),
}

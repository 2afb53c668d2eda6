"""Family row of Spark X2.5."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA, Names
from treadle.files.metadata import MetadataReader

_ROPE = {
    "full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key of the number of rotated dims in layers with a window, which differs from that
    of other layers.
    """
    head_dim = keys.integer("head_dim")
    rope = keys.within("rope_parameters")
    local = rope.within("sliding_attention") if rope else None
    share = local.number("partial_rotary_factor", 1.0, lo=0.0, hi=1.0) if local else 1.0
    return {"rope.dimension_count_swa": int(head_dim * share)}


_NAMES: Names = {**LLAMA, "self_attn.q_k_v_proj": "attn_qkv", "self_attn.g_proj": "attn_gate"}

SPARK_FAMILIES: dict[str, Family] = {
    "spark2_5": Family(
        "spark2_5",
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 10000.0,
            "rope_parameters": _ROPE,
            "partial_rotary_factor": None,
            "sliding_window": 512,
            "intermediate_size": 8192,
            "hidden_act": "gelu",
        },
        _NAMES,
        activation="gelu",
        windowed=lambda keys, n_layer: [False] * n_layer,
        own_local_rope=True,
        only={"gate_attn_act_mode": "sigmoid", "headwise_attn_output_gate": True},
        more=_keys,
    ),
}

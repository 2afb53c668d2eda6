"""Family row of Laguna."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.experts import PACKED_EXPERTS, leading_dense, scores
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM

_ROPE = {
    "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's keys: query heads of each layer, the number of rotated dims in layers with a
    window, which differs from the others', and leading dense layers.
    """
    n_head = keys.integer("num_attention_heads")
    head_dim = keys.integer("head_dim")
    heads = keys.get("num_attention_heads_per_layer") or [n_head] * n_layer
    if not isinstance(heads, list) or len(heads) != n_layer:
        keys.fail("num_attention_heads_per_layer", f"is {heads!r:.60}", f"a list of {n_layer}")
    rope = keys.within("rope_parameters")
    local = rope.within("sliding_attention") if rope else None
    share = local.number("partial_rotary_factor", 1.0, lo=0.0, hi=1.0) if local else 1.0
    return {
        "attention.head_count": heads,
        "rope.dimension_count_swa": int(head_dim * share),
        "leading_dense_block_count": leading_dense(keys, n_layer, 1),
        EXPERTS_NORM: True,
    }


_NAMES: Names = {**LLAMA_EXPERTS, "self_attn.g_proj": "attn_gate"}

LAGUNA_FAMILIES: dict[str, Family] = {
    "laguna": Family(
        "laguna",
        {
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "rope_parameters": _ROPE,
            "partial_rotary_factor": None,
            "sliding_window": 512,
            "intermediate_size": 8192,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_routed_scaling_factor": 1.0,
        },
        _NAMES,
        windowed=lambda keys, n_layer: [False] * n_layer,
        own_local_rope=True,
        copied={"moe_routed_scaling_factor": "expert_weights_scale"},
        only={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
        experts=True,
        derived=lambda keys: (
            scores("mlp.experts.e_score_correction_bias", "mlp.score"),
            scores("mlp.gate.e_score_correction_bias", "mlp.score"),
            *PACKED_EXPERTS,
        ),
        more=_keys,
    ),
}

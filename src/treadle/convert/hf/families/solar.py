"""Family rows of Solar Open; and of Solar Open 2, whose model transformers 5.24 lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.experts import PACKED_EXPERTS, scores
from treadle.convert.hf.families.glm import GLM_FAMILIES
from treadle.convert.hf.families.kda import (
    decay_of_heads,
    kda_config,
    kda_names,
    kda_rules,
    kda_sizes,
)
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS
from treadle.convert.hf.windows import has_attention
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader

_GLM4 = GLM_FAMILIES["glm4_moe"]


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of each layer's key heads, 0 for layers with a recurrent state, and of the
    states' sizes.
    """
    inner = kda_config(keys)
    n_head = keys.integer("num_attention_heads")
    if inner.get("num_kv_heads") not in (None, n_head):
        keys.refuse("linear_attn_config", "num_kv_heads: treadle supports as many as num_heads")
    n_head_kv = keys.integer("num_key_value_heads")
    return {
        "attention.head_count_kv": [n_head_kv * flag for flag in _attends(keys, n_layer)],
        **kda_sizes(keys, heads=n_head, head_dim=keys.integer("head_dim")),
    }


def _attends(keys: MetadataReader, n_layer: int) -> list[bool]:
    """Return a flag per layer: true for attention, false for a recurrent state."""
    listed = keys.get("gqa_layers")
    if listed is None:
        if keys.get("layer_types") is None:
            keys.refuse("gqa_layers", "is missing: expected the layers with attention")
        return has_attention(keys, n_layer)
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < n_layer for i in listed):
        keys.fail("gqa_layers", f"is {listed!r:.60}", f"a list of layers from 0 to {n_layer - 1}")
    return [i in listed for i in range(n_layer)]


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return (
        *kda_rules(decay_of_heads),
        scores("mlp.gate.e_score_correction_bias", "mlp.score"),
        *PACKED_EXPERTS,
    )


SOLAR_FAMILIES: dict[str, Family] = {
    "solar_open": replace(
        _GLM4,
        defaults={
            **_GLM4.defaults,
            "rope_theta": 1e6,
            "vocab_size": 196608,
            "head_dim": 128,
            "partial_rotary_factor": 1.0,
            "intermediate_size": 10240,  # unused
            "moe_intermediate_size": 1280,
            "first_k_dense_replace": 0,
        },
        only={"first_k_dense_replace": 0, "use_qk_norm": False},
        extra_layers="",
    ),
    "solar_open2": Family(
        "solar-open2",
        {
            "vocab_size": 196608,
            "hidden_size": 4096,
            "intermediate_size": 10240,  # unused
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 320,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_group": None,
            "topk_group": None,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
            "gqa_layers": None,
            "layer_types": None,
        },
        {**LLAMA_EXPERTS, **kda_names(), "self_attn.g_proj": "attn_gate"},
        only={
            "first_k_dense_replace": 0,
            "use_qk_norm": False,
            "use_rope": False,
            "use_gqa_gate": True,
            "use_gqa_gate_bias": False,
            "kda_use_full_proj": False,
            "kda_allow_neg_eigval": True,
        },
        experts=True,
        derived=_rules,
        more=_keys,
    ),
}

"""Family rows of Arcee: the dense models, and Trinity (AFMoE)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.families.experts import scores
from treadle.convert.hf.family import Family, Windowed
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA_EXPERTS, Names
from treadle.convert.sources.derived_tensors import DerivationRule
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_NORM
from treadle.models.graphs.positions import by_period

_NAMES: Names = {
    **LLAMA_EXPERTS,
    "self_attn.gate_proj": "attn_gate",
    "post_attention_layernorm": "post_attention_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.router.gate": "ffn_gate_inp",
}


def _windowed(keys: MetadataReader, n_layer: int) -> Windowed:
    return by_period(keys.integer("global_attn_every_n_layers"), n_layer)


def _keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return GGUF's expert keys. Expert weights are always normalised to a sum of 1, as in
    transformers. Raises UnsupportedError for a null ``sliding_window``: only layers with a window
    have RoPE.
    """
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    return {
        "expert_shared_count": keys.integer("num_shared_experts", lo=0),
        "expert_weights_scale": f32(keys.number("route_scale", lo=0.0)),
        EXPERTS_NORM: True,
    }


def _rules(keys: MetadataReader) -> Sequence[DerivationRule]:
    return (scores("mlp.expert_bias", "mlp.score"),)


ARCEE_FAMILIES: dict[str, Family] = {
    "arcee": Family(
        "arcee",
        {**COMMON_EPS_5, "vocab_size": 32000, "max_position_embeddings": 4096},
        activation="relu2",
    ),
    "afmoe": Family(
        "afmoe",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 200192,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1408,
            "num_dense_layers": 1,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "sliding_window": 1024,
            "global_attn_every_n_layers": 4,
            "mup_enabled": False,
        },
        _NAMES,
        windowed=_windowed,
        only={"mup_enabled": True, "route_norm": True, "score_func": "sigmoid"},
        experts=True,
        derived=_rules,
        more=_keys,
    ),
}

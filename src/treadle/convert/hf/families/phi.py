"""Family rows of Phi: dense models and the mixture."""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.defaults import COMMON_EPS_5
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import LLAMA, PHI3, Names, experts_123
from treadle.convert.hf.windows import every_layer
from treadle.files.metadata import MetadataReader
from treadle.models.archs import EXPERTS_JITTER

# -- Phi 2 ----------------------------------------------------------------------------------------

_PHI: Names = {
    **LLAMA,
    "final_layernorm": "output_norm",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}

# -- the mixture ----------------------------------------------------------------------------------

_LONG = ("longrope", "su")  # two names of one method


def _phimoe_keys(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return Phi-MoE's keys of the norm, of the router's jitter and of RoPE. The norm is a
    LayerNorm, but its epsilon is under the RMS norm's key, where llama.cpp reads it. Raises
    UnsupportedError for RoPE scaling other than LongRoPE.
    """
    eps = f32(keys.number("rms_norm_eps", lo=0.0, hi=1.0))
    made: dict[str, Any] = {
        "attention.layer_norm_epsilon": None,
        "attention.layer_norm_rms_epsilon": eps,
        EXPERTS_JITTER: f32(keys.number(EXPERTS_JITTER, lo=1e-6, hi=1.0)),
    }
    rope = keys.within("rope_parameters") or keys.within("rope_scaling")
    kind = rope.text("rope_type", rope.text("type", "default")) if rope else "default"
    if rope is None or kind == "default":
        return made
    if kind not in _LONG:
        rope.refuse(
            "rope_type", f"{kind!r:.60}: treadle supports only longrope in this architecture"
        )
    short, long = (rope.number(f"{one}_mscale", lo=1e-6, hi=1e6) for one in ("short", "long"))
    if short != long:
        rope.refuse(
            "long_mscale", f"is {long:g}, and short_mscale is {short:g}: expected equal values"
        )
    return {**made, "rope.scaling.attn_factor": f32(long)}


PHI_FAMILIES: dict[str, Family] = {
    "phi3": Family(
        "phi3",
        {
            **COMMON_EPS_5,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        PHI3,
        windowed=every_layer,
    ),
    "phi": Family(
        "phi2",
        {
            "vocab_size": 51200,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
        _PHI,
        {"rms_norm_eps": "layer_norm_eps"},
        activation="gelu_new",
        only={"qk_layernorm": False},
    ),
    "phimoe": Family(
        "phimoe",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "vocab_size": 32064,
            "num_key_value_heads": 8,
            "intermediate_size": 6400,
            "max_position_embeddings": 131072,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            EXPERTS_JITTER: 0.01,
        },
        {**LLAMA, **experts_123("block_sparse_moe.")},
        windowed=every_layer,
        only={"num_experts_per_tok": 2},
        experts=True,
        more=_phimoe_keys,
    ),
}

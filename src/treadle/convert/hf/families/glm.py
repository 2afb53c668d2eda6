"""Family rows of GLM: dense models, ChatGLM, mixtures, and text parts of multimodal models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.defaults import COMMON, COMMON_EPS_5
from treadle.convert.hf.families.experts import always, scores
from treadle.convert.hf.families.multimodal import sections
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.convert.hf.tensor_names import GLM4, LLAMA, LLAMA_EXPERTS, Names
from treadle.files.metadata import MetadataReader

# -- GLM 4 and ChatGLM ----------------------------------------------------------------------------


def _ratio_of_base(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the key of the RoPE base. ChatGLM's config.json gives it as a multiple of 10,000."""
    ratio = keys.number("rope_ratio", 1.0, lo=1e-3, hi=1e9)
    return {"rope.freq_base": f32(10000.0 * ratio)}


_CHATGLM: Names = {
    "embedding.word_embeddings": "token_embd",
    "encoder.final_layernorm": "output_norm",
    "output_layer": "output",
    "input_layernorm": "attn_norm",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",  # fused with its gate, which comes first
    "mlp.dense_4h_to_h": "ffn_down",
}
_GLM: Names = {**LLAMA, "mlp.gate_up_proj": "ffn_up"}

GLM_FAMILIES: dict[str, Family] = {
    "glm4": Family(
        "glm4",
        {
            **COMMON,
            "rms_norm_eps": 1.5625e-7,
            "vocab_size": 151552,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
        },
        GLM4,
        paired=True,
    ),
    "glm4_moe": Family(
        "glm4moe",
        {
            **COMMON_EPS_5,
            "vocab_size": 151552,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
        {**LLAMA_EXPERTS, "post_attention_layernorm": "post_attention_norm"},
        experts=True,
        derived=always(scores("mlp.gate.e_score_correction_bias", "mlp.score")),
        extra_layers="num_nextn_predict_layers",
    ),
    "glm": Family(
        "chatglm",
        {
            **COMMON,
            "rms_norm_eps": 1.5625e-7,
            "vocab_size": 151552,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
        },
        _GLM,
        paired=True,
    ),
    "chatglm": Family(
        "chatglm",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "layernorm_epsilon": 1e-5,
            "seq_length": 2048,
            "kv_channels": 128,
            "partial_rotary_factor": 0.5,
        },
        _CHATGLM,
        {
            "vocab_size": "padded_vocab_size",
            "num_hidden_layers": "num_layers",
            "num_key_value_heads": "multi_query_group_num",
            "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size",
            "max_position_embeddings": "seq_length",
            "rms_norm_eps": "layernorm_epsilon",
        },
        only={
            "multi_query_attention": True,
            "rmsnorm": True,
            "apply_residual_connection_post_layernorm": False,
            "post_layer_norm": True,
            "original_rope": True,
        },
        paired=True,
        more=_ratio_of_base,
    ),
}

# -- text parts of multimodal models ---------------------------------------------------------------

# RoPE pairs are adjacent in a head, and rows keep their order: a GGUF file of these is a text
# model. llama.cpp's converter reorders the rows, so that its M-RoPE can rotate halves.
_GLM4V = Family(
    "glm4",
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": 151552,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 1.0,
    },
    GLM4,
    paired=True,
    extra_layers="num_nextn_predict_layers",
)

GLM_FAMILIES |= {
    "glm4v_text": _GLM4V,
    "glm_ocr_text": replace(
        _GLM4V,
        defaults={
            **_GLM4V.defaults,
            "vocab_size": 59392,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "glm4v_moe_text": replace(
        GLM_FAMILIES["glm4_moe"],
        defaults={
            **GLM_FAMILIES["glm4_moe"].defaults,
            "vocab_size": 151424,
            "max_position_embeddings": 65536,
        },
        more=sections(8, 12, 12),
    ),
}

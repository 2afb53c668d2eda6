"""Family rows of MiniCPM: dense models, and MiniCPM 3 with latent attention."""

from __future__ import annotations

import math
from typing import Any

from treadle.convert.hf.families.deepseek import JOINT_NAMES, ROPE_DIM, joint_keys
from treadle.convert.hf.families.defaults import COMMON
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.files.metadata import MetadataReader


def _minicpm3(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return MiniCPM 3's keys of latent attention, and its scales of embeddings, residuals and
    logits; a scale is 1 if config.json has null for ``scale_depth`` or ``dim_model_base``.
    """
    n_embd = keys.integer("hidden_size")
    depth = 1.0
    if keys.values.get("scale_depth", 0) is not None:
        depth = keys.number("scale_depth", lo=1e-6) / n_layer**0.5
    base = float(n_embd)
    if keys.values.get("dim_model_base", 0) is not None:
        base = keys.number("dim_model_base", lo=1e-6)
    return {
        **joint_keys(keys),
        "embedding_scale": f32(keys.number("scale_emb", lo=1e-6)),
        "residual_scale": f32(depth),
        "logit_scale": f32(n_embd / base),
    }


_NO_EXPERTS = {"num_experts": 0}


def _scales(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys of MiniCPM's scales of embeddings, residuals and logits."""
    base = keys.number("dim_model_base", lo=1e-6)
    return {
        "embedding_scale": f32(keys.number("scale_emb", lo=1e-6)),
        "residual_scale": f32(keys.number("scale_depth", lo=1e-6) / math.sqrt(n_layer)),
        "logit_scale": f32(keys.integer("hidden_size") / base),
    }


MINICPM_FAMILIES: dict[str, Family] = {
    "minicpm3": Family(
        "minicpm3",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 73448,
            "num_key_value_heads": 40,
            "max_position_embeddings": 32768,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        JOINT_NAMES,
        ROPE_DIM,
        more=_minicpm3,
    ),
    "minicpm": Family(
        "minicpm",
        {
            **COMMON,
            "tie_word_embeddings": True,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "scale_emb": 1.0,
            "scale_depth": 1.0,
            "dim_model_base": 1.0,
        },
        only=_NO_EXPERTS,
        more=_scales,
    ),
}

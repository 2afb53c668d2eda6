"""Family rows similar to DeepSeek's: latent attention in another architecture, or under another
name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from treadle.convert.hf.families.deepseek import LATENT_NAMES, LATENTS
from treadle.convert.hf.families.mixtures import MIXTURES
from treadle.convert.hf.family import Family
from treadle.convert.hf.rope import f32
from treadle.files.keys import MetadataReader
from treadle.models.archs import EXPERTS_GATING, LEADING_DENSE
from treadle.models.graphs.kinds import Q_RANK
from treadle.models.graphs.latent import KEY, KV_RANK, VALUE

_WHOLE = {
    **{name: stem for name, stem in LATENT_NAMES.items() if stem not in ("attn_k_b", "attn_v_b")},
    "self_attn.kv_b_proj": "attn_kv_b",
}
_TURNED = {"head_dim": "qk_rope_head_dim"}
_V3 = LATENTS["deepseek_v3"]
_GLM4 = MIXTURES["glm4_moe"]


def _head_keys(keys: MetadataReader) -> dict[str, Any]:
    """Return head sizes for a joint key and value matrix: llama.cpp caches expanded heads, not
    latents.
    """
    rope = keys.within("rope_parameters") or keys.within("rope_scaling")
    # transformers scales attention scores by it.
    if rope is not None and rope.get("mscale_all_dim"):
        rope.refuse("mscale_all_dim", "not supported in this architecture")
    n_head = keys.integer("num_attention_heads")
    n_v = max(1, keys.integer("hidden_size") // n_head)
    result: dict[str, Any] = {
        "attention.head_count_kv": n_head,
        KV_RANK: keys.integer("kv_lora_rank"),
        KEY: keys.integer("qk_nope_head_dim") + keys.integer("qk_rope_head_dim"),
        VALUE: keys.integer("v_head_dim", n_v),
    }
    # null means queries without the low-rank step; a missing key means the default
    if keys.values.get("q_lora_rank", keys.defaults.get("q_lora_rank")) is not None:
        result[Q_RANK] = keys.integer("q_lora_rank")
    return result


def _minicpm3(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys; a scale that is null is 1."""
    n_embd = keys.integer("hidden_size")
    depth = 1.0
    if keys.values.get("scale_depth", 0) is not None:
        depth = keys.number("scale_depth", lo=1e-6) / n_layer**0.5
    base = float(n_embd)
    if keys.values.get("dim_model_base", 0) is not None:
        base = keys.number("dim_model_base", lo=1e-6)
    return {
        **_head_keys(keys),
        "embedding_scale": f32(keys.number("scale_emb", lo=1e-6)),
        "residual_scale": f32(depth),
        "logit_scale": f32(n_embd / base),
    }


def _of_heads(family: Family) -> dict[str, Any]:
    """Return the defaults without those of experts."""
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    return {key: family.defaults[key] for key in (*names, "rms_norm_eps", "rope_theta")}


def _dense(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return keys for a model without experts; llama.cpp still requires some keys of experts."""
    made = _V3.more(keys, n_layer)
    del made[EXPERTS_GATING]
    width = keys.integer("intermediate_size")
    return {
        **made,
        LEADING_DENSE: n_layer,
        "expert_feed_forward_length": width,
        "expert_shared_count": 0,
    }


def _sarvam(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the keys; its first folders have their own key for the shared experts."""
    result = _V3.more(keys, n_layer)
    if keys.get("num_shared_experts") is not None:
        result["expert_shared_count"] = keys.integer("num_shared_experts", lo=0)
    return result


LATENT_KIN: dict[str, Family] = {
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
        _WHOLE,
        _TURNED,
        more=_minicpm3,
    ),
    "plm": Family(
        "plm",
        {
            "rms_norm_eps": 1e-6,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
            "max_position_embeddings": 4096,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "q_lora_rank": None,
        },
        _WHOLE,
        _TURNED,
        activation="relu2",
        paired=True,
        only={"rope_interleave": True},
        more=lambda keys, n_layer: _head_keys(keys),
    ),
    "youtu": replace(
        _V3,
        defaults={
            **_of_heads(_V3),
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "q_lora_rank": 1536,
            "tie_word_embeddings": True,
        },
        only={"rope_interleave": True},
        extra_layers="",
        more=_dense,
    ),
    "sarvam_mla": replace(
        _V3,
        defaults={
            **_V3.defaults,
            "vocab_size": 262144,
            "q_lora_rank": None,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        more=_sarvam,
    ),
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
}

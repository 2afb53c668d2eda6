"""The families: a row for each ``model_type`` of transformers.

A row gives GGUF's architecture, the spelling of keys and tensors, transformers' defaults for keys
that config.json omits, and rules for tensors that GGUF stores differently.
"""

from __future__ import annotations

from typing import Any

from treadle.convert.hf.families.arcee import AFMOE
from treadle.convert.hf.families.bailing import BAILING_VARIANTS, BAILINGS
from treadle.convert.hf.families.bert import ENCODERS
from treadle.convert.hf.families.bert_like import BERTKIN
from treadle.convert.hf.families.dbrx import DBRX
from treadle.convert.hf.families.deepseek import LATENTS
from treadle.convert.hf.families.dots import DOTS
from treadle.convert.hf.families.exaone import EXAONE_MOE
from treadle.convert.hf.families.expert_variants import MIXERS
from treadle.convert.hf.families.falcon_h1 import FALCON_H1
from treadle.convert.hf.families.gemma import GEMMA_VARIANTS, GEMMAS
from treadle.convert.hf.families.gemma3n import GEMMA3N
from treadle.convert.hf.families.gemma4 import GEMMA4
from treadle.convert.hf.families.gpt_like import CLASSIC_VARIANTS, CLASSICS
from treadle.convert.hf.families.gpt_neo import GPT_NEO
from treadle.convert.hf.families.granite import GRANITE_SHARED
from treadle.convert.hf.families.hybrids import HYBRIDS
from treadle.convert.hf.families.kimi_linear import KIMI
from treadle.convert.hf.families.latent_attention import LATENT_KIN
from treadle.convert.hf.families.llama4 import LLAMA4
from treadle.convert.hf.families.llama_like import KIN, OWN_CODE
from treadle.convert.hf.families.mamba1 import MAMBA1S
from treadle.convert.hf.families.mamba2 import MAMBA_VARIANTS, MAMBAS
from treadle.convert.hf.families.mistral4 import MISTRAL4
from treadle.convert.hf.families.mixtures import MIXTURES
from treadle.convert.hf.families.multimodal import PICTURES
from treadle.convert.hf.families.not_in_llamacpp import UNHELD
from treadle.convert.hf.families.rwkv7 import RWKV7
from treadle.convert.hf.families.step_mimo import FLASH
from treadle.convert.hf.families.t5_bias_encoders import DISTANCE
from treadle.convert.hf.families.uneven_layers import OLDER
from treadle.convert.hf.families.variants import MORE
from treadle.convert.hf.families.windowed_mixtures import WINDOWED
from treadle.convert.hf.family import GELU_TANH, Family
from treadle.convert.hf.rope import MINISTRAL_ROPE, fourth_still
from treadle.convert.hf.tensor_names import (
    GLM4,
    HUNYUAN,
    NEOX,
    PHI3,
    POST_NORMS,
    SCORE,
    SEED_OSS,
    STARCODER2,
)
from treadle.convert.hf.windows import all_but_every, every_layer, still_layers, upper_layers
from treadle.convert.sources.derived_tensors import norms_of_heads
from treadle.files.keys import MetadataReader

_COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_COMMON_5 = {**_COMMON, "rms_norm_eps": 1e-5}
_QWEN = {
    **_COMMON,
    "vocab_size": 151936,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_COHERE = {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def _cohere2(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Refuse a missing window: transformers then applies RoPE in no layer, GGUF in all of them."""
    if keys.values.get("sliding_window", 0) is None:
        keys.refuse("sliding_window", "is null, but only layers with a window have RoPE")
    return {}


_LAYER_NORM = {"rms_norm_eps": "layer_norm_eps"}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", {**_COMMON, "vocab_size": 32000, "max_position_embeddings": 2048}),
    "mistral": Family(
        "llama",
        {
            **_COMMON,
            "vocab_size": 32000,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
        },
        windowed=every_layer,
    ),
    "ministral3": Family(
        "mistral3",
        {
            **_COMMON_5,
            "vocab_size": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": MINISTRAL_ROPE,
        },
        windowed=every_layer,
    ),
    "qwen2": Family("qwen2", _QWEN, windowed=upper_layers),
    "qwen3": Family("qwen3", {**_QWEN, "head_dim": 128}, windowed=upper_layers, score_names=SCORE),
    "smollm3": Family(
        "smollm3",
        {
            **_COMMON,
            "vocab_size": 128256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        windowed=still_layers,
        more=fourth_still,
    ),
    "granite": Family(
        "granite",
        {
            **_COMMON,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        copied={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
    ),
    "olmo2": Family(
        "olmo2",
        {**_COMMON_5, "vocab_size": 50304, "max_position_embeddings": 2048},
        POST_NORMS,
    ),
    "olmo3": Family(
        "olmo2",
        {
            **_COMMON_5,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
        },
        POST_NORMS,
        windowed=all_but_every(4),
        own_local_rope=True,
    ),
    "exaone4": Family(
        "exaone4",
        {
            **_COMMON_5,
            "vocab_size": 102400,
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
        },
        POST_NORMS,
        windowed=all_but_every(4, overridable=True),
    ),
    "seed_oss": Family(
        "seed_oss",
        {
            **_COMMON,
            "vocab_size": 155136,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 524288,
        },
        SEED_OSS,
    ),
    "arcee": Family(
        "arcee",
        {**_COMMON_5, "vocab_size": 32000, "max_position_embeddings": 4096},
        activation="relu2",
    ),
    "phi3": Family(
        "phi3",
        {
            **_COMMON_5,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 1.0,
        },
        PHI3,
        windowed=every_layer,
    ),
    "glm4": Family(
        "glm4",
        {
            **_COMMON,
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
    "ernie4_5": Family(
        "ernie4_5",
        {
            **_COMMON_5,
            "vocab_size": 103424,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        paired=True,
    ),
    "hunyuan_v1_dense": Family(
        "hunyuan-dense",
        {**_COMMON_5, "vocab_size": 290943, "max_position_embeddings": 2048},
        HUNYUAN,
    ),
    "cohere": Family(
        "command-r",
        {**_COHERE, "rope_theta": 500000.0},
        words=_LAYER_NORM,
        paired=True,
        copied={"logit_scale": "logit_scale"},
    ),
    "cohere2": Family(
        "cohere2",
        {**_COHERE, "rope_theta": 10000.0, "sliding_window": 4096},
        words=_LAYER_NORM,
        windowed=all_but_every(4, overridable=True),
        paired=True,
        copied={"logit_scale": "logit_scale"},
        more=_cohere2,
    ),
    "stablelm": Family(
        "stablelm",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50304,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": False,
        },
        words=_LAYER_NORM,
        copied={"use_parallel_residual": "use_parallel_residual"},
        derived=norms_of_heads,
    ),
    "starcoder2": Family(
        "starcoder2",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
        },
        STARCODER2,
        {"rms_norm_eps": "norm_epsilon"},
        activation=GELU_TANH,
        windowed=every_layer,
    ),
    "nemotron": Family(
        "nemotron",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 256000,
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
        },
        words={"rms_norm_eps": "norm_eps"},
        activation="relu2",
        norm_shift=1.0,
    ),
    "jais2": Family(
        "jais2",
        {
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 150272,
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
        },
        words=_LAYER_NORM,
        activation="relu2",
    ),
    "gpt_neox": Family(
        "gptneox",
        {
            "rotary_emb_base": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
        NEOX,
        {**_LAYER_NORM, "partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        activation="gelu",
        copied={"use_parallel_residual": "use_parallel_residual"},
        by_head=True,
    ),
}
FAMILIES |= GEMMAS | MIXTURES | HYBRIDS | MAMBAS | MAMBA1S | FALCON_H1 | LATENTS | GEMMA4 | ENCODERS
FAMILIES |= MISTRAL4 | LLAMA4 | KIN | OWN_CODE | CLASSICS | PICTURES | GEMMA3N | WINDOWED
FAMILIES |= DISTANCE | BAILINGS | DOTS | AFMOE | EXAONE_MOE | GRANITE_SHARED | OLDER | MIXERS | MORE
FAMILIES |= KIMI | LATENT_KIN | BERTKIN | FLASH | RWKV7 | DBRX | UNHELD | GPT_NEO
FAMILIES["granite4_vision_text"] = FAMILIES["granite"]
# Rows that ``variant`` chooses.
VARIANTS = (*MAMBA_VARIANTS, *GEMMA_VARIANTS, *CLASSIC_VARIANTS, *BAILING_VARIANTS)

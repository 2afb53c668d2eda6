"""Multimodal models (pictures or sound): rows for their text decoders, and the location of the text
part in such a folder. The other parts are left out.

A token's position there is three numbers (M-RoPE). They are equal for text, so plain RoPE applies;
GGUF still gets the sections of the three, because llama.cpp requires them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Any

from treadle.base.fast_dataclass import dataclass
from treadle.convert.hf.families.mixtures import MIXTURES
from treadle.convert.hf.family import Family
from treadle.convert.hf.tensor_names import GLM4, HUNYUAN
from treadle.convert.hf.windows import upper_layers
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, lower, turned, upper
from treadle.files.keys import MetadataReader
from treadle.models.load import SECTIONS


@dataclass(frozen=True)
class TextPart:
    """The text part. at: its key, with its parents in front. kind: its ``model_type`` if not given.
    tied: the default of whether output and embeddings are tied. defaults: for keys that it omits,
    before its family's.
    """

    at: str
    kind: str
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


def sections(*usual: int) -> Callable[[MetadataReader, int], dict[str, Any]]:
    """Return the rule for the sections of the three numbers in a head's pairs; ``usual``:
    transformers' own.
    """

    def more(keys: MetadataReader, n_layer: int) -> dict[str, Any]:
        found: list[int] = list(usual)
        for key in ("rope_parameters", "rope_scaling"):
            rope = keys.within(key)
            for word in ("mrope_section", "xdrope_section"):
                given = rope.get(word) if rope else None
                if rope is None or given is None:
                    continue
                if not isinstance(given, list) or not all(type(n) is int for n in given):
                    rope.fail(word, f"is {given!r:.60}", "a list of numbers")
                found = given
        return {SECTIONS: [*found, 0, 0, 0][:4]}

    return more


def _deepstack(whole: MetadataReader) -> dict[str, Any]:
    """Return the number of layers to which picture states are added."""
    vision = whole.within("vision_config")
    layers = vision.get("deepstack_visual_indexes") if vision else []
    return {"n_deepstack_layers": len(layers) if isinstance(layers, list) else 3}


# -- Qwen -------------------------------------------------------------------------------------

_QWEN2 = Family(
    "qwen2vl",
    {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 80,
    },
    windowed=upper_layers,
    more=sections(16, 24, 24),
)
_QWEN3 = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
}


# Experts' matrices are [in, out] in published folders, and [out, in] in those of transformers 5.
# The shape tells which, as in transformers.


def _gate(rows: Rows, n_embd: int) -> Rows:
    return upper(rows if rows.shape[-1] == n_embd else turned(rows))


def _up(rows: Rows, n_embd: int) -> Rows:
    return lower(rows if rows.shape[-1] == n_embd else turned(rows))


def _down(rows: Rows, n_embd: int) -> Rows:
    return rows if rows.shape[-2] == n_embd else turned(rows)


def _qwen3_experts(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for all experts in one tensor, gates before ups."""
    at = "mlp.experts."
    n_embd = keys.integer("hidden_size")
    gives = {
        f"{at}gate_proj.weight": partial(_gate, n_embd=n_embd),
        f"{at}up_proj.weight": partial(_up, n_embd=n_embd),
    }
    return (
        DerivationRule((f"{at}gate_up_proj",), gives),
        DerivationRule(
            (f"{at}down_proj",), {f"{at}down_proj.weight": partial(_down, n_embd=n_embd)}
        ),
    )


# -- GLM and Hunyuan ---------------------------------------------------------------------------

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


PICTURES: dict[str, Family] = {
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3_vl_text": Family(
        "qwen3vl",
        {
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        more=sections(24, 20, 20),
        beside=_deepstack,
    ),
    "qwen3_vl_moe_text": replace(
        MIXTURES["qwen3_moe"],
        arch="qwen3vlmoe",
        defaults={
            **_QWEN3,
            "tie_word_embeddings": True,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
        windowed=lambda keys, n_layer: None,
        derived=_qwen3_experts,
        more=sections(24, 20, 20),
        beside=_deepstack,
    ),
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
        MIXTURES["glm4_moe"],
        defaults={
            **MIXTURES["glm4_moe"].defaults,
            "vocab_size": 151424,
            "max_position_embeddings": 65536,
        },
        more=sections(8, 12, 12),
    ),
    "hunyuan_vl_text": Family(
        "hunyuan_vl",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "vocab_size": 290943,
            "max_position_embeddings": 2048,
        },
        HUNYUAN,
        more=sections(16, 16, 16, 16),
    ),
}
_LLAMA = TextPart("text_config", "llama")
OUTER: Mapping[str, TextPart] = {
    "gemma3": TextPart("text_config", "gemma3_text"),
    "gemma3n": TextPart("text_config", "gemma3n_text"),
    "gemma4": TextPart("text_config", "gemma4_text"),
    "llama4": TextPart("text_config", "llama4_text"),
    "mistral3": TextPart("text_config", "mistral"),
    "qwen3_5": TextPart("text_config", "qwen3_5_text"),
    "qwen3_5_moe": TextPart("text_config", "qwen3_5_moe_text"),
    "qwen2_vl": TextPart("text_config", "qwen2_vl_text"),
    "qwen2_5_vl": TextPart("text_config", "qwen2_5_vl_text"),
    "qwen3_vl": TextPart("text_config", "qwen3_vl_text"),
    "qwen3_vl_moe": TextPart("text_config", "qwen3_vl_moe_text"),
    "glm4v": TextPart("text_config", "glm4v_text"),
    "glm46v": TextPart("text_config", "glm4v_text"),
    "glm_ocr": TextPart("text_config", "glm_ocr_text"),
    "glm4v_moe": TextPart("text_config", "glm4v_moe_text"),
    "hunyuan_vl": TextPart("text_config", "hunyuan_vl_text", tied=True),
    "step3p7": TextPart("text_config", "step3p5"),
    "llava": _LLAMA,
    "llava_next": _LLAMA,
    "vipllava": _LLAMA,
    "llava_onevision": TextPart("text_config", "qwen2"),
    "idefics3": TextPart("text_config", "llama", defaults={"rms_norm_eps": 1e-5}),
    "smolvlm": TextPart("text_config", "llama", defaults={"rms_norm_eps": 1e-5}),
    "internvl": TextPart("text_config", "qwen2", tied=True),
    "internvl_chat": TextPart("llm_config", "qwen2"),  # its first folders
    "aya_vision": TextPart("text_config", "cohere2", tied=True),
    "cohere2_vision": TextPart("text_config", "cohere2", tied=True),
    "lfm2_vl": TextPart("text_config", "lfm2", tied=True),
    "gemma4_unified": TextPart("text_config", "gemma4_unified_text"),
    "glmga": TextPart("text_config", "glm4v_text"),
    **dict.fromkeys(("llava_next_video", "video_llava", "perception_lm", "voxtral"), _LLAMA),
    **dict.fromkeys(("janus", "deepseek_vl", "deepseek_vl_hybrid"), replace(_LLAMA, tied=True)),
    "idefics2": TextPart("text_config", "mistral"),
    **dict.fromkeys(
        ("video_llama_3", "fast_vlm", "qwen2_audio", "audioflamingo3", "musicflamingo"),
        TextPart("text_config", "qwen2"),
    ),
    **dict.fromkeys(("ovis2", "got_ocr2"), TextPart("text_config", "qwen2", tied=True)),
    "qianfan_ocr": TextPart("text_config", "qwen3"),
    "lighton_ocr": TextPart("text_config", "qwen3", tied=True),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7"), TextPart("text_config", "qwen3_5_text")),
    "minicpm_ocr": TextPart("text_config", "qwen3_5_text", tied=True),
    "exaone4_5": TextPart("text_config", "exaone4"),
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"), TextPart("text_config", "granite", tied=True)
    ),
    "granite4_vision": TextPart("text_config", "granite4_vision_text"),
    "hyperclovax_vision_v2": TextPart("text_config", "hyperclovax", tied=True),
}
# transformers' defaults for keys that such a part omits, by its ``model_type``.
SIZES: Mapping[str, Mapping[str, int]] = {
    kind: {
        "hidden_size": 4096,
        "intermediate_size": n_ff,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    for kind, n_ff in {
        **{"llama": 11008, "mistral": 14336, "qwen2": 22016, "qwen3": 22016, "exaone4": 16384},
        **{"granite": 11008, "granite4_vision_text": 11008, "hyperclovax": 11008},
    }.items()
}

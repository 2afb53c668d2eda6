"""Multimodal models (images or audio): where config.json has the text part. The other parts are
left out; the family rows of text parts are in their vendors' files.

A token's position there is three numbers (M-RoPE). They are equal for text, so plain RoPE applies;
GGUF still gets the sections of the three, because llama.cpp requires them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.files.metadata import MetadataReader
from treadle.models.load import SECTIONS


@dataclass(frozen=True)
class TextPart:
    """The text part of a multimodal config.json.

    at: the key that holds it, after the keys that hold that one.
    kind: the ``model_type`` to use if the part states none.
    tied: default of whether output and embeddings are tied.
    defaults: for keys that the part omits; they take precedence over its family's.
    alone: a ``model_type`` that the part may state; it is read as ``kind``.
    """

    at: str
    kind: str
    tied: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    alone: str = ""


def sections(*usual: int) -> Callable[[MetadataReader, int], dict[str, Any]]:
    """Return a ``Family.more`` that gives the key of M-RoPE's sections: how many RoPE pairs of a
    head take each of a position's numbers. ``usual``: transformers' defaults.
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


_LLAMA = TextPart("text_config", "llama")
OUTER: Mapping[str, TextPart] = {
    "gemma3": TextPart("text_config", "gemma3_text"),
    "gemma3n": TextPart("text_config", "gemma3n_text"),
    "gemma4": TextPart("text_config", "gemma4_text"),
    "llama4": TextPart("text_config", "llama4_text"),
    "mistral3": TextPart("text_config", "mistral"),
    "qwen3_5": TextPart("text_config", "qwen3_5_text"),
    "minimax_m3_vl": TextPart("text_config", "minimax_m3_vl_text"),
    "qwen4_exp": TextPart("text_config", "qwen4_exp_text"),
    "qwen3_5_moe": TextPart("text_config", "qwen3_5_moe_text"),
    "qwen2_vl": TextPart("text_config", "qwen2_vl_text"),
    "qwen2_5_vl": TextPart("text_config", "qwen2_5_vl_text"),
    "qwen3_vl": TextPart("text_config", "qwen3_vl_text"),
    "qwen3_vl_moe": TextPart("text_config", "qwen3_vl_moe_text"),
    "glm4v": TextPart("text_config", "glm4v_text"),
    "glm46v": TextPart("text_config", "glm4v_text"),
    "glm_ocr": TextPart("text_config", "glm_ocr_text"),
    "glm4v_moe": TextPart("text_config", "glm4v_moe_text"),
    "glm5_next": TextPart("text_config", "glm5_next_text"),
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
    "muse_glimmer": TextPart("text_config", "muse_glimmer_text"),
    "lfm3_vl": TextPart("text_config", "lfm3", tied=True),
    "gemma4_assistant": TextPart("text_config", "gemma4_text", tied=True),
    "gemma4_unified_assistant": TextPart("text_config", "gemma4_unified_text", tied=True),
    "embedding_gemma2": TextPart("text_config", "embedding_gemma2_text"),
    "gemma4_unified": TextPart("text_config", "gemma4_unified_text"),
    "kimi_k3": TextPart("text_config", "kimi_k3_text", alone="kimi_linear"),
    "dots3_note": TextPart("text_config", "dots3_note_text"),
    "cohere_compass": TextPart("text_config", "cohere_compass_text", tied=True),
    "inkling_mm_model": TextPart("text_config", "inkling_text"),
    "glmga": TextPart("text_config", "glm4v_text"),
    **dict.fromkeys(("llava_next_video", "video_llava", "perception_lm", "voxtral"), _LLAMA),
    "ultravox": _LLAMA,
    **dict.fromkeys(("janus", "deepseek_vl", "deepseek_vl_hybrid"), replace(_LLAMA, tied=True)),
    "idefics2": TextPart("text_config", "mistral"),
    **dict.fromkeys(
        ("video_llama_3", "fast_vlm", "qwen2_audio", "audioflamingo3", "musicflamingo"),
        TextPart("text_config", "qwen2"),
    ),
    **dict.fromkeys(("ovis2", "got_ocr2"), TextPart("text_config", "qwen2", tied=True)),
    "qianfan_ocr": TextPart("text_config", "qwen3"),
    "qwen3_asr": TextPart("text_config", "qwen3_asr_text", tied=True, alone="qwen3"),
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
# Models whose folders may lack the text part, and the key that names the text model.
TEXT_APART: Mapping[str, str] = {"ultravox": "text_model_id"}
TEXT_WEIGHTS = "language_model."  # beginning of its tensors' names, if a folder has it
# transformers' defaults for keys that a text part omits, by its ``model_type``.
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

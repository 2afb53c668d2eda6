"""Further models of text and pictures, or sound, whose text is that of a known family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.convert import test_hf_pictures as pictures
from tests.convert.test_hf import convert, worst
from tests.models.hf_tiny import _draw, float64_only, require_transformers
from tests.models.test_arch_truth import ids_of
from tests.tiny import rounding
from treadle.convert.hf.config import read_config

_VIT = pictures._VIT
_SIGLIP = {**_VIT, "model_type": "siglip_vision_model"}
_CLIP = {**_VIT, "model_type": "clip_vision_model"}
_PIXTRAL = {**_VIT, "model_type": "pixtral", "head_dim": 16}
_SCALES = {"embedding_multiplier": 6.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2}
_UNIFIED = {
    "model_type": "gemma4_unified_text",
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_AUDIO = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_mel_bins": 8}
_WHISPER = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 16,
}
# transformers' class by its name's stem, the architecture, the part for text, all other keys.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma4_unified": (
        "Gemma4Unified",
        "gemma4",
        _UNIFIED,
        {
            "vision_config": {
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "mm_embed_dim": 64,
                "mm_posemb_size": 8,
                "output_proj_dims": 64,
            },
            "tie_word_embeddings": True,
        },
    ),
    "llava_next_video": (
        "LlavaNextVideo",
        "llama",
        {"model_type": "llama"},
        {"vision_config": _CLIP},
    ),
    "video_llava": ("VideoLlava", "llama", {"model_type": "llama"}, {"vision_config": _CLIP}),
    "deepseek_vl": ("DeepseekVL", "llama", {"model_type": "llama"}, {"vision_config": _SIGLIP}),
    "voxtral": (
        "Voxtral",
        "llama",
        {"model_type": "llama", "head_dim": 32},
        {"audio_config": {**_AUDIO, "num_attention_heads": 2, "max_source_positions": 16}},
    ),
    "qwen3_asr": (
        "Qwen3ASR",
        "qwen3vl",
        {"model_type": "qwen3", "head_dim": 32},
        {
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 32,
                "output_dim": 64,
                "downsample_hidden_size": 8,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_audio": (
        "Qwen2Audio",
        "qwen2",
        {"model_type": "qwen2"},
        {"audio_config": {**_WHISPER, "model_type": "qwen2_audio_encoder"}},
    ),
    "lighton_ocr": (
        "LightOnOcr",
        "qwen3",
        {"model_type": "qwen3", "head_dim": 32},
        {"vision_config": _PIXTRAL, "tie_word_embeddings": True},
    ),
    "granite_speech": (
        "GraniteSpeech",
        "granite",
        {"model_type": "granite", **_SCALES},
        {
            "encoder_config": {
                "hidden_dim": 32,
                "num_layers": 2,
                "num_heads": 2,
                "dim_head": 16,
                "input_dim": 16,
                "output_dim": 16,
            },
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "encoder_hidden_size": 32,
            },
            "tie_word_embeddings": True,
        },
    ),
    "exaone4_5": (
        "Exaone4_5_",
        "exaone4",
        {"model_type": "exaone4", "sliding_window": 16, "num_hidden_layers": 4},
        {
            "vision_config": {
                **pictures._VISION,
                "out_hidden_size": 64,
                "num_key_value_heads": 2,
                "fullatt_block_indexes": [0],
            }
        },
    ),
}


def build(name: str) -> Any:
    import numpy as np
    import torch
    import transformers

    require_transformers()
    stem, _, text, more = CASES[name]
    config = getattr(transformers, f"{stem}Config")(
        text_config={**pictures._TEXT, **text}, attn_implementation="eager", **more
    )
    model_class = getattr(transformers, f"{stem}ForConditionalGeneration")
    model_class(config)  # imports what it needs before torch.float32 is another
    with float64_only():
        model = model_class(config).eval()
    rng = np.random.default_rng(sum(name.encode()))
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            tied = bool(getattr(config, "tie_word_embeddings", False))
            drawn = _draw(rng, each, tuple(parameter.shape), tied)
            parameter.copy_(torch.from_numpy(drawn.astype(np.float64)))
    return model


@pytest.mark.parametrize("name", CASES)
def test_text_of_other_models(name: str, tmp_path: Path) -> None:
    model = build(name)
    expected = pictures.logits(model, ids_of())
    folder = pictures.save(model, tmp_path / "hf")
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.arch.name == CASES[name][1]
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids_of()), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))


def test_an_output_that_the_part_for_text_ties() -> None:
    """As transformers reads folders of some of them; others say it of the whole model."""
    text = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    text |= {"num_hidden_layers": 2, "vocab_size": 320}

    def tied(outer: bool | None, inner: bool | None) -> bool:
        whole = {"model_type": "video_llama_3", "tie_word_embeddings": outer}
        part = {**text, "tie_word_embeddings": inner}
        return read_config({**whole, "text_config": part}, Path("config.json")).tied

    assert tied(False, True)
    assert tied(True, None)
    assert tied(True, False)
    assert not tied(False, None)
    assert not tied(None, False)

"""Gemma 4 E2B's and E4B's kind of model, tiny: a tower whose matrices clamp, a decoder with
per-layer embeddings, and an encoder of sound. transformers makes the folder and, in float64, the
truth.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.media.bounded_tower import ENDS, Bounds, bounds_of_all
from tests.models.hf_tiny import float64_only, require_transformers

N_EMBD = 1536  # of the decoder: files of this width have no bidirectional spans
MARKS = {
    "boi_token_id": 280,
    "eoi_token_id": 281,
    "image_token_id": 282,
    "video_token_id": 283,
    "boa_token_id": 284,
    "eoa_token_index": 285,
    "audio_token_id": 286,
}
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TEXT: Mapping[str, Any] = {
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "hidden_size": N_EMBD,
    "hidden_size_per_layer_input": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 48,
    "max_position_embeddings": 512,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
VISION: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "patch_size": 8,
    "pooling_kernel_size": 3,
    "position_embedding_size": 32,
    "use_clipped_linears": True,
    "standardize": False,
}
SOUND: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [8, 4],
    "output_proj_dims": 48,
}


@dataclass(frozen=True)
class SmallGemma4:
    """The folder, and of transformers, in float64: the tower's states, the media rows, the prompt's
    ids with a mark for each row, and its logits. free: the media rows without any bounds.
    """

    folder: Path
    states: np.ndarray
    rows: np.ndarray
    ids: list[int]
    logits: np.ndarray
    free: np.ndarray


def small_gemma4(like: Path, folder: Path) -> SmallGemma4:
    """Make the model in ``folder``. Its tokenizer, preprocessor, prompt and picture are those of
    ``like``, a folder of the larger Gemma 4's kind of model with its truth.
    """
    require_transformers()
    import torch
    import transformers

    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    config = transformers.Gemma4Config(
        text_config=dict(TEXT),
        vision_config=dict(VISION),
        audio_config=dict(SOUND),
        tie_word_embeddings=True,
        **MARKS,
    )
    model = transformers.Gemma4ForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    _draw(model, torch)
    _set_bounds(model, bounds_of_all())
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # which rounds rope's angles
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        shutil.copy(like / name, folder / name)
    with np.load(like / "truth.npz") as given:
        pixels = torch.tensor(given["pixel_values"]).double()
        places = torch.tensor(given["image_position_ids"]).long()
        ids = torch.tensor(given["input_ids"]).long()
    kinds = (ids == MARKS["image_token_id"]).int()
    with float64_only(), torch.no_grad():
        model = model.double()
        seen = model.model.get_image_features(pixels, places, return_dict=True)
        picture = {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
        logits = model(input_ids=ids, **picture).logits[0].numpy()
        _set_bounds(model, {key: (-np.inf, np.inf) * 2 for key in bounds_of_all()})
        free = model.model.get_image_features(pixels, places, return_dict=True)
    assert logits.dtype == np.float64
    return SmallGemma4(
        folder,
        seen.last_hidden_state.numpy(),
        torch.cat(list(seen.pooler_output)).numpy(),
        ids[0].tolist(),
        logits,
        torch.cat(list(free.pooler_output)).numpy(),
    )


def _draw(model: Any, torch: Any) -> None:
    """Draw weights that bfloat16 and float16 both hold, large enough that a wrong step shows."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            values = torch.randn(weight.shape, generator=drawn)
            if "embed_tokens" in name or "position" in name:
                values *= 0.05 if "embed_tokens." in name else 0.5
            elif weight.ndim >= 2:
                values *= 1.1 / weight[0].numel() ** 0.5
            else:
                values = weight + 0.1 * values
            values = values.to(torch.bfloat16).float()
            weight.copy_(torch.where(values.abs() < 2.0**-13, torch.zeros(()), values))


def _set_bounds(model: Any, bounds: Bounds) -> None:
    for (layer, name), values in bounds.items():
        matrix = model.model.vision_tower.encoder.layers[layer].get_submodule(MODULES[name])
        for end, value in zip(ENDS, values, strict=True):
            getattr(matrix, end).fill_(value)

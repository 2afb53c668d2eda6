"""Gemma 4 E2B's and E4B's kind of model, tiny: a tower whose matrices clamp, and a decoder with
per-layer embeddings. transformers makes the folder and the truth, in float64.
"""

from __future__ import annotations

import copy
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.hf_tiny import float64_only, require_transformers

N_EMBD = 1536  # of the decoder: files of this width have no bidirectional spans
N_LAYER = 2  # of the tower
MARKS = {"boi": 280, "eoi": 281, "image": 282, "video": 283, "boa": 284, "eoa": 285, "audio": 286}
MATRICES = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)

# Of layer and matrix: the least and the largest input, and those of products. Queries and keys read
# the same clamped rows, values others; one matrix has no bounds at all, some have one.
BOUNDS: dict[tuple[int, str], tuple[float, float, float, float]] = {}
for _layer in range(N_LAYER):
    for _n, _name in enumerate(MATRICES):
        _small = 0.05 * _n + 0.2 * _layer
        BOUNDS[_layer, _name] = (-0.9 - _small, 1.0 + _small, -0.8 - _small, 0.7 + _small)
    BOUNDS[_layer, "self_attn.k_proj"] = (
        *BOUNDS[_layer, "self_attn.q_proj"][:2],
        *BOUNDS[_layer, "self_attn.k_proj"][2:],
    )
BOUNDS[1, "self_attn.o_proj"] = (-np.inf, np.inf, -np.inf, np.inf)
BOUNDS[1, "mlp.down_proj"] = (-np.inf, 0.75, -np.inf, np.inf)
BOUNDS[0, "mlp.gate_proj"] = (-np.inf, np.inf, -0.5, np.inf)
ENDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True)
class SmallGemma4:
    """The folder, and of transformers: what the tower gives, the media rows, the prompt's ids with
    a mark for each row, and its logits. ``free``: the rows without any bounds.
    """

    folder: Path
    tower: np.ndarray
    rows: np.ndarray
    ids: list[int]
    logits: np.ndarray
    free: np.ndarray


def small_gemma4(like: Path, folder: Path) -> SmallGemma4:
    """Make the model in ``folder``. Its tokenizer, preprocessor, prompt and picture are those of
    ``like``, the folder of a larger Gemma 4's kind of model.
    """
    require_transformers()
    import torch
    import transformers

    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    config = _config(transformers)
    model = transformers.Gemma4ForConditionalGeneration._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    ).eval()
    _draw(model, torch)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # which rounds rope's angles
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        shutil.copy(like / name, folder / name)
    with np.load(like / "truth.npz") as given:
        pixels = torch.tensor(given["pixel_values"]).double()
        places = torch.tensor(given["image_position_ids"]).long()
        ids = torch.tensor(given["input_ids"]).long()
    with float64_only(), torch.no_grad():
        model = model.double()
        _set_bounds(model, torch, BOUNDS)
        seen = model.model.get_image_features(pixels, places, return_dict=True)
        kinds = (ids == MARKS["image"]).int()
        given = {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": kinds}
        logits = model(input_ids=ids, **given).logits[0].numpy()
        _set_bounds(model, torch, {key: (-np.inf, np.inf) * 2 for key in BOUNDS})
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


def _config(transformers: Any) -> Any:
    text = {
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
    vision = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": N_LAYER,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "patch_size": 8,
        "pooling_kernel_size": 3,
        "position_embedding_size": 32,
        "use_clipped_linears": True,
        "standardize": False,
    }
    return transformers.Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=None,
        image_token_id=MARKS["image"],
        boi_token_id=MARKS["boi"],
        eoi_token_id=MARKS["eoi"],
        video_token_id=MARKS["video"],
        boa_token_id=MARKS["boa"],
        eoa_token_index=MARKS["eoa"],
        audio_token_id=MARKS["audio"],
        tie_word_embeddings=True,
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
                values *= 1.1 / weight.shape[-1] ** 0.5
            else:
                values = weight + 0.1 * values
            values = values.to(torch.bfloat16).float()
            weight.copy_(torch.where(values.abs() < 2.0**-13, torch.zeros(()), values))
    _set_bounds(model, torch, BOUNDS)


def _set_bounds(model: Any, torch: Any, bounds: Any) -> None:
    """Set the bounds, rounded to what the folder's bfloat16 holds."""
    for (layer, name), values in bounds.items():
        matrix = model.model.vision_tower.encoder.layers[layer].get_submodule(name)
        for end, value in zip(ENDS, values, strict=True):
            getattr(matrix, end).fill_(torch.tensor(value).to(torch.bfloat16).item())

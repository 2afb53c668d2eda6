"""Shapes of published towers that the tiny models lack, beside transformers' models in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media.picture_cases import off, picture
from tests.models.hf_tiny import float64_only, require_transformers
from treadle.devices import open_device
from treadle.media.pixels import normalise
from treadle.media.projector import open_projector

pytestmark = pytest.mark.slow  # importing transformers' models takes half a minute
NEAR = 1e-5

SMALL = {"num_hidden_layers": 2, "intermediate_size": 100}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # 384 pixels are 27 patches of 14 and 6 pixels more; heads of 72 (SmolVLM 2.2B)
    "rest": (
        "smolvlm",
        {"hidden_size": 144, "num_attention_heads": 2, "image_size": 62, "patch_size": 14},
        {"scale_factor": 2},
    ),
    # the tower of 6 billion parameters (InternVL 38B, 78B)
    "rms": (
        "internvl",
        {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False},
        {},
    ),
    # heads of 88 (Llama 4)
    "heads": ("llama4", {"hidden_size": 176, "num_attention_heads": 2}, {}),
    # heads of 64, three positions a side (LFM2-VL 450M: heads of 64)
    "table": ("lfm2vl", {"hidden_size": 128, "num_attention_heads": 2, "num_patches": 9}, {}),
}


def write_model(name: str, data: Path, to: Path, vision: Any, config: Any) -> Any:
    """Write a folder with random weights; return the model, in float64."""
    import torch
    import transformers

    source = data / "media" / name
    settings = json.loads((source / "config.json").read_text("utf-8"))
    settings |= config
    settings["vision_config"] |= {**SMALL, **vision}
    if name == "llama4":
        sizes = settings["vision_config"]
        sizes["intermediate_size"] = 4 * sizes["hidden_size"]  # of the joined patches
    (to / "config.json").write_text(json.dumps(settings), "utf-8")
    made = transformers.AutoConfig.from_pretrained(to)
    torch.manual_seed(0)
    cls = getattr(transformers, settings["architectures"][0])
    model = cls._from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for key, values in model.named_parameters():
            fan = values[0].numel() ** 0.5 if values.ndim > 1 else 4.0
            values.add_(torch.randn(values.shape) * (1.0 / fan))
            if "positional" in key or "position_embed" in key:
                values.copy_(torch.randn(values.shape) * 0.5)
    model.save_pretrained(to)
    (to / "config.json").write_text(json.dumps(settings), "utf-8")
    preprocessor = json.loads((source / "preprocessor_config.json").read_text("utf-8"))
    if "image_size" in vision:
        preprocessor |= {"size": {"longest_edge": 3 * vision["image_size"]}}
    (to / "preprocessor_config.json").write_text(json.dumps(preprocessor), "utf-8")
    return model.double()


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_transformers(case: str, data: Path, tmp_path: Path) -> None:
    require_transformers()
    import torch

    name, vision, config = CASES[case]
    model = write_model(name, data, tmp_path, vision, config)
    projector = open_projector(tmp_path, open_device("cpu", None, 1, None), exact=True)
    family = projector.family("image")
    tiles: list[np.ndarray] = []
    build = family.image  # type: ignore[attr-defined]

    def image(pixels: np.ndarray, pictures: list[np.ndarray], **rest: Any) -> Any:
        tiles.extend(pictures)
        return build(pixels, pictures, **rest)

    family.image = image  # type: ignore[attr-defined]
    prepared = projector.prepare(picture(97, 61), 60)
    rows = projector.encode(prepared)
    clip = family.clip
    values = np.stack([normalise(tile, clip.mean, clip.std).transpose(2, 0, 1) for tile in tiles])
    given = {"pixel_values": torch.from_numpy(values).double()}
    if name == "smolvlm":
        given = {"pixel_values": given["pixel_values"][None]}
    if name == "lfm2vl":
        side = clip.patch_size
        (h, w), (tile,) = prepared.inputs[0].grid, values
        cut = tile.reshape(3, h, side, w, side).transpose(1, 3, 2, 4, 0).reshape(1, h * w, -1)
        given = {
            "pixel_values": torch.from_numpy(cut).double(),
            "spatial_shapes": torch.tensor([[h, w]]),
            "pixel_attention_mask": torch.ones(1, h * w, dtype=torch.int64),
        }
    base = getattr(model, "model", model)
    for part in base.modules():  # Llama 4: a conversion leaves the real part of a complex buffer
        if hasattr(part, "_compute_freqs_ci"):
            part.freqs_ci = part._compute_freqs_ci(part.config)
    with torch.no_grad(), float64_only():
        found = base.get_image_features(**given)
        if name == "llama4":
            found = base.multi_modal_projector(found.last_hidden_state)
    found = getattr(found, "pooler_output", found)
    found = torch.cat(list(found)) if not torch.is_tensor(found) else found
    expected = found.double().numpy().reshape(-1, rows.shape[1])
    assert off(rows, expected) < NEAR

"""Llama 4's folders: Scout's shape and Maverick's, alone and inside a model of pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OPTIONS: dict[str, Any] = {
    "num_hidden_layers": 5,  # the fourth sees everything
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "attention_chunk_size": 12,  # three times in the prompt, and within pages
    "attn_temperature_tuning": True,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "rope_parameters": _ROPE,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "layer_types": None,
    "no_rope_layers": None,
    "moe_layers": None,
}
SCOUT = Case("Llama4", "llama4", OPTIONS)
MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
SIZES = {"scout": {}, "maverick": MAVERICK}


@pytest.mark.parametrize("size", SIZES)
def test_in_place_and_converted(size: str, tmp_path: Path) -> None:
    """In one go, in chunks of the prompt that end anywhere, and by decode."""
    model = save(own(SCOUT, **SIZES[size]), tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    truth = compute_logits(model, ids_of())
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        assert found["expert_feed_forward_length"] == 32
        assert found["feed_forward_length"] == 96
        assert found["attention.sliding_window"] == 12
        (note,) = reading_differences(gguf.metadata, gguf.tensors)
        assert "attention.sliding_window, attention.temperature_scale" in note


def test_inside_a_model_of_pictures(tmp_path: Path) -> None:
    """As it is published; a list of no layers is none, and two bounds of the rope may be one."""
    rope = {**_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
    model = save(own(SCOUT, rope_parameters=rope, attn_temperature_tuning=True), tmp_path)
    truth = compute_logits(model, ids_of(20))
    text = json.loads((tmp_path / "config.json").read_text())
    text |= {"no_rope_layers": [], "moe_layers": None, "attn_temperature_tuning": 4}
    outer = {"model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
        error = np.abs(loaded.logits(ids_of(20)) - truth).max() / np.abs(truth).max()
        assert error <= rounding(loaded.config)


def test_experts_one_by_one(folder: Path, tmp_path: Path) -> None:
    """As Maverick's quantised folders have them, [out, in]: the same bits."""
    from safetensors.numpy import load_file, save_file

    tensors: dict[str, np.ndarray] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        before, _, last = name.rpartition(".")
        if not before.endswith(".experts"):
            tensors[name] = value
            continue
        for e, each in enumerate(value.swapaxes(-1, -2)):
            parts = np.split(each, 2) if last == "gate_up_proj" else [each]
            stems = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for stem, part in zip(stems, parts, strict=True):
                tensors[f"{before}.{e}.{stem}.weight"] = np.ascontiguousarray(part)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    found = []
    for path in (folder, tmp_path):
        with treadle.load(path, threads=2, kv="f32") as model:
            found.append(model.logits(ids_of(20)))
    assert np.array_equal(found[0], found[1])


def test_without_a_temperature(tmp_path: Path) -> None:
    with open_gguf(check_both(own(SCOUT, attn_temperature_tuning=False), tmp_path)) as made:
        assert made.metadata["llama4.attention.temperature_scale"] == 0.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_qk_norm": False}, "use_qk_norm: must be true with 6 experts"),
        ({"moe_layers": [1, 3]}, r"moe_layers: is \[1, 3\]"),
        ({"no_rope_layers": [1, 1, 1, 1, 0]}, "no_rope_layers: is .*every 4th layer"),
        (
            {"layer_types": ["full_attention"] * 5},
            "layer_types: is .*chunks only in layers with RoPE",
        ),
        ({"attention_chunk_size": None}, "attention_chunk_size: is null"),
        ({"num_experts_per_tok": 2}, "expert_used_count: 2: treadle supports one expert"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnsupportedError, match=why):
        open_hf(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama4")
    save(own(SCOUT), path)
    return path

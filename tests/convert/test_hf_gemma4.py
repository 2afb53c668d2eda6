"""Gemma 4: as ``test_hf_mixtures`` has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import prompt
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check, own
from tests.models.hf_cases import Case
from treadle.convert.hf.config import read_config
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf

_COMMON: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
_E = {
    "num_hidden_layers": 12,
    "hidden_size_per_layer_input": 32,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
}
_MOE = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
CASES: dict[str, dict[str, Any]] = {"gemma4-dense": {}, "gemma4-e": _E, "gemma4-moe": _MOE}


def case(name: str) -> Case:
    return own(Case("Gemma4", "gemma4", {}), **{**_COMMON, **CASES[name]})


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path, data: Path) -> None:
    check(name, case(name), tmp_path, data)
    file = data / "arch" / f"{name}.gguf"
    with open_gguf(tmp_path / "made.gguf") as ours, open_gguf(file) as theirs:
        for key, value in theirs.metadata.items():
            if key.startswith("gemma4.") and "epsilon" not in key:
                assert np.array_equal(ours.metadata[key], value), key
        made, expected = (of.tensors["rope_freqs.weight"].dequantize() for of in (ours, theirs))
        assert np.array_equal(made, expected)


def test_as_it_is_published(tmp_path: Path) -> None:
    """A model of text and images, whose widths are two keys, and whose layers that read others'
    keys and values have matrices for some all the same.
    """
    from safetensors.numpy import load_file, save_file

    save(case("gemma4-e"), tmp_path / "hf")
    weights = tmp_path / "hf" / "model.safetensors"
    said = tmp_path / "hf" / "config.json"
    expected, _ = both(tmp_path / "hf")
    tensors = load_file(weights)
    config = json.loads(said.read_text())
    for name in list(tensors):
        tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
    at = "model.language_model.layers."
    for one in ("k_proj", "v_proj", "k_norm"):
        of = f"self_attn.{one}.weight"
        tensors[f"{at}7.{of}"] = tensors[f"{at}4.{of}"]
    for other in ("audio_tower.x", "vision_tower.x", "embed_vision.x", "embed_audio.x"):
        tensors[f"model.{other}.weight"] = np.ones((2, 2), np.float32)
    del config["per_layer_config"]
    config |= {"global_head_dim": 64, "use_bidirectional_attention": "vision"}
    save_file(tensors, weights)
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}
    said.write_text(json.dumps({**outer, "text_config": config}))
    found, names = both(tmp_path / "hf")
    assert np.array_equal(found, expected)
    assert "blk.5.attn_k.weight" in names
    assert "blk.7.attn_k.weight" not in names


def test_heads_of_one_width(tmp_path: Path) -> None:
    """transformers lists the layers that differ: here none."""
    save(own(Case("Gemma4", "gemma4", {}), **{**_COMMON, "global_head_dim": 32}), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["per_layer_config"] == {}
    with treadle.load(tmp_path, threads=1) as model:
        assert {layer.head_dim for layer in model.config.layers} == {32}


def both(folder: Path) -> tuple[Any, set[str]]:
    """Logits, and the names of tensors."""
    with treadle.load(folder, threads=2, kv="f32") as model:
        return model.logits(prompt()), set(model.gguf.tensors)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_bidirectional_attention": "all"}, "treadle supports gemma4 only as a decoder"),
        ({"layer_types": ["sliding_attention"] * 30}, "layer_types: the last layer has a window"),
        (
            {"per_layer_config": {"5": {"head_dim": 64}, "11": {}}},
            "per_layer_config: treadle supports at most two",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "supports only rope_type proportional",
        ),
        ({"attention_bias": True}, "attention_bias: is True"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        read_config({"model_type": "gemma4_text", **change}, Path("config.json"))

"""Cohere Compass: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import PORTABLE, check_instruction_set, check_returns
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

TURNED = {"rope_type": "default", "rope_theta": 50000.0}
OTHER = {"rope_type": "default", "rope_theta": 10000.0}
OPTIONS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"sliding_attention": TURNED, "full_attention": None},
    "logit_scale": 0.25,
}
CASES = {
    "still": OPTIONS,
    "both": {
        **OPTIONS,
        "rope_parameters": {"sliding_attention": TURNED, "full_attention": OTHER},
        "logit_scale": None,
    },
    "whole": {
        **OPTIONS,
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"full_attention": TURNED},
    },
}


def case(name: str) -> Case:
    return own(Case("CohereCompass", "cohere-compass", CASES[name]))


def test_in_every_way(tmp_path: Path) -> None:
    truth = compute_logits(save(case("still"), tmp_path / "hf"), ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    check_returns(made)
    with open_gguf(made) as file:
        keys: dict[str, Any] = {
            key.partition(".")[2]: value for key, value in file.metadata.items()
        }
    assert [*keys["attention.rope_pattern"]] == [True, False, True]
    assert [*keys["attention.sliding_window_pattern"]] == [True, False, True]
    assert keys["rope.freq_base"] == 50000.0
    assert keys["logit_scale"] == 0.25


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both", "whole"])
def test_other_layers(name: str, tmp_path: Path) -> None:
    truth = compute_logits(save(case(name), tmp_path / "hf"), ids_of())
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as model:
            assert worst(model.logits(ids_of()), truth) <= 2 * rounding(model.config)


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    truth = compute_logits(save(case("still"), tmp_path / "hf"), ids_of())
    check_instruction_set(
        convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth, PORTABLE
    )


@pytest.mark.slow
def test_beside_a_tower(tmp_path: Path) -> None:
    """The text part of a model that reads pictures, and vectors of the last token."""
    from safetensors.numpy import load_file, save_file

    truth = compute_logits(save(case("still"), tmp_path), ids_of())
    config = json.loads((tmp_path / "config.json").read_text())
    config["pooling"] = "eos"
    config["rope_parameters"]["sliding_attention"]["mrope_section"] = [2, 1, 1]
    whole = {"model_type": "cohere_compass", "text_config": config, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    path = tmp_path / "model.safetensors"
    made = {
        name.replace("model.", "model.language_model.", 1): rows
        for name, rows in load_file(path).items()
    }
    made["model.visual.patch_embed.proj.weight"] = np.zeros((4, 4), np.float32)
    save_file(made, path)
    with treadle.load(tmp_path, threads=2, kv="f32") as model:
        assert model.config.pooling == "last"
        assert worst(model.logits(ids_of()), truth) <= 2 * rounding(model.config)


TEXT: dict[str, Any] = {"model_type": "cohere_compass_text", **OPTIONS}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rope_parameters": None}, "rope_parameters: is None .*parameters by kinds"),
        ({"rope_parameters": {"full_attention": None}}, "rope_parameters: has no such key"),
        ({"rope_parameters": {**OPTIONS["rope_parameters"], "full_attention": 1}}, "is 1"),
        ({"layer_types": ["full_attention"]}, "layer_types: is .* a list of 3"),
        ({"layer_types": ["x"] * 3}, "layer_types: 'x'"),
        ({"layer_types": [[]] * 3}, r"layer_types: \[\]: treadle supports"),
        ({"pooling": []}, r"pooling: \[\]: treadle supports mean, bos, eos"),
        ({"pooling": "max"}, "pooling: 'max': treadle supports mean, bos, eos"),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {**TURNED, "rope_type": "linear", "factor": 2.0},
                    "full_attention": None,
                }
            },
            "does not scale RoPE of layers with a window",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    read_config(TEXT, Path("config.json"))
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({**TEXT, **change}, Path("config.json"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"attention.rope_pattern": [True]}, "rope_pattern: has 1 entries"),
        ({"attention.layer_norm_epsilon": None}, "layer_norm_epsilon"),
        ({"attention.sliding_window": None}, "sliding_window: the key is missing"),
    ],
)
def test_bad_files(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    save(case("still"), tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        given = {**file.metadata, **{f"cohere-compass.{key}": x for key, x in change.items()}}
        file.metadata = {key: x for key, x in given.items() if x is not None}
        with pytest.raises(FileError, match=why):
            load_config(file)

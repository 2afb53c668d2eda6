"""LFM 3: folders, in place and converted, against transformers."""

from __future__ import annotations

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
from tests.models.ways import NARROW, check_instruction_set, check_returns
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

KINDS = ["conv", "conv", "full_attention", "conv", "sliding_attention"]
CASE = Case(
    "Lfm3",
    "lfm3",
    {
        "num_hidden_layers": 5,
        "head_dim": 32,
        "sliding_window": 16,
        "layer_types": KINDS,
        "tie_word_embeddings": True,
    },
)


def test_in_every_way(tmp_path: Path) -> None:
    model = save(own(CASE, num_hidden_layers=5), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_returns(made)
    with treadle.load(made, threads=1) as loaded:
        config = loaded.config
        labels = {step.label for step in loaded.plan(1)}
    assert {"L2.attn.gate", "L2.attn.output.post_norm", "L0.shortconv.out.post_norm"} <= labels
    assert [layer.window for layer in config.layers] == [0, 0, 0, 0, 16]
    # Half of the pairs rotate in layers without a window, all in those with one.
    full, local = config.ropes
    assert (full.base, local.base) == (1e6, 1e4)
    assert full.factors is not None
    assert [factor > 1 for factor in full.factors] == [False] * 8 + [True] * 8
    assert (full.dims, local.dims, local.factors) == (32, 32, None)


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    model = save(own(CASE, num_hidden_layers=5), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_instruction_set(made, ids_of(), truth, NARROW)


_FULL = {"rope_type": "default", "rope_theta": 1e5}


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["conv", *["sliding_attention"] * 2, "conv"], "tie_word_embeddings": False},
        {
            "layer_types": ["full_attention", "conv"] * 2,
            "rope_parameters": {"full_attention": _FULL, "sliding_attention": _FULL},
            "conv_L_cache": 3,
        },
    ],
)
def test_in_place_and_converted(more: dict[str, Any], tmp_path: Path) -> None:
    made = check_both(own(CASE, num_hidden_layers=4, **more), tmp_path)
    with open_gguf(made) as file:
        config = load_config(file)
    assert [bool(layer.window) for layer in config.layers] == [
        kind == "sliding_attention" for kind in more["layer_types"]
    ]


def read(**more: Any) -> dict[str, Any]:
    return read_config({"model_type": "lfm3", **more}, Path("config.json")).metadata


def test_layers_where_nothing_is_said() -> None:
    made = read()
    assert made["lfm3.attention.head_count_kv"][:6] == [0, 0, 4, 0, 4, 0]
    assert made["lfm3.attention.sliding_window_pattern"][:5] == [False, False, False, False, True]
    assert np.isclose(made["lfm3.rope.freq_base_swa"], 1e4)


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"use_attention_gate": False}, UnsupportedError, "use_attention_gate: is False"),
        ({"use_sandwich_norm": False}, UnsupportedError, "use_sandwich_norm: is False"),
        ({"sliding_window": None}, UnsupportedError, "sliding_window: is null"),
        ({"layer_types": ["mamba"] * 24}, UnsupportedError, "layer_types: 'mamba': treadle supp"),
        ({"layer_types": ["conv"]}, FileError, r"layer_types: is \['conv'\].* a list of 24"),
    ],
)
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        read(**change)

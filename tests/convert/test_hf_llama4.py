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
from treadle.convert.elsewhere import read_otherwise
from treadle.convert.hf import open_hf
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
    check_truth(tmp_path / "hf", truth)
    with open_gguf(made) as gguf:
        found = {key.partition(".")[2]: value for key, value in gguf.metadata.items()}
        assert found["expert_feed_forward_length"] == 32
        assert found["feed_forward_length"] == 96
        assert found["attention.sliding_window"] == 12
        (note,) = read_otherwise(gguf.metadata, gguf.tensors)
        assert "attention.sliding_window, attention.temperature_scale" in note

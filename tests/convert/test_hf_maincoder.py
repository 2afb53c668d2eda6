"""Maincoder: folders, run in place and converted, against transformers' dense Hunyuan, which has
its norms of queries and keys behind the rope too. It turns halves of a head where Maincoder turns
neighbours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert.test_hf import convert
from tests.models.hf_cases import Case
from tests.models.hf_tiny import EPS, build, compute_logits, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.config import read_config
from treadle.convert.hf.row_order import halves_to_pairs
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf

HEADS = {"q": 4, "k": 2}
CASE = Case("HunYuanDenseV1", "maincoder", {"head_dim": 32, "tie_word_embeddings": True})
CONFIG: dict[str, Any] = {
    "model_type": "maincoder",
    "architectures": ["MaincoderForCausalLM"],
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": EPS,
    "rope_scaling": {},
    "use_qk_norm": True,
    "vocab_size": 320,
}


def respelt(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = {}
    for name, x in tensors.items():
        name = name.replace(".mlp.", ".feed_forward.")
        for one, full in (("q", "query"), ("k", "key")):
            if f"{one}_proj" in name:
                x = halves_to_pairs(x, HEADS[one])
            elif f"{full}_layernorm" in name:
                x = halves_to_pairs(x, 1)
                name = name.replace(f"{full}_layernorm", f"{one}_norm")
        made[name] = np.ascontiguousarray(x)
    return made


def test_agrees_with_transformers(tmp_path: Path) -> None:
    require_transformers()
    import torch
    from safetensors.numpy import load_file, save_file

    model = build(CASE)
    theta = model.config.rope_parameters["rope_theta"]
    model.to(torch.float32).save_pretrained(tmp_path)
    truth = compute_logits(model.to(torch.float64), ids_of())
    assert truth.std() > 0.5
    path = tmp_path / "model.safetensors"
    save_file(respelt(load_file(path)), path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": theta}))
    made = convert(tmp_path, tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path, truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        assert gguf.metadata["general.architecture"] == "maincoder"
        assert gguf.metadata["maincoder.rope.dimension_count"] == 32


def test_keys_of_the_published_folder() -> None:
    found = read_config({"model_type": "maincoder"}, Path("config.json")).metadata
    assert found["maincoder.attention.key_length"] == 96
    assert found["maincoder.feed_forward_length"] == 4096
    assert found["maincoder.rope.freq_base"] == 1e6
    with pytest.raises(UnsupportedError, match="use_qk_norm: is False"):
        read_config({**CONFIG, "use_qk_norm": False}, Path("config.json"))

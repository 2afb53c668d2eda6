"""GPT-J and CodeGen: folders of transformers, run in place and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.convert.test_hf import convert
from tests.models.hf_cases import Case
from tests.models.hf_tiny import build, compute_logits, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.config import read_config
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf

_SIZES = {"num_key_value_heads": 8, "num_attention_heads": 8, "rotary_dim": 4, "hidden_size": 64}
CASES = {
    "gptj": Case("GPTJ", "gptj", {**_SIZES, "n_inner": 96}),
    "codegen": Case("CodeGen", "gptj", _SIZES),
}


@pytest.mark.parametrize("kind", CASES)
def test_agrees_with_transformers(kind: str, tmp_path: Path) -> None:
    require_transformers()
    import torch
    from safetensors.numpy import load_file, save_file

    model = build(CASES[kind])
    model.to(torch.float32).save_pretrained(tmp_path / "hf")
    truth = compute_logits(model.to(torch.float64), ids_of())
    assert truth.std() > 0.5
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    for i in range(3):  # published folders have masks
        for mask in ("bias", "masked_bias", "causal_mask"):
            tensors[f"transformer.h.{i}.attn.{mask}"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    with open_gguf(made) as gguf:
        assert gguf.metadata["general.architecture"] == "gptj"
        assert gguf.metadata["gptj.rope.dimension_count"] == 4
        assert gguf.tensors["blk.0.attn_k.weight"].shape == (64, 64)
        assert "output.bias" in gguf.tensors


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rotary_dim": None}, "rotary_dim: is null"),
        ({"activation_function": "relu"}, "activation_function: 'relu'"),
    ],
)
def test_what_is_refused(given: dict[str, Any], said: str) -> None:
    config = {"model_type": "gptj", "n_embd": 64, "n_head": 8, "n_layer": 3, "rotary_dim": 4}
    read_config(config, Path("config.json"))
    with pytest.raises(UnsupportedError, match=said):
        read_config({**config, **given}, Path("config.json"))

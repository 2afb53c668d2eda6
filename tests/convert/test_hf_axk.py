"""A.X K2: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_indexed import LATENT
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import check_instruction_sets, check_returns
from tests.tiny import rounding
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

CASE = Case(
    "AXK2",
    "axk2",
    {
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
        "n_group": None,
        "topk_group": None,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_hidden_layers": 3,
        "gated_norm_rank": 8,
    },
)
NAMES = """
    attn_norm attn_norm_gate_down attn_norm_gate_up attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa
    attn_kv_a_norm attn_k_b attn_v_b attn_output attn_gate indexer.attn_q_b indexer.attn_k
    indexer.k_norm indexer.proj ffn_norm ffn_norm_gate_down ffn_norm_gate_up ffn_gate ffn_down
    ffn_up ffn_gate_inp exp_probs_b ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_shexp
    ffn_down_shexp ffn_up_shexp
"""


def saved(folder: Path, *, split: bool = True) -> Any:
    """A model whose queries read the normed rank alone, and gates the other, as published ones."""
    import torch

    model = save(own(CASE), folder)
    if split:
        for layer in model.model.layers:
            weight = layer.self_attn.q_gate_proj.weight
            heads = weight.data.view(4, -1, weight.shape[1])
            heads[:, :48, 32:] = 0
            heads[:, 48:, :32] = 0
        model.to(torch.float32).save_pretrained(folder)
        model.to(torch.float64)
    return model


def test_in_every_way(tmp_path: Path) -> None:
    truth = compute_logits(saved(tmp_path / "hf"), ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth)
    check_returns(made)
    with open_gguf(made) as file:
        rest = [name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")]
        assert {re.sub(r"\.(weight|bias)$", "", name) for name in rest} == {*NAMES.split()}
        assert file.metadata["axk2.gated_norm_rank"] == 8
        assert file.metadata["axk2.leading_dense_block_count"] == 1


@pytest.mark.slow
def test_on_other_instruction_sets(tmp_path: Path) -> None:
    truth = compute_logits(saved(tmp_path / "hf"), ids_of())
    check_instruction_sets(convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth)


@pytest.mark.slow
def test_the_spelling_of_the_class(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    truth = compute_logits(saved(tmp_path), ids_of())
    path = tmp_path / "model.safetensors"
    spelt = {"q_b_proj": "q_gate_proj", "W_down": "mlp.fc1", "W_up": "mlp.fc2"}
    made = load_file(path)
    assert any("W_down" in name for name in made)
    for of, to in spelt.items():
        made = {re.sub(rf"(?<!indexer)\.{of}\.", f".{to}.", k): v for k, v in made.items()}
    save_file(made, path)
    with treadle.load(tmp_path, threads=2, kv="f32") as model:
        assert worst(model.logits(ids_of()), truth) <= 2 * rounding(model.config)


def test_a_matrix_that_cannot_be_split(tmp_path: Path) -> None:
    saved(tmp_path / "hf", split=False)
    with pytest.raises(UnsupportedError, match="queries read the rank before its norm"):
        convert(tmp_path / "hf", tmp_path / "made.gguf")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gated_norm_rank": None}, "axk2.gated_norm_rank: the key is missing"),
        ({"gated_norm_rank": 7}, r"attn_norm_gate_down.weight: shape \[8, 64\].*\[7, 64\]"),
        ({"leading_dense_block_count": 2}, "blk.1.ffn_gate.weight"),
        ({"attention.q_lora_rank": None}, "q_lora_rank"),
    ],
)
def test_bad_files(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    saved(tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        given = {**file.metadata, **{f"axk2.{key}": x for key, x in change.items()}}
        file.metadata = {key: x for key, x in given.items() if x is not None}
        with pytest.raises(FileError, match=why):
            load_config(file)


def test_folders_say_how_wide_gates_are(tmp_path: Path) -> None:
    saved(tmp_path / "hf")
    with treadle.load(tmp_path / "hf", threads=2, kv="f32") as model:
        labels = [step.label for step in model.plan(1).match("L1.*")]
        assert "L1.attn.norm.gate" in labels
        assert "L1.ffn.norm.gate" in labels
        assert np.isfinite(model.logits([3, 4])).all()

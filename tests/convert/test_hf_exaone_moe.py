"""K-EXAONE: folders, in place and converted, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt
from tests.convert.test_hf_bailing import names_are_known
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

CASE = Case(
    "ExaoneMoe",
    "exaone-moe",
    {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 5,
        "head_dim": 32,
        "sliding_window": 16,
    },
)


def save_exaone(folder: Path) -> Any:
    return save(own(CASE), folder)


@pytest.mark.parametrize(
    "more",
    [
        {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
        {"sliding_window_pattern": 2, "tie_word_embeddings": True},
    ],
)
def test_in_place_and_converted(more: dict[str, Any], tmp_path: Path) -> None:
    made = check_both(own(CASE, **more), tmp_path)
    names_are_known(made, {"attn_q", "attn_q_norm", "ffn_up_shexp"})
    with open_gguf(made) as file:
        layers = load_config(file).layers
    period = more.get("sliding_window_pattern", 4)
    assert [layer.rope is not None for layer in layers] == [(i + 1) % period > 0 for i in range(5)]
    assert [layer.window for layer in layers] == [16 * (layer.rope is not None) for layer in layers]


def test_in_every_way(tmp_path: Path) -> None:
    model = save_exaone(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, compute_logits(model, ids_of()))


def test_layers_behind_the_last(tmp_path: Path) -> None:
    """They stand apart; what is read is the same without them, and a conversion says so."""
    from safetensors.numpy import load_file, save_file

    save_exaone(tmp_path)
    path = tmp_path / "model.safetensors"
    ids = prompt()
    with treadle.load(tmp_path, threads=1) as model:
        alone = model.logits(ids)
    tensors = load_file(path)
    save_file(tensors | {"mtp.fc.weight": np.zeros((64, 128), np.float32)}, path)
    with treadle.load(tmp_path, threads=1) as model:
        assert np.array_equal(model.logits(ids), alone)
    source = open_hf_source(tmp_path)
    assert any("MTP layers are left out" in note for note in source.notes)
    source.close()


def test_experts_in_other_layers_are_refused(tmp_path: Path) -> None:
    save_exaone(tmp_path)
    path = tmp_path / "config.json"
    kinds = ["sparse", "dense", "sparse", "sparse", "sparse"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlp_layer_types": kinds}))
    with pytest.raises(UnsupportedError, match="mlp_layer_types: is"):
        open_hf(tmp_path)

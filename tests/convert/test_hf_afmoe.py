"""Trinity (AFMoE): folders, in place and converted, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_bailing import names_are_known
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from treadle.convert.hf.folder import open_hf
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

CASE = Case(
    "Afmoe",
    "afmoe",
    {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "num_hidden_layers": 5,
        "head_dim": 32,
        "sliding_window": 16,
        "route_scale": 2.5,
        "mup_enabled": True,
    },
)


def save_afmoe(folder: Path) -> Any:
    return save(own(CASE), folder)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_shared_experts": 2, "tie_word_embeddings": True},
        {"global_attn_every_n_layers": 2},
        {"layer_types": ["full_attention"] * 5},
    ],
)
def test_in_place_and_converted(more: dict[str, Any], tmp_path: Path) -> None:
    made = check_both(own(CASE, **more), tmp_path)
    names_are_known(made, {"attn_q", "attn_gate", "attn_q_norm", "post_attention_norm"})
    with open_gguf(made) as file:
        layers = load_config(file).layers
    turned = [layer.rope is not None for layer in layers]
    assert turned == [layer.window > 0 for layer in layers]
    every = more.get("global_attn_every_n_layers", 4)
    kinds = [bool((i + 1) % every) for i in range(5)]
    assert turned == ([False] * 5 if "layer_types" in more else kinds)


def test_in_every_way(tmp_path: Path) -> None:
    model = save_afmoe(tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, compute_logits(model, ids_of()))
    with treadle.load(made, threads=1) as loaded:
        labels = [step.label for step in loaded.plan(1).match("L0.attn.*")]
    assert {"L0.attn.qkv_gate", "L0.attn.gate"} <= set(labels)


def test_a_gate_is_in_all_layers_or_the_file_is_damaged(tmp_path: Path) -> None:
    save_afmoe(tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        assert np.isfinite(file.tensors.pop("blk.2.attn_gate.weight").dequantize()).all()
        with pytest.raises(FileError, match=r"blk\.2\.attn_gate\.weight: the tensor is missing"):
            load_config(file)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mup_enabled": False}, "mup_enabled: is False"),
        ({"route_norm": False}, "route_norm: is False"),
        ({"score_func": "softmax"}, "score_func: is 'softmax'"),
        ({"sliding_window": None}, "sliding_window: is null"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    save_afmoe(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedError, match=why):
        open_hf(tmp_path)

"""dots.llm1 and DeepSeekMoE: folders, in place and converted, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_bailing import (
    Tensors,
    names_are_known,
    renamed,
    save_as,
    with_shared_halved,
)
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf

_DOTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,  # llama.cpp has it with as many as of queries
    "head_dim": 32,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
DOTS = Case("Dots1", "dots1", _DOTS)
CASES = {
    "dots1": DOTS,
    "dots1-window": Case(
        "Dots1",
        "dots1",
        {**_DOTS, "norm_topk_prob": False, "sliding_window": 16, "max_window_layers": 2},
    ),
}


def save_dots(folder: Path) -> Any:
    return save(own(DOTS), folder)


@pytest.mark.parametrize("name", CASES)
def test_dots(name: str, tmp_path: Path) -> None:
    made = check_both(own(CASES[name]), tmp_path)
    names_are_known(made, {"attn_q", "attn_k", "attn_v"})
    with treadle.load(tmp_path / "hf", threads=1) as model:
        windows = [layer.window for layer in model.config.layers]
        assert windows == ([0, 0, 16, 16] if name == "dots1-window" else [0] * 4)


def test_dots_in_every_way(tmp_path: Path) -> None:
    model = save_dots(tmp_path / "hf")
    check_truth(convert(tmp_path / "hf", tmp_path / "d.gguf"), compute_logits(model, ids_of()))


FIRST = Case(
    "Qwen2Moe",
    "deepseek",
    {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
        "qkv_bias": False,
        "mlp_only_layers": [0],
    },
)
_FIRST = {
    "architectures": ["DeepseekForCausalLM"],
    "model_type": "deepseek",
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "attention_bias": False,
    "rope_scaling": None,
}


def deepseek(tensors: Tensors) -> Tensors:
    return renamed(with_shared_halved(tensors), {"shared_expert.": "shared_experts."})


def save_first(folder: Path, **more: Any) -> Any:
    return save_as(FIRST, folder, deepseek, _FIRST | more)


def test_deepseek(tmp_path: Path) -> None:
    model = save_first(tmp_path / "hf")
    ids = prompt()
    expected = compute_logits(model, ids)
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path in (tmp_path / "hf", made):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            assert worst(loaded.logits(ids), expected) <= rounding(loaded.config)
    check_truth(made, compute_logits(model, ids_of()))
    names_are_known(made, {"attn_q", "attn_k", "attn_v"})
    with open_gguf(made) as file:
        assert not reading_differences(file.metadata, file.tensors)
        assert file.tensors["blk.0.ffn_up.weight"].shape == (96, 64)
        assert file.tensors["blk.1.ffn_up_shexp.weight"].shape == (64, 64)


def test_weights_that_add_up_to_1(tmp_path: Path) -> None:
    """treadle does what the configuration says; llama.cpp asks no key in this architecture."""
    save_first(tmp_path, norm_topk_prob=True)
    source = open_hf_source(tmp_path)
    (note,) = reading_differences(source.metadata, source.tensors)
    source.close()
    assert "does not normalise expert weights" in note


@pytest.mark.parametrize(("key", "value"), [("moe_layer_freq", 2), ("scoring_func", "sigmoid")])
def test_what_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    save_first(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UnsupportedError, match=f"{key}: is {value!r}"):
        open_hf(tmp_path)

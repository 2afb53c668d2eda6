"""Families with latent attention: as ``test_hf_mixtures`` has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check, check_both, own
from tests.models.hf_cases import Case
from tests.models.test_latent import LITE
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf

_V3 = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_GLM = {**_V3, "n_group": 1, "mlp_layer_types": ["dense", *["sparse"] * 3]}
del _GLM["first_k_dense_replace"]

CASES: dict[str, Case] = {
    "deepseek3": Case("DeepseekV3", "deepseek2", _V3),
    "glm4moelite": Case("Glm4MoeLite", "deepseek2", _GLM),
}


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path, data: Path) -> None:
    check(name, own(CASES[name], max_position_embeddings=256), tmp_path, data)
    file = data / "arch" / f"{name}.gguf"
    with open_gguf(tmp_path / "made.gguf") as ours, open_gguf(file) as theirs:
        for key, value in theirs.metadata.items():
            if isinstance(value, int) and key.startswith("deepseek2."):
                assert ours.metadata.get(key) == value, key


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_v2(method: str, tmp_path: Path) -> None:
    """V2 Lite's shape (queries made at once, YaRN), and the larger one's groups of experts."""
    options = {**LITE, "topk_method": method}
    if method != "greedy":
        options |= {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "q_lora_rank": 32}
    check_both(own(Case("DeepseekV2", "deepseek2", options)), tmp_path)


def test_more_shared_experts_than_others(tmp_path: Path) -> None:
    """All of them are one matrix; nothing bounds how many there are."""
    options = {**LITE, "n_shared_experts": 7}
    assert options["n_shared_experts"] > options["n_routed_experts"]
    check_both(own(Case("DeepseekV2", "deepseek2", options)), tmp_path)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3"])
def test_no_shared_experts(family: str, tmp_path: Path) -> None:
    """transformers writes matrices of no rows for them."""
    options = {**(LITE if family == "DeepseekV2" else _V3), "n_shared_experts": 0}
    with open_gguf(check_both(own(Case(family, "deepseek2", options)), tmp_path)) as made:
        assert not any("shexp" in name for name in made.tensors)


BIASED = {
    "DeepseekV2": {**LITE, "mlp_bias": True},  # queries are made at once
    "DeepseekV3": _V3,
    "Glm4MoeLite": _GLM,
}


@pytest.mark.parametrize("family", BIASED)
def test_biases(family: str, tmp_path: Path) -> None:
    """Of the matrices that transformers gives one. llama.cpp has none of them, and is said to."""
    case = own(Case(family, "deepseek2", {**BIASED[family], "attention_bias": True}))
    with open_gguf(check_both(case, tmp_path)) as made:
        biases = {name for name in made.tensors if name.endswith(".bias")}
        assert {"blk.0.attn_kv_a_mqa.bias", "blk.0.attn_output.bias"} <= biases
        assert ("blk.0.attn_q_a.bias" in biases) == (family != "DeepseekV2")
        assert ("blk.2.ffn_up_shexp.bias" in biases) == (family == "DeepseekV2")
        (note,) = (n for n in reading_differences(made.metadata, made.tensors) if "refuses" in n)
        assert "attn_kv_a_mqa.bias, attn_output.bias" in note.replace(" attn_q_a.bias,", "")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1.0}}, "mscale: is 1: "),
        ({"rope_scaling": {"type": "yarn", "attention_factor": 1.0}}, "attention_factor: treadle"),
        # transformers scales scores by it whatever stretches the rope.
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
            "mscale_all_dim: treadle supports it only with yarn, not 'linear'",
        ),
        ({"rope_interleave": False}, "rope_interleave: is False"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "mlp_layer_types: is "),
        ({"v_head_dim": 64}, r"kv_b_proj.*shape \[256, 32\]"),
        ({"v_head_dim": 48}, r"k_b\.weight: shape \[4, 32, 16\] \(expected \[4, 32, 32\]"),
        ({"q_lora_rank": None}, r"q_proj\.weight: the tensor is missing"),
    ],
)
def test_what_is_at_odds(change: dict[str, Any], why: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if "rope_scaling" in change:
        del config["rope_parameters"]
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises((FileError, UnsupportedError), match=why):
        open_hf(tmp_path)


def test_heads_that_end_within_a_tile(tmp_path: Path) -> None:
    """convert refuses what the file that it would write is refused for."""
    model = own(Case("DeepseekV2", "deepseek2", {**LITE, "v_head_dim": 24}))
    save(model, tmp_path / "hf")
    says = r"attention\.value_length_mla: 24: expected a multiple of 16"
    with pytest.raises(UnsupportedError, match=rf"hf.*{says}"):
        convert(tmp_path / "hf", tmp_path / "made.gguf")
    assert not (tmp_path / "made.gguf").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm")
    save(own(CASES["glm4moelite"]), path)
    return path

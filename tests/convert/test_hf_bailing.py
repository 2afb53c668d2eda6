"""Ling and Ring, and DeepSeek's first mixture: folders of models that transformers does not have.

Other models of transformers compute the same: GLM 4.5 what Ling 2 does, Qwen 2 with experts what
the others do, where the gate of its shared expert is always half open. Their weights are written in
the spelling of the checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import build, compute_logits, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf

_SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "norm_topk_prob",
]
Tensors = dict[str, np.ndarray]

SECOND = Case(
    "Glm4Moe",
    "bailingmoe2",
    {
        "n_routed_experts": 16,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 32,
        "num_attention_heads": 2,  # llama.cpp has it with n_head * head_dim == n_embd
        "num_key_value_heads": 1,
        "head_dim": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
    },
)
FIRST = Case(
    "Qwen2Moe",
    "bailingmoe",
    {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "qkv_bias": False,
    },
)


def half_open(model: Any) -> None:
    """Qwen's shared expert with weight 1/2, whatever the token is."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("shared_expert_gate.weight"):
                parameter.zero_()


def save_as(
    case: Case, folder: Path, spelt: Callable[[Tensors], Tensors], config: dict[str, Any]
) -> Any:
    """The model, in float64, whose weights the folder has under the names that ``spelt`` gives."""
    require_transformers()
    import torch
    from safetensors.numpy import load_file, save_file

    model = build(own(case))
    half_open(model)
    model.to(torch.float32).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = spelt(load_file(path))
    save_file({name: np.ascontiguousarray(rows) for name, rows in tensors.items()}, path)
    said = json.loads((folder / "config.json").read_text())
    said = {key: said[key] for key in _SIZES} | {"rope_theta": 10000.0} | config
    (folder / "config.json").write_text(json.dumps(said))
    return model.to(torch.float64)


def renamed(tensors: Tensors, names: Mapping[str, str]) -> Tensors:
    def new(name: str) -> str:
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        return name

    return {new(name): rows for name, rows in tensors.items()}


def with_shared_halved(tensors: Tensors) -> Tensors:
    """As Qwen's gate does it, which itself is left out."""
    made = {n: r for n, r in tensors.items() if "shared_expert_gate" not in n}
    return {n: r / 2 if "shared_expert.down" in n else r for n, r in made.items()}


_BAILING = {
    "embed_tokens": "word_embeddings",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn.o_proj": "attention.dense",
    "self_attn.qkv": "attention.query_key_value",
    "gate.e_score_correction_bias": "gate.expert_bias",
    "shared_expert.": "shared_experts.",
}


def bailing(tensors: Tensors) -> Tensors:
    tensors = with_shared_halved(tensors)
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{x}_proj.")) for x in "qkv"]
        tensors[name.replace(".q_proj.", ".qkv.")] = np.concatenate(parts)
    return renamed(tensors, _BAILING)


_SECOND: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "num_experts": 16,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 16,
    "use_bias": False,
    "use_qkv_bias": False,
    "norm_head": False,
    "norm_softmax": False,
    "num_nextn_predict_layers": 0,
    "rope_scaling": None,
}
_FIRST: dict[str, Any] = {
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "num_experts": 8,
    "num_shared_experts": 2,
    "first_k_dense_replace": 0,
    "norm_head": False,
    "norm_softmax": False,
    "rope_scaling": None,
}


def save_second(folder: Path, **more: Any) -> Any:
    return save_as(SECOND, folder, bailing, _SECOND | more)


def save_first(folder: Path, **more: Any) -> Any:
    return save_as(FIRST, folder, bailing, _FIRST | more)


# transformers writes the one spelling of counts, the first checkpoint has the other.
_SARVAM = {
    "transformers": {"n_routed_experts": 16, "n_shared_experts": 1},
    "checkpoint": {"num_experts": 16, "num_shared_experts": 1},
}


@pytest.mark.parametrize("spelling", _SARVAM)
def test_sarvam(spelling: str, tmp_path: Path) -> None:
    """Whole heads turn, and there are no groups unless the configuration has some."""
    more = {"partial_rotary_factor": 1.0, "n_group": 1, "topk_group": 1}
    case = Case(SECOND.family, SECOND.arch, {**SECOND.options, **more})
    config = {"model_type": "sarvam_moe", "head_dim": 32, "use_qk_norm": True}
    model = save_as(case, tmp_path / "hf", bailing, config | _SARVAM[spelling])
    expected = compute_logits(model, prompt())
    ids = prompt()
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=1, kv="f32") as loaded:
            assert loaded.config.ropes[0].dims == 32
            assert worst(loaded.logits(ids), expected) <= rounding(loaded.config)


SAVED = {"bailingmoe2": save_second, "bailingmoe": save_first}
# Which of llama.cpp's names their matrices of attention have.
ATTENTION = {"bailingmoe2": {"attn_qkv"}, "bailingmoe": {"attn_q", "attn_k", "attn_v"}}


@pytest.mark.parametrize("arch", SAVED)
def test_in_place_and_converted(arch: str, tmp_path: Path) -> None:
    model = SAVED[arch](tmp_path / "hf")
    ids = prompt()
    expected = compute_logits(model, ids)
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path in (tmp_path / "hf", made):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.arch.name == arch
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))
    check_truth(made, compute_logits(model, ids_of()))
    names_are_known(made, ATTENTION[arch])


def names_are_known(path: Path, attention: set[str]) -> None:
    """Names and keys are those that the gguf package lists for the architecture."""
    gguf = pytest.importorskip("gguf")
    with open_gguf(path) as file:
        name = file.metadata["general.architecture"]
        arch = next(a for a, written in gguf.MODEL_ARCH_NAMES.items() if written == name)
        known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
        stems = {re.sub(r"^blk\.\d+\.", "blk.{bid}.", n).rpartition(".")[0] for n in file.tensors}
        assert stems <= known
        assert {f"blk.{{bid}}.{stem}" for stem in attention} <= stems


def test_what_the_files_say(tmp_path: Path) -> None:
    """Keys that llama.cpp asks for."""
    save_second(tmp_path / "hf")
    source = open_hf_source(tmp_path / "hf")
    found = {key.partition(".")[2]: value for key, value in source.metadata.items()}
    source.close()
    expected = {
        "leading_dense_block_count": 1,
        "rope.dimension_count": 16,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
        "expert_shared_count": 1,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    assert found.items() >= expected.items()


def test_layers_behind_the_last(tmp_path: Path) -> None:
    """They are left out, and a conversion says so."""
    from safetensors.numpy import load_file, save_file

    save_second(tmp_path, num_nextn_predict_layers=1)
    path = tmp_path / "model.safetensors"
    ids = prompt()
    with treadle.load(tmp_path, threads=1) as model:
        alone = model.logits(ids)
    tensors = load_file(path)
    for name in [name for name in tensors if ".layers.3." in name]:
        tensors[name.replace(".3.", ".4.", 1)] = tensors[name]
    for one in ("enorm", "hnorm", "final_layernorm"):
        tensors[f"model.layers.4.{one}.weight"] = np.ones(64, np.float32)
    tensors["model.layers.4.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    save_file(tensors, path)
    with treadle.load(tmp_path, threads=1) as model:
        assert np.array_equal(model.logits(ids), alone)
    source = open_hf_source(tmp_path)
    assert any("MTP layers are left out" in note for note in source.notes)
    source.close()


def test_an_output_whose_columns_have_length_1(tmp_path: Path) -> None:
    """``norm_head``, of the first version: states meet the columns' directions."""
    import torch

    model = save_first(tmp_path, norm_head=True)
    ids = prompt()
    with torch.no_grad():
        weight = model.lm_head.weight
        weight /= weight.norm(dim=0, keepdim=True) + 1e-7
    expected = compute_logits(model, ids)
    with treadle.load(tmp_path, threads=1, kv="f32") as loaded:
        assert worst(loaded.logits(ids), expected) <= rounding(loaded.config)


@pytest.mark.parametrize(
    ("save", "key", "value"),
    [
        (save_first, "score_function", "sigmoid"),
        (save_first, "multi_gate", True),
        (save_second, "score_function", "softmax"),
        (save_second, "norm_head", True),
        (save_second, "use_sliding_window", True),
    ],
)
def test_what_is_refused(save: Any, key: str, value: Any, tmp_path: Path) -> None:
    save(tmp_path, **{key: value})
    with pytest.raises(UnsupportedError, match=f"{key}: is {value!r}"):
        open_hf(tmp_path)

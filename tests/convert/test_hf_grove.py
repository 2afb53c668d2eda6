"""GroveMoE: folders of random weights, in place and converted, against the reference. Of what the
model's own code computes llama.cpp differs in two things; with these its logits are the reference's
within 1e-6.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import write_random
from tests.convert.test_hf import convert
from tests.convert.test_hf_bailing import names_are_known
from tests.models.test_arch_truth import check_truth, ids_of
from tests.reference import forward
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.active_parameters import active
from treadle.models.load import load_config

N_EMBD = 64
HEAD_DIM = 32
N_FF = 32
N_EXPERT = 8
N_VOCAB = 320
N_LAYER = 3
CONFIG = {
    "architectures": ["GroveMoeForCausalLM"],
    "model_type": "grove_moe",
    "vocab_size": N_VOCAB,
    "hidden_size": N_EMBD,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "intermediate_size": 96,
    "moe_intermediate_size": N_FF,
    "num_experts": N_EXPERT,
    "num_experts_per_tok": 5,  # so many that of some neighbours both are chosen
    "norm_topk_prob": True,
}
N_SMALL = 128  # what the model's code says


def shapes() -> dict[str, tuple[int, ...]]:
    n_q = 4 * HEAD_DIM
    n_kv = 2 * HEAD_DIM
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (N_VOCAB, N_EMBD)}
    for i in range(N_LAYER):
        at = f"model.layers.{i}"
        moe = f"model.layers.{i}.mlp"
        made |= {
            f"{at}.input_layernorm.weight": (N_EMBD,),
            f"{at}.post_attention_layernorm.weight": (N_EMBD,),
            f"{at}.self_attn.q_proj.weight": (n_q, N_EMBD),
            f"{at}.self_attn.k_proj.weight": (n_kv, N_EMBD),
            f"{at}.self_attn.v_proj.weight": (n_kv, N_EMBD),
            f"{at}.self_attn.o_proj.weight": (N_EMBD, n_q),
            f"{at}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{at}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{moe}.gate.weight": (N_EXPERT, N_EMBD),
            f"{moe}.expert_bias": (N_EXPERT,),
        }
        groups = (("experts", N_EXPERT, N_FF), ("chunk_experts", N_EXPERT // 2, N_SMALL))
        for kind, n, width in groups:
            for e in range(n):
                one = f"{moe}.{kind}.{e}"
                made |= {f"{one}.{x}_proj.weight": (width, N_EMBD) for x in ("gate", "up")}
                made[f"{one}.down_proj.weight"] = (N_EMBD, width)
    return made | {"model.norm.weight": (N_EMBD,), "lm_head.weight": (N_VOCAB, N_EMBD)}


def save(folder: Path) -> Path:
    write_random(folder, shapes(), CONFIG, 7)
    return folder


@pytest.mark.slow
def test_in_every_way(tmp_path: Path) -> None:
    made = convert(save(tmp_path / "hf"), tmp_path / "made.gguf")
    names_are_known(made, {"attn_q", "ffn_gate_exps", "ffn_gate_chexps", "ffn_down_chexps"})
    with open_gguf(made) as file:
        truth = forward(file, load_config(file), ids_of())
    check_truth(made, truth)
    with treadle.load(tmp_path / "hf", threads=1, kv="f32") as model:
        assert np.abs(model.logits(ids_of()) - truth).max() <= 1e-5 * np.abs(truth).max()
        labels = [step.label for step in model.plan(1).match("L0.ffn.*")]
        small = N_LAYER * N_EXPERT // 2 * 3 * N_SMALL * N_EMBD
        large = N_LAYER * N_EXPERT * 3 * N_FF * N_EMBD
        n_all = sum(int(np.prod(each.shape)) for each in model.gguf.tensors.values())
        # A token has up to 5 of 8 large ones, and all 4 small ones; its embedding is one row.
        n = n_all - large * 3 // 8 - (N_VOCAB - 1) * N_EMBD
        assert active(model.gguf, model.config).n_parameters == n > small
    assert {"L0.ffn.route", "L0.ffn.chunks.route", "L0.ffn.chunks.down"} <= set(labels)


def test_small_experts_count(tmp_path: Path) -> None:
    """A twentieth of their answers is added, with the weights of those that bring them along."""
    made = convert(save(tmp_path / "hf"), tmp_path / "made.gguf")
    with open_gguf(made) as file:
        said = forward(file, load_config(file), ids_of())
        file.metadata = {**file.metadata, "grovemoe.expert_group_scale": 0.0}
        without = forward(file, load_config(file), ids_of())
        file.metadata = {**file.metadata, "grovemoe.experts_per_group": 3}
        with pytest.raises(FileError, match="experts_per_group: 3 does not divide 8"):
            load_config(file)
    assert 1e-3 < np.abs(said - without).max() / np.abs(said).max() < 0.5


def test_what_llama_cpp_computes_otherwise(tmp_path: Path) -> None:
    with open_gguf(convert(save(tmp_path / "hf"), tmp_path / "made.gguf")) as file:
        (note,) = reading_differences(file.metadata, file.tensors)
    assert "in grovemoe small experts read the other experts' output" in note


@pytest.mark.parametrize("keys", [{"norm_topk_prob": False}, {"mlp_only_layers": [1]}])
def test_what_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    path = save(tmp_path / "hf") / "config.json"
    path.write_text(json.dumps(CONFIG | keys))
    (key,) = keys
    with pytest.raises(UnsupportedError, match=f"{key}: is "):
        open_hf(tmp_path / "hf")

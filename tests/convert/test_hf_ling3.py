"""Ling 3 (Bailing hybrid): folders, in place and converted, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import check_both, own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import PORTABLE, check_instruction_set, check_returns
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf

CASE = Case(
    "BailingHybrid",
    "bailingmoe3",
    {
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "head_dim": 16,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
)
# What llama.cpp's loader asks for, of both kinds of layers.
NAMES = """
    attn_norm ffn_norm attn_q attn_output
    attn_k attn_v ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v ssm_f_a ssm_beta ssm_a ssm_dt ssm_g_a
    ssm_norm ffn_gate ffn_up ffn_down
    attn_kv_a_mqa attn_kv_a_norm attn_k_b attn_v_b attn_gate ffn_gate_inp exp_probs_b
    ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_shexp ffn_up_shexp ffn_down_shexp
"""


def test_in_every_way(tmp_path: Path) -> None:
    model = save(own(CASE), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_returns(made)
    with open_gguf(made) as file:
        rest = [name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")]
        assert {name.removesuffix(".weight").removesuffix(".bias") for name in rest} == {
            *NAMES.split()
        }
        keys: dict[str, Any] = {
            key.partition(".")[2]: value for key, value in file.metadata.items()
        }
    assert [*keys["attention.head_count_kv"]] == [0, 1, 0, 1]
    assert keys["kda.gate_lower_bound"] == -5.0
    assert keys["kda.safe_gate"] is True


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    model = save(own(CASE), tmp_path / "hf")
    truth = compute_logits(model, ids_of())
    check_instruction_set(
        convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth, PORTABLE
    )


def test_queries_of_a_low_rank(tmp_path: Path) -> None:
    more = {"q_lora_rank": 32, "kda_lower_bound": -2.0, "short_conv_kernel_size": 3}
    more |= {"head_dim": 32}  # of a state, as in published folders
    check_both(own(CASE, **more), tmp_path)


def test_the_published_spelling(tmp_path: Path) -> None:
    """Convolutions apart, or as transformers has them; attention and embeddings by other names."""
    from safetensors.numpy import load_file, save_file

    model = save(own(CASE), tmp_path)
    expected = compute_logits(model, ids_of())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    spelt = {".self_attn.o_proj.": ".attention.dense.", "embed_tokens": "word_embeddings"}
    spelt |= {".forget_gate.": ".", ".attention.": ".self_attn."}
    respelt = {}
    for name, rows in tensors.items():
        for before, after in spelt.items():
            name = name.replace(before, after)
        respelt[name] = rows
    joined = {}
    for name, rows in tensors.items():
        stem = name.removesuffix("q_conv1d.weight")
        if stem != name:
            parts = [tensors[f"{stem}{x}_conv1d.weight"] for x in "qkv"]
            joined[f"{stem}conv1d.weight"] = np.concatenate(parts)
        elif not name.endswith("_conv1d.weight"):
            joined[name] = rows
    assert len(joined) < len(tensors)
    for each in (respelt, joined):
        save_file({name: np.ascontiguousarray(rows) for name, rows in each.items()}, path)
        with treadle.load(tmp_path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids_of()), expected)
            assert error <= rounding(loaded.config), error / rounding(loaded.config)


@pytest.mark.parametrize(
    ("change", "kind", "why"),
    [
        ({"kda_safe_gate": False}, UnsupportedError, "kda_safe_gate: is False"),
        ({"no_kda_lora": False}, UnsupportedError, "no_kda_lora: is False"),
        (
            {"expert_swiglu_limit_list": [None, 7.0]},
            UnsupportedError,
            "expert_swiglu_limit_list: is .*experts without limits",
        ),
        ({"layer_types": ["mamba"] * 42}, UnsupportedError, "layer_types: 'mamba': treadle supp"),
        ({"layer_types": []}, FileError, r"layer_types: is \[\].* a list of 42"),
    ],
)
def test_what_is_refused(change: dict[str, Any], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        read_config({"model_type": "bailing_hybrid", **change}, Path("config.json"))


def test_a_file_without_the_bound(tmp_path: Path) -> None:
    from treadle.models.load import load_config

    save(own(CASE), tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        plain = dict(file.metadata)
        file.metadata = {**plain, "bailingmoe3.kda.safe_gate": False}
        with pytest.raises(UnsupportedError, match=r"kda\.safe_gate: is false: treadle supports"):
            load_config(file)
        del plain["bailingmoe3.kda.gate_lower_bound"]
        file.metadata = plain
        with pytest.raises(FileError, match="gate_lower_bound"):
            load_config(file)
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "bailing_hybrid"

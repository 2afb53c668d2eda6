"""Hunyuan 4: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.convert.test_hf import convert, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_indexed import LATENT
from tests.convert.test_hf_mixtures import own
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import NARROW, check_instruction_set, check_returns
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

CASE = Case(
    "HYV4",
    "hy_v4",
    {
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
        "num_hidden_layers": 4,
        "indexer_types": ["full", "full", "shared", "full"],
        "hc_mult": 3,
        "hc_magnitude": 1.5,
        "hc_eps": 1e-3,
        "swiglu_limit": 0.75,
        "routed_scaling_factor": 1.5,
    },
)
# Tensors of a layer that llama.cpp's loader requires.
NAMES = """
    attn_norm attn_sinks attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm attn_k_b
    attn_v_b attn_output attn_gate indexer.attn_q_b indexer.attn_k indexer.k_norm indexer.proj
    hc_attn_fn hc_attn_base hc_attn_scale hc_ffn_fn hc_ffn_base hc_ffn_scale ffn_norm
    ffn_gate ffn_down ffn_up ffn_gate_inp exp_probs_b ffn_gate_exps ffn_up_exps ffn_down_exps
    ffn_gate_shexp ffn_down_shexp ffn_up_shexp
"""
N_ROPE = LATENT["qk_rope_head_dim"]
HEADS = {  # matrices whose rows turn: dims of a head, of which the last turn
    "q_b_proj.weight": LATENT["qk_nope_head_dim"] + N_ROPE,
    "kv_a_proj_with_mqa.weight": LATENT["kv_lora_rank"] + N_ROPE,
    "indexer.wq_b.weight": LATENT["index_head_dim"],
    "indexer.wk.weight": LATENT["index_head_dim"],
    "indexer.k_norm.weight": LATENT["index_head_dim"],
    "indexer.k_norm.bias": LATENT["index_head_dim"],
}


def saved(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """A folder as it is published, whose pairs are neighbours, and transformers' logits: it has
    them in halves, so that its model is that of the same rows in another order.
    """
    from safetensors.numpy import load_file, save_file

    model = save(own(CASE), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    published = {  # and what a folder has for drafts
        "model.mtp_layers.0.eh_proj.weight": np.zeros((64, 128), np.float32)
    }
    for name, rows in load_file(path).items():
        name = re.sub(r"\.hc_pre\.(hc_\w+_layer)", r".\1.hc_pre", name)
        name = name.replace(".hc_pre.hc_head.", ".hc_head.")
        if ".self_attn." not in name:
            name = name.replace("linear_gate", "gate_proj")
        n = next((n for end, n in HEADS.items() if name.endswith(end)), 0)
        if n:
            heads = rows.reshape(-1, n, *rows.shape[1:])
            halves = heads[:, n - N_ROPE :].reshape(len(heads), 2, N_ROPE // 2, *rows.shape[1:])
            paired = np.swapaxes(halves, 1, 2).reshape(len(heads), N_ROPE, *rows.shape[1:])
            made = np.concatenate([heads[:, : n - N_ROPE], paired], 1)
            rows = np.ascontiguousarray(made.reshape(rows.shape))
        published[name] = rows
    save_file(published, path)
    return tmp_path / "hf", compute_logits(model, ids_of())


def test_in_every_way(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path)
    made = convert(folder, tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(folder, truth, threads_of=(2,))
    check_returns(made)
    with open_gguf(made) as file:
        rest = [name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")]
        assert {re.sub(r"\.(weight|bias)$", "", name) for name in rest} == {*NAMES.split()}
        heads = {name for name in file.tensors if name.startswith("output_hc")}
        assert heads == {f"output_hc_{part}.weight" for part in ("fn", "base", "scale")}
        keys: dict[str, Any] = {
            key.partition(".")[2]: value for key, value in file.metadata.items()
        }
    assert [*keys["attention.indexer.types"]] == [True, True, False, True]
    assert [*keys["swiglu_clamp_exp"]] == [0.75] * 4
    assert "swiglu_clamp_shexp" not in keys
    assert keys["hyper_connection.count"] == 3
    assert keys["hyper_connection.magnitude"] == 1.5
    assert keys["expert_gating_func"] == 2


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    folder, truth = saved(tmp_path)
    check_instruction_set(convert(folder, tmp_path / "made.gguf"), ids_of(), truth, NARROW)


@pytest.mark.slow
def test_pairs_in_halves(tmp_path: Path) -> None:
    """As transformers' own files have them, if config.json says so; its own names of streams."""
    from safetensors.numpy import load_file, save_file

    truth = compute_logits(save(own(CASE), tmp_path), ids_of())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_interleave": False}))
    spelt = {
        ".hc_pre.hc_attn_layer.hc_": ".attn_hc.",
        ".hc_pre.hc_mlp_layer.hc_": ".ffn_hc.",
        ".hc_pre.hc_head.hc_head_": ".hc_head.hc_",
        ".learnable_sink_param": ".sinks",
        ".linear_gate.": ".gate_proj.",
    }
    path = tmp_path / "model.safetensors"
    found = load_file(path)
    for way in ("as transformers writes it", "as its classes have it"):
        with treadle.load(tmp_path, threads=2, kv="f32") as model:
            assert model.config.arch.rope == "neox"
            assert worst(model.logits(ids_of()), truth) <= 2 * rounding(model.config), way
        again = {}
        for name, rows in found.items():
            for theirs, other in spelt.items():
                name = name.replace(theirs, other)
            again[name] = rows
        assert again.keys() != found.keys()
        save_file(again, path)


def test_without_an_indexer(tmp_path: Path) -> None:
    """A file whose layers see all keys, as llama.cpp reads it, is one that chooses all of them."""
    folder, _ = saved(tmp_path)
    made = convert(folder, tmp_path / "made.gguf")
    with open_gguf(made) as file:
        all_keys = {key: 64 for key in file.metadata if key.endswith("indexer.top_k")}
    write_changed(made, tmp_path / "False.gguf", all_keys)
    write_changed(made, tmp_path / "True.gguf", without=lambda name: "indexer" in name)
    found = []
    for few in (False, True):
        with treadle.load(tmp_path / f"{few}.gguf", threads=2, kv="f32") as model:
            found.append(model.logits(ids_of()))
    assert worst(found[1], found[0]) < 1e-5


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gating_type": "headwise"}, "gating_type: is 'headwise': treadle supports 'elementwise'"),
        ({"hc_mult": 1}, "hc_mult: is 1"),
        ({"indexer_types": ["full"]}, "indexer_types: is .* expected 4 of full, shared"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    config = {
        "model_type": "hy_v4",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
    }
    read_config(config, Path("config.json"))
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({**config, **change}, Path("config.json"))


def test_a_file_without_ranks(tmp_path: Path) -> None:
    folder, _ = saved(tmp_path)
    with open_gguf(convert(folder, tmp_path / "made.gguf")) as file:
        plain = dict(file.metadata)
        file.metadata = {k: v for k, v in plain.items() if "indexer" not in k and "q_lora" not in k}
        with pytest.raises(UnsupportedError, match="q_lora_rank: is missing: treadle supports"):
            load_config(file)
        file.metadata = {k: v for k, v in plain.items() if "magnitude" not in k}
        with pytest.raises(FileError, match=r"hyper_connection\.magnitude: the key is missing"):
            load_config(file)

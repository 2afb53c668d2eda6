"""Inkling: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.convert.test_hf import convert, worst
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_mixtures import own
from tests.models import ways
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
    "Inkling",
    "inkling",
    {
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "sliding_window_size": 9,
        "d_rel": 8,
        "rel_extent": 20,
        "log_scaling_n_floor": 7,
        "log_scaling_alpha": 0.3,
        "local_layer_ids": [0, 2],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "route_scale": 2.5,
    },
)
# Tensors of a layer that the loaders of published files require.
NAMES = """
    attn_norm attn_q attn_k attn_v attn_r attn_q_norm attn_k_norm attn_rel_proj shortconv_k
    shortconv_v shortconv_attn shortconv_mlp attn_output ffn_norm ffn_gscale ffn_gate ffn_up
    ffn_down ffn_gate_inp exp_probs_b ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_shexp
    ffn_up_shexp ffn_down_shexp
"""


def test_in_every_way(tmp_path: Path) -> None:
    truth = compute_logits(save(own(CASE), tmp_path / "hf"), ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_truth(tmp_path / "hf", truth, threads_of=(2,))
    check_returns(made)
    with open_gguf(made) as file:
        rest = [name.split(".", 2)[2] for name in file.tensors if name.startswith("blk.")]
        assert {re.sub(r"\.(weight|bias)$", "", name) for name in rest} == {*NAMES.split()}
        keys: dict[str, Any] = {
            key.partition(".")[2]: value for key, value in file.metadata.items()
        }
    assert [*keys["attention.head_count_kv"]] == [4, 2, 4]
    assert [*keys["attention.sliding_window_pattern"]] == [True, False, True]
    assert (keys["rel_extent"], keys["rel_extent_swa"]) == (20, 9)
    assert keys["dense_block_count"] == 1
    assert keys["feed_forward_length"] == 96
    assert keys["expert_feed_forward_length"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["inkling", "axk2", "solar-open2", "cohere-compass"])
def test_twins_of_kernels(arch: str, tiny: WriteTiny) -> None:
    """In one go, by decode, and by the numpy twin of each kernel."""
    with treadle.load(tiny(arch), threads=2, kv="f32", context=64) as model:
        ways.check_float64(model, ids_of(21))


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    truth = compute_logits(save(own(CASE), tmp_path / "hf"), ids_of())
    check_instruction_set(convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth, NARROW)


SHORT: dict[str, str] = {"q": "wq_du", "k": "wk_dv", "v": "wv_dv", "r": "wr_du", "o": "wo_ud"}
PUBLISHED: dict[str, str | Callable[[re.Match[str]], str]] = {  # published names
    r"model\.embed_tokens\.embed_norm\.": "model.llm.embed_norm.",
    r"model\.embed_tokens\.": "model.llm.embed.",
    r"lm_head\.": "model.llm.unembed.",
    r"model\.(layers|norm)\.": r"model.llm.\1.",
    r"self_attn\.([qkvor])_proj\.": lambda m: f"attn.{SHORT[m[1]]}.",
    r"self_attn\.": "attn.",
    r"conv1d\.": "",
    r"post_attention_layernorm\.": "mlp_norm.",
    r"input_layernorm\.": "attn_norm.",
    r"(mlp)\.down_proj\.": r"\1.w2_md.",
    r"experts\.down_proj": "experts.w2_weight",
    r"shared_experts\.w2_weight": "shared_experts.shared_w2_weight",
    r"gate\.e_score_correction_bias": "gate.bias",
}


def as_published(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors by their published names; rows of gates and ups alternate there."""
    made: dict[str, np.ndarray] = {}
    for name, rows in tensors.items():
        if name.endswith(("up_proj.weight", "experts.up_proj")):
            continue
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(rows, 2, 1)
            made[name.replace("gate_up_proj", "w13_weight")] = paired(gate, up)
        elif name.endswith("shared_experts.gate_proj"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            made[name.replace("gate_proj", "shared_w13_weight")] = paired(rows, up)
        elif name.endswith("mlp.gate_proj.weight"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            made[name.replace("gate_proj", "w13_dn")] = paired(rows, up)
        else:
            made[name] = rows
    for of, to in PUBLISHED.items():
        made = {re.sub(of, to, name): rows for name, rows in made.items()}
    return {re.sub(r"^model\.layers", "model.llm.layers", k): v for k, v in made.items()}


def paired(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Both, row by row in turns."""
    n, width = gate.shape[-2:]
    return np.stack([gate, up], -2).reshape(*gate.shape[:-2], 2 * n, width)


@pytest.mark.slow
def test_the_published_spelling(tmp_path: Path) -> None:
    """Text keys beside towers, pairs of rows, older names of sizes, MTP layers; an output matrix
    with more rows than tokens.
    """
    from safetensors.numpy import load_file, save_file

    truth = compute_logits(save(own(CASE), tmp_path), ids_of())
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "conv_kernel_size", "model_type"):
        del config[key]
    config |= {
        "intermediate_size": config.pop("moe_intermediate_size"),
        "dense_intermediate_size": config["intermediate_size"],
        "sconv_kernel_size": 4,
        "model_max_length": config.pop("max_position_embeddings"),
        "dense_mlp_idx": 1,
        "use_sconv": True,
        "gate_activation": "sigmoid",
        "unpadded_vocab_size": 310,
    }
    whole = {"model_type": "inkling_mm_model", "text_config": config, "audio_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    path = tmp_path / "model.safetensors"
    zeros = np.zeros((4, 4), np.float32)
    beside = ("model.audio.encoder", "model.visual.layers.linear_0", "model.mtp.layers.0.attn_norm")
    made = as_published(load_file(path))
    assert "model.llm.layers.1.mlp.experts.w13_weight" in made
    save_file({**made, **{f"{name}.weight": zeros for name in beside}}, path)
    with treadle.load(tmp_path, threads=2, kv="f32") as model:
        found = model.logits(ids_of())
        assert (found[:, 310:] == np.float32(-1e30)).all()
        assert worst(found[:, :310], truth[:, :310]) <= 2 * rounding(model.config)
        weights = model.attention(ids_of()[:12], 1)
        assert np.allclose(weights.weights.sum(-1), 1.0)


TEXT: dict[str, Any] = {"model_type": "inkling_text", "num_hidden_layers": 7}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"shared_expert_sink": False}, "shared_expert_sink: is False: treadle supports only True"),
        ({"swa_head_dim": 64}, "swa_head_dim: differs from head_dim"),
        ({"layer_types": ["hybrid"]}, r"layer_types: is \['hybrid'\] .* a list of 7"),
        ({"layer_types": ["x"] * 7}, "layer_types: 'x': treadle supports hybrid_sliding"),
        ({"layer_types": [{}] * 7}, r"layer_types: \{\}: treadle supports hybrid_sliding"),
        ({"local_layer_ids": "x"}, "local_layer_ids: is 'x' .* a list of layers"),
        ({"unpadded_vocab_size": 1 << 20}, "unpadded_vocab_size"),
        ({"final_logit_softcapping": 3.0}, "final_logit_softcapping"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    made = read_config(TEXT, Path("config.json")).metadata
    assert made["inkling.attention.sliding_window_pattern"] == [True] * 5 + [False, True]
    assert made["inkling.dense_block_count"] == 0
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({**TEXT, **change}, Path("config.json"))


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"d_rel": None}, FileError, "inkling.d_rel: the key is missing"),
        ({"d_rel": 7}, FileError, r"attn_r.weight: shape \[32, 64\].*\[28, 64\]"),
        ({"rel_extent": 21}, FileError, r"attn_rel_proj.weight: shape \[8, 20\].*\[8, 21\]"),
        ({"rel_extent_swa": 0}, FileError, "rel_extent_swa"),
        ({"logit_scale_denom": 0.0}, FileError, "logit_scale_denom"),
        ({"shortconv_kernel": 1}, FileError, "shortconv_kernel"),
        ({"expert_shared_count": 0}, UnsupportedError, "expert_shared_count: 0: treadle supports"),
        ({"dense_block_count": 2}, FileError, "blk.1.ffn_gate.weight"),
        ({"unpadded_vocab_size": 321}, FileError, "unpadded_vocab_size"),
    ],
)
def test_bad_files(
    change: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    save(own(CASE), tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        given = {**file.metadata, **{f"inkling.{key}": x for key, x in change.items()}}
        file.metadata = {key: x for key, x in given.items() if x is not None}
        with pytest.raises(error, match=why):
            load_config(file)

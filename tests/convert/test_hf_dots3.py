"""dots3-note: folders, in place and converted, against transformers in float64."""

from __future__ import annotations

import json
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
from tests.models.ways import NARROW, check_instruction_set, check_returns
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

LOCAL = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 48,
    "head_dim": 64,
    "qk_nope_head_dim": 48,
    "v_head_dim": 16,
}
KINDS = ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"]
CASE = Case(
    "Dots3Note",
    "dots3note",
    {
        **{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"},
        "num_hidden_layers": 4,
        "head_dim": 48,
        "layer_types": KINDS,
        "sliding_window": 9,
        "shared_experts_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
        "per_layer_config": {i: LOCAL for i in (1, 2)},
    },
)
# Tensors of a layer that llama.cpp's loader requires.
NAMES = """
    attn_norm attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm attn_k_norm attn_k_b
    attn_v_b attn_output attn_gate indexer.attn_q_b indexer.attn_k indexer.k_norm indexer.proj
    ffn_norm ffn_gate ffn_down ffn_up ffn_gate_inp exp_probs_b ffn_gate_exps ffn_up_exps
    ffn_down_exps ffn_gate_shexp ffn_down_shexp ffn_up_shexp
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
    assert [*keys["attention.head_count"]] == [4, 2, 2, 4]
    assert [*keys["attention.sliding_window_pattern"]] == [False, True, True, False]
    assert [*keys["attention.indexer.types"]] == [True, False, False, True]
    assert keys["rope.freq_base"] == 8e7
    assert keys["rope.freq_base_swa"] == 5e4
    assert keys["attention.key_length_mla_swa"] == 64
    assert keys["expert_shared_feed_forward_length"] == 48


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    truth = compute_logits(save(own(CASE), tmp_path / "hf"), ids_of())
    check_instruction_set(convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth, NARROW)


@pytest.mark.slow
def test_the_published_spelling(tmp_path: Path) -> None:
    """Text keys beside towers, sizes of layers with a window by their own names, MTP layers."""
    from safetensors.numpy import load_file, save_file

    truth = compute_logits(save(own(CASE), tmp_path), ids_of())
    config = json.loads((tmp_path / "config.json").read_text())
    more = {f"swa_{key}": value for key, value in LOCAL.items()}
    for key in ("per_layer_config", "rope_parameters", "mlp_layer_types"):
        del config[key]
    config |= {
        **more,
        "model_type": "dots3_note",
        "swa_q_lora_rank": 32,
        "swa_qk_rope_head_dim": 16,
        "sliding_window_size": config.pop("sliding_window"),
        "rope_theta": 8e7,
        "swa_rope_theta": 5e4,
        "layer_types": [kind.replace("indexed", "full") for kind in KINDS],
        "moe_shared_expert_intermediate_size": config.pop("shared_experts_intermediate_size"),
        "first_k_dense_replace": 1,
        "use_dsa": True,
        "apply_mla_qkv_lora_rescale": True,
        "k_rope_only_layernorm": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "model.safetensors"
    zeros = np.zeros((4, 4), np.float32)
    beside = (
        "audio_encoder.x",
        "vision_encoder.x",
        "model.mtp.embed_tokens",
        "model.layers.4.enorm",
    )
    save_file({**load_file(path), **{f"{name}.weight": zeros for name in beside}}, path)
    with treadle.load(tmp_path, threads=2, kv="f32") as model:
        assert worst(model.logits(ids_of()), truth) <= 2 * rounding(model.config)


TEXT: dict[str, Any] = {
    "model_type": "dots3_note_text",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "layer_types": KINDS,
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_dsa": False}, "use_dsa: is False: treadle supports only True"),
        ({"swa_q_lora_rank": 8}, "swa_q_lora_rank: differs from q_lora_rank, 1024"),
        ({"layer_types": ["x"]}, r"layer_types: is \['x'\] .* a list of 4"),
        ({"per_layer_config": 1}, "per_layer_config: is 1 .*sizes by layer"),
        (
            {"per_layer_config": {"0": {"kv_lora_rank": 8}}},
            "per_layer_config: treadle supports one",
        ),
        (
            {"per_layer_config": {}, "layer_types": ["full_attention"] * 4},
            "layer_types: full_attention: treadle supports indexed_attention",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    read_config(TEXT, Path("config.json"))
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({**TEXT, **change}, Path("config.json"))


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"attention.kv_lora_rank_swa": None}, FileError, "kv_lora_rank_swa: the key is missing"),
        ({"attention.kv_lora_rank_swa": 40}, UnsupportedError, "40: expected a multiple of 16"),
        ({"attention.key_length_swa": 65}, FileError, "is 65 .*64: one row shared by all heads"),
        ({"attention.q_lora_rank": None}, FileError, "q_lora_rank"),
        ({"attention.sliding_window_pattern": [True]}, FileError, "sliding_window_pattern"),
    ],
)
def test_bad_files(
    change: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    save(own(CASE), tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        given = {**file.metadata, **{f"dots3note.{key}": x for key, x in change.items()}}
        file.metadata = {key: x for key, x in given.items() if x is not None}
        with pytest.raises(error, match=why):
            load_config(file)


def test_an_indexer_as_llama_cpp_rotates_it(tmp_path: Path) -> None:
    save(own(CASE), tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        for halved, rope in ((False, "norm"), (True, "neox")):
            file.metadata = {**file.metadata, "dots3note.attention.indexer.rope_halved": halved}
            config = load_config(file)
            first = config.layers[0].indexer
            assert first is not None
            assert (first.rope, config.arch.rope) == (rope, "norm")

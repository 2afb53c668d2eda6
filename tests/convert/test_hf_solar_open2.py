"""Solar Open 2, which transformers 5.24 lacks: folders, in place and converted, against a forward
pass in plain numpy and float64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.models.hf_tiny import N_VOCAB
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import check_instruction_sets, check_returns
from tests.reference import forward
from tests.tiny import draw
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

CONFIG: dict[str, Any] = {
    "architectures": ["SolarOpen2ForCausalLM"],
    "model_type": "solar_open2",
    "vocab_size": N_VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "gqa_interval": 3,
    "gqa_layers": [0],
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "kda_allow_neg_eigval": True,
    "linear_attn_config": {
        "short_conv_kernel_size": 4,
        "head_dim": 32,
        "num_heads": 4,
        "num_kv_heads": None,
    },
}
MIXERS = {
    True: {"q": (128, 64), "k": (64, 64), "v": (64, 64), "g": (128, 64), "o": (64, 128)},
    False: {
        **{name: (128, 64) for name in "qkv"},
        **{f"{x}_a": (32, 64) for x in "fg"},
        **{f"{x}_b": (128, 32) for x in "fg"},
        "b": (4, 64),
        "o": (64, 128),
    },
}


def write_folder(folder: Path) -> Path:
    """A checkpoint as published: its experts one by one."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(5)
    tensors: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        tensors[name] = draw(rng, name.replace("embed", "embd"), shape)

    for name in ("model.embed_tokens", "lm_head"):
        add(f"{name}.weight", N_VOCAB, 64)
    add("model.norm.weight", 64)
    for i in range(3):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}.{norm}.weight", 64)
        for name, shape in MIXERS[i == 0].items():
            add(f"{at}.self_attn.{name}_proj.weight", *shape)
        if i:
            for name in "qkv":
                add(f"{at}.self_attn.{name}_conv1d.weight", 128, 1, 4)
            add(f"{at}.self_attn.o_norm.weight", 32)
            tensors[f"{at}.self_attn.A_log"] = rng.uniform(0, 1, (1, 1, 4, 1)).astype(np.float32)
            tensors[f"{at}.self_attn.dt_bias"] = rng.standard_normal(128).astype(np.float32)
        add(f"{at}.mlp.gate.weight", 8, 64)
        bias = 0.2 * rng.standard_normal(8)
        tensors[f"{at}.mlp.gate.e_score_correction_bias"] = bias.astype(np.float32)
        for at_expert in (*(f"experts.{e}" for e in range(8)), "shared_experts"):
            for one, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
                add(f"{at}.mlp.{at_expert}.{one}_proj.weight", *shape)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_in_every_way(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    made = convert(folder, tmp_path / "made.gguf")
    with open_gguf(made) as file:
        config = load_config(file)
        truth = forward(file, config, ids_of())
        states = [at.state for at in config.layers if not at.n_head_kv]
        assert [at.n_head_kv for at in config.layers] == [2, 0, 0]
        assert {state.beta_most for state in states if state} == {2.0}
        rates = file.tensors["blk.1.ssm_a"].dequantize()
        assert rates.shape == (1, 4, 1)
        assert (rates < 0).all()
        assert file.metadata["solar-open2.kda.head_dim"] == 32
    check_truth(made, truth)
    check_truth(folder, truth)
    check_returns(made)


@pytest.mark.slow
def test_on_other_instruction_sets(tmp_path: Path) -> None:
    made = convert(write_folder(tmp_path / "hf"), tmp_path / "made.gguf")
    with open_gguf(made) as file:
        truth = forward(file, load_config(file), ids_of())
    check_instruction_sets(made, ids_of(), truth)


def test_layers_of_other_spellings(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    more = {key: value for key, value in CONFIG.items() if key != "gqa_layers"}
    made = read_config({**more, "layer_types": kinds}, Path("config.json")).metadata
    assert made["solar-open2.attention.head_count_kv"] == [2, 0, 0]
    folder = write_folder(tmp_path / "hf")
    with treadle.load(folder, threads=2) as model:
        labels = {step.label for step in model.plan(1).match("L0.attn.gate")}
    assert labels == {"L0.attn.gate"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kda_allow_neg_eigval": False}, "kda_allow_neg_eigval: is False: treadle supports only"),
        ({"kda_use_full_proj": True}, "kda_use_full_proj: is True: treadle supports only False"),
        ({"use_rope": True}, "use_rope: is True: treadle supports only False"),
        ({"gqa_layers": [7]}, r"gqa_layers: is \[7\].*layers from 0 to 2"),
        ({"gqa_layers": None}, "gqa_layers: is missing"),
        ({"linear_attn_config": {"num_heads": 2}}, "2 heads have a state: expected"),
        ({"linear_attn_config": {"num_kv_heads": 2}}, "num_kv_heads: treadle supports as many"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises((FileError, UnsupportedError), match=why):
        read_config({**CONFIG, **change}, Path("config.json"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kda.head_dim": None}, "kda.head_dim: the key is missing"),
        ({"attention.head_count_kv": [2, 2, 0]}, "blk.1"),
        ({"attention.head_count_kv": [3, 0, 0]}, "3 does not divide 4 heads"),
        ({"ssm.conv_kernel": 1}, "ssm.conv_kernel"),
    ],
)
def test_bad_files(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    with open_gguf(convert(write_folder(tmp_path / "hf"), tmp_path / "made.gguf")) as file:
        given = {**file.metadata, **{f"solar-open2.{key}": x for key, x in change.items()}}
        file.metadata = {key: x for key, x in given.items() if x is not None}
        with pytest.raises(FileError, match=why):
            load_config(file)

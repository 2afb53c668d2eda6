"""Families with experts: Hugging Face folders, run in place and converted, against transformers,
and against what llama.cpp's converter wrote of models of the same sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_encoders import save
from tests.models.hf_cases import Case
from tests.models.hf_tiny import N_VOCAB, compute_logits
from tests.tiny import rounding
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.models.load import load_config

_QWEN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OWN = {"experts_implementation": "eager", "num_hidden_layers": 4, "pad_token_id": 0}
_WINDOW = {"sliding_window": 16, "head_dim": 32}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}

# By the name of the file that llama.cpp's converter wrote of such a one.
CASES: dict[str, Case] = {
    "qwen3moe": Case("Qwen3Moe", "qwen3moe", {**_QWEN, "head_dim": 32, "norm_topk_prob": False}),
    "mixtral": Case("Mixtral", "llama", {"num_local_experts": 4, "sliding_window": None}),
    "gpt-oss": Case(
        "GptOss",
        "gpt-oss",
        {
            **_WINDOW,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "qwen2moe": Case("Qwen2Moe", "qwen2moe", {**_QWEN, "shared_expert_intermediate_size": 64}),
    "olmoe": Case(
        "Olmoe",
        "olmoe",
        {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    ),
    "granitemoe": Case(
        "GraniteMoe",
        "granitemoe",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
    ),
    "ernie45moe": Case(
        "Ernie4_5_Moe",
        "ernie4_5-moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_num_shared_experts": 1,
        },
    ),
    "glm4moe": Case(
        "Glm4Moe",
        "glm4moe",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimaxm2": Case(
        "MiniMaxM2",
        "minimax-m2",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
}


# llama.cpp's converter wrote no file of these.
ALONE: dict[str, Case] = {
    "hunyuan-moe": Case(
        "HunYuanMoEV1",
        "hunyuan-moe",
        {"num_experts": 8, "moe_topk": 3, "head_dim": 32, "intermediate_size": 64},
    ),
    "hunyuan-moe-alpha": Case(
        "HunYuanMoEV1",
        "hunyuan-moe",
        {
            "num_experts": 8,
            "moe_topk": 2,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
            },
        },
    ),
}


def own(case: Case, **more: Any) -> Case:
    options: Mapping[str, Any] = {**_OWN, **case.options, **more}
    return Case(case.family, case.arch, options, case.head)


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path, data: Path) -> None:
    check(name, own(CASES[name]), tmp_path, data)


@pytest.mark.parametrize("name", ALONE)
def test_without_a_file_of_llama_cpp(name: str, tmp_path: Path) -> None:
    """What is converted has the names and keys that the gguf package lists."""
    gguf = pytest.importorskip("gguf")
    case = own(ALONE[name])
    arch = next(a for a, written in gguf.MODEL_ARCH_NAMES.items() if written == case.arch)
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    with open_gguf(check_both(case, tmp_path)) as file:
        for name in file.tensors:
            stem = name.rpartition(".")[0]
            assert stem.replace(f"blk.{name.split('.')[1]}.", "blk.{bid}.") in known, name
        found = {key.partition(".")[2]: value for key, value in file.metadata.items()}
        assert found["expert_used_count"] == case.options["moe_topk"]
        assert found["expert_feed_forward_length"] == found["feed_forward_length"]
        assert found["expert_shared_feed_forward_length"] == found["feed_forward_length"]


def test_counts_layer_by_layer(tmp_path: Path) -> None:
    """As Hunyuan-A13B has them: all alike, or refused."""
    save(own(ALONE["hunyuan-moe"]), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    n = config["num_hidden_layers"]
    config |= dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor"), False)
    config |= {"moe_topk": [3] * n, "num_shared_expert": [1] * n, "moe_intermediate_size": [64] * n}
    path.write_text(json.dumps(config))
    with treadle.load(tmp_path / "hf", threads=1) as model:
        experts = model.config.layers[0].experts
        assert experts is not None
        assert (experts.n_used, experts.n_ff, experts.n_ff_shared) == (3, 64, 64)
    path.write_text(json.dumps(config | {"moe_topk": [3] * (n - 1) + [2]}))
    with pytest.raises(UnsupportedError, match="moe_topk: differs from layer to layer"):
        open_hf(tmp_path / "hf")


def check(name: str, case: Case, tmp_path: Path, data: Path) -> None:
    """Both ways to use a folder, and that its tensors become those of file ``name``."""
    made = check_both(case, tmp_path)
    with open_gguf(made) as ours, open_gguf(data / "arch" / f"{name}.gguf") as theirs:
        assert shapes(ours) == shapes(theirs)


def check_both(case: Case, tmp_path: Path) -> Path:
    """A folder in place and converted gives transformers' logits; the file that was made."""
    model = save(case, tmp_path / "hf")
    ids = prompt()
    expected = compute_logits(model, ids)
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path in (tmp_path / "hf", made):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(ids), expected)
            assert error <= rounding(loaded.config), (path, error / rounding(loaded.config))
    return made


def test_a_least_sum_of_weights(tmp_path: Path) -> None:
    """ERNIE's bounds no sum of its files; one that did would be wrong, silently."""
    save(own(CASES["ernie45moe"]), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config["moe_norm_min"] == 1e-12
    path.write_text(json.dumps({**config, "moe_norm_min": 0.5}))
    with pytest.raises(
        UnsupportedError, match=r"moe_norm_min: is 0\.5: treadle supports only 1e-12"
    ):
        open_hf(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_an_output_with_a_bias(tied: bool, tmp_path: Path) -> None:
    """ERNIE's, as its other matrices have one. GGUF has it beside an output of its own."""
    case = own(CASES["ernie45moe"], use_bias=True, tie_word_embeddings=tied)
    made = check_both(case, tmp_path)
    with open_gguf(made) as file:
        assert file.tensors["output.bias"].shape == (N_VOCAB,)
        own_output = file.tensors["output.weight"].data.tobytes()
        assert (own_output == file.tensors["token_embd.weight"].data.tobytes()) == tied
        (note,) = (n for n in reading_differences(file.metadata, file.tensors) if "refuses" in n)
        assert "output.bias" in note
        del file.tensors["output.weight"]
        with pytest.raises(FileError, match=r"output\.bias: has no matrix"):
            load_config(file)


def shapes(file: GGUF) -> dict[str, tuple[Any, str]]:
    """Without ones, of which some converters write more; nor layers behind the last."""
    return {
        name: (tuple(n for n in tensor.shape if n > 1), tensor.type_name)
        for name, tensor in file.tensors.items()
    }


# -- weights in MXFP4 ---------------------------------------------------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])


def test_mxfp4_stays_mxfp4(tmp_path: Path) -> None:
    """As OpenAI has gpt-oss: the very weights, in place and converted, and the same bits."""
    from safetensors.numpy import load_file, save_file

    save(own(CASES["gpt-oss"]), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    rng = np.random.default_rng(3)
    tensors = load_file(path)
    exact = {}
    for name in [name for name in tensors if name.endswith("experts.down_proj")]:
        for stem, rows, k in (("gate_up", 192, 64), ("down", 64, 96)):
            at = name.replace("down", stem)
            del tensors[at]
            codes = rng.integers(0, 256, (8, rows, k // 32, 16), np.uint8)
            scales = rng.integers(118, 123, (8, rows, k // 32), np.uint8)
            tensors[f"{at}_blocks"] = codes
            tensors[f"{at}_scales"] = scales
            pairs = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(8, rows, k // 32, 32)
            scale = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
            layer = name.split(".")[2]
            weights = (pairs * scale[..., None]).reshape(8, rows, k)
            parts = {"gate": weights[:, ::2], "up": weights[:, 1::2]}
            for one, values in (parts if stem == "gate_up" else {"down": weights}).items():
                exact[f"blk.{layer}.ffn_{one}_exps.weight"] = values
    save_file(tensors, path)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    found = []
    for made in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(made, threads=2) as loaded:
            for name, values in exact.items():
                assert loaded.gguf.tensors[name].type_name == "MXFP4"
                assert np.array_equal(loaded.gguf.tensors[name].dequantize(), values), name
            found.append(loaded.logits(prompt()))
    assert len(exact) == 12
    assert np.array_equal(found[0], found[1])


# -- what is refused ----------------------------------------------------------------------------


def _drop(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]


def _cut(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = tensors[name][:16]


def _dense(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["mlp_only_layers"] = [2]


def _fewer(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["num_local_experts"] = config["num_experts"] = 4


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_drop, r"experts\.\d\.up_proj.*expert 3 has no such"),
        (_cut, r"experts\.3\.up_proj.*shape \[16, 64\].*\[32, 64\]"),
        (_dense, r"mlp_only_layers: is \[2\]"),
        (_fewer, r"mlp\.gate\.weight: shape \[8, 64\]"),
    ],
)
def test_what_is_at_odds(change: Any, why: str, tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    save(own(CASES["qwen3moe"]), tmp_path)
    weights = tmp_path / "model.safetensors"
    said = tmp_path / "config.json"
    tensors = load_file(weights)
    config = json.loads(said.read_text())
    change(tensors, config)
    save_file(tensors, weights)
    said.write_text(json.dumps(config))
    with pytest.raises((FileError, UnsupportedError), match=why):
        open_hf(tmp_path)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("qwen3moe", "num_experts_per_tok", 0), ("granitemoe", "num_experts_per_tok", 0)],
)
def test_keys_by_their_own_names(name: str, key: str, value: int, tmp_path: Path) -> None:
    """What the graph finds out of range is named as config.json has it, GGUF's name behind."""
    folder = tmp_path / "hf"
    save(own(CASES[name]), folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(FileError, match=rf"config\.json: {key} \([a-z0-9]+\.expert_\w+\): is 0"):
        open_hf(folder)

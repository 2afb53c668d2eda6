"""Granite Switch's folders, of which transformers has no class: against the formulae of its makers'
package (granite-switch 0.0.11 and 0.1.1) in float64, in place and converted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import softmax, write_random
from tests.convert.test_hf import convert, worst
from tests.models.test_arch_truth import ids_of
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import TreadleError
from treadle.files.gguf import open_gguf

N_LAYER = 2
WIDTH = 64
N_FF = 96
HEADS = 4
HEADS_KV = 2
DIM = 16
N_VOCAB = 320
RANK = 5
TOKENS = [301, 302, 303]
CONFIG: dict[str, Any] = {
    "model_type": "granite_switch",
    "architectures": ["GraniteSwitchForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 777,
    "shared_intermediate_size": N_FF,
    "num_hidden_layers": N_LAYER + 1,
    "layer_types": ["full_attention"] * (N_LAYER + 1),
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "num_local_experts": 0,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
    "num_adapters": 3,
    "max_lora_rank": RANK,
    "adapter_ranks": [4, RANK, 3],
    "adapter_token_ids": TOKENS,
    "adapter_substitute_token_ids": [7, 8, 8],
    "control_token_gain": 15.0,
    "lora_target_modules": [
        "qkv_proj",
        "o_proj",
        "shared_input_linear",
        "shared_output_linear",
    ],
}
MULTI = {
    "num_hidden_layers": N_LAYER + 2,
    "layer_types": ["attention"] * (N_LAYER + 2),
    "ms_code_m": 6,
    "adapter_token_ids": [300, *TOKENS],
    "adapter_substitute_token_ids": [9, 7, 8, 8],
}
FEW = {"lora_target_modules": ["o_proj"]}
MODULES = {  # rows of each part, columns
    "self_attn.qkv_proj": ([HEADS * DIM, HEADS_KV * DIM, HEADS_KV * DIM], WIDTH),
    "self_attn.o_proj": ([WIDTH], HEADS * DIM),
    "shared_mlp.input_linear": ([N_FF, N_FF], WIDTH),
    "shared_mlp.output_linear": ([WIDTH], N_FF),
}
GROUPS = dict(zip(MODULES, CONFIG["lora_target_modules"], strict=True))
Array = np.ndarray


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (N_VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "model.switch.codebook": (16, 8),
        "model.switch.control_to_substitute_lut": (N_VOCAB, 1),
    }
    for i in range(N_LAYER):
        at = f"model.layers.{i}"
        made |= {f"{at}.{x}_layernorm.weight": (WIDTH,) for x in ("input", "post_attention")}
        for module, (rows, columns) in MODULES.items():
            adapted = GROUPS[module] in config["lora_target_modules"]
            base = ".base_layer" if adapted else ""
            made[f"{at}.{module}{base}.weight"] = (sum(rows), columns)
            for j, n in enumerate(rows if adapted else []):
                part = f"_slices.{j}" if len(rows) > 1 else ""
                made[f"{at}.{module}.lora_A{part}"] = (3, 1, RANK, columns)
                made[f"{at}.{module}.lora_B{part}"] = (3, 1, n, RANK)
    return made


def write(folder: Path, config: dict[str, Any]) -> dict[str, Array]:
    from safetensors.numpy import save_file

    tensors = write_random(folder, shapes(config), config, 5)
    for name, rows in tensors.items():
        if ".lora_" in name:
            rows /= np.float32(np.sqrt(rows.shape[-1]))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def exact(
    weights: dict[str, Array], config: dict[str, Any], ids: list[int], adapters: list[int]
) -> Array:
    """Logits, float64 [n_tokens, n_vocab], with the adapter of each token."""
    w = {name: rows.astype(np.float64) for name, rows in weights.items()}
    n = len(ids)
    future = np.triu(np.ones((n, n), bool), 1)
    angles = np.arange(n)[:, None, None] * 1e4 ** (-np.arange(0, DIM, 2) / DIM)
    tokens = config["adapter_token_ids"]
    instead = dict(zip(tokens, config["adapter_substitute_token_ids"], strict=True))

    def rms(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"])

    def linear(x: Array, i: int, module: str) -> Array:
        name = f"model.layers.{i}.{module}"
        if f"{name}.weight" in w:
            return np.asarray(x @ w[f"{name}.weight"].T)
        y = x @ w[f"{name}.base_layer.weight"].T
        first = 0
        rows = MODULES[module][0]
        for j, height in enumerate(rows):
            part = f"_slices.{j}" if len(rows) > 1 else ""
            for t in (t for t in range(n) if adapters[t]):
                a, b = (w[f"{name}.lora_{side}{part}"][adapters[t] - 1, 0] for side in "AB")
                y[t, first : first + height] += b @ (a @ x[t])
            first += height
        return np.asarray(y)

    def turned(x: Array) -> Array:
        a, b = np.split(x.reshape(n, -1, DIM), 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][[instead.get(token, token) for token in ids]] * 6.0
    for i in range(N_LAYER):
        h = rms(x, f"model.layers.{i}.input_layernorm")
        qkv = linear(h, i, "self_attn.qkv_proj")
        q, k, v = np.split(qkv, [HEADS * DIM, (HEADS + HEADS_KV) * DIM], -1)
        k, v = (y.repeat(HEADS // HEADS_KV, 1) for y in (turned(k), v.reshape(n, -1, DIM)))
        scores = np.einsum("qhd,khd->hqk", turned(q), k) * 0.3
        y = np.einsum("hqk,khd->qhd", softmax(np.where(future, -np.inf, scores)), v)
        x = x + 0.5 * linear(y.reshape(n, -1), i, "self_attn.o_proj")
        h = rms(x, f"model.layers.{i}.post_attention_layernorm")
        gate, up = np.split(linear(h, i, "shared_mlp.input_linear"), 2, -1)
        x = x + 0.5 * linear(gate / (1 + np.exp(-gate)) * up, i, "shared_mlp.output_linear")
    return np.asarray(rms(x, "model.norm") @ w["model.embed_tokens.weight"].T / 4.0)


@pytest.mark.parametrize(
    "kind", ["single", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("multi", "few"))]
)
def test_in_place_and_converted(kind: str, tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {"single": {}, "multi": MULTI, "few": FEW}
    config = {**CONFIG, **changes[kind]}
    weights = write(tmp_path / "hf", config)
    ids = ids_of(24)
    ids[3], ids[12], ids[20] = TOKENS[0], TOKENS[2], 300
    n = (3, 9, 8, 4)
    adapters = np.repeat([0, 1, 3, 0] if kind == "multi" else [0, 1, 2, 2], n).tolist()
    truth = exact(weights, config, ids, adapters)
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path in (tmp_path / "hf", made):
        with treadle.load(path, threads=2, kv="f32") as model:
            assert worst(model.logits(ids), truth) <= 2 * rounding(model.config)
            assert model.config.n_layer == N_LAYER
            assert model.config.ignored == ()
    with open_gguf(made) as file:
        assert file.tensors["blk.1.attn_k.lora_b"].shape == (4, HEADS_KV * DIM, RANK)
        assert {"blk.0.attn_qkv.weight", "blk.0.ffn_down.lora_a"} < file.tensors.keys()
        keys = {name.partition(".adapters.")[2]: v for name, v in file.metadata.items()}
        listed: Any = keys["token_ids_activate"]
        assert list(listed) == config["adapter_token_ids"]
        assert (keys["count"], keys["lora_rank"], keys["router_gain"]) == (3, RANK, 15.0)
        assert keys.get("latest") == (True if kind == "multi" else None)
        said = " ".join(reading_differences(file.metadata, file.tensors))
        assert ("a control token for no adapter" in said) == (kind == "multi")


def test_several_switches_of_llama_cpp() -> None:
    keys = {"general.architecture": "graniteswitch", "graniteswitch.adapters.latest": True}
    keys |= {"graniteswitch.adapters.count": 2, "graniteswitch.adapters.token_ids_activate": [1, 2]}
    assert "the last one does" in reading_differences(keys, ())[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_adapters": 0}, "num_adapters: is 0"),
        ({"num_hidden_layers": 1}, "num_hidden_layers: is 1"),
        ({"switch_type": "many"}, "switch_type: is 'many': treadle supports single and multi"),
        ({"adapter_token_ids": None}, "adapter_token_ids: is missing"),
        ({"adapter_substitute_token_ids": [1, "x"]}, "adapter_substitute_token_ids: is"),
        ({"layer_types": ["mamba"] * 3}, "layer_types: is .*treadle supports attention"),
        ({"lora_target_modules": ["lm_head"]}, "lora_target_modules: is"),
        ({"dual_stream": True}, "dual_stream: is True: treadle supports only False"),
        ({"qk_norm": True}, "qk_norm: is True"),
        ({"num_local_experts": 8}, "num_local_experts: is 8"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(TreadleError, match=why):
        read_config({**CONFIG, **change}, Path("config.json"))

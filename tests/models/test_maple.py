"""Maple, which transformers does not have: against its formulae in float64 (llama.cpp's
``maple.cpp``), from a folder and converted. Its experts' gates are limited before SiLU.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.convert.random_folder import softmax, write_random
from tests.convert.test_hf import convert, worst
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import NARROW, check_instruction_set, check_returns
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import TreadleError
from treadle.files.gguf import open_gguf
from treadle.kernels.activations import activated, gated

N_LAYER = 4
WIDTH = 64
N_FF = 32
HEADS = 4
HEADS_KV = 2
DIM = 16
TURNED = 8  # dims of a head
N_EXPERT = 8
N_USED = 2
N_VOCAB = 320
WINDOW = 8  # tokens before the current one
EPS = float(np.float32(1e-6))
CONFIG: dict[str, Any] = {
    "architectures": ["MapleForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "moe_intermediate_size": N_FF,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV,
    "head_dim": DIM,
    "num_experts": N_EXPERT,
    "num_experts_per_tok": N_USED,
    "num_shared_experts": 0,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "sliding_window": WINDOW,
    "nope_on_global_attention": True,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "tie_word_embeddings": False,
}
Array = np.ndarray


def shapes() -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (N_VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (N_VOCAB, WIDTH),
    }
    for i in range(N_LAYER):
        at = f"model.layers.{i}"
        made |= {
            f"{at}.input_layernorm.weight": (WIDTH,),
            f"{at}.post_attention_layernorm.weight": (WIDTH,),
            f"{at}.self_attn.q_proj.weight": (HEADS * DIM, WIDTH),
            f"{at}.self_attn.k_proj.weight": (HEADS_KV * DIM, WIDTH),
            f"{at}.self_attn.v_proj.weight": (HEADS_KV * DIM, WIDTH),
            f"{at}.self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
            f"{at}.self_attn.q_norm.weight": (DIM,),
            f"{at}.self_attn.k_norm.weight": (DIM,),
            f"{at}.mlp.gate.weight": (N_EXPERT, WIDTH),
        }
        for e in range(N_EXPERT):
            made |= {
                f"{at}.mlp.experts.{e}.gate_proj.weight": (N_FF, WIDTH),
                f"{at}.mlp.experts.{e}.up_proj.weight": (N_FF, WIDTH),
                f"{at}.mlp.experts.{e}.down_proj.weight": (WIDTH, N_FF),
            }
    return made


def write(folder: Path) -> dict[str, Array]:
    """Write a folder whose experts' products exceed their limit, which is 7; return the tensors."""
    from safetensors.numpy import save_file

    tensors = write_random(folder, shapes(), CONFIG, 5)
    for name, rows in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            rows *= 4
        if name.endswith("down_proj.weight"):
            rows /= 16
    save_file(tensors, folder / "model.safetensors")
    return tensors


def exact(weights: dict[str, Array], ids: list[int], window: int) -> tuple[Array, Array]:
    """Logits, float64 [n_tokens, n_vocab], and all gates of chosen experts."""
    w = {name: rows.astype(np.float64) for name, rows in weights.items()}
    n = len(ids)
    age = np.arange(n)[:, None] - np.arange(n)
    angles = np.arange(n)[:, None, None] * 1e4 ** (-np.arange(0, TURNED, 2) / TURNED)

    def rms(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[f"{name}.weight"])

    def turned(x: Array) -> Array:
        a, b = np.split(x[..., :TURNED], 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., TURNED:]], -1)

    x = w["model.embed_tokens.weight"][ids]
    gates = []
    for i in range(N_LAYER):
        at = f"model.layers.{i}"
        attn = f"{at}.self_attn"
        h = rms(x, f"{at}.input_layernorm")
        q, k, v = (h @ w[f"{attn}.{one}_proj.weight"].T for one in "qkv")
        q = rms(q.reshape(n, HEADS, DIM), f"{attn}.q_norm")
        k = rms(k.reshape(n, HEADS_KV, DIM), f"{attn}.k_norm")
        seen = age >= 0
        if i % 4 < 3:
            q, k, seen = turned(q), turned(k), seen & (age < window)
        k, v = (y.reshape(n, HEADS_KV, DIM).repeat(HEADS // HEADS_KV, 1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        y = np.einsum("hqk,khd->qhd", softmax(np.where(seen, scores, -np.inf)), v)
        x = x + y.reshape(n, -1) @ w[f"{attn}.o_proj.weight"].T
        h = rms(x, f"{at}.post_attention_layernorm")
        p = softmax(h @ w[f"{at}.mlp.gate.weight"].T)
        for t in range(n):
            chosen = np.argsort(-p[t])[:N_USED]
            for e in chosen:
                of = f"{at}.mlp.experts.{e}"
                gate, up = (h[t] @ w[f"{of}.{one}_proj.weight"].T for one in ("gate", "up"))
                gates.append(gate)
                gate = np.minimum(gate, 7.0)
                made = gate / (1 + np.exp(-gate)) * np.clip(up, -7.0, 7.0)
                x[t] += p[t, e] / p[t, chosen].sum() * (made @ w[f"{of}.down_proj.weight"].T)
    return rms(x, "model.norm") @ w["lm_head.weight"].T, np.concatenate(gates)


@pytest.mark.slow
def test_in_every_way(tmp_path: Path) -> None:
    tensors = write(tmp_path / "hf")
    truth, gates = exact(tensors, ids_of(), WINDOW + 1)
    assert 0.02 < (gates > 7.0).mean() < 0.5
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_returns(made)
    with treadle.load(tmp_path / "hf", threads=2, kv="f32") as model:
        assert worst(model.logits(ids_of()), truth) <= rounding(model.config)
    with open_gguf(made) as file:
        keys = {key.partition(".")[2]: value for key, value in file.metadata.items()}
    pattern: Any = keys["attention.sliding_window_pattern"]
    limits: Any = keys["swiglu_clamp_exp"]
    assert list(pattern) == [True, True, True, False]
    assert list(limits) == [7.0] * N_LAYER
    assert (keys["attention.sliding_window"], keys["rope.dimension_count"]) == (WINDOW + 1, TURNED)


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    tensors = write(tmp_path / "hf")
    truth = exact(tensors, ids_of(), WINDOW + 1)[0]
    check_instruction_set(convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth, NARROW)


def test_a_file_of_llama_cpp(tmp_path: Path) -> None:
    """Its converter writes the folder's window, and its graph counts the current token in."""
    tensors = write(tmp_path / "hf")
    truth = exact(tensors, ids_of(), WINDOW)[0]
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    with open_gguf(made) as file:
        arch = file.metadata["general.architecture"]
    keys = {f"{arch}.attention.sliding_window": WINDOW, f"{arch}.feed_forward_length": None}
    write_changed(made, tmp_path / "theirs.gguf", keys)
    with treadle.load(tmp_path / "theirs.gguf", threads=2, kv="f32") as model:
        assert worst(model.logits(ids_of()), truth) <= rounding(model.config)


def test_a_limit_before_the_activation() -> None:
    x = np.array([-2.0, 1.0, 9.0])
    up = np.array([-9.0, 0.25, 9.0])
    silu = activated("silu", np.array([-2.0, 1.0, 1.5]))
    assert gated("silu_of_1.5", x, up).tolist() == (silu * [-1.5, 0.25, 1.5]).tolist()
    assert gated("silu_to_1.5", x, up)[2] > gated("silu_of_1.5", x, up)[2]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"nope_on_global_attention": False}, "nope_on_global_attention: is False: treadle supp"),
        ({"num_shared_experts": 1}, "num_shared_experts: is 1: treadle supports only 0"),
        ({"norm_topk_prob": False}, "norm_topk_prob: is False: treadle supports only True"),
        ({"sliding_window": None}, "sliding_window: is null, but only layers with a window"),
        ({"sliding_window": 1 << 40}, "sliding_window: is 1099511627776"),
    ],
)
def test_what_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(TreadleError, match=why):
        read_config({**json.loads(json.dumps(CONFIG)), **change}, Path("config.json"))

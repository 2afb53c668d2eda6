"""Spark X2.5, which transformers does not have: against the formulae of its published graph in
float64 (llama.cpp's ``spark2-5.cpp``), from a folder, converted, and with separate matrices.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import gelu, softmax, write_random
from tests.convert.test_hf import convert, prompt
from tests.reference import forward
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf

N_LAYER = 4
WIDTH = 64
N_FF = 96
HEADS = 4
HEADS_KV = 2
DIM = 32
WINDOW = 16
N_VOCAB = 320
EPS = float(np.float32(1e-5))
BASES = {"full_attention": 1e6, "sliding_attention": 1e4}
SHARES = {"full_attention": 0.5, "sliding_attention": 1.0}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
CONFIG: dict[str, Any] = {
    "model_type": "spark2_5",
    "architectures": ["Spark2_5ForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": N_FF,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV,
    "head_dim": DIM,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "hidden_act": "gelu",
    "sliding_window": WINDOW,
    "layer_types": KINDS,
    "gate_attn_act_mode": "sigmoid",
    "headwise_attn_output_gate": True,
    "tie_word_embeddings": False,
    "rope_parameters": {
        kind: {
            "rope_type": "default",
            "rope_theta": BASES[kind],
            "partial_rotary_factor": SHARES[kind],
        }
        for kind in BASES
    },
}
N_Q = HEADS * DIM
N_KV = HEADS_KV * DIM
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
            f"{at}.self_attn.q_k_v_proj.weight": (N_Q + 2 * N_KV, WIDTH),
            f"{at}.self_attn.g_proj.weight": (HEADS, WIDTH),
            f"{at}.self_attn.o_proj.weight": (WIDTH, N_Q),
            f"{at}.post_attention_layernorm.weight": (WIDTH,),
            f"{at}.mlp.gate_proj.weight": (N_FF, WIDTH),
            f"{at}.mlp.up_proj.weight": (N_FF, WIDTH),
            f"{at}.mlp.down_proj.weight": (WIDTH, N_FF),
        }
    return made


def rms(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight)


def turned(x: Array, kind: str) -> Array:
    """The first share of each head's dims, by halves: [tokens, heads, dims]."""
    n = int(DIM * SHARES[kind])
    angles = np.arange(len(x))[:, None] * BASES[kind] ** (-np.arange(0, n, 2) / n)
    cos, sin = (f(angles)[:, None] for f in (np.cos, np.sin))
    a, b, rest = np.split(x, [n // 2, n], -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def exact(weights: dict[str, Array], ids: list[int]) -> Array:
    """Logits, float64 [n_tokens, n_vocab]."""
    w = {name: rows.astype(np.float64) for name, rows in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    n = len(ids)
    behind = np.arange(n)[:, None] - np.arange(n)  # how far a key is behind a query
    for i, kind in enumerate(KINDS):
        at = f"model.layers.{i}"
        h = rms(x, w[f"{at}.input_layernorm.weight"])
        q, k, v = np.split(h @ w[f"{at}.self_attn.q_k_v_proj.weight"].T, [N_Q, N_Q + N_KV], -1)
        q = turned(q.reshape(n, HEADS, DIM), kind)
        k = turned(k.reshape(n, HEADS_KV, DIM), kind).repeat(HEADS // HEADS_KV, 1)
        v = v.reshape(n, HEADS_KV, DIM).repeat(HEADS // HEADS_KV, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        seen = (behind >= 0) & ((behind < WINDOW) | (kind == "full_attention"))
        y = np.einsum("hqk,khd->qhd", softmax(np.where(seen, scores, -np.inf)), v)
        gate = 1 / (1 + np.exp(-h @ w[f"{at}.self_attn.g_proj.weight"].T))
        x = x + (y * gate[..., None]).reshape(n, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = rms(x, w[f"{at}.post_attention_layernorm.weight"])
        up = h @ w[f"{at}.mlp.up_proj.weight"].T
        x = (
            x
            + (gelu(h @ w[f"{at}.mlp.gate_proj.weight"].T) * up) @ w[f"{at}.mlp.down_proj.weight"].T
        )
    return np.asarray(rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    folder = tmp_path_factory.mktemp("spark") / "hf"
    return folder, write_random(folder, shapes(), CONFIG, 5)


def split(source: Path, path: Path) -> Path:
    """The same file with a matrix for each of queries, keys and values."""
    with open_gguf(source) as gguf:
        writer = GGUFWriter(path)
        for key, value in gguf.metadata.items():
            writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            assert tensor.format is not None
            rows = tensor.dequantize().reshape(tensor.shape)
            parts = {name: rows}
            if "attn_qkv" in name:
                ends = [N_Q, N_Q + N_KV]
                names = (name.replace("qkv", one) for one in "qkv")
                parts = dict(zip(names, np.split(rows, ends), strict=True))
            for own, part in parts.items():
                writer.add_tensor(own, part.shape, tensor.format, tensor.format.quantize_rows(part))
        writer.write()
    return path


def test_agrees_with_its_formulae(weights: tuple[Path, dict[str, Array]], tmp_path: Path) -> None:
    folder, tensors = weights
    ids = prompt()
    truth = exact(tensors, ids)
    scale = np.abs(truth).max()
    made = convert(folder, tmp_path / "made.gguf")
    found: dict[int, Array] = {}
    for path in (folder, made, split(made, tmp_path / "split.gguf")):
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as model:
                assert model.config.ignored == ()
                allowed = rounding(model.config)
                twin = forward(model.gguf, model.config, ids)
                assert np.abs(twin - truth).max() < 1e-9 * scale
                ways = [model.logits(ids)]
                for chunk in (1, 3, 64):
                    model.engine.cache.forget()
                    session = model.session()
                    parts = [ids[at : at + chunk] for at in range(0, len(ids), chunk)]
                    ways.append(np.concatenate([session.logits(part) for part in parts]))
                    session.close()
            for way, logits in enumerate(ways):
                assert np.abs(logits - truth).max() <= 2 * allowed * scale, (path, way)
                if path is made:
                    assert np.array_equal(found.setdefault(way, logits), logits), (threads, way)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("hidden_act", "silu", UnsupportedError),
        ("gate_attn_act_mode", "tanh", UnsupportedError),
        ("headwise_attn_output_gate", False, UnsupportedError),
        ("layer_types", KINDS[:2], FileError),
    ],
)
def test_what_its_folders_may_not_say(key: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=key):
        read_config(CONFIG | {key: value}, Path("config.json"))

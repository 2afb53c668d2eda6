"""Nanbeige 4.2, whose layers run several times. transformers does not have it: against the formulae
of its published graph in float64 (llama.cpp's ``nanbeige.cpp``), from a folder and converted.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import softmax, write_random
from tests.convert.test_hf import convert, prompt
from tests.reference import forward
from tests.tiny import rounding, write_model
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.active_parameters import active
from treadle.models.graphs import GRAPHS
from treadle.models.load import load_config
from treadle.models.stages import staged

N_LAYER = 2
WIDTH = 64
N_FF = 96
HEADS = 4
HEADS_KV = 2
DIM = 16
N_VOCAB = 320
EPS = float(np.float32(1e-5))
CONFIG: dict[str, Any] = {
    "model_type": "nanbeige",
    "architectures": ["NanbeigeForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": N_FF,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS_KV,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "num_loops": 3,
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
            f"{at}.self_attn.q_proj.weight": (HEADS * DIM, WIDTH),
            f"{at}.self_attn.k_proj.weight": (HEADS_KV * DIM, WIDTH),
            f"{at}.self_attn.v_proj.weight": (HEADS_KV * DIM, WIDTH),
            f"{at}.self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
            f"{at}.post_attention_layernorm.weight": (WIDTH,),
            f"{at}.mlp.gate_proj.weight": (N_FF, WIDTH),
            f"{at}.mlp.up_proj.weight": (N_FF, WIDTH),
            f"{at}.mlp.down_proj.weight": (WIDTH, N_FF),
        }
    return made


def rms(x: Array, weight: Array) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight)


def turned(x: Array) -> Array:
    """Each head's dims, by halves: [tokens, heads, dims]."""
    angles = np.arange(len(x))[:, None] * 1e4 ** (-np.arange(0, DIM, 2) / DIM)
    cos, sin = (f(angles)[:, None] for f in (np.cos, np.sin))
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def exact(weights: dict[str, Array], ids: list[int], n_loops: int, norm: bool) -> Array:
    """Logits, float64 [n_tokens, n_vocab]."""
    w = {name: rows.astype(np.float64) for name, rows in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    n = len(ids)
    future = np.triu(np.ones((n, n), bool), 1)
    for i in range(n_loops * N_LAYER):
        if norm and i and i % N_LAYER == 0:
            x = rms(x, w["model.norm.weight"])
        at = f"model.layers.{i % N_LAYER}"
        h = rms(x, w[f"{at}.input_layernorm.weight"])
        q, k, v = (h @ w[f"{at}.self_attn.{one}_proj.weight"].T for one in "qkv")
        q = turned(q.reshape(n, HEADS, DIM))
        k = turned(k.reshape(n, HEADS_KV, DIM)).repeat(HEADS // HEADS_KV, 1)
        v = v.reshape(n, HEADS_KV, DIM).repeat(HEADS // HEADS_KV, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        y = np.einsum("hqk,khd->qhd", softmax(np.where(future, -np.inf, scores)), v)
        x = x + y.reshape(n, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = rms(x, w[f"{at}.post_attention_layernorm.weight"])
        gate, up = (h @ w[f"{at}.mlp.{one}_proj.weight"].T for one in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    return np.asarray(rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T)


@pytest.mark.parametrize(("n_loops", "skips"), [(3, False), (2, True), (1, False)])
def test_agrees_with_its_formulae(n_loops: int, skips: bool, tmp_path: Path) -> None:
    config = CONFIG | {"num_loops": n_loops, "skip_loop_final_norm": skips}
    tensors = write_random(tmp_path / "hf", shapes(), config, 5)
    ids = prompt()
    truth = exact(tensors, ids, n_loops, not skips)
    scale = np.abs(truth).max()
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    found: dict[int, Array] = {}
    for path in (tmp_path / "hf", made):
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as model:
                assert model.config.ignored == ()
                assert model.config.n_layer == n_loops * N_LAYER
                assert sum(len(pool.layers) for pool in model.engine.cache.pools) == (
                    n_loops * N_LAYER
                )
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


def test_its_sizes(tmp_path: Path) -> None:
    """Parameters count once, bytes that a token reads in every loop; it has no stages."""
    write_model(tmp_path / "model.gguf", "nanbeige")
    with open_gguf(tmp_path / "model.gguf") as gguf:
        config = load_config(gguf)
        assert (config.n_loops, config.loop_norm, config.n_layer) == (2, True, 6)
        layers = sum(t.n_bytes for name, t in gguf.tensors.items() if name.startswith("blk."))
        others = sum(t.n_bytes for name, t in gguf.tensors.items() if not name.startswith("blk."))
        found = active(gguf, config)
        assert found.n_bytes == 2 * layers + others
        assert 4 * found.n_parameters == layers + others
        assert GRAPHS["nanbeige"].outputs.keys() >= {"logits", "embedding"}
        with pytest.raises(UnsupportedError, match="cannot be split into stages"):
            staged(config, range(3))
        gguf.metadata = {**gguf.metadata, "nanbeige.num_loops": 0}
        with pytest.raises(FileError, match="num_loops"):
            load_config(gguf)

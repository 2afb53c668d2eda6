"""Talkie, which transformers does not have: against its formulae in float64 (llama.cpp's
``talkie.cpp`` and converter), from a folder and converted.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.random_folder import softmax, write_random
from tests.convert.test_hf import convert, worst
from tests.models.test_arch_truth import check_truth, ids_of
from tests.models.ways import PORTABLE, check_instruction_set, check_returns
from tests.reference import forward
from tests.tiny import rounding
from treadle.errors import FileError
from treadle.files.gguf import open_gguf

N_LAYER = 3
WIDTH = 64
N_FF = 128  # 8 / 3 of the width, to the next multiple of 128
HEADS = 4
DIM = 16
N_VOCAB = 320
EPS = 2.0**-23
CONFIG: dict[str, Any] = {
    "model_type": "talkie",
    "architectures": ["TalkieForCausalLM"],
    "hidden_size": WIDTH,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": HEADS,
    "head_dim": DIM,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
}
Array = np.ndarray


def shapes() -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {
        "model.embed.weight": (N_VOCAB, WIDTH),
        "lm_head": (N_VOCAB, WIDTH),
        "lm_head_gain.w_g": (1,),
    }
    for i in range(N_LAYER):
        at = f"model.blocks.{i}"
        made |= {f"{at}.attn.attn_{x}.weight": (WIDTH, WIDTH) for x in ("query", "key", "value")}
        made |= {f"{at}.{x}.a_g": (1,) for x in ("attn_gain", "mlp_gain", "embed_skip")}
        made |= {
            f"{at}.attn.attn_resid.weight": (WIDTH, WIDTH),
            f"{at}.attn.head_gain.head_g": (HEADS,),
            f"{at}.mlp.mlp_gate.weight": (N_FF, WIDTH),
            f"{at}.mlp.mlp_linear.weight": (N_FF, WIDTH),
            f"{at}.mlp.mlp_resid.weight": (WIDTH, N_FF),
        }
    return made


def write(folder: Path) -> dict[str, Array]:
    """Write a folder, with factors that are not near 0."""
    from safetensors.numpy import save_file

    tensors = write_random(folder, shapes(), CONFIG, 5)
    for name in tensors:
        if name.endswith(("_g", "head_g")):
            tensors[name] = np.float32(1.2) + tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return tensors


def exact(weights: dict[str, Array], ids: list[int]) -> Array:
    """Logits, float64 [n_tokens, n_vocab]."""
    w = {name: rows.astype(np.float64) for name, rows in weights.items()}
    n = len(ids)
    future = np.triu(np.ones((n, n), bool), 1)
    angles = np.arange(n)[:, None, None] * 1e6 ** (-np.arange(0, DIM, 2) / DIM)

    def rms(x: Array) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS))

    def turned(x: Array) -> Array:
        """The other way than elsewhere."""
        a, b = np.split(x, 2, -1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)

    x = embd = rms(w["model.embed.weight"][ids])
    for i in range(N_LAYER):
        at = f"model.blocks.{i}"
        h = rms(x)
        q, k, v = (
            (h @ w[f"{at}.attn.attn_{one}.weight"].T).reshape(n, HEADS, DIM)
            for one in ("query", "key", "value")
        )
        q = rms(turned(q)) * w[f"{at}.attn.head_gain.head_g"][:, None]
        k = rms(turned(k))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
        y = np.einsum("hqk,khd->qhd", softmax(np.where(future, -np.inf, scores)), v)
        y = y.reshape(n, -1) @ w[f"{at}.attn.attn_resid.weight"].T
        x = x + y * w[f"{at}.attn_gain.a_g"]
        h = rms(x)
        gate, up = (h @ w[f"{at}.mlp.mlp_{one}.weight"].T for one in ("gate", "linear"))
        y = (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.mlp_resid.weight"].T
        x = x + y * w[f"{at}.mlp_gain.a_g"] + embd * w[f"{at}.embed_skip.a_g"]
    return np.asarray(rms(x) @ w["lm_head"].T * w["lm_head_gain.w_g"])


def test_a_folder(tmp_path: Path) -> None:
    truth = exact(write(tmp_path / "hf"), ids_of())
    with treadle.load(tmp_path / "hf", threads=2, kv="f32") as model:
        twin = forward(model.gguf, model.config, ids_of())
        assert np.abs(twin - truth).max() < 1e-9 * np.abs(truth).max()
        assert worst(model.logits(ids_of()), truth) <= rounding(model.config)


@pytest.mark.slow
def test_in_every_way(tmp_path: Path) -> None:
    truth = exact(write(tmp_path / "hf"), ids_of())
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, truth)
    check_returns(made)
    with open_gguf(made) as file:
        assert file.tensors["blk.1.attn_q_norm.weight"].shape == (HEADS, 1)
        assert {"blk.0.attn_output.scale", "blk.0.ffn_down.scale"} < file.tensors.keys()
        assert "blk.0.layer_output_scale.weight" in file.tensors
        assert file.metadata["talkie.feed_forward_length"] == N_FF


@pytest.mark.slow
def test_on_another_instruction_set(tmp_path: Path) -> None:
    truth = exact(write(tmp_path / "hf"), ids_of())
    check_instruction_set(
        convert(tmp_path / "hf", tmp_path / "made.gguf"), ids_of(), truth, PORTABLE
    )


def test_what_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = write(tmp_path / "hf")
    for change, why in (
        ({"lm_head_gain.w_g": None}, "lm_head_gain.w_g: the tensor is missing"),
        ({"lm_head_gain.w_g": np.ones(2, np.float32)}, r"lm_head_gain.w_g: shape \[2\] in F32"),
    ):
        given = {name: rows for name, rows in (tensors | change).items() if rows is not None}
        save_file(given, tmp_path / "hf/model.safetensors")
        with pytest.raises(FileError, match=why):
            treadle.load(tmp_path / "hf")

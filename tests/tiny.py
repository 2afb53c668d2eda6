"""Small random models as GGUF files, of any architecture and format that treadle has a row for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.hf_tiny import N_VOCAB, byte_vocabulary
from treadle.files.gguf import GGUFWriter
from treadle.formats import by_name
from treadle.models.archs import ARCHS, LAYER_TENSORS, MODEL_TENSORS
from treadle.models.config import Config

SIZES = {
    "n_layer": 3,
    "n_embd": 64,
    "n_ff": 96,
    "n_head": 4,
    "n_head_kv": 2,
    "head_dim": 32,
    "n_vocab": N_VOCAB,
    "n_ctx": 4096,
    "window": 0,
    "tied": 1,  # the embeddings are the output matrix as well
}


def write_model(
    path: Path,
    arch: str = "llama",
    fmt: str = "F32",
    *,
    others: Mapping[str, tuple[int, ...]] | None = None,
    **sizes: int,
) -> None:
    """Norms and biases are F32, matrices ``fmt``; tensors that the architecture can lack, it lacks.
    ``others``: tensors of zeros that no decoder knows.

    Weights keep activations near 1 and logits apart, as those of ``tests/models/hf_tiny.py`` do.
    """
    size = SIZES | sizes
    writer = GGUFWriter(path)
    writer.add("general.architecture", arch)
    for key, value in keys(size).items():
        writer.add(f"{arch}.{key}", value)
    for key, value in byte_vocabulary().items():
        writer.add(f"tokenizer.ggml.{key}", value)
    dims = {
        "n_vocab": size["n_vocab"],
        "n_embd": size["n_embd"],
        "n_ff": size["n_ff"],
        "head_dim": size["head_dim"],
        "n_q": size["n_head"] * size["head_dim"],
        "n_k": size["n_head_kv"] * size["head_dim"],
        "n_v": size["n_head_kv"] * size["head_dim"],
        "n_attn": size["n_head"] * size["head_dim"],
    }
    names = [
        (row.name, row)
        for row in MODEL_TENSORS
        if not row.optional or (row.name == "output.weight" and not size["tied"])
    ]
    for i in range(size["n_layer"]):
        for row in LAYER_TENSORS:
            if not row.optional or row.name in ARCHS[arch].needs:
                names.append((f"blk.{i}.{row.name}", row))
    rng = np.random.default_rng(list(arch.encode()))
    for name, row in names:
        shape = tuple(dims[word] for word in row.shape)
        weights = by_name(fmt if len(shape) == 2 else "F32")
        writer.add_tensor(name, shape, weights, weights.quantize_rows(draw(rng, name, shape)))
    for name, shape in (others or {}).items():
        zeros = np.zeros(shape, np.float32)
        writer.add_tensor(name, shape, by_name("F32"), by_name("F32").quantize_rows(zeros))
    writer.write()


def keys(size: dict[str, int]) -> dict[str, Any]:
    """GGUF's keys, without the architecture's prefix."""
    made = {
        "vocab_size": size["n_vocab"],
        "context_length": size["n_ctx"],
        "embedding_length": size["n_embd"],
        "block_count": size["n_layer"],
        "feed_forward_length": size["n_ff"],
        "attention.head_count": size["n_head"],
        "attention.head_count_kv": size["n_head_kv"],
        "attention.key_length": size["head_dim"],
        "attention.value_length": size["head_dim"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if size["window"]:
        made["attention.sliding_window"] = size["window"]
    return made


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape)
    if "norm" in name:
        x = 1.0 + 0.25 * x
    elif name.endswith("bias"):
        x = 0.5 * x
    elif "embd" in name:
        x = 0.35 * x
    elif name == "output.weight":
        x = 3.0 * x / math.sqrt(shape[1])
    else:
        x = 1.4 * x / math.sqrt(shape[1])
    return x.astype(np.float32)


def rounding(config: Config) -> float:
    """How far f32 logits may be from exact ones, as a share of the largest of them.

    With n roundings of 2**-24 on the way from a token to its logits the error is at most about
    4 sqrt(n) 2**-24 of the terms (Higham and Mary, 2019: but for one case in thousands).
    """
    per_layer = 2 * config.n_embd + config.n_head * config.head_dim + config.n_ff
    n = config.n_layer * per_layer + config.n_embd
    return 4 * math.sqrt(n) * 2.0**-24

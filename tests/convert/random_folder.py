"""Hugging Face folders of random weights, of models that transformers does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def write_random(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], seed: int
) -> Tensors:
    """Float32 weights that keep states near 1, and attention uneven; what was written."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        rows = rng.standard_normal(shape)
        if len(shape) == 1:
            is_norm = "norm" in name.lower() or "_ln" in name
            rows = 0.3 * rows + (is_norm and name.endswith("weight"))
        elif "embeddings" not in name:
            rows *= 1.4 / math.sqrt(shape[1])
        made[name] = rows.astype(np.float32)
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return made


class Formulae:
    """What models' formulae are made of, in float64, by the names of a checkpoint's tensors."""

    def __init__(self, tensors: Tensors, eps: float) -> None:
        self.w = {name: rows.astype(np.float64) for name, rows in tensors.items()}
        self.eps = eps

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """LayerNorm."""
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps)
        return np.asarray(x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"])

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0))


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(p / p.sum(-1, keepdims=True))


def gelu(x: np.ndarray) -> np.ndarray:
    """By the error function."""
    return np.asarray(x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2)

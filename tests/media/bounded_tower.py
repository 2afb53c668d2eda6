"""A tiny tower of Gemma 4 E2B's and E4B's kind: its projector file, as llama.cpp's converter names
it, and the same in numpy, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from treadle.files.gguf import GGUFWriter

WIDTH = 64
N_FF = 96
N_HEAD = 2
N_LAYER = 2
N_OUT = 64
SIDE = 8  # pixels of a patch's side
N_PLACES = 32
DIMS = WIDTH // N_HEAD
EPS = 1e-6
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
ENDS = ("input_min", "input_max", "output_min", "output_max")
INF = np.inf

Bounds = Mapping[tuple[int, str], tuple[float, float, float, float]]


def bounds_of_all() -> dict[tuple[int, str], tuple[float, float, float, float]]:
    """The bounds of each layer's matrices: the least and the largest input, and those of products;
    infinite where it has none. All are values of bfloat16.

    Queries and keys read the same clamped rows, values others. One matrix has no bounds at all.
    """
    made = {}
    for layer in range(N_LAYER):
        for i, name in enumerate(MATRICES):
            less = 0.0625 * i + 0.25 * layer
            made[layer, name] = (-0.875 - less, 1.0 + less, -0.75 - less, 0.625 + less)
        made[layer, "attn_k"] = (*made[layer, "attn_q"][:2], *made[layer, "attn_k"][2:])
    made[1, "attn_out"] = (-INF, INF, -INF, INF)
    made[1, "ffn_down"] = (-INF, 0.75, -INF, INF)
    made[0, "ffn_gate"] = (-INF, INF, -0.5, INF)
    return made


def weights_of(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by their names in the file, f32."""
    rng = np.random.default_rng(seed)

    def matrix(n: int, *shape: int) -> np.ndarray:
        return rng.standard_normal((n, *shape)).astype(np.float32) * np.float32(
            1.1 / np.prod(shape) ** 0.5
        )

    def norm(n: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    made = {
        "v.patch_embd.weight": matrix(WIDTH, 3, SIDE, SIDE),
        "v.position_embd.weight": 0.5 * rng.standard_normal((2, N_PLACES, WIDTH)),
        "mm.input_projection.weight": matrix(N_OUT, WIDTH),
    }
    heights = {"ffn_gate": N_FF, "ffn_up": N_FF}
    for i in range(N_LAYER):
        for name in MATRICES:
            width = N_FF if name == "ffn_down" else WIDTH
            made[f"v.blk.{i}.{name}.weight"] = matrix(heights.get(name, WIDTH), width)
        for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
            made[f"v.blk.{i}.{name}.weight"] = norm(WIDTH)
        for name in ("attn_q_norm", "attn_k_norm"):
            made[f"v.blk.{i}.{name}.weight"] = norm(DIMS)
    return {name: values.astype(np.float32) for name, values in made.items()}


def write_bounded_tower(path: Path, bounds: Bounds, *, infinite: bool = False) -> Path:
    """Write the projector file. ``infinite``: with the infinite bounds, which mean none."""
    writer = GGUFWriter(path)
    keys = {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": "gemma4v",
        "clip.vision.embedding_length": WIDTH,
        "clip.vision.feed_forward_length": N_FF,
        "clip.vision.block_count": N_LAYER,
        "clip.vision.attention.head_count": N_HEAD,
        "clip.vision.attention.layer_norm_epsilon": EPS,
        "clip.vision.projection_dim": N_OUT,
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": SIDE,
        "clip.vision.image_mean": np.zeros(3, np.float32),
        "clip.vision.image_std": np.ones(3, np.float32),
    }
    for key, value in keys.items():
        writer.add(key, value)
    tensors = weights_of()
    for (layer, name), values in bounds.items():
        for end, value in zip(ENDS, values, strict=True):
            if infinite or np.isfinite(value):
                tensors[f"v.blk.{layer}.{name}.{end}"] = np.array([value], np.float32)
    for name, data in tensors.items():
        writer.add_tensor(name, data.shape, "F32", data)
    writer.write()
    return path


def rows_by_numpy(patches: np.ndarray, grid: tuple[int, int], bounds: Bounds) -> np.ndarray:
    """The media rows of a picture's patches, in float64."""
    w = {name: values.astype(np.float64) for name, values in weights_of().items()}
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    table = w["v.position_embd.weight"]
    x = patches.astype(np.float64) @ w["v.patch_embd.weight"].reshape(WIDTH, -1).T
    x = x + table[0][column] + table[1][row]

    def product(layer: int, name: str, h: np.ndarray) -> np.ndarray:
        low, high, least, most = bounds.get((layer, name), (-INF, INF, -INF, INF))
        y = np.clip(h, low, high) @ w[f"v.blk.{layer}.{name}.weight"].T
        return np.asarray(np.clip(y, least, most))

    for i in range(N_LAYER):
        blk = f"v.blk.{i}"
        h = rms(x, w[f"{blk}.ln1.weight"])
        q, k, v = (product(i, f"attn_{name}", h).reshape(len(h), N_HEAD, DIMS) for name in "qkv")
        q = turned(rms(q, w[f"{blk}.attn_q_norm.weight"]), column, row)
        k = turned(rms(k, w[f"{blk}.attn_k_norm.weight"]), column, row)
        scores = np.einsum("nhd,mhd->hnm", q, k)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hnm,mhd->nhd", shares, rms(v)).reshape(len(h), WIDTH)
        x = x + rms(product(i, "attn_out", mixed), w[f"{blk}.attn_post_norm.weight"])
        h = rms(x, w[f"{blk}.ln2.weight"])
        h = gelu(product(i, "ffn_gate", h)) * product(i, "ffn_up", h)
        x = x + rms(product(i, "ffn_down", h), w[f"{blk}.ffn_post_norm.weight"])
    means = x.reshape(grid[0] // 3, 3, grid[1] // 3, 3, WIDTH).mean((1, 3)).reshape(-1, WIDTH)
    return np.asarray(rms(means * WIDTH**0.5) @ w["mm.input_projection.weight"].T)


def rms(x: np.ndarray, weight: np.ndarray | float = 1.0) -> np.ndarray:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight)


def gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))))


def turned(x: np.ndarray, column: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Heads whose first half is rotated by the column, and whose second by the row."""
    n = DIMS // 4  # pairs of a half
    made = []
    for i, place in enumerate((column, row)):
        angle = place[:, None, None] * 100.0 ** (-np.arange(n) / n)
        first = x[..., 2 * i * n : (2 * i + 1) * n]
        second = x[..., (2 * i + 1) * n : 2 * (i + 1) * n]
        made += [first * np.cos(angle) - second * np.sin(angle)]
        made += [second * np.cos(angle) + first * np.sin(angle)]
    return np.concatenate(made, -1)

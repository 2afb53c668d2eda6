"""Checkpoints as Meta ships them, made of a GGUF's tensors: sharded as its parallel layers are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from treadle.files.gguf import GGUF

MODEL = {"token_embd": "tok_embeddings", "output_norm": "norm", "output": "output"}
LAYER = {
    "attn_norm": "attention_norm",
    "attn_q": "attention.wq",
    "attn_k": "attention.wk",
    "attn_v": "attention.wv",
    "attn_output": "attention.wo",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
BY_COLUMNS = ("attention.wo", "feed_forward.w2", "tok_embeddings")


def meta_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in MODEL:
        return f"{MODEL[stem]}.weight"
    _, layer, rest = stem.split(".")
    return f"layers.{layer}.{LAYER[rest]}.weight"


def weights_of(gguf: GGUF) -> dict[str, np.ndarray]:
    """float32, by Meta's names."""
    return {meta_name(name): t.dequantize() for name, t in gguf.tensors.items()}


def shard_of(name: str, x: np.ndarray, rank: int, n: int, *, llama3: bool) -> np.ndarray:
    if x.ndim == 1 or n == 1:
        return x
    stem = name.removesuffix(".weight")
    columns = stem.endswith(BY_COLUMNS) and not (llama3 and stem == "tok_embeddings")
    return np.split(x, n, axis=1 if columns else 0)[rank]


def write_meta(
    folder: Path,
    weights: dict[str, np.ndarray],
    params: dict[str, Any],
    n: int = 1,
    *,
    llama3: bool = False,
    dtype: str = "float32",
    **more: Any,
) -> Path:
    """params.json and ``n`` shards; ``more`` are tensors that every shard has besides."""
    import torch

    folder.mkdir(exist_ok=True)
    (folder / "params.json").write_text(json.dumps(params))
    for rank in range(n):
        state = {
            name: torch.tensor(shard_of(name, x, rank, n, llama3=llama3).copy()).to(
                getattr(torch, dtype)
            )
            for name, x in weights.items()
        }
        state |= {name.replace("__", "."): torch.ones(2) for name in more}
        torch.save(state, folder / f"consolidated.{rank:02d}.pth")
    return folder


def params_of(gguf: GGUF, **more: Any) -> dict[str, Any]:
    meta: Any = gguf.metadata
    said = {
        "dim": meta["llama.embedding_length"],
        "n_layers": meta["llama.block_count"],
        "n_heads": meta["llama.attention.head_count"],
        "n_kv_heads": meta["llama.attention.head_count_kv"],
        "norm_eps": 1e-5,
        "multiple_of": 32,
        "vocab_size": -1,
    }
    return said | more

"""Write a GGUF of random weights in the real shape of a published model, to measure speed with.

python bench/random_model.py tinyllama Q8_0 tinyllama-Q8_0.gguf
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from treadle.files.gguf import GGUFWriter, ValueType
from treadle.formats import Format, by_name
from treadle.models.archs import ARCHS
from treadle.models.graphs import GRAPHS
from treadle.models.keys import ArchMetadata
from treadle.models.structure import TensorRow

STRIP = 1 << 20  # values made at once
QWEN35_STATES = {  # of its 4B and of its 35B-A3B
    "full_attention_interval": 4,
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 4096,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 32,
    "ssm.group_count": 16,
}


@dataclass(frozen=True)
class Shape:
    """A published model's sizes, and the metadata that its architecture wants besides."""

    arch: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    tied: bool
    extra: tuple[tuple[str, Any], ...] = ()


SHAPES = {
    "tinyllama": Shape("llama", 22, 2048, 5632, 32, 4, 64, 32000, 2048, False),
    "llama3-8b": Shape(
        "llama", 32, 4096, 14336, 32, 8, 128, 128256, 8192, False, (("rope.freq_base", 5e5),)
    ),
    "gemma3-1b": Shape(
        "gemma3",
        26,
        1152,
        6912,
        4,
        1,
        256,
        262144,
        32768,
        True,
        (("attention.sliding_window", 512), ("rope.freq_base", 1000000.0)),
    ),
    "qwen3-0.6b": Shape(
        "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, True, (("rope.freq_base", 1000000.0),)
    ),
}


@lru_cache(maxsize=8)
def quantised_strip(name: str, k: int) -> np.ndarray:
    """Rows of ``k`` normal weights of deviation 1/sqrt(k), as bytes."""
    rng = np.random.default_rng(k)
    base = rng.standard_normal((max(1, STRIP // k), k), np.float32) * np.float32(k**-0.5)
    return by_name(name).quantize_rows(base)


def tensors_of(
    arch: str, keys: Mapping[str, Any], path: Path
) -> Iterator[tuple[TensorRow, dict[str, tuple[int, ...]]]]:
    """Each tensor that the architecture's graph may have with these keys, and its places' shapes;
    ``path`` is for messages.
    """
    row = ARCHS[arch]
    embd = SimpleNamespace(shape=(keys["vocab_size"], keys["embedding_length"]))
    metadata = {f"{arch}.{key}": value for key, value in keys.items()}
    file: Any = SimpleNamespace(path=path, metadata=metadata, tensors={"token_embd.weight": embd})
    graph = GRAPHS[row.graph]
    yield from graph.tensors(graph.read(ArchMetadata(file, arch, row.keys), row))


def random_rows(fmt: Format, m: int, k: int, seed: int) -> np.ndarray:
    """``m`` rows, in strips: one strip is quantised for all tensors, its rows shuffled for each."""
    rng = np.random.default_rng(seed)
    data = quantised_strip(fmt.name, k)
    strips = (rng.permutation(len(data)) for _ in range(0, m, len(data)))
    rows: np.ndarray = data[np.concatenate(list(strips))[:m]]
    return rows


def write(shape: Shape, fmt: Format, path: str) -> None:
    """Write the file; matrices in ``fmt``, norms in F32."""
    w = GGUFWriter(path)
    key = shape.arch
    w.add("general.architecture", key)
    w.add("general.name", f"random weights, {fmt.name}")
    for name, value in (
        ("block_count", shape.n_layer),
        ("context_length", max(shape.n_ctx, 40960)),
        ("embedding_length", shape.n_embd),
        ("feed_forward_length", shape.n_ff),
        ("attention.head_count", shape.n_head),
        ("attention.head_count_kv", shape.n_head_kv),
        ("attention.key_length", shape.head_dim),
        ("attention.value_length", shape.head_dim),
        ("attention.layer_norm_rms_epsilon", 1e-5),
        ("rope.dimension_count", shape.head_dim),
        *shape.extra,
    ):
        w.add(f"{key}.{name}", value)
    w.add("tokenizer.ggml.model", "llama")
    special = ["<unk>", "<s>", "</s>"]
    byte = [f"<0x{b:02X}>" for b in range(256)]
    words = (
        special + byte + [f"\u2581w{i}" for i in range(shape.n_vocab - len(special) - len(byte))]
    )
    kinds = [2, 3, 3] + [6] * 256 + [1] * (shape.n_vocab - 259)
    w.add("tokenizer.ggml.tokens", words)
    w.add("tokenizer.ggml.scores", np.arange(0, -shape.n_vocab, -1, dtype=np.float32))
    w.add("tokenizer.ggml.token_type", kinds, ValueType.INT32)
    w.add("tokenizer.ggml.bos_token_id", 1)
    w.add("tokenizer.ggml.eos_token_id", 2)
    n_q = shape.n_head * shape.head_dim
    n_kv = shape.n_head_kv * shape.head_dim
    seed = 0

    def matrix(name: str, m: int, k: int) -> None:
        nonlocal seed
        seed += 1
        w.add_tensor(name, (m, k), fmt, lambda s=seed: random_rows(fmt, m, k, s))

    def norm(name: str, n: int) -> None:
        w.add_tensor(name, (n,), "F32", np.ones(n, np.float32))

    matrix("token_embd.weight", shape.n_vocab, shape.n_embd)
    for i in range(shape.n_layer):
        blk = f"blk.{i}."
        norm(f"{blk}attn_norm.weight", shape.n_embd)
        matrix(f"{blk}attn_q.weight", n_q, shape.n_embd)
        matrix(f"{blk}attn_k.weight", n_kv, shape.n_embd)
        matrix(f"{blk}attn_v.weight", n_kv, shape.n_embd)
        matrix(f"{blk}attn_output.weight", shape.n_embd, n_q)
        norm(f"{blk}ffn_norm.weight", shape.n_embd)
        matrix(f"{blk}ffn_gate.weight", shape.n_ff, shape.n_embd)
        matrix(f"{blk}ffn_up.weight", shape.n_ff, shape.n_embd)
        matrix(f"{blk}ffn_down.weight", shape.n_embd, shape.n_ff)
        if shape.arch in ("gemma3", "qwen3", "qwen3vl"):
            norm(f"{blk}attn_q_norm.weight", shape.head_dim)
            norm(f"{blk}attn_k_norm.weight", shape.head_dim)
        if shape.arch == "gemma3":
            norm(f"{blk}post_attention_norm.weight", shape.n_embd)
            norm(f"{blk}post_ffw_norm.weight", shape.n_embd)
    norm("output_norm.weight", shape.n_embd)
    if not shape.tied:
        matrix("output.weight", shape.n_vocab, shape.n_embd)
    w.write()
    # What was just written lies in the page cache in small pieces; what is read from the disk lies
    # there as it will after the next boot. Let the next reader read it.
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", help="such as Q8_0")
    parser.add_argument("path")
    given = parser.parse_args()
    write(SHAPES[given.shape], by_name(given.format), given.path)

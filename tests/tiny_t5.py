"""Small random T5s as GGUF files, in the names and keys of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.models.hf_tiny import N_VOCAB
from tests.tiny import draw
from treadle.files.gguf import GGUFWriter
from treadle.formats import by_name

N_EMBD = 64
N_FF = 96
N_HEAD = 4
HEAD_DIM = 32
N_INNER = N_HEAD * HEAD_DIM
N_LAYER = 3
N_DECODER_LAYER = 2
N_BUCKETS = 32
PAD, END, UNKNOWN = 0, 1, 2
VARIANTS: dict[str, dict[str, bool]] = {
    "t5": {},
    "flan": {"gated": True, "tied": False},
    "umt5": {"gated": True, "tied": False, "own": True},
}
KEYS: dict[str, Any] = {
    "context_length": 512,
    "embedding_length": N_EMBD,
    "feed_forward_length": N_FF,
    "block_count": N_LAYER,
    "decoder_block_count": N_DECODER_LAYER,
    "attention.head_count": N_HEAD,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.layer_norm_epsilon": 1e-6,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.relative_buckets_count": N_BUCKETS,
    "decoder_start_token_id": PAD,
}


def vocabulary() -> dict[str, Any]:
    """Pieces as T5's: single letters, and some words, the rest letters of other scripts."""
    words = ["▁", "▁the", "▁cat", "▁sat", "▁on", "ing", *"abcdefghijklmnopqrstuvwxyz.:<>"]
    pieces = ["<pad>", "</s>", "<unk>", *words]
    pieces += [f"▁{chr(0x3041 + i)}" for i in range(N_VOCAB - len(pieces))]
    return {
        "model": "t5",
        "pre": "default",
        "tokens": pieces,
        "scores": [0.0] * 3 + [-float(i) for i in range(1, N_VOCAB - 2)],
        "token_type": [3, 3, 2] + [1] * (N_VOCAB - 3),
        "eos_token_id": END,
        "unknown_token_id": UNKNOWN,
        "padding_token_id": PAD,
        "add_bos_token": False,
        "add_eos_token": True,
    }


def shapes(
    *, gated: bool = False, tied: bool = True, own: bool = False
) -> dict[str, tuple[int, ...]]:
    """The tensors of a file. ``own``: each layer has biases by distance of its own."""
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_VOCAB, N_EMBD)}
    if not tied:
        found["output.weight"] = (N_VOCAB, N_EMBD)
    for side, n_layer in (("enc", N_LAYER), ("dec", N_DECODER_LAYER)):
        found[f"{side}.output_norm.weight"] = (N_EMBD,)
        for i in range(n_layer):
            at = f"{side}.blk.{i}"
            for attention in ("attn", "cross_attn") if side == "dec" else ("attn",):
                found[f"{at}.{attention}_norm.weight"] = (N_EMBD,)
                found |= {f"{at}.{attention}_{x}.weight": (N_INNER, N_EMBD) for x in "qkv"}
                found[f"{at}.{attention}_o.weight"] = (N_EMBD, N_INNER)
            if not i or own:
                found[f"{at}.attn_rel_b.weight"] = (N_BUCKETS, N_HEAD)
            found[f"{at}.ffn_norm.weight"] = (N_EMBD,)
            found |= {f"{at}.ffn_gate.weight": (N_FF, N_EMBD)} if gated else {}
            found[f"{at}.ffn_up.weight"] = (N_FF, N_EMBD)
            found[f"{at}.ffn_down.weight"] = (N_EMBD, N_FF)
    return found


def write_t5(
    path: Path,
    variant: str = "t5",
    fmt: str = "F32",
    *,
    keys: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    beside: Mapping[str, tuple[int, ...]] | None = None,
    words: bool = True,
) -> Path:
    """Write a file; return its path. ``keys`` replace or add some, None leaves one out; tensors
    that are named ``without`` are left out, those ``beside`` are added; ``words``: it has a
    vocabulary.
    """
    writer = GGUFWriter(path)
    writer.add("general.architecture", "t5")
    for key, value in {**KEYS, **(keys or {})}.items():
        if value is not None:
            writer.add(f"t5.{key}", value)
    for key, value in vocabulary().items() if words else ():
        writer.add(f"tokenizer.ggml.{key}", value)
    rng = np.random.default_rng(list(variant.encode()))
    for name, shape in {**shapes(**VARIANTS[variant]), **(beside or {})}.items():
        values = draw(rng, name, shape)
        if name.endswith("attn_q.weight"):
            values *= np.float32(0.4)  # scores are not divided by the root of a head's width
        if name in without:
            continue
        kind = by_name(fmt if len(shape) == 2 and "rel_b" not in name else "F32")
        writer.add_tensor(name, shape, kind, kind.quantize_rows(values))
    writer.write()
    return path

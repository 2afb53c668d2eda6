"""The trained demo model as GGUF and back, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from demo_data import BOS, EOS, encode_document, id_of
from demo_model import MATRICES, NORM_EPS, ROPE_BASE, Size, Weights, forward, rope_table
from tokenizers import Tokenizer
from torch import Tensor

from treadle.files.gguf import GGUF, GGUFWriter, open_gguf
from treadle.formats import by_name

# token types
NORMAL = 1
CONTROL = 3
MOSTLY_Q4_K_S = 14  # general.file_type


def export(
    path: Path, weights: Weights, size: Size, tokenizer: Tokenizer, facts: Mapping[str, str | float]
) -> None:
    """Write the model to path; facts become general.* keys.

    Matrices are in Q4_K (in Q4_0 where a row is no multiple of its blocks), norms in F32.
    """
    writer = GGUFWriter(path)
    writer.add("general.architecture", "llama")
    for key, value in facts.items():
        writer.add(f"general.{key}", value)
    writer.add("general.file_type", MOSTLY_Q4_K_S)
    writer.add("general.quantization_version", 2)
    _add_shape(writer, size)
    _add_tokenizer(writer, tokenizer)
    for name, rows in _flat(weights, size).items():
        fmt = by_name(_format_of(rows))
        writer.add_tensor(name, rows.shape, fmt, fmt.quantize_rows(rows))
    writer.write()


def _format_of(rows: npt.NDArray[np.float32]) -> str:
    if rows.ndim == 1:
        return "F32"
    return "Q4_0" if rows.shape[-1] % 256 else "Q4_K"


def _add_shape(writer: GGUFWriter, size: Size) -> None:
    writer.add("llama.vocab_size", size.n_vocab)
    writer.add("llama.context_length", size.n_ctx)
    writer.add("llama.embedding_length", size.n_embd)
    writer.add("llama.block_count", size.n_layer)
    writer.add("llama.feed_forward_length", size.n_ff)
    writer.add("llama.attention.head_count", size.n_head)
    writer.add("llama.attention.head_count_kv", size.n_head_kv)
    writer.add("llama.attention.layer_norm_rms_epsilon", NORM_EPS)
    writer.add("llama.rope.dimension_count", size.head_dim)
    writer.add("llama.rope.freq_base", ROPE_BASE)


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    control = {id_of(tokenizer, BOS), id_of(tokenizer, EOS)}
    writer.add("tokenizer.ggml.model", "gpt2")
    writer.add("tokenizer.ggml.pre", "gpt-2")
    writer.add("tokenizer.ggml.tokens", tokens)
    types = [CONTROL if id in control else NORMAL for id in range(len(tokens))]
    writer.add("tokenizer.ggml.token_type", types)
    writer.add("tokenizer.ggml.merges", merges_of(tokenizer))
    writer.add("tokenizer.ggml.bos_token_id", id_of(tokenizer, BOS))
    writer.add("tokenizer.ggml.eos_token_id", id_of(tokenizer, EOS))
    writer.add("tokenizer.ggml.add_bos_token", True)
    writer.add("tokenizer.ggml.add_eos_token", False)


def merges_of(tokenizer: Tokenizer) -> list[str]:
    """The merges of a BPE in their order, each as two pieces and a space."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _flat(weights: Weights, size: Size) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors under their GGUF names, q and k turned from rotated halves to rotated pairs."""
    out = {"token_embd.weight": weights["token_embd"], "output_norm.weight": weights["output_norm"]}
    for n in range(size.n_layer):
        for stem in ("attn_norm", "ffn_norm", *MATRICES):
            value = weights[stem][n]
            if stem in ("attn_q", "attn_k"):
                value = _reorder(value, (-1, 2, size.head_dim // 2, size.n_embd))
            out[f"blk.{n}.{stem}.weight"] = value
    return {name: value.numpy().astype(np.float32) for name, value in out.items()}


def _reorder(rows: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Swap the middle two of [heads, halves, pairs, columns], or of its inverse."""
    return rows.reshape(shape).transpose(1, 2).reshape(rows.shape).contiguous()


def import_weights(gguf: GGUF, size: Size) -> Weights:
    """The weights of an exported file, dequantised, as training has them."""

    def tensor(name: str) -> Tensor:
        return torch.from_numpy(gguf.tensors[f"{name}.weight"].dequantize().copy())

    weights = {stem: tensor(stem) for stem in ("token_embd", "output_norm")}
    for stem in ("attn_norm", "ffn_norm", *MATRICES):
        layers = [tensor(f"blk.{n}.{stem}") for n in range(size.n_layer)]
        if stem in ("attn_q", "attn_k"):
            back = (-1, size.head_dim // 2, 2, size.n_embd)
            layers = [_reorder(layer, back) for layer in layers]
        weights[stem] = torch.stack(layers)
    return weights


def read_back(path: Path, size: Size) -> Weights:
    """Return the exported weights, rounded as the file's format rounds."""
    with open_gguf(path) as gguf:
        return import_weights(gguf, size)


def complete(
    weights: Weights, size: Size, tokenizer: Tokenizer, prompt: str, n: int, temperature: float
) -> str:
    """The prompt's continuation by at most n tokens; greedy at temperature 0, else seed 1."""
    generator = torch.Generator().manual_seed(1)
    ids = encode_document(tokenizer, prompt)
    rope = rope_table(size, size.n_ctx)
    first = len(ids)
    while len(ids) < min(first + n, size.n_ctx):
        table = (rope[0][: len(ids)], rope[1][: len(ids)])
        tensor = torch.tensor([ids])
        with torch.no_grad():
            logits = forward(weights, size, tensor, table, None, torch.float32)[0, -1]
        if temperature == 0:
            id = int(logits.argmax())
        else:
            chances = torch.softmax(logits / temperature, dim=-1)
            id = int(torch.multinomial(chances, 1, generator=generator))
        if id == id_of(tokenizer, EOS):
            break
        ids.append(id)
    text: str = tokenizer.decode(ids[first:], skip_special_tokens=True)
    return text

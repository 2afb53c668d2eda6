"""Llama's tensor names, shards and hyper-parameters, as Meta's releases and the formats before GGUF
have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.sources.source import Bytes, SourceTensor
from treadle.errors import FileError
from treadle.files.tensor import TensorData
from treadle.models.graphs.decoder import LAYER_ROWS, MODEL_ROWS

EPS = {"llama1": 1e-6, "llama2": 1e-5}  # of the RMS norms
ROWS = 0
COLUMNS = 1
# Meta's stem -> GGUF's, and the dimension along which ranks split it.
MODEL = {
    "tok_embeddings": ("token_embd", COLUMNS),  # Llama 3: rows, seen from the shape
    "norm": ("output_norm", None),
    "output": ("output", ROWS),
}
LAYER = {
    "attention_norm": ("attn_norm", None),
    "attention.wq": ("attn_q", ROWS),
    "attention.wk": ("attn_k", ROWS),
    "attention.wv": ("attn_v", ROWS),
    "attention.wo": ("attn_output", COLUMNS),
    "ffn_norm": ("ffn_norm", None),
    "feed_forward.w1": ("ffn_gate", ROWS),
    "feed_forward.w2": ("ffn_down", COLUMNS),
    "feed_forward.w3": ("ffn_up", ROWS),
}
FREQS = re.compile(r"(layers\.\d+\.attention\.inner_attention\.)?rope\.freqs")  # can be computed


def gguf_name(name: str) -> tuple[str, int | None] | None:
    """Return GGUF's name for a tensor of Meta's, and the axis along which shards split it (None:
    each has a copy); None for unknown tensors.
    """
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"layers\.(0|[1-9]\d{0,3})\.(.+)", stem)
    row = LAYER.get(layer[2]) if layer else MODEL.get(stem)
    if row is None or kind != "weight":
        return None
    return (f"blk.{layer[1]}.{row[0]}.weight" if layer else f"{row[0]}.weight"), row[1]


def named_pieces(parts: Sequence[Any], odd: str) -> Iterator[tuple[str, int | None, list[Any]]]:
    """Yield GGUF's name of each tensor, its split axis, and its piece from every part.

    ``parts`` are files with ``tensors`` by name; ``odd`` is the message for a tensor that some part
    lacks. Raises FileError for that, and for unknown tensors.
    """
    first = parts[0]
    for part in parts:
        for name in sorted(part.tensors.keys() ^ first.tensors.keys()):
            lacks = part if name in first.tensors else first
            raise FileError(odd, path=lacks.path, where=name)
    for name, tensor in first.tensors.items():
        if FREQS.fullmatch(name):
            continue
        row = gguf_name(name)
        if row is None:
            raise tensor.error("surplus", "only the tensors of a llama model")
        yield *row, [part.tensors[name] for part in parts]


def join(
    name: str,
    pieces: Sequence[TensorData],
    axis: int | None,
    ggml_type: int,
    copies: Sequence[tuple[TensorData, TensorData]] = (),
) -> SourceTensor:
    """Return a source tensor in ``ggml_type`` that joins ``pieces`` along ``axis``; None: all are
    copies of the first.

    ``copies`` are pairs of tensors that must be equal, of which only the first is among the pieces;
    reading raises FileError if they differ.
    """
    first = pieces[0]
    shape = list(first.shape)
    if axis is None:
        pieces, copies = pieces[:1], [(first, other) for other in pieces[1:]]
    else:
        shape[axis] *= len(pieces)
    return SourceTensor(
        name,
        tuple(shape),
        ggml_type,
        lambda: _joined(pieces, axis, copies),
        f"{first.path}: {first.name}",
        (*pieces, *(copy for _, copy in copies)),
    )


def _joined(
    pieces: Sequence[TensorData], axis: int | None, copies: Sequence[tuple[TensorData, TensorData]]
) -> Bytes:
    """Return the pieces joined along ``axis``, uint8 [n_bytes]: a view if there is one piece, else
    one new array. Raises FileError if two tensors of a pair in ``copies`` differ.
    """
    for first, copy in copies:
        if not np.array_equal(first.data, copy.data):
            what = f"differs from {first.path.name}: these are not shards of the same checkpoint"
            raise copy.error(what, offset=copy.offset)
    if len(pieces) == 1:
        return pieces[0].data
    if axis == ROWS:
        return np.concatenate([piece.data for piece in pieces])
    n_rows = pieces[0].shape[0]
    return np.concatenate([p.data.reshape(n_rows, -1) for p in pieces], axis=1).reshape(-1)


def llama_keys(path: Path, **n: Any) -> dict[str, Any]:
    """Return GGUF's keys of a llama model from its sizes ``n``:
    ``n_vocab n_ctx n_embd n_layer n_ff n_head n_head_kv eps``, and optionally ``head_dim`` and
    ``rope_base``. The model is named after ``path``.
    """
    n_embd = n["n_embd"]
    n_head = n["n_head"]
    head_dim = n.get("head_dim", n_embd // n_head)
    keys = {
        "vocab_size": n["n_vocab"],
        "context_length": n["n_ctx"],
        "embedding_length": n_embd,
        "block_count": n["n_layer"],
        "feed_forward_length": n["n_ff"],
        "attention.head_count": n_head,
        "attention.head_count_kv": n["n_head_kv"],
        "attention.layer_norm_rms_epsilon": float(np.float32(n["eps"])),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(np.float32(n.get("rope_base", 10000.0))),
    }
    if head_dim * n_head != n_embd:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    made: dict[str, Any] = {"general.architecture": "llama", "general.name": path.stem}
    return made | {f"llama.{key}": value for key, value in keys.items()}


def widths(n: Mapping[str, int]) -> dict[str, int]:
    """Return sizes in weights by the words in ``models.structure.TensorRow.shape`` (``n_q``,
    ``n_k`` ..).

    ``n`` has ``n_vocab n_embd n_ff n_head n_head_kv`` and optionally ``head_dim``.
    """
    head_dim = n.get("head_dim", n["n_embd"] // n["n_head"])
    sizes = {"n_vocab": n["n_vocab"], "n_embd": n["n_embd"], "n_ff": n["n_ff"]}
    sizes |= {"q_norm": head_dim, "k_norm": head_dim, "n_rope_freq": head_dim // 2}
    n_q = n["n_head"] * head_dim
    n_kv = n["n_head_kv"] * head_dim
    return sizes | {"n_q": n_q, "n_attn": n_q, "n_k": n_kv, "n_v": n_kv}


def check_llama(path: Path, tensors: Mapping[str, SourceTensor], n: Mapping[str, int]) -> None:
    """Check the tensors against a llama of sizes ``n``, those of ``widths`` and ``n_layer``. Raises
    FileError, naming the tensor, for one that is missing, unknown or of another shape.
    """
    sizes = widths(n)
    n_layer = n["n_layer"]
    known = {row.name: row for row in MODEL_ROWS}
    known |= {f"blk.{i}.{row.name}": row for i in range(n_layer) for row in LAYER_ROWS}
    for name, row in known.items():
        tensor = tensors.get(name)
        if tensor is None:
            if not row.optional:
                raise FileError(
                    "is missing", path=path, where=name, expected="this tensor in every llama model"
                )
            continue
        shape = tuple(sizes[word] for word in row.shape)
        if tensor.shape != shape:
            what = f"{tensor.origin} has shape {list(tensor.shape)}"
            raise FileError(what, path=path, where=name, expected=str(list(shape)))
    for name, tensor in tensors.items():
        if name not in known:
            expected = f"only the tensors of a llama model with {n_layer} layers"
            raise FileError(f"{tensor.origin}: surplus", path=path, where=name, expected=expected)

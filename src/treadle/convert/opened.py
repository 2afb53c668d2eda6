"""A checkpoint that has been opened and understood: what the readers in this folder return."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.source import SourceTensor
from treadle.errors import FileError, UnsupportedError
from treadle.formats import FORMATS, by_name, type_of
from treadle.models.archs import LAYER_TENSORS, MODEL_TENSORS

F32 = by_name("F32")
EPS = {"llama1": 1e-6, "llama2": 1e-5}  # of the RMS norms


@dataclass(eq=False)
class Opened:
    """A ``Source``. ``notes`` are for the user: what the checkpoint does not say and was assumed.

    ``verbatim``: the source is a GGUF file already, whose keys and types are kept as they are.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]
    files: Sequence[Any] = ()  # each with close()
    notes: list[str] = field(default_factory=list)
    verbatim: bool = False

    def close(self) -> None:
        """Let go of the files."""
        self.tensors = {}
        for file in self.files:
            file.close()
        self.files = ()


def as_f32(tensor: SourceTensor) -> SourceTensor:
    """The same tensor in F32: what GGUF has vectors in, and every reader of it wants."""
    fmt = FORMATS.get(tensor.ggml_type)
    if fmt is None:
        kind = type_of(tensor.ggml_type)
        name = kind.name if kind else tensor.ggml_type
        raise UnsupportedError(f"{tensor.origin}: treadle cannot read {name} weights yet")
    if fmt is F32:
        return tensor

    def read() -> Any:
        return fmt.dequantize_rows(tensor.read()).reshape(-1).view(np.uint8)

    return SourceTensor(tensor.name, tensor.shape, F32.ggml_id, read, tensor.origin, tensor.ranges)


def f64_as_f32(read: Callable[[], Any]) -> Callable[[], Any]:
    """``read`` of float64 bytes as one of float32 bytes."""

    def narrowed() -> Any:
        with np.errstate(over="ignore"):
            return read().view("<f8").astype("<f4").view(np.uint8)

    return narrowed


def llama_keys(path: Path, **sizes: Any) -> dict[str, Any]:
    """GGUF's hyper-parameters of a llama, from the words that the old formats share."""
    n_embd, n_head = sizes["n_embd"], sizes["n_head"]
    head_dim = sizes.get("head_dim", n_embd // n_head)
    keys = {
        "vocab_size": sizes["n_vocab"],
        "context_length": sizes["n_ctx"],
        "embedding_length": n_embd,
        "block_count": sizes["n_layer"],
        "feed_forward_length": sizes["n_ff"],
        "attention.head_count": n_head,
        "attention.head_count_kv": sizes["n_head_kv"],
        "attention.layer_norm_rms_epsilon": float(np.float32(sizes["eps"])),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(np.float32(sizes.get("rope_base", 10000.0))),
    }
    if head_dim * n_head != n_embd:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    made: dict[str, Any] = {"general.architecture": "llama", "general.name": path.stem}
    return made | {f"llama.{key}": value for key, value in keys.items()}


def check_llama(
    path: Path, tensors: Mapping[str, SourceTensor], sizes: Mapping[str, int], n_layer: int
) -> None:
    """Hold the tensors against a llama of these sizes: none missing, none more, each in shape.

    ``sizes`` has the words of ``models.archs.TensorRow.shape``. Raises FileError with the name.
    """
    rows = [(row.name, row) for row in MODEL_TENSORS]
    rows += [(f"blk.{i}.{row.name}", row) for i in range(n_layer) for row in LAYER_TENSORS]
    known = dict(rows)
    for name, row in known.items():
        tensor = tensors.get(name)
        if tensor is None:
            if not row.optional:
                raise FileError("is missing", path=path, where=name, expected="it in every llama")
            continue
        shape = tuple(sizes[word] for word in row.shape)
        if tensor.shape != shape:
            raise FileError(
                f"{tensor.origin} has shape {list(tensor.shape)}",
                path=path,
                where=name,
                expected=str(list(shape)),
            )
    for name, tensor in tensors.items():
        if name not in known:
            expected = f"the tensors of a llama of {n_layer} layers and no more"
            raise FileError(f"{tensor.origin}: surplus", path=path, where=name, expected=expected)


def llama_sizes(**n: int) -> dict[str, int]:
    """The words of shapes, from ``n_vocab n_embd n_ff n_head n_head_kv`` and maybe ``head_dim``."""
    head_dim = n.get("head_dim", n["n_embd"] // n["n_head"])
    sizes = {"n_vocab": n["n_vocab"], "n_embd": n["n_embd"], "n_ff": n["n_ff"]}
    sizes |= {"head_dim": head_dim, "n_rope_freq": head_dim // 2}
    n_q, n_kv = n["n_head"] * head_dim, n["n_head_kv"] * head_dim
    return sizes | {"n_q": n_q, "n_attn": n_q, "n_k": n_kv, "n_v": n_kv}


def n_bytes_of(tensor: SourceTensor) -> int:
    """What ``read()`` must give."""
    kind = type_of(tensor.ggml_type)
    if kind is None or (tensor.shape and tensor.shape[-1] % kind.block):
        what = f"shape {list(tensor.shape)} in ggml type {tensor.ggml_type}"
        raise UnsupportedError(f"{tensor.origin}: {what}")
    return math.prod(tensor.shape) // kind.block * kind.n_bytes


def set_key(metadata: dict[str, Any], text: str) -> None:
    """Apply ``KEY=VALUE`` to GGUF metadata; the value keeps the type that the key has."""
    key, equals, word = text.partition("=")
    if not equals or not key:
        raise UnsupportedError(f"--set {text!r:.80}: not KEY=VALUE")
    metadata[key] = _value(key, metadata.get(key), word)


def _value(key: str, before: Any, word: str) -> Any:
    """``word`` as the type of the key's value until now; a new key's is told by the word."""
    try:
        value: Any = json.loads(word)
    except (ValueError, RecursionError):
        value = word
    if before is None:
        return value if isinstance(value, (bool, int, float)) else word
    if isinstance(before, str):
        return word
    kind, whole = type(before), isinstance(value, int) and not isinstance(value, bool)
    if isinstance(before, (bool, np.bool_)):
        name, fits = "true or false", isinstance(value, bool)
    elif isinstance(before, np.integer):
        least, most = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
        name, fits = f"{kind.__name__}, from {least} to {most}", whole and least <= value <= most
    elif isinstance(before, int):
        name, fits = "an integer", whole
    elif isinstance(before, (float, np.floating)):
        largest = float(np.finfo(kind).max)
        fits = whole or isinstance(value, float)
        name, fits = "a number", fits and not largest < abs(value) < math.inf
    else:
        name, fits = "an array, which --set cannot replace", False
    if not fits:
        raise UnsupportedError(f"--set {key}={word:.60}: the key is {name}")
    return kind(value)

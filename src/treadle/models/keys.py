"""ArchMetadata: typed, range-checked access to an architecture's own keys in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import FileError
from treadle.files.metadata import SIZE_MAX, MetadataReader

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

N_LAYER_MAX = 1024
ENC = "enc."  # begins the names of an encoder's tensors, in a file with a decoder too
N_DECODER_LAYER = "decoder_block_count"
NEXTN = "nextn_predict_layers"  # number of last layers that are for multi-token prediction


class ArchMetadata(MetadataReader):
    """Reader of an architecture's keys: those that begin with its name and a dot, a prefix that
    callers leave out. ``lacking``: (key, value) pairs, for keys that the file lacks.

    Methods raise FileError for a value of another type or out of range, and for a missing key
    without a default.
    """

    def __init__(self, gguf: GGUF, arch: str, lacking: Iterable[tuple[str, float]] = ()) -> None:
        self.gguf = gguf
        self.arch = arch
        prefix = f"{arch}."
        own = {k.removeprefix(prefix): v for k, v in gguf.metadata.items() if k.startswith(prefix)}
        super().__init__(own, gguf.path, dict(lacking), prefix, "the key is missing")

    def per_layer(
        self, key: str, n_layer: int, default: Sequence[int] | None = None, *, lo: int = 1
    ) -> tuple[int, ...]:
        """Return ``n_layer`` integers of at least ``lo``, stored as one number for all layers or
        one per layer; ``default``, of any length, if the file lacks the key.
        """
        value = self.get(key)
        if value is None and default is not None:
            return tuple(default)
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
            return (self.integer(key, lo=lo),) * n_layer
        if len(value) != n_layer:
            self.fail(key, f"has {len(value)} entries", f"{n_layer}, one per layer")
        sizes = list(value)
        if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in sizes):
            self.fail(key, "holds values that are not integers", "integers")
        for size in sizes:
            if not lo <= size <= SIZE_MAX:
                self.fail(key, f"holds {size}", f"integers from {lo} to {SIZE_MAX}")
        return tuple(int(size) for size in sizes)

    def integers(self, key: str, lo: int, hi: int) -> list[int]:
        """Return the array of integers under ``key``, each from ``lo`` to ``hi``."""
        found = self.get(key)
        if not hasattr(found, "__len__") or isinstance(found, (str, bytes)):
            self.fail(key, self.missing if found is None else f"is {found!r:.60}", "an array")
        values = list(found)
        for value in values:
            if (
                isinstance(value, bool)
                or not isinstance(value, Integral)
                or not lo <= int(value) <= hi
            ):
                self.fail(key, f"holds {value!r:.60}", f"integers from {lo} to {hi}")
        return [int(value) for value in values]

    def flags(self, key: str, n_layer: int, default: bool) -> tuple[bool, ...]:
        """Return the flags under ``key``, one for each of ``n_layer`` layers; all are ``default``
        if the file has no such key.
        """
        found = self.get(key)
        if found is None:
            return (default,) * n_layer
        if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
            self.fail(key, f"is {found!r:.60}", f"{n_layer} flags")
        if len(found) != n_layer or any(flag not in (0, 1) for flag in found):
            self.fail(key, f"has {len(found)} entries", f"{n_layer} flags")
        return tuple(bool(flag) for flag in found)

    def n_vocab(self, *, lent: bool = False) -> int:
        """Return the number of rows of the token embeddings, checked to equal the vocabulary's
        size. ``lent``: the file may lack embeddings (a drafter that uses another model's); then
        return the vocabulary's size.
        """
        embd = self.gguf.tensors.get("token_embd.weight")
        if embd is None and lent:
            listed = self.gguf.metadata.get("tokenizer.ggml.tokens")
            if isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed):
                return len(listed)
            return self.integer("vocab_size", lo=1, hi=SIZE_MAX)
        if embd is None or len(embd.shape) != 2 or not 1 <= embd.shape[0] <= SIZE_MAX:
            raise FileError(
                "is missing" if embd is None else f"has shape {list(embd.shape)}",
                path=self.gguf.path,
                where="token_embd.weight",
                expected="shape [n_vocab, n_embd]",
            )
        n_vocab = embd.shape[0]
        tokens = self.gguf.metadata.get("tokenizer.ggml.tokens")
        n_tokens = len(tokens) if isinstance(tokens, Sequence) else None
        if n_tokens is None:
            n_tokens = self.integer("vocab_size", n_vocab, lo=1, hi=SIZE_MAX)
        if n_tokens != n_vocab:
            raise FileError(
                f"has {n_vocab} rows",
                path=self.gguf.path,
                where="token_embd.weight",
                expected=f"{n_tokens}, the size of the vocabulary",
            )
        return n_vocab

    def n_rows(self, name: str) -> int:
        """Return the number of rows of the matrix ``name``; 0 if the file has no such matrix."""
        tensor = self.gguf.tensors.get(name)
        return tensor.shape[0] if tensor is not None and len(tensor.shape) == 2 else 0

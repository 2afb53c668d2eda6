"""whisper.cpp's files, ``ggml-*.bin``.

::

    "lmgg" n_vocab n_audio_ctx n_audio_state n_audio_head n_audio_layer
           n_text_ctx n_text_state n_text_head n_text_layer n_mels ftype: 11 x i32
    n_mels n_fft: 2 x i32, the mel filters f32 [n_mels, n_fft]
    n_tokens:i32, n_tokens x {length:u32 bytes}                       text tokens by id
    tensors to the end: n_dims length type: 3 x i32, dims:i32[n_dims], name, data
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from treadle.convert.whisper.file import (
    WhisperFile,
    WhisperSizes,
    maps_of,
    model_keys,
    vocabulary_keys,
)
from treadle.convert.whisper.names import GGML
from treadle.convert.whisper.vocabulary import letters, merges_of
from treadle.errors import FileError, UnsupportedError
from treadle.files.reader import FileReader
from treadle.files.tensor import Tensor
from treadle.formats import FORMATS, REMOVED, type_of

MAGIC = b"lmgg"
HEAD = (
    *("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"),
    *("n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels", "ftype"),
)
N_BINS = 201  # of a frame's spectrum
SIZE_MAX = 1 << 20
MAX_DIMS = 4
HEAD_BYTES = 4 * (1 + len(HEAD) + 2)


def is_whisper_ggml(head: bytes) -> bool:
    """Return whether ``head``, a file's first bytes, is whisper.cpp's. llama's old files have the
    same magic, but no mel filters.
    """
    if len(head) < HEAD_BYTES or not head.startswith(MAGIC):
        return False
    numbers = [int.from_bytes(head[at : at + 4], "little") for at in range(4, HEAD_BYTES, 4)]
    return numbers[9] == numbers[11] and numbers[12] == N_BINS


class GgmlWhisper(FileReader):
    """One file: ``sizes`` from its header, ``tokens`` by id, and tensors by treadle's names."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a file of whisper.cpp")
        if self.take(4, "magic") != MAGIC:
            raise self.error("is no file of whisper.cpp", 0, "magic", repr(MAGIC))
        self.sizes = {name: self._size(name) for name in HEAD}
        n_mels, n_bins = self.uint("mel filters"), self.uint("mel filters")
        if (n_mels, n_bins) != (self.sizes["n_mels"], N_BINS):
            expected = f"{self.sizes['n_mels']} x {N_BINS}"
            raise self.error(f"{n_mels} x {n_bins}", where="mel filters", expected=expected)
        self.take(4 * n_mels * n_bins, "mel filters")
        n_tokens = self.count("vocabulary", 4, 4)
        if n_tokens > self.sizes["n_vocab"]:
            expected = f"at most {self.sizes['n_vocab']}"
            raise self.error(f"{n_tokens} tokens", where="vocabulary", expected=expected)
        self.tokens = [self._token(i) for i in range(n_tokens)]
        self.tensors: dict[str, Tensor] = {}
        while self.at < len(self.file):
            self._read_tensor()

    def _size(self, name: str) -> int:
        n = self.uint(name)
        if not (name == "ftype" or 1 <= n <= SIZE_MAX):
            raise self.error(f"is {n}", self.at - 4, name, f"1 to {SIZE_MAX}")
        return n

    def _token(self, i: int) -> bytes:
        where = f"token {i}"
        return self.take(self.uint(where), where)

    def _read_tensor(self) -> None:
        at = self.at
        n_dims, n_name, ggml_type = (self.uint("tensor") for _ in range(3))
        if not 1 <= n_dims <= MAX_DIMS or not 1 <= n_name <= 256:
            what = f"{n_dims} dimensions, a name of {n_name} bytes"
            raise self.error(what, at, "tensor", "a tensor of a Whisper model")
        shape = tuple(self.uint("tensor") for _ in range(n_dims))[::-1]
        theirs = self.text(n_name, "tensor name", at)
        kind = type_of(ggml_type)
        if ggml_type in REMOVED:
            old, why = REMOVED[ggml_type]
            raise UnsupportedError(f"{self.path}: {theirs}: {old}: {why}")
        if kind is None or shape[-1] % kind.block or 0 in shape:
            raise self.error(f"shape {list(shape)} in type {ggml_type}", at, theirs)
        n_bytes = math.prod(shape) // kind.block * kind.n_bytes
        self.check_inside(self.at, n_bytes, theirs)
        name = _name_of(theirs)
        if not name or name in self.tensors:
            what = "appears twice" if name else "is no tensor of a Whisper model"
            raise self.error(what, at, theirs)
        if name.endswith(".bias"):
            shape = (math.prod(shape),)  # those of convolutions are [n, 1]
        place = self.path, self.at, self.file
        fmt = FORMATS.get(ggml_type)
        self.tensors[name] = Tensor(name, shape, ggml_type, fmt, n_bytes, *place)
        self.at += n_bytes


def _name_of(theirs: str) -> str:
    """Return treadle's name of the tensor that whisper.cpp calls ``theirs``; "" for an
    unknown one.
    """
    if theirs.endswith(".positional_embedding"):
        return f"{GGML.name_of(theirs)}.weight"
    stem, _, suffix = theirs.rpartition(".")
    ours = GGML.name_of(stem)
    return f"{ours}.{suffix}" if ours and suffix in ("weight", "bias") else ""


def open_ggml_whisper(path: Path) -> WhisperFile:
    """Open a file in place. Raises FileError for a damaged file, UnsupportedError for tensor types
    that ggml has dropped.
    """
    file = GgmlWhisper(path)
    try:
        sizes = WhisperSizes(
            file.sizes["n_audio_layer"],
            file.sizes["n_text_layer"],
            file.sizes["n_audio_head"],
            file.sizes["n_text_head"],
        )
        keys = model_keys(path, file.tensors, sizes)
        _check(file, keys)
        tokens = file.tokens
        keys |= vocabulary_keys([letters(token) for token in tokens], file.sizes["n_vocab"])
    except BaseException:
        file.close()
        raise
    return WhisperFile(path, keys, file.tensors, maps_of([file.map]), partial(_merges, tokens))


def _merges(tokens: Sequence[bytes]) -> list[str]:
    return merges_of(tokens)


def _check(file: GgmlWhisper, keys: dict[str, object]) -> None:
    """Raise FileError if a size in the file's header contradicts the tensors, from which ``keys``
    come.
    """
    for name, key in {
        "n_vocab": "vocab_size",
        "n_audio_ctx": "encoder.context_length",
        "n_audio_state": "encoder.embedding_length",
        "n_text_ctx": "decoder.context_length",
        "n_text_state": "decoder.embedding_length",
        "n_mels": "encoder.mels_count",
    }.items():
        has = keys[f"whisper.{key}"]
        if has != file.sizes[name]:
            what = f"is {file.sizes[name]}"
            raise FileError(what, path=file.path, where=name, expected=f"{has}, as its tensors")

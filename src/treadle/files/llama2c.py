"""Reader of llama2.c checkpoints: a header of integers, then the weights, grouped by kind across
layers.

::

    legacy  dim hidden_dim n_layers n_heads n_kv_heads vocab_size seq_len: 7 x i32, vocab_size
            negative where the output matrix is not the embeddings; then f32 weights
    1       "24ka" 1 and the same 7, shared:u8, zeros to byte 256; then f32 weights
    2       "24ka" 2 and the same 7, shared:u8, group_size:i32, zeros to byte 256; norms in f32,
            then of each matrix its int8 codes and an f32 scale for each group of them
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.files.reader import MappedReader
from treadle.files.tensor import TensorData

Bytes = npt.NDArray[np.uint8]

MAGIC = struct.pack("<I", 0x616B3432)
HEADER = 256  # bytes, from version 1 on
SIZES = ("n_embd", "n_ff", "n_layer", "n_head", "n_head_kv", "n_vocab", "n_ctx")
SIZE_MAX = 1 << 24

# Kinds of tensors in file order: the GGUF name stem, and the shape as names of sizes. The stem of
# a per-layer tensor begins with a dot.
Kind = tuple[str, tuple[str, ...]]
EMBD: Kind = ("token_embd", ("n_vocab", "n_embd"))
ATTN_NORM: Kind = (".attn_norm", ("n_embd",))
FFN_NORM: Kind = (".ffn_norm", ("n_embd",))
NORM: Kind = ("output_norm", ("n_embd",))
ATTENTION: tuple[Kind, ...] = (
    (".attn_q", ("n_embd", "n_embd")),
    (".attn_k", ("n_kv", "n_embd")),
    (".attn_v", ("n_kv", "n_embd")),
    (".attn_output", ("n_embd", "n_embd")),
)
FFN: tuple[Kind, ...] = (
    (".ffn_gate", ("n_ff", "n_embd")),
    (".ffn_down", ("n_embd", "n_ff")),
    (".ffn_up", ("n_ff", "n_embd")),
)
OUTPUT: Kind = ("output", ("n_vocab", "n_embd"))
FREQS: tuple[Kind, ...] = (("", ("n_ctx", "n_half")), ("", ("n_ctx", "n_half")))  # rope; skipped
LEGACY = (EMBD, ATTN_NORM, *ATTENTION, FFN_NORM, *FFN, NORM, *FREQS)
NEWER = (ATTN_NORM, FFN_NORM, NORM, EMBD, *ATTENTION, *FFN)


@dataclass(frozen=True, eq=False)
class Llama2cTensor(TensorData):
    """One tensor: f32, or int8 codes with an f32 scale per ``group`` weights."""

    name: str  # GGUF name
    shape: tuple[int, ...]
    group: int  # 0: f32
    path: Path
    offset: int  # absolute, of the f32 or the codes
    n_bytes: int  # codes and scales, which are contiguous
    file: Bytes = field(repr=False)

    @property
    def data(self) -> Bytes:
        """uint8 view of the mapped file: the bytes of f32 weights, or the int8 codes."""
        n = math.prod(self.shape)
        return self.file[self.offset : self.offset + (n if self.group else 4 * n)]

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        """Scales of a quantised tensor, f32 [n / group], a view of the mapped file."""
        at = self.offset + math.prod(self.shape)
        return self.file[at : self.offset + self.n_bytes].view("<f4")


class Llama2c(MappedReader):
    """One checkpoint: ``tensors`` by GGUF name, and ``sizes`` from its header."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a llama2.c checkpoint")
        header = read_header(self.map[:HEADER], path)
        self.version, self.group, self.tied, self.sizes = header
        self.tensors: dict[str, Llama2cTensor] = {}
        self._at = HEADER if self.version else 4 * len(SIZES)
        for stem, shape, count in kinds_of(header):
            for i in range(count):
                layer = f"blk.{i}" if stem.startswith(".") else ""
                self._add(f"{layer}{stem}.weight", shape, kept=bool(stem))
        if self._at != len(self.file):
            what = f"{len(self.file) - self._at} bytes after the last tensor"
            raise self.error(what, self._at, expected="the end of the file")

    def _add(self, name: str, shape: tuple[int, ...], *, kept: bool) -> None:
        n = math.prod(shape)
        group = self.group if len(shape) > 1 else 0
        if group and n % group:
            what = f"{n} weights in groups of {group}"
            raise self.error(what, where=name, expected="whole groups")
        n_bytes = n + n // group * 4 if group else 4 * n
        self.check_inside(self._at, n_bytes, name if kept else "frequencies")
        if kept:
            at = self._at
            file = self.file
            self.tensors[name] = Llama2cTensor(name, shape, group, self.path, at, n_bytes, file)
        self._at += n_bytes


Header = tuple[int, int, bool, dict[str, int]]


def read_header(head: bytes, path: Path) -> Header:
    """Return version (0: legacy), group size in weights (0: f32), whether the output is tied to the
    embeddings, and sizes by name.

    ``head``: the file's first HEADER bytes. Raises FileError for invalid sizes, UnsupportedError
    for later versions.
    """
    version = group = at = 0
    if head[:4] == MAGIC:
        version = struct.unpack_from("<i", head.ljust(8, b"\0"), 4)[0]
        at = 8
        if version not in (1, 2):
            raise UnsupportedError(
                f"{path}: llama2.c version {version} (treadle supports 0, 1 and 2)"
            )
    if len(head) < (HEADER if version else 4 * len(SIZES)):
        raise FileError("cut short", path=path, expected="the header of a llama2.c checkpoint")
    sizes = dict(zip(SIZES, struct.unpack_from("<7i", head, at), strict=True))
    tied = sizes["n_vocab"] > 0
    sizes["n_vocab"] = abs(sizes["n_vocab"])
    if version:
        tied = head[at + 28] != 0
        group = struct.unpack_from("<i", head, at + 29)[0] if version > 1 else 0
    for name, n in sizes.items():
        if not 1 <= n <= SIZE_MAX:
            raise FileError(f"is {n}", path=path, where=name, expected=f"1 to {SIZE_MAX}")
    if sizes["n_embd"] % sizes["n_head"] or sizes["n_head"] % sizes["n_head_kv"]:
        what = f"{sizes['n_head']} heads, {sizes['n_head_kv']} of keys, width {sizes['n_embd']}"
        raise FileError(what, path=path, where="n_head", expected="sizes that divide")
    if version > 1 and not 1 <= group <= SIZE_MAX:
        raise FileError(f"is {group}", path=path, where="group_size", expected="a size")
    return version, group, tied, sizes


def kinds_of(header: Header) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield (stem, shape, number of layers) of each kind of tensor, in file order. The stem is
    GGUF's name without ``blk.N``, so it begins with a dot for tensors in layers; for others the
    number is 1.
    """
    version, _, tied, n = header
    head_dim = n["n_embd"] // n["n_head"]
    words = n | {"n_kv": n["n_head_kv"] * head_dim, "n_half": head_dim // 2}
    for stem, shape in (NEWER if version else LEGACY) + (() if tied else (OUTPUT,)):
        count = n["n_layer"] if stem.startswith(".") else 1
        yield stem, tuple(words[word] for word in shape), count


def n_bytes_of(head: bytes, path: Path) -> int:
    """Return the size in bytes of a legacy checkpoint that begins with ``head``, its first HEADER
    bytes. A file of that size is taken for one, because the format has no magic.
    """
    kinds = kinds_of(read_header(head, path))
    return 4 * (len(SIZES) + sum(count * math.prod(shape) for _, shape, count in kinds))

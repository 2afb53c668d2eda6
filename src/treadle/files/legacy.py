"""Reader of llama.cpp's formats before GGUF: GGML, GGMF and GGJT, for llama models.

::

    magic:u32 [version:u32, not in GGML] n_vocab n_embd n_mult n_head n_layer n_rot ftype: 7 x i32
    n_vocab x {length:u32 bytes [score:f32, not in GGML]}
    tensors to the end: n_dims:u32 length:u32 type:u32 dims:u32[n_dims] name
                        [GGJT: zeros to a multiple of 32] data

The layout of quantised blocks changed twice without a new magic, so a type number alone does not
determine the layout: ``SINCE`` has the first version with today's layout for each type.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from treadle.errors import UnsupportedError
from treadle.files.reader import FileReader
from treadle.files.tensor import Tensor
from treadle.formats import FORMATS, REMOVED, type_of

MAGICS = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT"}
VERSIONS = {"GGML": (0,), "GGMF": (1,), "GGJT": (1, 2, 3)}
SIZES = ("n_vocab", "n_embd", "n_mult", "n_head", "n_layer", "n_rot")
SIZE_MAX = 1 << 24
ALIGNMENT = 32  # of tensors in GGJT

# ggml type number -> the first GGJT version with today's block layout.
SINCE = {
    **dict.fromkeys((0, 1), 0),  # floats
    **dict.fromkeys((6, 7), 2),  # Q5_0, Q5_1: the order of the codes changed with version 2
    **dict.fromkeys((2, 3, 8), 3),  # Q4_0, Q4_1, Q8_0: their scales shrank to 16 bits as well
    **dict.fromkeys(range(10, 15), 3),  # Q2_K to Q6_K were added in version 3
}
WHY = {
    2: "its codes are in the order used before May 12, 2023 (llama.cpp #1405)",
    3: "its blocks are in the layout used before May 19, 2023 (llama.cpp #1405, #1508)",
}


class Legacy(FileReader):
    """One file: ``sizes`` from its header, ``pieces`` and ``scores`` of the vocabulary (None: the
    format has no scores), and tensors by name.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a GGML file")
        magic = self.take(4, "magic")
        if magic not in MAGICS:
            raise self.error(f"starts with {magic!r}", 0, expected="GGML, GGMF or GGJT")
        self.kind = MAGICS[magic]
        self.version = self.uint("version") if self.kind != "GGML" else 0
        if self.version not in VERSIONS[self.kind]:
            raise UnsupportedError(
                f"{path}: {self.kind} version {self.version} is not a llama file: treadle supports "
                f"{', '.join(f'{kind} {vs[-1]}' for kind, vs in VERSIONS.items() if vs[-1])} "
                "and older (rwkv.cpp uses 100 and above)"
            )
        self.layout = self.version if self.kind == "GGJT" else 0
        self.sizes = {name: self._size(name) for name in SIZES}
        self.uint("ftype")  # unused: each tensor has its own type
        if self.sizes["n_embd"] % self.sizes["n_head"]:
            what = f"{self.sizes['n_head']} does not divide n_embd, {self.sizes['n_embd']}"
            raise self.error(what, where="n_head")
        self.pieces: list[bytes] = []
        self.scores: list[float] | None = None if self.kind == "GGML" else []
        self._read_vocabulary()
        self.tensors: dict[str, Tensor] = {}
        while self.at < len(self.file):
            self._read_tensor()

    def _read_vocabulary(self) -> None:
        for i in range(self.sizes["n_vocab"]):
            where = f"piece {i}"
            self.pieces.append(self.take(self.uint(where), where))
            if self.scores is not None:
                score = float(np.frombuffer(self.take(4, where), "<f4")[0])
                if not math.isfinite(score):
                    raise self.error(f"a score of {score}", where=where)
                self.scores.append(score)

    def _read_tensor(self) -> None:
        at = self.at
        n_dims, n_name, ggml_type = (self.uint("tensor") for _ in range(3))
        if not 1 <= n_dims <= 2 or not 1 <= n_name <= 256:
            what = f"{n_dims} dimensions, a name of {n_name} bytes"
            raise self.error(what, at, "tensor", "a tensor of a llama model")
        shape = tuple(self.uint("tensor") for _ in range(n_dims))[::-1]
        name = self.text(n_name, "tensor name", at)
        if name in self.tensors or not name.isprintable():
            raise self.error("appears twice, or is not a valid name", at, repr(name)[:100])
        kind = type_of(ggml_type)
        self._check_layout(name, ggml_type)
        if kind is None or shape[-1] % kind.block or 0 in shape:
            raise self.error(f"shape {list(shape)} in type {ggml_type}", at, name)
        n_bytes = kind.tensor_bytes(shape)
        if self.kind == "GGJT":
            self.at = -(-self.at // ALIGNMENT) * ALIGNMENT
        self.check_inside(self.at, n_bytes, name)
        fmt = FORMATS.get(ggml_type)
        self.tensors[name] = Tensor(
            name, shape, ggml_type, fmt, n_bytes, self.path, self.at, self.file
        )
        self.at += n_bytes

    def _check_layout(self, name: str, ggml_type: int) -> None:
        kind = type_of(ggml_type)
        if ggml_type in REMOVED:
            old, why = REMOVED[ggml_type]
            raise UnsupportedError(f"{self.path}: {name}: {old}: {why}")
        since = SINCE.get(ggml_type)
        if since is None:
            what = f"ggml type {ggml_type}"
            raise self.error(what, where=name, expected="a type that these files support")
        if self.layout < since and kind is not None:
            raise UnsupportedError(
                f"{self.path}: {name}: {kind.name} of {self.kind} version {self.version}: "
                f"{WHY[since]}; convert the model's F16 or F32 file"
            )

    def _size(self, name: str) -> int:
        n = self.uint(name)
        if not 1 <= n <= SIZE_MAX:
            raise self.error(f"is {n}", self.at - 4, name, f"1 to {SIZE_MAX}")
        return n

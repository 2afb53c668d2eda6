"""The interface of checkpoint readers: GGUF metadata, and tensors read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.files.tensor import TensorData
from treadle.formats import FORMATS, GGMLType, by_name, type_of

F32 = by_name("F32")
ROPE_FREQS = "rope_freqs.weight"
# llama.cpp's general.file_type, the type of most weights, by the name of the format.
FILE_TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 12,
    "Q4_K": 15,
    "Q5_K": 17,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 28,
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
    "NVFP4": 39,
    "Q1_0": 40,
    "Q2_0": 41,
    # ik_llama.cpp's own numbers
    "IQ2_K": 138,
    "IQ3_K": 139,
    "IQ4_K": 140,
    "IQ5_K": 141,
    "IQ6_K": 142,
    "IQ4_KS": 145,
    "IQ2_KS": 147,
    "IQ4_KSS": 148,
    "IQ5_KS": 150,
    "IQ2_KT": 151,
    "IQ3_KT": 152,
    "IQ4_KT": 153,
    "IQ3_KS": 154,
    "IQ1_KT": 156,
}

PARTS_LEFT_OUT = "the image and audio parts"  # a note's first words

Bytes = npt.NDArray[np.uint8]
Read = Callable[[], Bytes]


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """One tensor in GGUF's form, with its data still in the checkpoint.

    read: returns uint8 [n_bytes] in ``ggml_type``, contiguous rows of ``shape[-1]`` weights,
        possibly a view of a mapped file. Nothing is read before that call and nothing large is kept
        after it: a converter holds one tensor at a time. Raises FileError.
    written: ggml type to write if the user names none; None: ``ggml_type``. A format that GGUF
        lacks is read as F32, but need not be written that large.
    """

    name: str  # GGUF's
    shape: tuple[int, ...]  # slowest dimension first: a weight is [M, K]
    ggml_type: int  # type of read(): F32, F16, BF16, or a quantised type
    read: Read = field(repr=False)
    origin: str  # the file and the tensor in it, for messages
    ranges: tuple[TensorData, ...] = ()  # file ranges that read() reads, if known
    written: int | None = None

    @property
    def k(self) -> int:
        """The number of weights in a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def n_bytes(self) -> int:
        """The size of ``read()`` in bytes. Raises UnsupportedError if rows are not whole blocks."""
        kind = self.kind
        if self.k % kind.block:
            what = f"shape {list(self.shape)} in ggml type {self.ggml_type}"
            raise UnsupportedError(f"{self.origin}: {what}")
        return kind.tensor_bytes(self.shape)

    @property
    def row_bytes(self) -> int:
        """The bytes per row; 1 if rows are empty."""
        return max(1, self.kind.row_bytes(self.k))

    @property
    def n_rows(self) -> int:
        """The number of rows, over all matrices."""
        return self.n_bytes // self.row_bytes

    @property
    def kind(self) -> GGMLType:
        """The ggml type of ``read()``. Raises UnsupportedError for one whose size is unknown."""
        kind = type_of(self.ggml_type)
        if kind is None:
            raise UnsupportedError(f"{self.origin}: ggml type {self.ggml_type} has no size")
        return kind

    def error(self, what: str, expected: str | None = None, where: str = "") -> FileError:
        """Return a FileError about the tensor, or about the part ``where`` of it; ``what`` and
        ``expected`` are clauses for the message.
        """
        path = self.ranges[0].path if self.ranges else self.origin
        own = self.origin.removeprefix(f"{path}: ") if self.ranges else self.name
        name = own if own == self.name else f"{own} ({self.name})"  # the checkpoint's comes first
        where = f"{name}: {where}" if where else name
        return FileError(what, path=path, where=where, expected=expected)

    def as_f32(self) -> SourceTensor:
        """Return the tensor in F32, the type of vectors in GGUF that every reader expects. Raises
        UnsupportedError if treadle cannot decode its format.
        """
        fmt = FORMATS.get(self.ggml_type)
        if fmt is None:
            name = self.kind.name
            raise UnsupportedError(f"{self.origin}: {name} weights are not supported yet")
        if fmt is F32:
            return self

        def read() -> Bytes:
            return fmt.dequantize_rows(self.read()).reshape(-1).view(np.uint8)

        return replace(self, ggml_type=F32.ggml_id, read=read)


def f32_bytes(values: npt.NDArray[Any]) -> Bytes:
    """Return numbers as bytes of F32 in a file, uint8 [4 * n], read-only."""
    data: Bytes = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8)
    data.flags.writeable = False
    return data


def f32_tensor(name: str, values: npt.NDArray[np.float32], origin: str) -> SourceTensor:
    """Return an F32 tensor of ``values``, which the checkpoint stores in another form; ``origin``:
    where, for messages.
    """
    data = f32_bytes(values)
    return SourceTensor(name, values.shape, F32.ggml_id, lambda: data, origin)


@dataclass(eq=False)
class Source:
    """A checkpoint that can be written as one GGUF file.

    ``metadata`` holds every key of the GGUF file (``general.*``, the architecture's,
    ``tokenizer.*``), as Python values, numpy arrays or GGUFArrays, so that GGUFWriter infers the
    right type. ``tensors``, by GGUF's names, are in writing order. ``notes`` are for the user:
    assumptions about what the checkpoint leaves open. ``verbatim``: the source is a GGUF file
    already, whose keys and types are kept.
    """

    path: Path  # the file or folder that the user named
    metadata: dict[str, Any]
    tensors: dict[str, SourceTensor]
    files: Sequence[Any] = ()  # each with close()
    notes: list[str] = field(default_factory=list)
    verbatim: bool = False

    def close(self) -> None:
        """Close the files; views still in use keep theirs mapped."""
        self.tensors = {}
        for file in self.files:
            file.close()
        self.files = ()

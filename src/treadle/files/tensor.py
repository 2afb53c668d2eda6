"""Tensors of model files: name, shape, type, and a view of the mapped bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property, dataclass
from treadle.errors import FileError, UnsupportedError

if TYPE_CHECKING:
    from treadle.formats import Format

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str, int, int], None]  # callback of long work: stage, amount done, total


class TensorData:
    """Base class of tensors in any file format: description, and a view of the mapped bytes."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first: a weight is [M, K]
    path: Path
    offset: int  # absolute, in path; in a bundle, from the model's first byte
    n_bytes: int  # in the file
    file: Bytes  # uint8 of the whole file (in a bundle, of the model), read-only and mapped

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes], read-only, zero copy; not always aligned to the element size."""
        return self.file[self.offset : self.offset + self.n_bytes]

    def error(
        self, what: str, expected: str | None = None, *, offset: int | None = None
    ) -> FileError:
        """Return a FileError about this tensor; ``what`` and ``expected`` are clauses for the
        message, ``offset`` the byte in the file where the fault is, if known.
        """
        return FileError(what, path=self.path, offset=offset, where=self.name, expected=expected)


@dataclass(frozen=True, eq=False)
class Tensor(TensorData):
    """One tensor of a file. Its bytes are not read until ``data`` is used."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first: a weight is [M, K]
    ggml_type: int
    format: Format | None  # None: the size is known, but treadle cannot compute with the type yet
    n_bytes: int
    path: Path
    offset: int  # absolute, in path
    file: Bytes = field(repr=False)  # uint8 of the whole file, read-only and mapped

    @property
    def type_name(self) -> str:
        """The name of the format, such as ``Q8_0``, or of the ggml type if there is no format."""
        if self.format is not None:
            return self.format.name
        from treadle.formats import type_of

        kind = type_of(self.ggml_type)
        return kind.name if kind else f"type {self.ggml_type}"

    @property
    def has_codes(self) -> bool:
        """Whether the weights are integer codes, not floats."""
        return self.format is not None and self.format.codes is not None

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes], read-only, zero copy. Raises FileError if the file is only a header."""
        data = super().data
        if len(data) != self.n_bytes:
            what = "the file ends after its header: no tensor data"
            raise self.error(what, f"{self.n_bytes} bytes", offset=self.offset)
        return data

    @property
    def arrays(self) -> list[Bytes]:
        """The tensor's arrays, uint8, read-only: one (``data``) in most formats, several in
        MLX's.
        """
        return [self.data]

    @property
    def blocks(self) -> npt.NDArray[Any]:
        """The tensor's blocks, an array [.., K / block] of the numpy type ``format.whole``,
        read-only: a view of ``data``, or a copy if rows of the format have scales of their own.

        Raises UnsupportedError if ``format`` is None.
        """
        fmt = self._require_format()
        *rows, k = self.shape or (1,)
        shape = (*rows, k // fmt.block) if self.shape else ()
        if not fmt.head:
            return self.data.view(fmt.dtype).reshape(shape)
        return fmt.blocks_of(self.data.reshape(prod(rows), fmt.row_bytes(k))).reshape(shape)

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Return all weights, f32 [*shape]. Raises UnsupportedError if ``format`` is None."""
        fmt = self._require_format()
        data = fmt.join(self.arrays)
        if fmt.head:
            data = data.reshape(prod(self.shape[:-1]), fmt.row_bytes(self.shape[-1]))
        return fmt.dequantize_rows(data).reshape(self.shape)

    def in_memory(self, name: str, shape: tuple[int, ...], fmt: Format, data: Bytes) -> Tensor:
        """Return a tensor in memory with these properties and ``data``; its ``path`` is this
        tensor's, for errors.
        """
        return Tensor(name, shape, fmt.ggml_id, fmt, data.nbytes, self.path, 0, data)

    def _require_format(self) -> Format:
        if self.format is None:
            raise UnsupportedError(f"{self.name}: {self.type_name} weights are not supported yet")
        return self.format


class LateTensor(Tensor):
    """A tensor whose format is that of its ggml type, imported when it is first used: runs of a
    stored plan never use it.
    """

    codes_known: bool | None = None  # ``has_codes``, if it is known without the format

    @classmethod
    def of(cls, **fields: Any) -> LateTensor:
        """Return a tensor with these ``fields``: all but ``format``; perhaps ``codes_known``."""
        tensor = cls.__new__(cls)
        tensor.__dict__.update(fields)
        return tensor

    @cached_property
    def format(self) -> Format | None:
        from treadle.formats import FORMATS

        return FORMATS.get(self.ggml_type)

    @property
    def has_codes(self) -> bool:
        if "format" in self.__dict__:  # used before, or replaced
            return super().has_codes
        if self.codes_known is not None:
            return self.codes_known
        from treadle.formats import FORMATS

        return FORMATS.has_codes(self.ggml_type)


@dataclass(frozen=True, eq=False)
class PartedTensor(Tensor):
    """A tensor whose format has several arrays (``parts``, in the format's order), each anywhere in
    a file, such as codes, scales and biases.

    ``path`` and ``offset`` are those of the first part; ``n_bytes`` counts all.
    """

    parts: tuple[Bytes, ...] = field(repr=False)

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes]: the format's blocks, joined in memory."""
        return self.format.join(self.parts) if self.format else super().data

    @property
    def arrays(self) -> list[Bytes]:
        """The parts: views of the mapped files, uint8, read-only."""
        return list(self.parts)


@dataclass(frozen=True, eq=False)
class MadeTensor(Tensor):
    """A tensor whose bytes ``make`` returns; its path and offset are those of its source in
    a file.
    """

    make: Callable[[], Bytes] = field(repr=False)

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes], read-only. Raises FileError if the source is damaged."""
        return self.make()

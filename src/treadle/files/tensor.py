"""A tensor as a file describes it, with a view of its bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_dataclass import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.formats import Format, type_of

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[str, int, int], None]  # of long work: its stage, how much is done, of how much


class TensorData:
    """What a tensor of any file has: its bytes are a view of the mapped file."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first: a weight is [M, K]
    path: Path
    offset: int  # absolute, in path; in a bundle, from the model's first byte
    n_bytes: int  # in the file
    file: Bytes  # uint8 of the whole file, read-only and mapped; of a bundle's, its model's

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes], read-only, zero copy; not always aligned to its elements."""
        return self.file[self.offset : self.offset + self.n_bytes]

    def error(
        self, what: str, expected: str | None = None, *, offset: int | None = None
    ) -> FileError:
        """A FileError about this tensor."""
        return FileError(what, path=self.path, offset=offset, where=self.name, expected=expected)


@dataclass(frozen=True, eq=False)
class Tensor(TensorData):
    """One tensor of a file. Nothing of its data is read before ``data`` is."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first: a weight is [M, K]
    ggml_type: int
    format: Format | None  # None: of known size, but treadle cannot compute with it yet
    n_bytes: int
    path: Path
    offset: int  # absolute, in path
    file: Bytes = field(repr=False)  # uint8 of the whole file, read-only and mapped

    @property
    def type_name(self) -> str:
        """The name of the format, such as ``Q8_0``, or of the ggml type without one."""
        if self.format is not None:
            return self.format.name
        kind = type_of(self.ggml_type)
        return kind.name if kind else f"type {self.ggml_type}"

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes], read-only, zero copy; FileError when the file is a header alone."""
        data = super().data
        if len(data) != self.n_bytes:
            what = "the file ends after its header: no tensor data"
            raise self.error(what, f"{self.n_bytes} bytes", offset=self.offset)
        return data

    @property
    def arrays(self) -> list[Bytes]:
        """The arrays that the format has of a tensor, as ``data``: most formats have one."""
        return [self.data]

    @property
    def blocks(self) -> npt.NDArray[Any]:
        """``format.dtype`` [..., K / block], read-only, zero copy.

        Raises UnsupportedError when treadle has no such format.
        """
        fmt = self._known()
        *rows, k = self.shape or (1,)
        blocks: npt.NDArray[Any] = self.data.view(fmt.dtype)
        return blocks.reshape(*rows, k // fmt.block) if self.shape else blocks.reshape(())

    def dequantize(self) -> npt.NDArray[np.float32]:
        """All weights, float32 of its shape; UnsupportedError when treadle has no such format."""
        fmt = self._known()
        return fmt.dequantize_rows(fmt.join(self.arrays)).reshape(self.shape)

    def made(self, name: str, shape: tuple[int, ...], fmt: Format, data: Bytes) -> Tensor:
        """One that is made of this one, in memory."""
        return Tensor(name, shape, fmt.ggml_id, fmt, data.nbytes, self.path, 0, data)

    def _known(self) -> Format:
        if self.format is None:
            raise UnsupportedError(f"{self.name}: {self.type_name} weights are not supported yet")
        return self.format


@dataclass(frozen=True, eq=False)
class PartedTensor(Tensor):
    """A tensor in several arrays, each somewhere in a file: ``parts`` are those of the format.

    What a tensor says of its place is said of the first; ``n_bytes`` counts all.
    """

    parts: tuple[Bytes, ...] = field(repr=False)

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes]: the format's blocks, put together in memory."""
        return self.format.join(self.parts) if self.format else super().data

    @property
    def arrays(self) -> list[Bytes]:
        """Views of the mapped files, read-only."""
        return list(self.parts)


@dataclass(frozen=True, eq=False)
class MadeTensor(Tensor):
    """A tensor that ``make`` puts together in memory; its place is that of what it is made of."""

    make: Callable[[], Bytes] = field(repr=False)

    @property
    def data(self) -> Bytes:
        """uint8 [n_bytes], read-only. FileError for what cannot be made of damaged parts."""
        return self.make()

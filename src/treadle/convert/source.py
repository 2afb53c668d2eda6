"""What every reader of checkpoints hands over: GGUF metadata, and tensors read one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file that one tensor is read from: what may be dropped from the page cache."""

    path: Path
    offset: int
    n_bytes: int


@dataclass(frozen=True, eq=False)
class SourceTensor:
    """One tensor as GGUF is to have it, with its data still in the checkpoint.

    ``read()`` gives uint8 [n_bytes] in ``ggml_type``, rows of ``shape[-1]`` weights one after the
    other; it may be a view of a mapped file. Nothing is read before it is called, and nothing
    large is kept after: a converter holds one tensor at a time. It raises FileError. ``written``
    is the ggml type to write where the user names none, None for that of ``read()``: a format that
    GGUF does not have is read as F32, and need not become so large.
    """

    name: str  # GGUF's
    shape: tuple[int, ...]  # slowest dimension first: a weight is [M, K]
    ggml_type: int  # what read() is in: F32, F16, BF16, or a quantised type
    read: Callable[[], npt.NDArray[np.uint8]] = field(repr=False)
    origin: str  # the file and the tensor in it, for messages
    ranges: tuple[FileRange, ...] = ()  # what read() reads, where that is known
    written: int | None = None


class Source(Protocol):
    """A checkpoint that can be written as one GGUF file.

    ``metadata`` holds every key of the GGUF file (``general.*``, the architecture's,
    ``tokenizer.*``), as Python values, numpy arrays or GGUFArrays, so that each has the type that
    GGUFWriter infers. ``tensors`` are in the order in which they are to be written.
    """

    @property
    def path(self) -> Path:
        """The checkpoint: the file or folder that the user named."""
        ...

    @property
    def metadata(self) -> dict[str, Any]:
        """GGUF keys to values."""
        ...

    @property
    def tensors(self) -> dict[str, SourceTensor]:
        """By GGUF name."""
        ...

    def close(self) -> None:
        """Let go of the files; views still in use keep theirs mapped."""
        ...

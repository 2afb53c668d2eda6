"""Derived tensors of a folder that is run in place, assembled in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.base.humanize import n_bytes
from treadle.convert.quantized.dequantized_tensor import DequantizedTensor
from treadle.convert.sources.check_finite import find_nonfinite, nonfinite_message
from treadle.convert.sources.derived_tensors import DerivedTensor
from treadle.errors import FileError
from treadle.files.safetensors import SafeTensor
from treadle.files.tensor import Bytes, MadeTensor, Progress
from treadle.formats import FORMATS, type_of
from treadle.machine.memory import usable_memory
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from treadle.convert.hf.tensors import MappedTensor


class AssembledTensors:
    """The tensors of a folder whose stored form differs from the engine's, assembled in memory.

    The first read of any of them assembles all, with one thread per processor (numpy releases the
    GIL). Names and shapes are available without that.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, MappedTensor]) -> None:
        self.folder = folder
        self.tensors = {
            name: named
            for name, named in tensors.items()
            if named.layout is not None or isinstance(named.tensor, DerivedTensor)
        }
        self._rows: dict[str, Bytes] = {}
        self._lock = threading.Lock()

    def tensor(self, named: MappedTensor) -> MadeTensor:
        """Return a tensor in the engine's form; its ``data`` assembles all tensors on first use."""
        fmt = FORMATS.get(named.ggml_type)  # None: integers
        size = _size(named)
        at = named.tensor.path, named.tensor.offset, named.tensor.file
        of = named.name, named.shape, named.ggml_type, fmt, size
        return MadeTensor(*of, *at, partial(self._read, named.name))

    def _read(self, name: str) -> Bytes:
        self.make()
        return self._rows[name]

    def make(self, progress: Progress = lambda *_: None) -> None:
        """Assemble all tensors, unless this was done. ``progress("unpack", done, total)`` counts
        tensors. Raises FileError if memory is too small, or for non-finite weights of a quantised
        checkpoint.
        """
        with self._lock:
            if len(self._rows) == len(self.tensors):
                return
            self._check_room(sum(map(_size, self.tensors.values())))
            with ThreadPoolExecutor(len(SYSTEM.affinity())) as pool:
                made = pool.map(_rows_of, self.tensors.values())
                for i, (name, rows) in enumerate(zip(self.tensors, made, strict=True)):
                    rows.flags.writeable = False
                    self._rows[name] = rows
                    progress("unpack", i + 1, len(self.tensors))

    def _check_room(self, n: int) -> None:
        """Raise FileError if ``n`` bytes exceed the free memory; else the system would kill the
        process.
        """
        bound = usable_memory()
        if bound and n > bound.free_bytes:
            what = f"{n_bytes(n)} of its weights must be converted in memory"
            left = f"{bound.what} leaves {n_bytes(bound.free_bytes)}"
            cure = f"a file of `treadle convert {self.folder} model.gguf`, or: {bound.cure}"
            raise FileError(f"{what}, and {left}", path=self.folder, expected=cure)


def _rows_of(named: MappedTensor) -> Bytes:
    rows = named.rows()
    if _is_unpacked(named.tensor):  # just computed, so the check is cheap
        fmt = FORMATS[named.ggml_type]
        if (block := find_nonfinite(fmt, rows, named.shape[-1])) >= 0:
            raise named.tensor.error(
                nonfinite_message(fmt, block, named.shape[-1]), "finite weights"
            )
    return rows


def _is_unpacked(tensor: SafeTensor) -> bool:
    """Return whether the tensor is computed from quantised codes and scales, possibly in several
    steps.
    """
    made = isinstance(tensor, DerivedTensor) and any(map(_is_unpacked, tensor.sources))
    return made or isinstance(tensor, DequantizedTensor)


def _size(named: MappedTensor) -> int:
    """Return the tensor's size in GGUF's form, in bytes."""
    kind = type_of(named.ggml_type)
    assert kind is not None
    return kind.tensor_bytes(named.shape)

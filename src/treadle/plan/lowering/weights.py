"""A model's tensors as the constants of its plans."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.errors import UnsupportedError
from treadle.kernels.matmul.matmul import COLUMNS
from treadle.kernels.spec import round_up
from treadle.plan.plan import Const, Storage

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.formats import Format
    from treadle.models.lora import LowRank

PART = re.compile(r"(?P<stem>.*)\[(?P<first>\d+):(?P<end>\d+)\](?P<kind>\.\w+)")


def whole(name: str) -> str:
    """The tensor of the file that ``name`` is, or names rows of (``models.ops.part``)."""
    match = PART.fullmatch(name)
    return match["stem"] + match["kind"] if match else name


def factor_of(name: str) -> str:
    """The tensor of the file with what the products of the matrix ``name`` are multiplied by.
    llama.cpp's converter writes one beside each matrix of NVFP4.
    """
    return f"{whole(f'{name}.weight').removesuffix('.weight')}.scale"


@dataclass
class Weights:
    """A model's tensors, and rows of them, as constants of a plan; shared by all of its plans."""

    gguf: GGUF
    storage: Storage
    consts: dict[str, tuple[Const, ...]] = field(default_factory=dict)
    # Of each adapter what it adds, by the matrix' name; and these packed (``lora.py``).
    adapters: Sequence[Mapping[str, LowRank]] = ()
    packed: dict[tuple[str, ...], Any] = field(default_factory=dict)
    # Of rows of the file's, in memory; see ``latent_heads.py``.
    made: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> tuple[Const, ...]:
        """A constant for each array that the tensor has."""
        if name not in self.consts:
            rows, n = self._part(name), self.n_rows(whole(name))
            # Rows of a tensor are rows of each of its arrays, one behind the other.
            arrays = [
                array.reshape(-1)[rows.start * (array.size // n) : rows.stop * (array.size // n)]
                if rows
                else array
                for array in self.tensor(name).arrays
            ]
            self.consts[name] = tuple(self.storage.weights(whole(name), array) for array in arrays)
        return self.consts[name]

    def floats(self, name: str, scale: float = 1.0, *, turned: int = 0) -> Const:
        """A vector (norm, bias) as f32, padded: kernels read whole vectors of a bias; or a small
        matrix, column by column in strips of ``turned`` rows; 1: in one.
        """
        key = f"{name}:f32" + (f" * {scale}" if scale != 1.0 else "")
        key += f".T{int(turned)}" if turned else ""
        if key not in self.consts:
            values, rows = self.tensor(name).dequantize(), self._part(name)
            if turned:
                size = turned if turned > 1 else len(values)
                strips = [values[at : at + size].T.ravel() for at in range(0, len(values), size)]
                values = np.concatenate(strips)
            values = values.ravel()
            values = (values[rows.start : rows.stop] if rows else values) * np.float32(scale)
            padded = np.zeros(round_up(values.size, COLUMNS) + COLUMNS, np.float32)
            padded[: values.size] = values
            self.consts[key] = (self.storage.weights(f"{whole(name)}:f32", padded),)
        (made,) = self.consts[key]
        return made

    def numbers(self, key: str, values: Sequence[float]) -> Const:
        """Numbers that no tensor has, as f32; ``key``: what they are of."""
        if key not in self.consts:
            self.consts[key] = (self.storage.weights(key, np.array(values, np.float32)),)
        (made,) = self.consts[key]
        return made

    @property
    def met(self) -> set[str]:
        """Matrices that some plan has adapters for."""
        return {whole(f"{name}.weight") for names in self.packed for name in names}

    @property
    def are_floats(self) -> bool:
        """Whether most of them are numbers by themselves, not codes with scales."""
        codes = sum(t.n_bytes for t in self.gguf.tensors.values() if t.format and t.format.codes)
        return 2 * codes < sum(t.n_bytes for t in self.gguf.tensors.values())

    def tensor(self, name: str) -> Tensor:
        """The tensor of the file, also where ``name`` names rows of it, or one made of such."""
        return self.made.get(name) or self.gguf.tensors[whole(name)]

    def n_rows(self, name: str) -> int:
        """Of a matrix, or of several in one tensor; a vector is a matrix of one row."""
        rows = self._part(name)
        return len(rows) if rows else prod(self.tensor(name).shape[:-1])

    def n_bytes(self, name: str) -> int:
        return self.tensor(name).n_bytes // self.n_rows(whole(name)) * self.n_rows(name)

    def _part(self, name: str) -> range | None:
        """The rows that ``name`` names, of a bias the values; None for all."""
        match = PART.fullmatch(name)
        return range(int(match["first"]), int(match["end"])) if match else None

    def format(self, name: str) -> Format:
        tensor = self.tensor(name)
        if tensor.format is None:
            raise UnsupportedError(
                f"{self.gguf.path}: {whole(name)} is {tensor.type_name}, "
                "a format treadle has no kernels for yet"
            )
        return tensor.format

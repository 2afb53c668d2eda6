"""A model's tensors as the constants of its plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import UnsupportedError
from treadle.kernels.run_state import round_up
from treadle.plan.plan import Const, Storage

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.formats import Format
    from treadle.models.lora import Floats, LowRank
    from treadle.models.ops import TensorName


def tensor_of_slice(name: TensorName) -> str:
    """Return the name of the tensor that the slice ``name`` is part of; a name that is no slice is
    returned as it is.
    """
    return name if isinstance(name, str) else name.whole


def factor_of(stem: TensorName) -> str:
    """Return the name of the tensor with the factor of the matrix ``stem``, by which its products
    are multiplied.

    llama.cpp's converter writes one with each NVFP4 matrix.
    """
    return f"{tensor_of_slice(stem)}.scale"


def bound_of(stem: TensorName, side: str, end: str) -> str:
    """Return the name of a bound of the matrix ``stem``: the ``end`` "min" or "max" of its ``side``
    "input" or "output". Rows of a matrix have the bounds of the whole matrix.
    """
    return f"{tensor_of_slice(stem)}.{side}_{end}"


@dataclass
class Weights:
    """A model's tensors, and slices of them, as constants that all plans of the model share."""

    gguf: GGUF
    storage: Storage
    consts: dict[TensorName, tuple[Const, ...]] = field(default_factory=dict)
    # Each adapter's low-rank matrices by tensor name, or by rows of a tensor; and these packed
    # (``lora.py``).
    adapters: Sequence[Mapping[TensorName, LowRank]] = ()
    # Control vectors' directions by layer, and the number of a sequence's scales: those of all
    # adapters of the model, then those of its control vectors.
    directions: Sequence[Mapping[int, Floats]] = ()
    n_scales: int = 0
    packed: dict[tuple[TensorName, ...], Any] = field(default_factory=dict)
    # Tensors in memory, derived from the file's (``cut_heads`` in ``latent.py``).
    derived: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: TensorName) -> tuple[Const, ...]:
        """Return a tensor or a slice of its rows as constants, one for each array of its format."""
        if name not in self.consts:
            arrays = list(self.tensor(name).arrays)
            if not isinstance(name, str):  # contiguous rows of each array
                n = self.n_rows(name.whole)
                sizes = [array.size // n for array in arrays]
                arrays = [
                    array.reshape(-1)[name.first * size : (name.first + name.n) * size]
                    for array, size in zip(arrays, sizes, strict=True)
                ]
            self.consts[name] = tuple(
                self.storage.weights(tensor_of_slice(name), array) for array in arrays
            )
        return self.consts[name]

    def floats(self, name: TensorName, scale: float = 1.0, *, turned: int = 0) -> Const:
        """Return a vector (norm, bias) or a small matrix as f32 times ``scale``, padded with zeros,
        because kernels read whole SIMD vectors of it.

        ``turned``: transpose the matrix in strips of so many rows; 1: the whole matrix at once; 0:
        not.
        """
        key = f"{name}:f32" + (f" * {scale}" if scale != 1.0 else "")
        key += f".T{int(turned)}" if turned else ""
        if key not in self.consts:
            from treadle.kernels.matmul.sizes import COLUMNS  # runs of stored plans make no vector

            values = self.tensor(name).dequantize()
            if turned:
                size = turned if turned > 1 else len(values)
                strips = [values[at : at + size].T.ravel() for at in range(0, len(values), size)]
                values = np.concatenate(strips)
            values = values.ravel()
            if not isinstance(name, str):
                values = values[name.first : name.first + name.n]
            values = values * np.float32(scale)
            padded = np.zeros(round_up(values.size, COLUMNS) + COLUMNS, np.float32)
            padded[: values.size] = values
            self.consts[key] = (self.storage.weights(f"{tensor_of_slice(name)}:f32", padded),)
        (result,) = self.consts[key]
        return result

    def numbers(self, key: str, values: Sequence[float] | Floats) -> Const:
        """Return ``values`` as an f32 constant, kept under ``key``: a later call with the same key
        returns the same constant. For numbers that are no tensor of the file.
        """
        if key not in self.consts:
            self.consts[key] = (self.storage.weights(key, np.array(values, np.float32)),)
        (result,) = self.consts[key]
        return result

    @property
    def adapted_matrices(self) -> set[str]:
        """Names of the matrices for which some plan has packed adapters."""
        return {f"{tensor_of_slice(name)}.weight" for names in self.packed for name in names}

    @property
    def are_floats(self) -> bool:
        """Whether most bytes of the model's tensors are plain floats, not quantised."""
        codes = sum(t.n_bytes for t in self.gguf.tensors.values() if t.has_codes)
        return 2 * codes < sum(t.n_bytes for t in self.gguf.tensors.values())

    def tensor(self, name: TensorName) -> Tensor:
        """Return the whole tensor ``name``: a derived one, else the file's."""
        return self.derived.get(tensor_of_slice(name)) or self.gguf.tensors[tensor_of_slice(name)]

    def n_rows(self, name: TensorName) -> int:
        """Return the rows of a matrix or a slice; of a tensor with several matrices, the rows of
        all; 1 for a vector.
        """
        return prod(self.tensor(name).shape[:-1]) if isinstance(name, str) else name.n

    def n_bytes(self, name: TensorName) -> int:
        return self.tensor(name).n_bytes // self.n_rows(tensor_of_slice(name)) * self.n_rows(name)

    def format(self, name: TensorName) -> Format:
        tensor = self.tensor(name)
        if tensor.format is None:
            raise UnsupportedError(
                f"{self.gguf.path}: {tensor_of_slice(name)} is {tensor.type_name}, "
                "a format that treadle does not support yet"
            )
        return tensor.format

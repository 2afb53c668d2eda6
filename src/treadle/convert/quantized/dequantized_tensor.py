"""A matrix of a quantised checkpoint, computed from its parts when it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.convert.sources.derived_tensors import DerivedTensor, Make, block_of
from treadle.files.safetensors import SafeTensor
from treadle.formats import by_name

Array = npt.NDArray[Any]
Found = dict[str, SafeTensor]

MULTIPLIED_OUT = frozenset(("F16", "BF16"))  # types of weights that no block format can hold
INT8 = "I8"
INT32 = "I32"
FLOATS = ("F32", "F16", "BF16")
EXPONENTS = ("U8", "F8_E8M0")  # dtypes that hold exponents of powers of two
_WHOLE = {"U32": "<u4", "I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1"}
_CODES = ("F8_E4M3", "F8_E5M2", "F8_E8M0")


@dataclass(frozen=True, eq=False)
class DequantizedTensor(DerivedTensor):
    """A tensor that ``make`` computes from the values of its sources (``numbers``) when it is read:
    bytes in ``dtype``, the name of a ggml type.
    """

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, uint8 [n_bytes], computed anew. Raises FileError for values
        that ``dtype`` cannot hold.
        """
        try:
            made = self.make(*map(numbers, self.sources))
        except OverflowError as error:
            raise self.error(f"{error}", f"{self.name} in {self.dtype}") from error
        return np.ascontiguousarray(made).reshape(-1).view(np.uint8)


def unpacked(
    name: str, dtype: str, shape: tuple[int, ...], sources: tuple[SafeTensor, ...], make: Make
) -> DequantizedTensor:
    """Return a tensor of ``shape`` in ``dtype`` (a ggml type's name), whose bytes ``make`` computes
    from the values of ``sources`` when it is read.
    """
    first = sources[0]
    (block, block_bytes) = block_of(dtype)
    size = math.prod(shape) // block * block_bytes
    return DequantizedTensor(
        name, dtype, shape, size, first.path, first.offset, first.file, sources, make
    )


def numbers(tensor: SafeTensor) -> Array:
    """Return the tensor's values [*shape]: integers in their type, floats as float32, 8-bit floats
    as raw bytes.
    """
    if tensor.dtype in _CODES:
        return tensor.data.reshape(tensor.shape)
    if kind := _WHOLE.get(tensor.dtype):
        found: Array = tensor.data.view(kind).reshape(tensor.shape)
        return found
    return by_name(tensor.dtype).dequantize_rows(tensor.data).reshape(tensor.shape)


def pop_companion(
    found: Found, first: SafeTensor, name: str, kinds: Sequence[str] = FLOATS
) -> SafeTensor:
    """Remove ``name``, a companion of the quantised tensor ``first`` (such as its scale), from
    ``found`` and return it. Raises FileError if it is missing, or if its type is none of ``kinds``.
    """
    if (part := pop_optional(found, name, kinds)) is None:
        raise first.error(f"is quantised but {name} is missing", f"{name} in the same checkpoint")
    return part


def pop_optional(found: Found, name: str, kinds: Sequence[str]) -> SafeTensor | None:
    """Remove ``name`` from ``found`` and return it; None if it is missing. Raises FileError if its
    type is none of ``kinds``.
    """
    part = found.pop(name, None)
    return part and typed(part, kinds)


def typed(tensor: SafeTensor, kinds: Sequence[str]) -> SafeTensor:
    """Return the tensor. Raises FileError if its type is none of ``kinds``."""
    if tensor.dtype not in kinds:
        raise tensor.error(f"is in {tensor.dtype}", ", ".join(kinds))
    return tensor


def floats_of(scale: SafeTensor) -> str:
    """Return the float type for weights that are multiplied by these scales: the scales' own if it
    is F16 or BF16, else BF16.
    """
    return scale.dtype if scale.dtype in MULTIPLIED_OUT else "BF16"


def matrix(tensor: SafeTensor) -> tuple[int, int]:
    """Return (rows, columns). Raises FileError unless there are two axes, none of them empty."""
    if len(tensor.shape) != 2:
        raise tensor.error(f"shape {list(tensor.shape)}", "a matrix")
    m, k = matrix_shape(tensor)
    return m, k


def matrix_shape(tensor: SafeTensor) -> tuple[int, ...]:
    """Return the shape [.., M, K]. Raises FileError for less than two axes, or an empty one."""
    if len(tensor.shape) < 2 or 0 in tensor.shape:
        raise tensor.error(f"shape {list(tensor.shape)}", "a matrix")
    return tensor.shape


def shared(n: int, parts: int, *said: int) -> int:
    """Return the first group size in ``said`` for which ``n`` weights have ``parts`` scales, where
    the last group may be smaller; 0 if none fits.
    """
    return next((size for size in said if size > 0 and -(-n // size) == parts), 0)


def one_number(tensor: SafeTensor) -> SafeTensor:
    """Return the tensor. Raises FileError unless it has exactly one element."""
    if math.prod(tensor.shape) != 1:
        raise tensor.error(f"shape {list(tensor.shape)}", "one number")
    return tensor

"""Weight formats: one file each, one row each in FORMATS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.formats.bf16 import BF16
from treadle.formats.f16 import F16
from treadle.formats.f32 import F32
from treadle.formats.format import F32Array, Format
from treadle.formats.ggml_types import GGML_TYPES, REMOVED, GGMLType
from treadle.formats.q4_0 import Q4_0
from treadle.formats.q4_1 import Q4_1
from treadle.formats.q8_0 import Q8_0

if TYPE_CHECKING:
    from treadle.files.gguf import Tensor

__all__ = [
    "FORMATS",
    "GGML_TYPES",
    "REMOVED",
    "Format",
    "GGMLType",
    "by_name",
    "dequantize_tensor",
    "type_of",
]

FORMATS: dict[int, Format] = {f.ggml_id: f for f in (F32, F16, BF16, Q8_0, Q4_0, Q4_1)}


def by_name(name: str) -> Format:
    """The format called ``name`` in either case; UnsupportedError names those there are."""
    for fmt in FORMATS.values():
        if fmt.name == name.upper():
            return fmt
    known = ", ".join(fmt.name for fmt in FORMATS.values())
    raise UnsupportedError(f"no weight format {name!r} (treadle has {known})")


def type_of(ggml_id: int) -> GGMLType | None:
    """Name and block size of a ggml type: that of its row, else of ggml's own table."""
    fmt = FORMATS.get(ggml_id)
    if fmt is not None:
        return GGMLType(fmt.name, fmt.block, fmt.dtype.itemsize)
    return GGML_TYPES.get(ggml_id)


def dequantize_tensor(tensor: Tensor) -> F32Array:
    """All weights of ``tensor``, float32 of its shape; UnsupportedError without a format row."""
    if tensor.format is None:
        raise UnsupportedError(f"{tensor.name}: treadle cannot read {tensor.type_name} weights yet")
    return tensor.format.dequantize_rows(tensor.data).reshape(tensor.shape)

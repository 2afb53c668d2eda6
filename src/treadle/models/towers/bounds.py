"""Bounds of a tower's matrices: tensors of one value, which clamp a matrix' input and result."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import TYPE_CHECKING

from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

SIDES = ("input", "output")  # of a matrix: the rows that it multiplies, and its products
ENDS = ("min", "max")
SUFFIXES = tuple(f".{side}_{end}" for side in SIDES for end in ENDS)


def bounded_stem(name: str) -> str:
    """Return the stem of the matrix whose input or result the tensor ``name`` clamps, by that name
    (such as ``STEM.input_max``); "" if it is not the name of a bound.
    """
    suffix = next((each for each in SUFFIXES if name.endswith(each)), "")
    return name.removesuffix(suffix) if suffix else ""


def find_bounds(gguf: GGUF, matrices: Container[str]) -> frozenset[str]:
    """Return the names of the tensors that are bounds of ``matrices``, the names of the tensors
    that a tower uses; the vectors among these have no bounds.

    Raises FileError for a bound that is no single number, or a minimum above the maximum.
    """
    found = {}
    for name, tensor in gguf.tensors.items():
        stem = bounded_stem(name)
        weight = f"{stem}.weight"
        if not stem or weight not in matrices or len(gguf.tensors[weight].shape) < 2:
            continue
        values = tensor.dequantize().ravel()
        if values.size != 1:
            raise tensor.error(f"shape {list(tensor.shape)}", "[1]")
        if math.isnan(values[0]):
            raise tensor.error("is not a number", "a bound")
        found[name] = float(values[0])
    for name, low in found.items():
        if name.endswith("_min"):
            most = found.get(f"{name.removesuffix('min')}max", math.inf)
            if low > most:
                what = f"is {low:g}, above the maximum {most:g}"
                raise FileError(what, path=gguf.path, where=name, expected="a smaller minimum")
    return frozenset(found)

"""PEFT adapters of experts, one module per expert, stacked in GGUF's form: A ``[E, rank, k]`` and B
``[E, m, rank]``. Experts without an adapter get zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.convert.sources.derived_tensors import EXPERT, DerivedTensor
from treadle.files.safetensors import SafeTensor

ALONE = -1  # index of a matrix that belongs to no expert

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ExpertPair:
    """A and B of a module; ``types``: their types in the file, safetensors' names; ``factor``
    multiplies B A.
    """

    a: SafeTensor
    b: SafeTensor
    factor: float
    types: tuple[str, str]


def group_by_module(pairs: Mapping[str, ExpertPair]) -> dict[str, dict[int, ExpertPair]]:
    """Group pairs by module name without the expert's index, then by that index; a module that is
    no expert's has the single index ALONE.
    """
    found: dict[str, dict[int, ExpertPair]] = {}
    for module, pair in pairs.items():
        match = EXPERT.fullmatch(module)
        at = match["before"] + match["rest"] if match else module
        found.setdefault(at, {})[int(match["i"]) if match else ALONE] = pair
    return found


def stack(pairs: Mapping[int, ExpertPair], n_expert: int) -> ExpertPair:
    """Stack the pairs of single experts to one pair for all ``n_expert`` of the model, A [E, rank,
    k] and B [E, m, rank], zeros for experts without one; if factors differ, they go into B.

    Raises FileError for an expert that the model lacks, and for experts of different shapes.
    """
    first = pairs[min(pairs)]
    factors = {pair.factor for pair in pairs.values()}
    if max(pairs) >= n_expert:
        raise pairs[max(pairs)].a.error("is of another model", f"experts 0 to {n_expert - 1}")
    for pair in pairs.values():
        for half, other in ((pair.a, first.a), (pair.b, first.b)):
            if half.shape != other.shape:
                expected = f"{list(other.shape)}, as {other.name}: one rank for all experts"
                raise half.error(f"shape {list(half.shape)}", expected)
    same = len(factors) == 1
    scales = {i: 1.0 if same else pair.factor for i, pair in pairs.items()}
    kinds = [set(each) for each in zip(*(pair.types for pair in pairs.values()), strict=True)]
    a, b = ("F32" if len(each) > 1 else min(each) for each in kinds)
    return ExpertPair(
        _stacked({i: pair.a for i, pair in pairs.items()}, n_expert, dict.fromkeys(pairs, 1.0)),
        _stacked({i: pair.b for i, pair in pairs.items()}, n_expert, scales),
        first.factor if same else 1.0,
        (a, b if same else "F32"),
    )


def _stacked(
    halves: Mapping[int, SafeTensor], n: int, scales: Mapping[int, float]
) -> DerivedTensor:
    first = halves[min(halves)]
    shape = (n, *first.shape)
    at = (first.path, first.offset, first.file)
    make = partial(_filled, halves, n, scales)
    sources = tuple(halves.values())
    return DerivedTensor(first.name, "F32", shape, 4 * prod(shape), *at, sources, make, floats=True)


def _filled(
    halves: Mapping[int, SafeTensor], n: int, scales: Mapping[int, float], *rows: Floats
) -> Floats:
    result = np.zeros((n, *rows[0].shape), np.float32)
    for (i, tensor), row in zip(halves.items(), rows, strict=True):
        if not np.isfinite(row).all():
            raise tensor.error("holds a value that is not a finite number")
        result[i] = row * np.float32(scales[i])
    return result

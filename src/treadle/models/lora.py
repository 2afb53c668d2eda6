"""LoRA adapters: low-rank matrices whose products are added to some of a model's matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.base.validate import number_between
from treadle.errors import TreadleError, UnsupportedError

Floats = npt.NDArray[np.float32]
MOST_SCALE = 1e6
EMBEDDINGS = "token_embd.weight"
TYPES = "token_types.weight"


@dataclass(frozen=True, eq=False)
class LowRank:
    """The low-rank product ``factor B A``, to be added to a matrix ``[m, k]``. ``a()`` returns f32
    ``[rank, k]`` and ``b()`` f32 ``[m, rank]``, rows in the model's order. For experts, both have a
    first axis of experts.
    """

    rank: int
    factor: float  # alpha / rank, or what the adapter states instead
    a: Callable[[], Floats]
    b: Callable[[], Floats]
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]


def transposed(low: LowRank) -> LowRank:
    """Return the low-rank product for the transposed matrix, ``factor A^T B^T``."""

    def a() -> Floats:
        return np.ascontiguousarray(low.b().T)

    def b() -> Floats:
        return np.ascontiguousarray(low.a().T)

    rank = low.b_shape[-1] if low.b_shape else 0
    return LowRank(rank, low.factor, a, b, low.b_shape[::-1], low.a_shape[::-1])


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter from a file or folder. ``ranks``: its low-rank products, by the names of the
    model's matrices to which they are added.
    """

    name: str
    path: Path
    ranks: Mapping[str, LowRank]
    mark: bytes  # digest of all weights

    def check(self, met: set[str]) -> None:
        """Raise UnsupportedError, naming a matrix, unless all matrices that the adapter changes are
        in ``met``: the names of the matrices in the products of a plan.
        """
        if rest := self.ranks.keys() - met:
            what = "is not used in a matrix product, so an adapter cannot apply to it"
            raise UnsupportedError(f"{self.path}: {min(rest)} {what}")


def lora_scale(of: str, scale: Any) -> float:
    """Return ``scale`` rounded to float32. Raises TreadleError, whose message begins with ``of``,
    unless it is a number from -1e6 to 1e6.
    """
    if number_between(scale, -MOST_SCALE, MOST_SCALE) is None:
        expected = f"a number from -{MOST_SCALE:g} to {MOST_SCALE:g}"
        raise TreadleError(f"{of}: the scale {scale!r:.40}: expected {expected}")
    return float(np.float32(scale))

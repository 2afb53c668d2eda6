"""Activation functions: how a kernel computes each, and what it is in numpy."""

from __future__ import annotations

from collections.abc import Callable
from math import erfc

import numpy as np
import numpy.typing as npt

from treadle.jit import math
from treadle.jit.language import Builder, Val
from treadle.record import dataclass

F64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Activation:
    """One function of one value; ``exact`` in float64."""

    emit: Callable[[Builder, Val], Val]
    exact: Callable[[F64Array], F64Array]


def _silu(y: F64Array) -> F64Array:
    return np.asarray(y * np.exp(-np.logaddexp(0, -y)))


def _gelu(y: F64Array) -> F64Array:
    return np.asarray(0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))))


def _gelu_erf(y: F64Array) -> F64Array:
    return np.asarray(0.5 * y * np.vectorize(erfc, otypes=[float])(-y / np.sqrt(2)))


def _relu2(y: F64Array) -> F64Array:
    return np.maximum(y, 0.0) ** 2


ACTIVATIONS = {
    "silu": Activation(math.silu, _silu),
    "gelu": Activation(math.gelu, _gelu),  # the tanh form
    "gelu_erf": Activation(math.gelu_erf, _gelu_erf),  # as it is defined
    "relu2": Activation(math.relu2, _relu2),
}


def activated(fn: str, y: F64Array) -> F64Array:
    """An activation, by its name, in numpy."""
    return ACTIVATIONS[fn].exact(y)

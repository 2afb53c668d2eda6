"""Activation functions: emitted code, and the exact function in numpy."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import erfc

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Val

F64Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Activation:
    """One activation function: ``emit`` in a kernel, ``exact`` in numpy (float64). Gated, it is
    ``emit`` of the gate times ``emit_up`` of up; ``emit_up`` None is the identity.
    """

    emit: Callable[[Builder, Val], Val]
    exact: Callable[[F64Array], F64Array]
    emit_up: Callable[[Builder, Val], Val] | None = None  # None: identity
    exact_up: Callable[[F64Array], F64Array] | None = None

    def gate(self, k: Builder, gate: Val, up: Val) -> Val:
        """Return the gated activation of two vectors: ``emit(gate) * emit_up(up)``."""
        return self.emit(k, gate) * (self.emit_up(k, up) if self.emit_up else up)


def _silu(y: F64Array) -> F64Array:
    return np.asarray(y * np.exp(-np.logaddexp(0, -y)))


def _gelu(y: F64Array) -> F64Array:
    return np.asarray(0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))))


def _gelu_erf(y: F64Array) -> F64Array:
    return np.asarray(0.5 * y * np.vectorize(erfc, otypes=[float])(-y / np.sqrt(2)))


def _gelu_quick(y: F64Array) -> F64Array:
    return np.asarray(y * np.exp(-np.logaddexp(0, -math.QUICK * y)))


def _relu(y: F64Array) -> F64Array:
    return np.maximum(y, 0.0)


def _relu2(y: F64Array) -> F64Array:
    return np.maximum(y, 0.0) ** 2


def _silu_clamped(y: F64Array) -> F64Array:
    y = np.minimum(y, math.SWIGLU_LIMIT)
    return np.asarray(y * np.exp(-np.logaddexp(0, -math.SWIGLU_ALPHA * y)))


def _clamped_plus_one(y: F64Array) -> F64Array:
    return np.asarray(np.clip(y, -math.SWIGLU_LIMIT, math.SWIGLU_LIMIT) + 1)


def _sigmoid(y: F64Array) -> F64Array:
    return np.asarray(np.exp(-np.logaddexp(0, -y)))


_ROWS = {
    "silu": Activation(math.silu, _silu),
    "gelu": Activation(math.gelu, _gelu),  # the tanh form
    "gelu_erf": Activation(math.gelu_erf, _gelu_erf),  # exact
    "gelu_quick": Activation(math.gelu_quick, _gelu_quick),  # CLIP's approximation
    "relu": Activation(math.relu, _relu),
    "relu2": Activation(math.relu2, _relu2),
    "swiglu_clamped": Activation(
        math.silu_clamped, _silu_clamped, math.clamped_plus_one, _clamped_plus_one
    ),
    "sigmoid": Activation(math.sigmoid, _sigmoid),
    "tanh": Activation(math.tanh, lambda y: np.tanh(y)),
    "softplus": Activation(math.softplus, lambda y: np.logaddexp(0, y)),
}


class Activations(dict[str, Activation]):
    """Activations by name. A name may end with a limit: silu_to_7 limits the activated gate to at
    most 7 (Step 3.5), silu_of_7 limits the gate before it is activated (DeepSeek V4, Maple); both
    limit up to -7..7. situ_4_25 is SiTU with bounds 4 and 25 (Kimi K3): see ``situ_name``. Raises
    KeyError for other names.
    """

    def __missing__(self, name: str) -> Activation:
        if name.startswith(SITU):
            return _situ(*map(float, name.removeprefix(SITU).split("_")))
        fn, limit = split_limit(name)
        if not limit:
            raise KeyError(name)
        return _limited(self[fn], float(limit), first=BEFORE in name)


SITU = "situ_"
AFTER = "_to_"  # the activated gate is limited
BEFORE = "_of_"  # the gate is limited, then activated


def situ_name(bound: float, bound_up: float) -> str:
    """Return the name of SiTU, ``b tanh(gate / b) sigmoid(gate) * c tanh(up / c)``: b is ``bound``,
    c is ``bound_up``. If ``bound_up`` is 0, the second factor is ``up`` itself.
    """
    return f"{SITU}{bound:.9g}_{bound_up:.9g}"


def split_limit(name: str) -> tuple[str, str]:
    """Split an activation's name into the name without its limit and the limit's number as text:
    ("silu", "7") for silu_to_7 and silu_of_7. The limit is "" if the name has none.
    """
    fn, _, limit = name.replace(BEFORE, AFTER).rpartition(AFTER)
    return (fn, limit) if fn else (name, "")


@cache
def _limited(of: Activation, limit: float, *, first: bool) -> Activation:
    def emit(k: Builder, x: Val) -> Val:
        # The computed value comes second, so that NaN gives NaN.
        most = k.const(limit, x.ty)
        return of.emit(k, k.min(most, x)) if first else k.min(most, of.emit(k, x))

    def emit_up(k: Builder, x: Val) -> Val:
        return k.max(k.const(-limit, x.ty), k.min(k.const(limit, x.ty), x))

    def exact(y: F64Array) -> F64Array:
        return of.exact(np.minimum(y, limit)) if first else np.minimum(of.exact(y), limit)

    def exact_up(y: F64Array) -> F64Array:
        return np.clip(y, -limit, limit)

    return Activation(emit, exact, emit_up, exact_up)


@cache
def _situ(bound: float, bound_up: float) -> Activation:
    def bent(k: Builder, x: Val, most: float) -> Val:
        return math.exact_tanh(k, x * (1 / most)) * most

    def emit_up(k: Builder, x: Val) -> Val:
        return bent(k, x, bound_up)

    def exact_up(y: F64Array) -> F64Array:
        return np.asarray(bound_up * np.tanh(y / bound_up))

    return Activation(
        lambda k, x: bent(k, x, bound) * math.sigmoid(k, x),
        lambda y: np.asarray(bound * np.tanh(y / bound) * _sigmoid(y)),
        emit_up if bound_up else None,
        exact_up if bound_up else None,
    )


ACTIVATIONS = Activations(_ROWS)


def activated(fn: str, y: F64Array) -> F64Array:
    """Return the activation named ``fn`` of ``y``, float64."""
    return ACTIVATIONS[fn].exact(y)


def gated(fn: str, gate: F64Array, up: F64Array) -> F64Array:
    """Return the gated activation named ``fn`` of ``gate`` and ``up``, float64."""
    row = ACTIVATIONS[fn]
    return row.exact(gate) * (row.exact_up(up) if row.exact_up else up)

"""Limits that are derived for products in f32, on a CPU that has matrix registers too.

There F16 weights and their activations are two bf16 each, weights with codes one: "Activations" in
docs/kernels.md.
"""

from __future__ import annotations

from treadle.formats import by_name
from treadle.isa import best, runnable
from treadle.isa.isa import Isa
from treadle.jit.host import host_features
from treadle.kernels.matmul.select_activation import matrix_act

# Two bf16 lose 2**-17 of a weight and of an activation: sqrt(2) 2**7 roundings of f32. A sum of 100
# products in f32 has the error of sqrt(100 / 2) roundings. So results are up to 25 times as far
# off. Limits are at least twice what f32 loses: 16 of them are enough. Three bf16 lose nothing.
WIDER = {None: 1, "bf16x3": 1, "bf16x2": 16}


def sharp_isa() -> str | None:
    """The fastest row of this CPU whose products of floats are f32: None if it is the default. For
    tests of structure, whose limits tell a wrong order of tokens or an early cut from rounding.
    """
    features = host_features()
    if best(features).matrix is None:
        return None
    plain = [row for row in runnable(features) if row.matrix is None]
    return [row for row in plain if not row.slow_with & features][-1].name


def limit(base: float, fmt: str, isa: Isa) -> float:
    """``base``, the limit of results in f32, for weights in the float format ``fmt`` on ``isa``."""
    act = matrix_act(by_name(fmt), isa) if isa.matrix is not None else None
    return base * WIDER[act]


def bf16_limit(base: float, isa: Isa) -> float:
    """``base``, a limit for products of BF16 weights as 16-bit words or in f32, where activations
    lose less than 2**-12 of the largest. Where they meet BF16 weights in bf16 they lose 2**-9 of
    themselves.
    """
    in_bf16 = isa.dot_bf16 is not None or isa.matrix is not None
    return base * 8 if in_bf16 else base


def weight_rounding(fmt: str, isa: Isa) -> float:
    """How far a weight in ``fmt`` may be rounded on matrix registers, as a share of itself."""
    act = matrix_act(by_name(fmt), isa) if isa.matrix is not None else None
    return {None: 0.0, "bf16x3": 0.0, "bf16x2": 2.0**-17, "bf16": 2.0**-9}[act]

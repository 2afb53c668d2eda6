"""Rates of the delta rule with a decay for each channel, and decays that are next to nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run
from tests.kernels.registry import STATES
from tests.kernels.test_states import checked, compiled, exact, floats, given, of
from treadle.isa.isa import Isa
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.kda import ChannelDelta, ChannelRates
from treadle.kernels.run_state import PART


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(ChannelRates), ids=registry.name)
def test_channel_rates(
    spec: ChannelRates, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """As ``test_rates``: softplus and its argument 6 u of both, which times ``a`` is an absolute
    error of the exponential's argument; sigmoid 4 u.
    """
    n = spec.heads * spec.k
    h = spec.heads
    x = 8 * floats(rng, 4, n + 5)
    beta = 4 * floats(rng, 4, h + 7)
    a = np.abs(floats(rng, h)) * (1 if spec.floor else -1)
    bias = floats(rng, n)
    width = COLUMNS * -(-h // COLUMNS) + n + 1
    args: dict[str, Any] = {"x": x, "beta": beta, "a": a, "bias": bias}
    args |= {"out": np.full((4, width), np.nan, np.float32), "out_stride": width}
    args |= {"stride": n + 5, "beta_stride": h + 7, "column": 3, "beta_column": 2}
    most = 9.0 + np.abs(x).max() + np.abs(bias).max()
    tolerance = (8 + 8 * np.abs(a).max()) * most * U32
    if spec.floor:  # a quarter of its argument's error is the sigmoid's, and it has 4 u itself
        tolerance = (8 + -spec.floor * (4 + np.abs(a).max() * most)) * U32
    checked(spec, isa, memory, args, "out", 4 * h, lambda exact: tolerance)


@pytest.mark.parametrize(
    "spec", [s for s in STATES if isinstance(s, ChannelDelta)], ids=registry.name
)
def test_channels_decay_apart(spec: ChannelDelta, memory: Memory, rng: np.random.Generator) -> None:
    """A channel that forgets all at once leaves the others' as they are, and nothing of it is no
    number: products of its decays are zero.
    """
    args = given(spec, rng)
    run = Run(parts=np.array([(0, 9, 4, 0, 1, 0)], PART))
    decays = args["rates"][:, COLUMNS:][:, : spec.n_head * spec.n_state]
    decays[:] = 1.0
    decays.reshape(9, spec.n_head, -1)[:, :, 0] = 1e-30
    known = exact(spec, args, run)
    found = compiled(spec, rows.ALL[-1], memory, args, run)
    assert np.isfinite(found["out"][:, :-1]).all()
    scale = np.abs(known["out"][:, :-1]).max()
    # Decays of 1 keep every rounding: nine tokens' sums of n_state terms, twice each.
    tolerance = 9 * (2 * spec.n_state + 8) * U32 * scale * 4
    assert np.abs(found["out"][:, :-1] - known["out"][:, :-1]).max() < tolerance

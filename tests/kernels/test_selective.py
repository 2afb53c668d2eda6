"""Mamba-1's scan against its numpy twin, and the same bits however a text is cut into runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import SELECTIVES
from tests.kernels.test_states import CELLS, PARTS
from treadle.isa.isa import Isa
from treadle.kernels.recurrent.mamba1 import Selective
from treadle.kernels.run_state import PART

FRONT = 12  # bytes of other layers in front of a state
N = 9  # tokens
TOKENS = 5  # of a part, at most


def given(spec: Selective, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of awkward strides; decays from nearly none to nearly all of a state."""
    k = spec.k
    n = spec.n_state
    cell = 4 * k * n + 2 * FRONT
    states = np.full(CELLS * cell, 0xFF, np.uint8)
    for slot in range(CELLS):
        at = slot * cell + FRONT
        states[at : at + 4 * k * n] = floats(rng, k * n).view(np.uint8)
    x = floats(rng, N, 2 * k + 3)
    dt = 3 * floats(rng, N, k + 1)
    bc = floats(rng, N, 2 * n + 7)
    return {
        "x": x,
        "dt": dt,
        "bc": bc,
        "a": -np.exp(floats(rng, k * n)),
        "d": floats(rng, k),
        "states": states,
        "out": np.full((N, k + 2), np.nan, np.float32),
        "stride": x.shape[1],
        "dt_stride": dt.shape[1],
        "bc_stride": bc.shape[1],
        "out_stride": k + 2,
        "values": 2,
        "gates": k + 3,
        "keys": 1,
        "queries": n + 4,
        "cell_bytes": cell,
        "state_off": FRONT,
    }


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def exact(spec: Selective, args: dict[str, Any], run: Run) -> dict[str, Any]:
    """The twin's results, in float64 but for the states."""
    made = {
        name: value.astype(np.float64)
        if getattr(value, "dtype", None) == np.float32
        else value.copy()
        if isinstance(value, np.ndarray)
        else value
        for name, value in args.items()
    }
    spec.run_ref(spec.args(**made), run)
    return made


def compiled(
    spec: Selective,
    isa: Isa,
    memory: Memory,
    args: dict[str, Any],
    run: Run,
    *,
    front: bool = False,
) -> dict[str, Any]:
    made = {
        name: memory.copy(value, name=name, front=front) if isinstance(value, np.ndarray) else value
        for name, value in args.items()
    }
    call(spec, isa, memory, made, run, len(run.parts) * spec.items)
    return made


def states_in(args: dict[str, Any]) -> np.ndarray:
    """All slots, float32 ``[CELLS, n_values]``."""
    cells = args["states"].reshape(CELLS, -1)[:, FRONT:-FRONT]
    return np.ascontiguousarray(cells).view(np.float32)


def magnitudes(spec: Selective, args: dict[str, Any]) -> tuple[float, float]:
    """The largest that a state could be, and an output, were no term to cancel another."""
    dt = float(np.logaddexp(0, args["dt"].astype(np.float64)).max())
    x, bc = (float(np.abs(args[name]).max()) for name in ("x", "bc"))
    state = float(np.abs(states_in(args)).max()) + TOKENS * dt * x * bc
    out = (spec.n_state * bc * state + x * float(np.abs(args["d"]).max())) * x
    return state, out


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", SELECTIVES, ids=registry.name)
def test_states_are_read_and_written(
    spec: Selective, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Three sequences in one run. Of a decay ``2**-v`` the rounding of v (softplus has 6 of them,
    the product one) makes a relative error of ln(2) v 7 u, and ``v 2**-v`` is below 0.54: 3 u, and
    2 u of the power itself. With the products that makes at most 16 u of a state a token; sums of
    n_state terms, silu's 8 u, and 5 tokens.
    """
    args = given(spec, rng)
    run = Run(parts=np.array(PARTS, PART))
    expected = exact(spec, args, run)
    state, out = magnitudes(spec, args)
    for front in (False, True):
        found = compiled(spec, isa, memory, args, run, front=front)
        tolerance = TOKENS * 16 * U32
        assert_close(states_in(found), states_in(expected), tolerance * state, spec.name)
        tolerance += (spec.n_state + 9) * U32
        assert_close(found["out"], expected["out"], tolerance * out, spec.name)
        written = [part[4] for part in PARTS]
        same = np.delete(args["states"].reshape(CELLS, -1), written, 0)
        assert np.array_equal(np.delete(found["states"].reshape(CELLS, -1), written, 0), same)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", SELECTIVES, ids=registry.name)
def test_bits_do_not_depend_on_how_a_text_is_cut(
    spec: Selective, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    args = given(spec, rng)
    whole = compiled(spec, isa, memory, args, Run(parts=np.array([(0, N, 0, 0, 1, 0)], PART)))
    for cuts in ((0, 1, 2, 5, N), (0, 8, N)):
        piece = args
        slot = 0
        for start, end in pairwise(cuts):
            part = (start, end - start, start, slot, slot + 1, 0)
            piece = compiled(spec, isa, memory, piece, Run(parts=np.array([part], PART)))
            slot += 1
        assert piece["out"].tobytes() == whole["out"].tobytes()
        assert states_in(piece)[slot].tobytes() == states_in(whole)[1].tobytes()

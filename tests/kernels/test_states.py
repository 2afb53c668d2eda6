"""The kernels of layers with a state against their numpy twins, and the same bits however a text is
cut into runs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import STATES
from treadle.isa.isa import Isa
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.recurrent.gates import OutputGate, Rates, SplitHalves, UnitHeads
from treadle.kernels.recurrent.rules import Delta, Mamba2
from treadle.kernels.recurrent.scan import Scan
from treadle.kernels.run_state import LINE, PART

Row = Convolution | Scan
PAIR = 2 * COLUMNS  # two numbers of each head
CELLS = 5  # slots of states
PARTS = [
    (0, 5, 0, 0, 1, 0),
    (5, 1, 9, 2, 3, 0),
    (6, 3, 4, 4, 0, 0),
]  # the first one begins its text


def of(kind: Any) -> list[Any]:
    return [spec for spec in STATES if isinstance(spec, kind)]


def values_of(spec: Row) -> int:
    """Of one state."""
    if isinstance(spec, Convolution):
        return spec.before * spec.k
    return spec.n_head * spec.n_state * spec.head_dim


def front_of(spec: Row) -> int:
    """Bytes of other layers in front of a state: whole cache lines, where it has to lie in such."""
    return LINE if getattr(spec, "passing", False) else 12


def given(spec: Row, rng: np.random.Generator) -> dict[str, Any]:
    """Arguments with rows of awkward strides; keys and queries of length about 1."""
    n = 9
    front = front_of(spec)
    cell = 4 * values_of(spec) + 2 * front
    states = np.full(CELLS * cell, 0xFF, np.uint8)
    for slot in range(CELLS):
        at = slot * cell + front
        noise = rng.standard_normal(values_of(spec)).astype(np.float32)
        states[at : at + noise.nbytes] = noise.view(np.uint8)
    made: dict[str, Any] = {"states": states, "cell_bytes": cell, "state_off": front}
    if isinstance(spec, Convolution):
        width = spec.k * (3 if spec.gates else 1) + 2
        made |= {"x": rng.standard_normal((n, width + 3)), "stride": width + 3, "column": 2}
        made["w"] = rng.standard_normal((spec.taps, spec.k))
        made |= {"bias": rng.standard_normal(spec.k)} if spec.bias else {}
        made |= {"gain": np.full(1, 1.25)} if spec.scaled else {}
    else:
        n_values = spec.n_head * spec.head_dim
        n_keys = spec.n_group * spec.n_state
        x = rng.standard_normal((n, 3 + n_values + 2 * n_keys))
        x[:, 3 + n_values :] /= np.sqrt(spec.n_state)
        made |= {"x": x, "stride": x.shape[1]}
        made |= {"values": 3, "keys": 3 + n_values, "queries": 3 + n_values + n_keys}
        width = COLUMNS + max(COLUMNS, spec.n_head * spec.n_decay)
        made |= {"rates": rng.uniform(0.1, 0.9, (n, width)), "rates_stride": width}
        made |= {"out": np.full((n, n_values + 1), np.nan), "out_stride": n_values + 1}
        made |= {"d": rng.standard_normal(spec.n_head)} if isinstance(spec, Mamba2) else {}
    return {
        name: value.astype(np.float32) if getattr(value, "dtype", None) == np.float64 else value
        for name, value in made.items()
    }


def exact(spec: Row, args: dict[str, Any], run: Run) -> dict[str, Any]:
    """The twin's results: arrays in float64, but for the states."""
    made = {
        name: value.astype(np.float64)
        if getattr(value, "dtype", None) == np.float32
        else value.copy()
        if isinstance(value, np.ndarray)
        else value
        for name, value in args.items()
    }
    for name in ("w", "bias", "d"):
        if name in made:
            made[name] = made[name].ravel()
    spec.run_ref(spec.args(**made), run)
    return made


def compiled(
    spec: Row, isa: Isa, memory: Memory, args: dict[str, Any], run: Run, *, front: bool = False
) -> dict[str, Any]:
    made = {
        name: memory.copy(value, name=name, front=front) if isinstance(value, np.ndarray) else value
        for name, value in args.items()
    }
    n = len(run.parts) * (spec.tiles if isinstance(spec, Convolution) else spec.items)
    call(spec, isa, memory, made, run, n)
    return made


def states_in(spec: Row, args: dict[str, Any]) -> np.ndarray:
    """All slots, float32 ``[CELLS, n_values]``."""
    front = front_of(spec)
    cells = args["states"].reshape(CELLS, -1)[:, front : front + 4 * values_of(spec)]
    return np.ascontiguousarray(cells).view(np.float32)


def magnitudes(spec: Row, args: dict[str, Any]) -> float:
    """The largest value that an output or a state could have, were no term to cancel another."""
    x = np.abs(args["x"]).max()
    if isinstance(spec, Convolution):
        u = max(x * x if spec.gates else x, np.abs(states_in(spec, args)).max())
        most = u * np.abs(args["w"]).max() * spec.taps + np.abs(args.get("bias", np.zeros(1))).max()
        return float(most * (x if spec.gates else 1.1))
    s = float(np.abs(states_in(spec, args)).max())
    n = spec.n_state
    key = float(np.abs(args["x"][:, args["keys"] :]).max())
    for _ in range(5):
        seen = key * n * s if isinstance(spec, Delta) else 0.0
        s = s + key * (x + seen)
    return float(max(s, n * key * s + x * 4))


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of((Convolution, Scan)), ids=registry.name)
def test_states_are_read_and_written(
    spec: Row, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Three sequences in one run. A state takes at most 4 roundings a token and sums of n_state (or
    of taps), 5 tokens; with decays of channels keys take one more each; silu's Lipschitz constant
    is 1.1.
    """
    args = given(spec, rng)
    run = Run(parts=np.array(PARTS, PART))
    expected = exact(spec, args, run)
    n_sum = spec.taps if isinstance(spec, Convolution) else spec.n_state
    tolerance = 5 * (2 * n_sum + 8) * U32 * magnitudes(spec, args)
    for front in (False, True):
        found = compiled(spec, isa, memory, args, run, front=front)
        name = "x" if isinstance(spec, Convolution) else "out"
        assert_close(found[name], expected[name], tolerance, spec.name)
        assert_close(states_in(spec, found), states_in(spec, expected), tolerance, spec.name)
        written = {part[4] for part in PARTS}
        same = np.delete(args["states"].reshape(CELLS, -1), list(written), 0)
        assert np.array_equal(np.delete(found["states"].reshape(CELLS, -1), list(written), 0), same)


ONE_BY_ONE = [spec for spec in of((Convolution, Scan)) if getattr(spec, "block", 1) == 1]


@pytest.mark.parametrize("spec", ONE_BY_ONE, ids=registry.name)
def test_bits_do_not_depend_on_how_a_text_is_cut(
    spec: Row, memory: Memory, rng: np.random.Generator
) -> None:
    args = given(spec, rng)
    isa = rows.ALL[-1]
    whole = compiled(spec, isa, memory, args, Run(parts=np.array([(0, 9, 0, 0, 1, 0)], PART)))
    for cuts in ((0, 1, 2, 5, 9), (0, 8, 9)):
        piece = args
        slot = 0
        for start, end in pairwise(cuts):
            part = (start, end - start, start, slot, slot + 1, 0)
            piece = compiled(spec, isa, memory, piece, Run(parts=np.array([part], PART)))
            slot += 1
        for name in ("x", *(("out",) if isinstance(spec, Scan) else ())):
            assert piece[name].tobytes() == whole[name].tobytes()
        assert states_in(spec, piece)[slot].tobytes() == states_in(spec, whole)[1].tobytes()


def checked(
    spec: Any,
    isa: Isa,
    memory: Memory,
    args: dict[str, Any],
    name: str,
    n_items: int,
    tolerance: Any,
) -> None:
    """Rows of four tokens; ``tolerance`` is given the twin's results."""
    twin = {k: v.astype(np.float64) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    spec.run_ref(spec.args(**twin), Run(4))
    for front in (False, True):
        made = {
            k: memory.copy(v, name=k, front=front) if isinstance(v, np.ndarray) else v
            for k, v in args.items()
        }
        call(spec, isa, memory, made, Run(4), n_items)
        assert_close(made[name], twin[name], tolerance(twin[name]), spec.name)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(Rates), ids=registry.name)
def test_rates(spec: Rates, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Softplus and its argument: 6 u of both; the exponential turns an absolute error of its own
    argument, at most |a| of that and a rounding, into a relative one; sigmoid 4 u.
    """
    x = 8 * floats(rng, 4, 100)
    a = -np.abs(floats(rng, spec.heads))
    bias = floats(rng, spec.heads)
    out = np.full((4, PAIR), np.nan, np.float32)
    args = {
        "x": x,
        "a": a,
        "bias": bias,
        "out": out,
        "stride": 100,
        "out_stride": PAIR,
        "column": 3,
    }
    args |= {"beta_column": 50} if spec.beta else {}
    most = 9.0 + 8 * np.abs(x).max()
    tolerance = (8 + 8 * np.abs(a).max()) * most * U32
    checked(spec, isa, memory, args, "out", 4, lambda exact: tolerance)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of((UnitHeads, OutputGate)), ids=registry.name)
def test_lengths_and_gates(
    spec: UnitHeads | OutputGate, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """A sum of squares has relative errors of at most k / 2 + 8 roundings in its root (all terms
    are positive), and a gate 8; of products both.
    """
    n = spec.k * (spec.heads if isinstance(spec, UnitHeads) else 1)
    x = floats(rng, 4, n + 5)
    w = floats(rng, spec.k)
    args: dict[str, Any] = {"x": x, "stride": n + 5, "column": 2}
    if isinstance(spec, OutputGate):
        args |= {"gate": floats(rng, 4, n + 9), "gate_stride": n + 9, "column": 7}
        args |= {"w": w} if spec.eps else {}
    items = 4 * (spec.heads if isinstance(spec, UnitHeads) else spec.groups)
    relative = (spec.k / 2 + 24) * U32
    checked(spec, isa, memory, args, "x", items, lambda exact: relative * np.abs(exact) + 1e-37)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(SplitHalves), ids=registry.name)
def test_halves(spec: SplitHalves, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    n = 2 * spec.k * spec.heads
    x = floats(rng, 4, n + 5)
    both = x[:, 2 : 2 + n].copy().reshape(4, spec.heads, 2, spec.k)
    args = {"x": x, "stride": n + 5, "column": 2}
    checked(spec, isa, memory, args, "x", 4, lambda exact: 0.0)
    spec.run_ref(spec.args(**args), Run(4))
    assert np.array_equal(x[:, 2 : 2 + n // 2], both[:, :, 0].reshape(4, -1))

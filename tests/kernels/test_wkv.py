"""RWKV-7's kernels against their numpy twins, and the same bits however a text is cut into runs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import WKVS
from tests.kernels.test_states import CELLS, PARTS, checked, exact, floats
from treadle.isa.isa import Isa
from treadle.kernels.recurrent.wkv import ROW, TokenShift, Wkv, WkvKeys, WkvOut
from treadle.kernels.run_state import LINE, PART

N = 9  # tokens of a run
TOKENS = 5  # of a part, at most
Row = TokenShift | Wkv


def of(*kinds: type) -> list[Any]:
    return [spec for spec in WKVS if isinstance(spec, kinds)]


def values_of(spec: Row) -> int:
    return spec.k if isinstance(spec, TokenShift) else spec.n_head * spec.n_state * spec.head_dim


def front_of(spec: Row) -> int:
    return LINE if getattr(spec, "passing", False) else 12


def given(spec: Row, rng: np.random.Generator) -> dict[str, Any]:
    """Rows of awkward strides. What is removed has length 1, and what is added is shorter."""
    front = front_of(spec)
    n_values = values_of(spec)
    cell = 4 * n_values + 2 * front
    states = np.full(CELLS * cell, 0xFF, np.uint8)
    for slot in range(CELLS):
        at = slot * cell + front
        states[at : at + 4 * n_values] = floats(rng, n_values).view(np.uint8)
    made: dict[str, Any] = {"states": states, "cell_bytes": cell, "state_off": front}
    if isinstance(spec, TokenShift):
        x = floats(rng, N, spec.k + 3)
        width = spec.n * spec.k + 1
        made |= {"x": x, "w": floats(rng, spec.n * spec.k)}
    else:
        width = spec.n_head * spec.head_dim
        shape = (N, spec.n_head, spec.n_state)
        decays = rng.uniform(0.55, 1, shape)
        rate = rng.uniform(0, 1, shape)
        removed = rng.standard_normal(shape)
        removed /= np.sqrt((removed**2).sum(-1, keepdims=True))
        key, value = (rng.standard_normal(shape) for _ in range(2))
        parts = [part.reshape(N, -1) for part in (decays, removed, removed * rate, key, value)]
        x = np.concatenate([*parts, np.zeros((N, 3))], -1).astype(np.float32)
        r = floats(rng, N, width + 2)
        width = width + 1
        made |= {"x": x, "r": r, "r_stride": r.shape[1]}
    out = np.full((N, width), np.nan, np.float32)
    return made | {"stride": x.shape[1], "out": out, "out_stride": width}


def compiled(
    spec: Row, isa: Isa, memory: Memory, args: dict[str, Any], run: Run, *, front: bool = False
) -> dict[str, Any]:
    made = {
        name: memory.copy(value, name=name, front=front) if isinstance(value, np.ndarray) else value
        for name, value in args.items()
    }
    items = spec.tiles if isinstance(spec, TokenShift) else spec.items
    call(spec, isa, memory, made, run, len(run.parts) * items)
    return made


def states_in(spec: Row, args: dict[str, Any]) -> np.ndarray:
    """All slots, float32 ``[CELLS, n_values]``."""
    front = front_of(spec)
    cells = args["states"].reshape(CELLS, -1)[:, front : front + 4 * values_of(spec)]
    return np.ascontiguousarray(cells).view(np.float32)


def allowed(spec: Row, args: dict[str, Any]) -> tuple[float, float]:
    """Errors of a state and of an output.

    A shift has a difference and a sum. A column of a state, as a vector, at most doubles with a
    token, for what is removed and what is added are no longer than 1, and so does its error; sums
    of n_state terms and 8 roundings add to that.
    """
    x = float(np.abs(args["x"]).max())
    if isinstance(spec, TokenShift):
        most = max(x, float(np.abs(states_in(spec, args)).max()))
        return 0.0, 3 * U32 * most * (1 + 2 * float(np.abs(args["w"]).max()))
    n = spec.n_state
    width = spec.n_head * spec.head_dim
    parts = len(ROW)
    state = states_in(spec, args).reshape(CELLS, spec.n_head, n, -1)
    norm = float(np.sqrt((state**2).sum(-2)).max())
    both = args["x"][:, : parts * width].reshape(N, parts, spec.n_head, n)
    length = float(np.sqrt((both[:, ROW.index("keys")] ** 2).sum(-1)).max())
    new = length * float(np.abs(both[:, ROW.index("values")]).max())
    error = 0.0
    for _ in range(TOKENS):
        error = 2 * error + (n + 8) * U32 * (2 * norm + new)
        norm = 2 * norm + new
    r = args["r"][:, :width].reshape(N, spec.n_head, n)
    seen = float(np.sqrt((r**2).sum(-1)).max())
    return error, seen * (error + n * U32 * norm)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(TokenShift, Wkv), ids=registry.name)
def test_states_are_read_and_written(
    spec: Row, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Three sequences in one run, the first of which begins."""
    args = given(spec, rng)
    run = Run(parts=np.array(PARTS, PART))
    twin: Any = spec
    args["out"][:] = 0  # behind the columns of a token nothing is written
    expected = exact(twin, args, run)
    state, out = allowed(spec, args)
    for front in (False, True):
        found = compiled(spec, isa, memory, args, run, front=front)
        assert_close(found["out"], expected["out"], out, spec.name)
        assert_close(states_in(spec, found), states_in(spec, expected), state, spec.name)
        written = [part[4] for part in PARTS]
        same = np.delete(args["states"].reshape(CELLS, -1), written, 0)
        assert np.array_equal(np.delete(found["states"].reshape(CELLS, -1), written, 0), same)


@pytest.mark.parametrize("spec", of(TokenShift, Wkv), ids=registry.name)
def test_bits_do_not_depend_on_how_a_text_is_cut(
    spec: Row, memory: Memory, rng: np.random.Generator
) -> None:
    args = given(spec, rng)
    isa = rows.ALL[-1]
    whole = compiled(spec, isa, memory, args, Run(parts=np.array([(0, N, 0, 0, 1, 0)], PART)))
    for cuts in ((0, 1, 2, 5, N), (0, 8, N)):
        piece = args
        slot = 0
        for start, end in pairwise(cuts):
            part = (start, end - start, start, slot, slot + 1, 0)
            piece = compiled(spec, isa, memory, piece, Run(parts=np.array([part], PART)))
            slot += 1
        assert piece["out"].tobytes() == whole["out"].tobytes()
        assert states_in(spec, piece)[slot].tobytes() == states_in(spec, whole)[1].tobytes()


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(WkvKeys), ids=registry.name)
def test_keys(spec: WkvKeys, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A sigmoid has 4 u, and its argument's rounding; what is of length 1 the error of a sum of
    squares; then there are some products.
    """
    width = spec.heads * spec.k
    names = ["decay", "rate", "key", "value", *(("first", "mix") if spec.mixed else ())]
    args: dict[str, Any] = {name: floats(rng, 4, width + 5) for name in names}
    args["decay"] *= 4
    vectors = ["w0", "a0", "k_k", "k_a", *(("mix0",) if spec.mixed else ())]
    args |= {name: floats(rng, width) for name in vectors}
    args["key"][1, : spec.k] = 0  # of length 0
    total = len(ROW) * width + 2
    args |= {"out": np.full((4, total), 0, np.float32), "out_stride": total, "stride": width + 5}
    most = max(float(np.abs(args[name]).max()) for name in names)
    roundings = spec.k / 2 + 32 + 2 * (most + 4)
    largest = most * (2 + float(np.abs(args["k_a"]).max()))
    checked(spec, isa, memory, args, "out", 4 * spec.heads, lambda exact: roundings * U32 * largest)


def test_what_is_removed_has_length_1(rng: np.random.Generator) -> None:
    """Also of the twin; and decays are between e**-0.606531 and 1."""
    spec = next(spec for spec in of(WkvKeys) if not spec.mixed)
    width = spec.heads * spec.k
    args: dict[str, Any] = {
        name: 9 * floats(rng, 4, width) for name in ("decay", "rate", "key", "value")
    }
    args |= {name: floats(rng, width) for name in ("w0", "a0", "k_k", "k_a")}
    args |= {"out": np.zeros((4, 5 * width)), "out_stride": 5 * width, "stride": width}
    spec.run_ref(spec.args(**args), Run(4))
    decays, removed, added, _, value = args["out"].reshape(4, 5, spec.heads, -1).swapaxes(0, 1)
    assert np.allclose((removed**2).sum(-1), 1)
    assert np.abs(added).max() < 1
    assert 0.545 < decays.min() < 0.55 < 0.99 < decays.max() <= 1
    assert np.array_equal(value.reshape(4, width), args["value"])


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(WkvOut), ids=registry.name)
def test_out(spec: WkvOut, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A normed value is at most the root of k; sums of k terms, and a dozen other roundings."""
    width = spec.heads * spec.k
    parts = len(ROW)
    names = ["x", "r", *(("gate",) if spec.gate else ())]
    args: dict[str, Any] = {name: floats(rng, 4, width + 3) for name in names}
    args |= {"rows": floats(rng, 4, parts * width + 1), "r_k": floats(rng, width)}
    args |= {name: floats(rng, width) for name in (("w", "bias") if spec.norm else ())}
    args |= {"stride": width + 3, "rows_stride": parts * width + 1}
    most = {name: float(np.abs(value).max()) for name, value in args.items()}
    normed = np.sqrt(spec.k) * most["w"] + most["bias"] if spec.norm else most["x"]
    bonus = spec.k * most["r"] * most["rows"] * most["r_k"] * most["rows"]
    tolerance = (spec.k + 32) * U32 * (normed + bonus) * (most["gate"] if spec.gate else 1)
    checked(spec, isa, memory, args, "x", 4 * spec.heads, lambda exact: tolerance)

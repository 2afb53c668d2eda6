"""Recurrences by chunks on matrix registers: against the twin that goes token by token, exactly
where bf16 holds every number that registers meet, and within its roundings where it does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import CHUNK_KEYS, CHUNKED
from treadle.isa.isa import Isa
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.recurrent.chunk_keys import CHUNK, ChunkKeys
from treadle.kernels.recurrent.chunked import FEW, Chunked
from treadle.kernels.recurrent.rules import Mamba2
from treadle.kernels.run_state import PART

U16 = 2.0**-9  # unit roundoff of bf16
N = 4 * CHUNK + 7
# Parts of many tokens and of few; that begin and end within chunks; that begin their text.
PARTS = [
    (0, 40, 0, 0, 1, 0),
    (40, FEW - 1, 9, 2, 3, 0),
    (39 + FEW, 50, 4, 4, 0, 0),
    (89 + FEW, N - 89 - FEW, 4, 5, 6, 0),
]
CELLS = 7


def given(spec: Chunked, rng: np.random.Generator, *, whole: bool) -> dict[str, Any]:
    """``whole``: small numbers that bf16 holds, and so few tokens that add that sums are as well;
    a key is one direction.
    """
    heads = spec.n_head
    dims = spec.head_dim
    n = spec.n_state
    groups = spec.n_group
    size = heads * dims * n
    values = np.zeros((N, heads * dims))
    keys = np.zeros((2, N, groups, n))
    states: np.ndarray = rng.standard_normal((CELLS, size))
    rates = np.full((N, 2 * COLUMNS), np.nan)
    if whole:
        states = rng.integers(-3, 4, (CELLS, size))
        values[:] = rng.integers(-2, 3, values.shape)
        for t, group in np.ndindex(N, groups):
            keys[0, t, group, rng.integers(n)] = rng.choice([-1, 1])
            keys[1, t, group, rng.integers(n, size=4)] = rng.choice([-1, 1, 2])
        rates[:, :heads] = rng.choice([0, 1, 1], (N, heads))
        decay = np.ones((N, heads))
        decay[rng.integers(N, size=3)] = 0.5
    else:
        values[:] = rng.standard_normal(values.shape)
        keys[:] = rng.standard_normal(keys.shape) / np.sqrt(n)
        rates[:, :heads] = rng.uniform(0, 1, (N, heads))
        decay = rng.uniform(0.6, 1, (N, heads)) ** rng.choice([0.1, 1, 9], (N, heads))
    rates[:, COLUMNS : COLUMNS + heads] = decay
    x = np.concatenate([np.full((N, 3), np.nan), values, *keys.reshape(2, N, -1)], 1)
    made: dict[str, Any] = {
        "x": x.astype(np.float32),
        "rates": rates.astype(np.float32),
        "states": states.astype(np.float32).view(np.uint8).ravel(),
        "out": np.full((N, heads * dims + 1), np.nan, np.float32),
        "stride": x.shape[1],
        "rates_stride": 2 * COLUMNS,
        "out_stride": heads * dims + 1,
        "values": 3,
        "keys": 3 + heads * dims,
        "queries": 3 + heads * dims + groups * n,
        "cell_bytes": 4 * size,
        "state_off": 0,
    }
    if isinstance(spec, Mamba2):
        made["d"] = rng.integers(-2, 3, heads).astype(np.float32)
    return made


def compiled(spec: Chunked, isa: Isa, memory: Memory, args: dict[str, Any]) -> dict[str, Any]:
    made = {k: memory.copy(v, name=k) if isinstance(v, np.ndarray) else v for k, v in args.items()}
    run = Run(N, parts=np.array(PARTS, PART))
    made["chunks"] = chunked_keys(spec.keys, isa, memory, made)
    call(spec, isa, memory, made, run, len(PARTS) * spec.items)
    return made


def chunked_keys(spec: ChunkKeys, isa: Isa, memory: Memory, args: dict[str, Any]) -> np.ndarray:
    n_chunks = -(-N // CHUNK)
    out = memory.array(n_chunks * spec.n_group * spec.n_bytes, name="chunks")
    some = {name: args[name] for name in ("x", "stride", "keys", "queries")}
    call(spec, isa, memory, {**some, "out": out}, Run(N), n_chunks * spec.n_group)
    return out


def exact(spec: Chunked, args: dict[str, Any]) -> dict[str, Any]:
    made = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in args.items()}
    made |= {k: made[k].astype(np.float64) for k in ("x", "rates", "out", "d") if k in made}
    spec.run_ref(spec.args(**made), Run(N, parts=np.array(PARTS, PART)))
    return made


def of_states(args: dict[str, Any]) -> np.ndarray:
    states: np.ndarray = args["states"]
    return states.view(np.float32).reshape(CELLS, -1)


@pytest.mark.slow
@pytest.mark.parametrize("isa", rows.MATRICES, ids=rows.name)
@pytest.mark.parametrize("spec", CHUNKED, ids=registry.name)
def test_whole_numbers_are_exact(
    spec: Chunked, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    args = given(spec, rng, whole=True)
    expected = exact(spec, args)
    assert np.abs(of_states(expected)).max() < 64  # else bf16 would not hold them
    found = compiled(spec, isa, memory, args)
    assert_close(of_states(found), of_states(expected), 0.0, spec.name)
    columns = slice(spec.n_head * spec.head_dim)
    assert_close(found["out"][:, columns], expected["out"][:, columns], 0.0, spec.name)


@pytest.mark.parametrize("isa", rows.MATRICES, ids=rows.name)
@pytest.mark.parametrize("spec", CHUNKED, ids=registry.name)
def test_rounded_numbers_are_near(
    spec: Chunked, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """A term is a product of at most four numbers that are rounded to bf16, and no term's error is
    a larger share of it than six such roundings of each.
    """
    args = given(spec, rng, whole=False)
    expected = exact(spec, args)
    found = compiled(spec, isa, memory, args)
    states = of_states(expected)
    out = expected["out"][:, : spec.n_head * spec.head_dim]
    assert_close(of_states(found), states, 6 * 4 * U16 * np.abs(states).max(), spec.name)
    assert_close(found["out"][:, :-1], out, 6 * 4 * U16 * np.abs(out).max(), spec.name)


@pytest.mark.parametrize("isa", rows.MATRICES, ids=rows.name)
@pytest.mark.parametrize("spec", CHUNK_KEYS, ids=registry.name)
def test_keys_of_chunks(
    spec: ChunkKeys, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Registers hold the same bits as the twin's, and sums have n_state roundings."""
    whole = next(each for each in CHUNKED if each.keys == spec)
    args = given(whole, rng, whole=False)
    args["x"] = memory.copy(args["x"], name="x")
    found = chunked_keys(spec, isa, memory, args)
    expected = np.zeros_like(found)
    some = {name: args[name] for name in ("x", "stride", "keys", "queries")}
    spec.run_ref(spec.args(**some, out=expected), Run(N))
    both = (chunks.reshape(-1, spec.n_bytes) for chunks in (found, expected))
    assert isa.matrix is not None
    for a, b in zip(*both, strict=True):
        mine = spec.read_ref(a, turns=isa.matrix.turn is not None)
        theirs = spec.read_ref(b)
        assert mine.keys() == theirs.keys()
        for name, values in theirs.items():
            dots = name in ("seen", "known")
            tolerance = spec.n_state * U32 * 8 if dots else 0.0
            assert_close(mine[name], values, tolerance, name)

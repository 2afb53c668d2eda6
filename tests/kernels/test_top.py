"""The largest logits of rows, and the sums under them, against their numpy twins.

Which are the largest, and in what order, is exact. The sums are within TOTAL_ERROR of the twin's in
f64, as ``kernels/elementwise/top_logits.py`` derives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, Picked, Run, assert_close, call
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.softcap import PIECE, Softcap
from treadle.kernels.elementwise.top_logits import (
    PADDING_ID,
    PARTIAL,
    SLICE,
    WORD_KEYS,
    JoinTop,
    TopLogitsKernel,
    floats_ref,
    keys_ref,
    slices,
)
from treadle.kernels.run_state import N_TOP, RESULT, TOTAL_ERROR

INF = np.inf


def largest(
    x: np.ndarray,
    isa: Isa,
    picked: list[Picked],
    *,
    pieces: int = 3,
    kernels: tuple[TopLogitsKernel, JoinTop] = (TopLogitsKernel(), JoinTop()),
    memory: Memory | None = None,
) -> np.ndarray:
    """RESULTs of rows ``x`` by both kernels; what each wrote is held against its twin."""
    n, k = x.shape
    memory = memory or Memory()
    run = Run(picked=picked)
    (top, join) = kernels
    stride = -(-k // WORD_KEYS) * WORD_KEYS + WORD_KEYS
    row = memory.array((n, stride), np.float32, name="x")  # NaN behind k
    row[:, :k] = x
    n_parts = len(picked) * slices(k)
    partials = memory.array(n_parts * PARTIAL.itemsize, name="partials")
    args = {"x": row, "out": partials, "stride": stride, "n": k}
    twin = np.zeros(partials.size, np.uint8)
    TopLogitsKernel().run_ref(TopLogitsKernel.args(**{**args, "out": twin}), run)
    call(top, isa, memory, args, run, n_parts, pieces=pieces)
    made = partials.view(PARTIAL)
    expected = twin.view(PARTIAL)
    for field in ("keys", "ids"):
        assert (made[field] == expected[field]).all(), field
    wanted = np.array([look.total for look in picked], bool)
    sound = np.isfinite(expected["total"]) & (expected["max"] < INF)
    assert (made["max"] == expected["max"])[sound].all()
    check_sums(made, expected, sound & np.repeat(wanted, slices(k)))
    out = memory.array(len(picked) * RESULT.itemsize, name="out")
    args = {"partials": partials, "out": out, "n": k}
    twin = np.zeros(out.size, np.uint8)
    JoinTop().run_ref(JoinTop.args(**{**args, "out": twin}), run)
    call(join, isa, memory, args, run, len(picked), pieces=pieces)
    result = out.view(RESULT)
    expected = twin.view(RESULT)
    assert (result["ids"] == expected["ids"]).all()
    assert np.array_equal(result["values"], expected["values"], equal_nan=True)
    sound = (result["values"][:, 0] < INF) & np.isfinite(expected["total"])
    check_sums(result, expected, sound & wanted)
    return result.copy()


def check_sums(made: np.ndarray, expected: np.ndarray, where: np.ndarray) -> None:
    made = made["total"][where]
    expected = expected["total"][where]
    assert_close(made, expected, expected * TOTAL_ERROR, "sums")


def expected_of(row: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, float]:
    """By one sort of the whole row in f64: ids, values, sum."""
    x = row.astype(np.float64)
    if mask is not None:
        x = np.where(mask, x, -INF)
    ids = np.argsort(-x, kind="stable")[:N_TOP]
    top = x[ids[0]] if x[ids[0]] > -INF else 0.0
    return ids, x[ids], float(np.exp(x - top).sum())


def check(x: np.ndarray, isa: Isa, picked: list[Picked], **given: Any) -> None:
    found = largest(x, isa, picked, **given)
    for made, look in zip(found, picked, strict=True):
        ids, values, total = expected_of(x[look.row], look.mask)
        if look.first:
            ids = ids[values == values[0]]
            values = values[values == values[0]]
        n = len(ids)
        assert made["ids"][:n].tolist() == ids.tolist()
        assert made["values"][:n].tolist() == values.tolist()
        assert (made["values"][n:] == -INF).all()
        behind = made["ids"][n:]
        assert ((behind >= x.shape[1]) | (behind == PADDING_ID)).all()
        if look.total:
            assert made["total"] == pytest.approx(total, rel=TOTAL_ERROR)


def spread(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(0, 3, shape).astype(np.float32)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("k", [1, 31, 63, 64, 65, 320, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE + 77])
def test_any_length(k: int, isa: Isa, rng: np.random.Generator) -> None:
    check(spread(rng, 2, k), isa, [Picked(1), Picked(0), Picked(0, None, first=True)])


@pytest.mark.parametrize("n", [1, 2, 7, 128])
def test_any_number_of_rows(n: int, rng: np.random.Generator) -> None:
    x = spread(rng, n, 1000)
    masks: list[Picked] = []
    for row in range(n):
        masks.append(Picked(row, first=row % 5 == 1, total=row % 4 > 0))
        if row % 3:
            masks.append(Picked(row, rng.random(1000) < 0.3, total=row % 4 == 0))
    check(x, rows.ALL[-1], masks)


def test_a_large_vocabulary(rng: np.random.Generator) -> None:
    k = 262_144
    check(spread(rng, 1, k), rows.ALL[-1], [Picked(0), Picked(0, rng.random(k) < 1e-4)])


def shaped(name: str, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    made: dict[str, Callable[[], np.ndarray]] = {
        "equal": lambda: np.zeros_like(x),
        "few values": lambda: np.round(x),
        "rising": lambda: np.sort(x),
        "falling": lambda: np.sort(x)[::-1],
        "one column": lambda: np.where(np.arange(len(x)) % N_TOP == 5, x + 100, x),
        "one row": lambda: np.where(np.arange(len(x)) // N_TOP == 5, x + 100, x),
        "all but one ruled out": lambda: np.where(np.arange(len(x)) == len(x) - 1, x, -INF),
        "all ruled out": lambda: np.full_like(x, -INF),
        "40 left": lambda: np.where(rng.permutation(len(x)) < 40, x, -INF),
        "zeros of both signs": lambda: np.where(rng.random(len(x)) < 0.5, 0.0, -0.0),
        "huge": lambda: x * np.float32(1e38 / 20),
        "tiny": lambda: x * np.float32(1e-42),
        "far apart": lambda: x * 1000,
    }
    return made[name]().astype(np.float32)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize(
    "shape",
    [
        "equal",
        "few values",
        "rising",
        "falling",
        "one column",
        "one row",
        "all but one ruled out",
        "all ruled out",
        "40 left",
        "zeros of both signs",
        "huge",
        "tiny",
        "far apart",
    ],
)
def test_any_values(shape: str, isa: Isa, rng: np.random.Generator) -> None:
    x = shaped(shape, spread(rng, 2 * SLICE + 300), rng)[None]
    half = np.asarray(rng.random(x.shape[1]) < 0.5)
    masks = [Picked(0, mask) for mask in (None, half, np.zeros(x.shape[1], bool))]
    masks += [look._replace(first=True) for look in masks]
    check(x, isa, masks)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, INF])
@pytest.mark.parametrize("masked", [False, True])
def test_what_is_no_number_comes_first(
    bad: float, masked: bool, isa: Isa, rng: np.random.Generator
) -> None:
    """Though a mask rules it out; NaN before infinity, of one kind the lowest id."""
    x = spread(rng, 1, SLICE + 100)
    x[0, [SLICE + 3, 70, 900]] = bad
    if np.isnan(bad):
        x[0, 5] = INF
    mask = np.zeros(x.shape[1], bool) if masked else None
    (found,) = largest(x, isa, [Picked(0, mask)])
    assert found["ids"][:3].tolist() == [70, 900, SLICE + 3]
    assert np.array_equal(found["values"][:3], [bad] * 3, equal_nan=True)
    if np.isnan(bad):
        assert (found["values"][3], found["ids"][3]) == (INF, 5)


def test_how_items_are_cut_changes_no_bit(rng: np.random.Generator) -> None:
    x = spread(rng, 3, 5 * SLICE + 9)
    masks = [Picked(row) for row in (0, 2, 1)]
    one, two, five = (largest(x, rows.ALL[-1], masks, pieces=n) for n in (1, 2, 5))
    for field in ("values", "ids", "total"):
        assert one[field].tobytes() == two[field].tobytes() == five[field].tobytes()


def test_nobody_samples() -> None:
    assert not len(largest(np.zeros((2, 100), np.float32), rows.ALL[-1], []))


def test_keys_have_the_order_of_floats(rng: np.random.Generator) -> None:
    x = np.concatenate([spread(rng, 1000), [-INF, INF, 0.0, 1e-45, -1e-45, 3e38, -3e38]])
    x = np.sort(x.astype(np.float32))
    keys = keys_ref(x).astype(np.int64)
    assert (np.diff(keys)[np.diff(x) > 0] > 0).all()
    special = np.array([-np.nan, np.nan, INF, 0.0, -0.0, -INF], np.float32)
    keys = keys_ref(special).astype(np.int64)
    assert (np.sign(-np.diff(keys)) == [1, 1, 1, 0, 1]).all()
    assert keys[-1] == -(2**31)
    found = floats_ref(keys_ref(special))
    assert np.array_equal(found, special, equal_nan=True)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", [Softcap(7, 30.0), Softcap(PIECE, 30.0), Softcap(2561, 5.0)])
def test_softcap(spec: Softcap, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """In units of 2**-24, on arguments up to 1: tanh 2 (``jit/math.py``), its argument 2, the last
    product 1.
    """
    n = 3
    stride = spec.k + 3
    y = memory.array((n, stride), np.float32, name="y")
    y[:, : spec.k] = rng.uniform(-spec.cap, spec.cap, (n, spec.k))
    run = Run(output_rows=np.arange(n, dtype=np.int32))
    twin = y.astype(np.float64)
    spec.run_ref(spec.args(y=twin, stride=stride), run)
    call(spec, isa, memory, {"y": y, "stride": stride}, run, n * spec.pieces)
    assert_close(y, twin, spec.cap * 5 * U32, spec.name)  # the columns behind k are still NaN

"""The searches for scales against their numpy twins.

The two round sums differently, so that of two candidates almost equal they may choose one each, and
end in other minima. So what is held is that the codes are the nearest for the scales that were
found, that almost all blocks are the twin's to the bit, and that the others are as good.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, call
from tests.kernels.registry import SEARCHES
from treadle.formats import by_name
from treadle.isa.isa import Isa
from treadle.kernels.quantize.k_search import SearchKernel
from treadle.kernels.run_state import round_up

K_SEARCHES = [s for s in SEARCHES if hasattr(s.how, "n_sub")]
N = 51  # super-blocks: more than a vector of any row has lanes, and no whole number of vectors


def some_blocks(spec: SearchKernel, rng: np.random.Generator) -> np.ndarray:
    """Normal ones; one shifted, one of zeros, one constant, three that no scale fits; and such as
    were quantised before, where rounding to f16 is what is left.
    """
    x = (rng.standard_normal((N, spec.block)) * rng.uniform(0.01, 3, (N, 1))).astype(np.float32)
    x[1] += 10
    x[2] = 0
    x[3] = -0.375
    x[4, 7] = np.nan
    x[5, 200 % spec.block] = np.inf
    x[6, 31] = 1e38
    steps = rng.integers(1, max(spec.how.top, 2), (8, spec.n_sub, 1)) * np.float32(0.01)
    whole = rng.integers(0, 4, (8, spec.n_sub, spec.length))
    x[8:16] = (steps * whole).reshape(8, spec.block)
    return x


def found(spec: SearchKernel, args: dict[str, Any]) -> tuple[Any, np.ndarray]:
    """The blocks as numbers, and the weights that they stand for, f64 ``[N, 256]``."""
    made = spec.numbers(args, N)
    sub = (N, spec.n_sub, 1)
    with np.errstate(invalid="ignore"):
        y = made.d.astype(np.float64)[:, None, None] * made.sc.reshape(sub)
        y = y * made.q.reshape(N, spec.n_sub, -1)
        if "dmin" in spec.scales:
            y -= made.dmin.astype(np.float64)[:, None, None] * made.m.reshape(sub)
    return made, y.reshape(N, spec.block)


def searched(
    spec: SearchKernel, isa: Isa, memory: Memory, x: np.ndarray, weights: np.ndarray
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the kernel and what its twin write."""
    padded = round_up(N, isa.lanes)
    items = padded // isa.lanes
    given: dict[str, Any] = {"x": memory.copy(x), "n": N}
    if spec.aware:
        given["importance"] = memory.copy(weights)
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {"codes": ((padded, spec.block), np.uint8)}
    shapes |= {name: ((padded,), np.float32) for name in spec.scales}
    shapes |= {name: ((items, spec.n_sub, isa.lanes), np.uint8) for name in spec.integers}
    outs = {name: memory.array(shape, ty, name=name) for name, (shape, ty) in shapes.items()}
    call(spec, isa, memory, {**given, **outs}, Run(), items)
    twins = {name: np.zeros(shape, ty) for name, (shape, ty) in shapes.items()}
    spec.run_ref(spec.args(**{**given, **twins}), Run())
    return outs, twins


def some_weights(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """With such as are none."""
    weights = rng.gamma(0.5, size=shape).astype(np.float32)
    weights[20] = 0
    weights[21, ::2] = -1
    weights[22, 3] = np.nan
    return weights


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", K_SEARCHES, ids=registry.name)
def test_search(spec: SearchKernel, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    x = some_blocks(spec, rng)
    weights = some_weights(x.shape, rng)
    outs, twins = searched(spec, isa, memory, x, weights)
    (ours, y), (theirs, z) = found(spec, outs), found(spec, twins)

    sound = np.ones(N, bool)
    sound[4:7] = False
    assert np.isnan(ours.d[4])
    assert np.isinf(ours.d[5:7]).all()
    assert np.isfinite(ours.d[sound]).all()
    # A code that is not the first or the last is the nearest, but for what rounding does to a
    # weight in steps: a handful of roundings of numbers no larger than these.
    scale = ours.d[sound, None].astype(np.float64) * ours.sc[sound]
    step = np.repeat(np.abs(scale), spec.length, axis=1)
    q = ours.q[sound]
    off = (y - x)[sound]
    ends = (0, spec.how.levels) if "dmin" in spec.scales else (-spec.how.half, spec.how.half - 1)
    inner = (q > ends[0]) & (q < ends[1]) & (step > 0)
    terms = np.abs(x[sound]) + np.abs(y[sound]) + step * ends[1]
    assert inner.mean() > 0.3
    assert (np.abs(off) <= step / 2 + 8 * U32 * terms)[inner].all()
    # As good as the twin's.
    w = weights if spec.aware else np.ones_like(x)
    w = np.where(np.isfinite(w) & (w > 0), w, 0).astype(np.float64) + 1e-9
    mine, other = (((v - x) ** 2 * w)[sound].sum(-1) for v in (y, z))
    same = [(getattr(ours, n) == getattr(theirs, n)).reshape(N, -1).all(-1) for n in ours._fields]
    assert np.all(same, axis=0)[16:].mean() > 0.7  # the normal ones
    assert mine.sum() < other.sum() * 1.01
    assert (mine <= other * 1.2 + 1e-9).all(), np.max(mine / (other + 1e-30))


@pytest.mark.slow
@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", [s for s in SEARCHES if s not in K_SEARCHES], ids=registry.name)
def test_search_of_points(
    spec: SearchKernel, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """One scale for a block, a rung for each sub-block: the same, of blocks of every magnitude."""
    fmt = by_name(spec.w)
    magnitude = 10.0 ** rng.uniform(-5, 4, (N, 1))
    x: np.ndarray = (rng.standard_normal((N, spec.block)) * magnitude).astype(np.float32)
    x[2] = 0
    x[3] = -0.375
    x[4, 7], x[5, 200 % spec.block], x[6], x[7] = np.nan, np.inf, x[6] * 1e30, x[7] * 1e-30
    weights = some_weights(x.shape, rng)
    outs, twins = searched(spec, isa, memory, x, weights)
    kept = weights if spec.aware else None
    ours, theirs = (
        fmt.quantize_rows(x, kept, lambda *_, a=a: spec.numbers(a, N)) for a in (outs, twins)
    )
    y, z = (fmt.dequantize_rows(packed).astype(np.float64) for packed in (ours, theirs))
    x = x.astype(np.float64)
    sound = np.ones(N, bool)
    sound[4:6] = False
    assert np.isnan(y[~sound]).all()
    assert (ours == theirs).all(-1)[sound].mean() > 0.8
    w = np.where(np.isfinite(weights) & (weights > 0), weights, 0) if spec.aware else 1.0
    scale = np.abs(x[sound]).max(-1, keepdims=True) + 1e-60
    mine, other, whole = (((((v - x) ** 2) * w)[sound] / scale**2).sum(-1) for v in (y, z, 0.0))
    assert mine.sum() < other.sum() * 1.005
    # In a block of one number all values that scale to it tie, but for the rounding of their f16.
    assert (mine <= other * 1.1 + 1e-5 * whole).all(), np.max(mine / (other + 1e-30))

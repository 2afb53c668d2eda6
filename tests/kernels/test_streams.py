"""AltUp's streams, LAuReL's sum and sparse gates against their numpy twins. Tolerances are in units
``u`` of f32's rounding, of what each value is a sum of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call, step
from tests.kernels.registry import SPARSE_GATES, STREAMS
from tests.kernels.test_elementwise import check_act
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.altup import (
    AddBeside,
    CopyColumns,
    Correct,
    Join,
    Laurel,
    Predict,
    SpreadStreams,
)
from treadle.kernels.elementwise.sparse_gate import SparseGate
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Spec
from treadle.selftest.rounding_bounds import norm_error, sum_chain

N = 5  # tokens
Given = dict[str, Any]


def of(kind: type[Spec]) -> list[Any]:
    return [spec for spec in STREAMS if isinstance(spec, kind)]


def check(
    spec: Any, isa: Isa, memory: Memory, given: Given, tolerance: Any, *out: str, items: int = N
) -> None:
    """The kernel's ``out`` are the twin's; behind the columns nothing is written."""
    twin = {n: v.astype(np.float64) if n in out else v for n, v in given.items() if v is not None}
    spec.run_ref(spec.args(**{n: v.ravel() if _is(v) else v for n, v in twin.items()}), Run(N))
    for front in (False, True):
        args = {n: memory.copy(v, name=n, front=front) if _is(v) else v for n, v in given.items()}
        call(spec, isa, memory, args, Run(N), items)
        for name in out:
            allowed = tolerance(name, twin[name]) if callable(tolerance) else tolerance
            assert_close(args[name], twin[name], allowed, f"{spec.name}: {name}")


def _is(v: Any) -> bool:
    return isinstance(v, np.ndarray)


def empty(width: int) -> np.ndarray:
    return np.full((N, width), np.nan, np.float32)


def drawn(rng: np.random.Generator, *shape: int, size: float = 1.0) -> np.ndarray:
    return (size * rng.standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(SpreadStreams), ids=registry.name)
def test_spread(spec: SpreadStreams, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A product of three factors, two of them square roots of sums; a small row is not made large:
    the root of LEAST is the least that it is divided by.
    """
    k = spec.k
    column = 4
    x = drawn(rng, N, k + 3)
    y = drawn(rng, N, column + k * (spec.n - 1) + 2, size=3.0)
    y[1] *= 1e-6
    strides = {"stride": k + 3, "y_stride": y.shape[1], "out_stride": k * spec.n + 1}
    given = {"x": x, "y": y, "out": empty(k * spec.n + 1), **strides, "column": column}
    relative = 2 * norm_error(k, isa)
    check(spec, isa, memory, given, lambda _, twin: np.abs(twin) * relative, "out")


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(CopyColumns), ids=registry.name)
def test_take(spec: CopyColumns, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    given = {"x": drawn(rng, N, spec.k + 9), "out": empty(spec.k + 2)}
    strides = {"stride": spec.k + 9, "out_stride": spec.k + 2, "column": 6, "to": 1}
    check(spec, isa, memory, {**given, **strides}, 0.0, "out")


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(Join), ids=registry.name)
def test_join(spec: Join, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """As Spread, and a sum."""
    k = spec.k
    x = drawn(rng, N, 2 * k)
    y = drawn(rng, N, k + 3, size=3.0)
    total = drawn(rng, N, k + 3)
    given: Given = {"x": x, "y": y, "total": None if spec.first else total, "out": empty(k + 3)}
    before = np.abs(x[:, :k] / spec.n if spec.first else total[:, :k])
    relative, size = 2 * norm_error(k, isa) + 2 * U32, np.zeros((N, k + 3))

    def allowed(name: str, twin: np.ndarray) -> np.ndarray:
        size[:, :k] = np.abs(twin[:, :k]) + 2 * before
        return size * relative

    check(spec, isa, memory, {**given, "stride": 2 * k, "out_stride": k + 3}, allowed, "out")


def routers(rng: np.random.Generator, k: int, n: int, rows: int) -> Given:
    """A router that says numbers of all sizes, and coefficients."""
    router = drawn(rng, n, k, size=np.sqrt(k)) * np.float32(3.0) ** -np.arange(n)[:, None]
    return {
        "norm": 1 + drawn(rng, k, size=0.25),
        "router": router.astype(np.float32),
        "coef": drawn(rng, rows, n),
    }


def said(spec: Any, given: Given, x: np.ndarray, isa: Isa) -> tuple[np.ndarray, np.ndarray]:
    """The coefficients, ``[N, rows]``, and how far f32's may be from them.

    A router's number is a dot product of one chain, times a gain as a norm's; its tanh is no
    steeper than 1, and good to 8 u of the number or, far from 0, of 1. Then n products are summed.
    """
    x, norm, router, coef = (
        a.astype(np.float64) for a in (x, given["norm"], given["router"], given["coef"])
    )
    gain = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + spec.eps) / spec.k
    terms = np.abs(x * norm * gain) @ np.abs(router).T
    sums = (x * norm * gain) @ router.T
    chain = -(-spec.k // isa.lanes) + 3 + isa.lanes.bit_length()
    # A GPU's block of threads adds in another order, of no more turns than sum_chain's.
    chain = max(chain, sum_chain(spec.k, isa))
    off = U32 * (chain * terms + (chain / 2 + 10) * np.abs(sums))
    off += U32 * np.where(np.abs(sums) < 0.25, 8 * np.abs(sums), 8.0)
    made = np.tanh(sums)
    slack = U32 * spec.n * (np.abs(made) @ np.abs(coef).T)
    return made @ coef.T, off @ np.abs(coef).T + slack


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(Predict), ids=registry.name)
def test_predict(spec: Predict, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A sum of n + 1 products, each off by its coefficient's error and by roundings."""
    k = spec.k
    n = spec.n
    stride = spec.k * spec.n + 3
    x = drawn(rng, N, stride)
    x[2] = 0
    given = {**routers(rng, k, n, n * n), "x": x, "out": empty(stride), "stride": stride}
    coefs, off = (a.reshape(N, n, n) for a in said(spec, given, x[:, :k], isa))
    streams = np.abs(x[:, : n * k]).astype(np.float64).reshape(N, n, k)
    roundings = (n + 1) * U32 * (streams + np.abs(coefs) @ streams)
    tolerance = np.zeros((N, stride))
    tolerance[:, : n * k] = (off @ streams + roundings).reshape(N, n * k)
    check(spec, isa, memory, given, tolerance, "out", items=N * spec.slices)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(Correct), ids=registry.name)
def test_correct(spec: Correct, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A difference, a product and a sum; the first of them times the scale as well."""
    k = spec.k
    n = spec.n
    stride = spec.k * spec.n + 3
    x = drawn(rng, N, stride)
    y = drawn(rng, N, k + 2)
    scale = 1 + drawn(rng, k, size=0.3)
    strides = {"stride": stride, "y_stride": k + 2}
    given = {
        **routers(rng, k, n, n),
        "x": x,
        "y": y,
        "out": empty(k + 2),
        "scale": scale,
        **strides,
    }
    coefs, off = said(spec, given, y[:, :k], isa)
    off = off + U32 * (1 + np.abs(coefs))
    streams = np.abs(x[:, : n * k]).astype(np.float64).reshape(N, n, k)
    new = np.abs(y[:, :k]) + streams[:, 0]  # above the difference, and above what it is off by / u
    each = off[:, :, None] * new[:, None]
    each += 4 * U32 * (streams + (1 + np.abs(coefs))[:, :, None] * new[:, None])
    allowed = {"x": np.zeros((N, stride)), "out": np.zeros((N, k + 2))}
    allowed["x"][:, : n * k] = each.reshape(N, n * k)
    allowed["out"][:, :k] = np.abs(scale) * each[:, 0] * (1 + U32)
    check(
        spec, isa, memory, given, lambda name, _: allowed[name], "x", "out", items=N * spec.slices
    )


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(AddBeside), ids=registry.name)
def test_add_beside(spec: AddBeside, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A norm and a sum; the first stream stays, and what is behind the last."""
    k = spec.k
    n = spec.n
    stride = spec.k * spec.n + 3
    x, y, w = drawn(rng, N, stride), drawn(rng, N, k + 2, size=3.0), 1 + drawn(rng, k, size=0.3)
    given = {"x": x, "y": y, "w": w, "stride": stride, "y_stride": k + 2}
    relative, inside = norm_error(k, isa) + U32, slice(k, n * k)

    def allowed(name: str, twin: np.ndarray) -> np.ndarray:
        size = np.zeros((N, stride))
        size[:, inside] = np.abs(twin[:, inside]) + np.abs(x[:, inside])
        return size * relative

    check(spec, isa, memory, given, allowed, "x", items=N * spec.slices)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", of(Laurel), ids=registry.name)
def test_laurel(spec: Laurel, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Three norms, three sums, a product."""
    k = spec.k
    given: Given = {"x": drawn(rng, N, 2 * k), "stride": 2 * k, "out_stride": k + 1}
    given |= {name: drawn(rng, N, k + 1, size=2.0) for name in ("a", "b")}
    weights = {f"w_{name}": 1 + drawn(rng, k, size=0.3) for name in "xab"}
    size = np.zeros((N, k + 1))
    size[:, :k] = np.abs(given["x"][:, :k])
    for name, w in weights.items():
        v = given[name[-1]][:, :k].astype(np.float64)
        size[:, :k] += np.abs(v / np.sqrt((v**2).mean(-1, keepdims=True) + spec.eps) * w)
    tolerance = size * (norm_error(k, isa) + 4 * U32) * abs(spec.scale)
    given |= {**weights, "out": empty(k + 1)}
    check(spec, isa, memory, given, tolerance, "out", items=N * spec.slices)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", SPARSE_GATES, ids=registry.name)
def test_sparse_gate(spec: SparseGate, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """The least value that passes is off by the mean's error, once more for each deviation, and by
    that of a deviation, as a norm's; GELU is no steeper than 1.13, and as exact as in Pack.
    """
    k = spec.k
    n = 7
    up = round_up(k + 2, step(isa))
    stride = round_up(up + k + 1, step(isa))
    x = drawn(rng, n, stride, size=2.0)
    x[3] = 0
    act = spec.layout()
    run = Run(n_tokens=n)
    given = {"stride": stride, "up": up}
    plain = replace(spec, act="f32", group=1)
    exact_out = np.empty(plain.layout().n_bytes(n), np.uint8)
    plain.run_ref(plain.args(x=x, out=exact_out, **given), run)
    exact = plain.layout().read_ref(exact_out, n)
    gate = np.abs(x[:, :k]).astype(np.float64)
    ups = np.abs(x[:, up : up + k])
    mean = U32 * (sum_chain(k, isa) + 2) * gate.mean(-1, keepdims=True)
    deviation = x[:, :k].std(-1, keepdims=True, dtype=np.float64)
    least = (1 + abs(spec.cut)) * mean + abs(spec.cut) * deviation * norm_error(k, isa)
    least = least + 3 * U32 * (gate + np.abs(x[:, :k].mean(-1, keepdims=True)))
    least += 3 * U32 * abs(spec.cut) * deviation
    relative = (12 + 3 * 87) * U32
    absolute = 1.13 * least * ups + 1e-37
    for front in (False, True):
        out = memory.array(act.n_bytes(n), name="out", front=front)
        args = {**given, "x": memory.copy(x, name="x", front=front), "out": out}
        call(spec, isa, memory, args, run, act.grid(spec.slices, "n_tokens").items(run))
        check_act(out, act, exact, relative, spec.name, absolute)
    assert 0.01 < (exact != 0).mean() < (0.6 if spec.cut > 0 else 1.0)

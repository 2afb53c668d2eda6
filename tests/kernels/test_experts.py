"""The kernels of a mixture of experts: routing, sorting and summing against their numpy twins;
products of several experts to the bit against the same product of each expert by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import COMBINES, GATHERS, ROUTES, SORTS
from tests.kernels.test_matmul import Problem, random
from treadle.formats import FORMATS, by_name
from treadle.isa.isa import Isa
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.matmul import TILE, Matmul
from treadle.kernels.matmul.matrix import MatrixGemm
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.matmul.select_activation import gemm_act
from treadle.kernels.matmul.vector_bytes import LanesGemm
from treadle.kernels.matmul.vector_floats import FloatLanes
from treadle.kernels.moe.dispatch import PIECE, Combine, Gather
from treadle.kernels.moe.route import Route, Sort, blocks_most
from treadle.kernels.run_state import round_up


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", ROUTES, ids=registry.name)
def test_route(spec: Route, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Weights: exp or sigmoid 3 units of 2**-24, their sum in chains 8, a division and the scale
    2. Scores of half of the tokens are whole numbers, so that many are equal.
    """
    n = 9
    stride = spec.n + spec.n_shared + 3
    scores = rng.standard_normal((n, stride)).astype(np.float32)
    scores[::2] = rng.integers(-2, 3, scores[::2].shape)
    # Of one group many are equal, too. Of several, the sums of each one's two best must not be
    # equal but for rounding, where a machine's sigmoid decides: no two biases are the same.
    bias = rng.standard_normal(spec.n + 16).astype(np.float32)
    if spec.n_groups == 1:
        bias = np.round(bias, 1)
    scales = rng.standard_normal(spec.n + 16).astype(np.float32)
    given: dict[str, Any] = {
        "scores": scores,
        "bias": bias if spec.bias else None,
        "scales": scales if spec.own else None,
        "shared_scales": scales[: spec.n_shared] if spec.own_shared else None,
    }
    results = {"chosen": spec.n_used, "weights": spec.n_used}
    if spec.n_shared:
        results |= {"shared_chosen": spec.n_shared, "shared_weights": spec.n_shared}
    kinds = {x: np.int32 if x.endswith("chosen") else np.float32 for x in results}
    exact = {x: np.zeros(n * width, kinds[x]) for x, width in results.items()}
    spec.run_ref(spec.args(**given, **exact, stride=stride), Run(n))
    if not spec.bias and spec.n_groups == 1:
        for row, few in zip(scores, exact["chosen"].reshape(n, -1), strict=True):
            order = (np.argsort(-row[: spec.n], kind="stable") // spec.per).tolist()
            assert few.tolist() == order[: spec.n_used]
    copies = {name: None if a is None else memory.copy(a, name=name) for name, a in given.items()}
    out = {x: memory.array(each.shape, kinds[x], name=x) for x, each in exact.items()}
    call(spec, isa, memory, {**copies, **out, "stride": stride}, Run(n), n)
    for x, want in exact.items():
        if x.endswith("chosen"):
            assert np.array_equal(out[x], want)
        else:
            assert_close(out[x], want, 16 * U32 * np.abs(want), spec.name)


# places
FIRST = 1000
LEFT_OUT = -1


def sorted_rows(
    spec: Sort, chosen: np.ndarray, memory: Memory, isa: Isa | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tiles, rows and places from FIRST on, LEFT_OUT where there is none: by the kernel, or without
    ``isa`` by its twin.
    """
    n_slots = len(chosen)
    most = [blocks_most(n_slots, spec.n, rows) for rows in (spec.most, spec.block)]
    tiles = memory.array(1 + most[0] * 3, np.int64, name="tiles")
    into = memory.array(2 + most[1] * spec.block, np.int32, name="rows")
    places = memory.array(n_slots, np.int32, name="places")
    places[:] = LEFT_OUT
    given = {"chosen": memory.copy(chosen), "tiles": tiles, "rows": into, "places": places}
    args = {**given, "first": FIRST}
    run = Run(n_slots // spec.n_used)
    if isa is None:
        spec.run_ref(spec.args(**args), run)
    else:
        call(spec, isa, memory, args, run, 1)
    return tiles, into, places


@pytest.mark.parametrize("isa", rows.VECTORS[-1:], ids=rows.name)
@pytest.mark.parametrize("spec", SORTS, ids=registry.name)
def test_sort(spec: Sort, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """All numbers are whole: exact. Most experts have no token, or one has all, or not too many."""
    few = np.full(3 * spec.n_used, spec.n - 1, np.int32)
    for chosen in (few, rng.integers(0, spec.n, 41 * spec.n_used).astype(np.int32)):
        exact = sorted_rows(spec, chosen, memory, None)
        for made, want in zip(sorted_rows(spec, chosen, memory, isa), exact, strict=True):
            assert np.array_equal(made, want)
        tiles, into, places = exact
        records = tiles[1 : 1 + 3 * tiles[0]].view(TILE)
        sizes = np.bincount(chosen, minlength=spec.n)
        met = (sizes > spec.over) & (sizes <= (spec.upto or len(chosen)))
        assert np.array_equal(places != LEFT_OUT, met[chosen])
        assert records["n"].sum() == sizes[met].sum()
        assert records["n"].max(initial=0) <= spec.most
        tokens = into[2:]
        places = places - FIRST
        there = np.flatnonzero(met[chosen])
        assert np.array_equal(tokens[places[there]], there // spec.n_used)
        for expert, first, n in records.tolist():
            assert first % spec.block == 0
            slots = np.flatnonzero((places >= first) & (places < first + n))
            assert (chosen[slots] == expert).all()
            assert (np.diff(places[slots]) > 0).all()  # in the order of slots


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", GATHERS, ids=registry.name)
def test_gather(spec: Gather, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """What is gathered is what would be written there: bytes are moved, none is computed."""
    n = 7
    act = spec.layout()
    tokens = rng.integers(0, n, 3 * spec.block).astype(np.int32)
    x = rng.standard_normal((n, spec.k)).astype(np.float32)
    one = replace(act, group=1)
    source = np.zeros(one.n_bytes(n), np.uint8)
    one.write_ref(source, x)
    expected = np.zeros(act.n_bytes(len(tokens)), np.uint8)
    act.write_ref(expected, x[tokens])
    into = np.concatenate([np.array([3], np.int64).view(np.int32), tokens])
    twin = np.zeros_like(expected)
    spec.run_ref(spec.args(x=source, rows=into, out=twin), Run(n))
    out = memory.array(expected.shape, name="out")
    call(
        spec,
        isa,
        memory,
        {"x": memory.copy(source), "rows": memory.copy(into), "out": out},
        Run(n),
        3,
    )
    for made in (out, twin):
        assert np.array_equal(act.read_ref(made, len(tokens)), act.read_ref(expected, len(tokens)))
        assert np.array_equal(groups_of(made, act), groups_of(expected, act))


def groups_of(raw: np.ndarray, act: ActivationLayout) -> np.ndarray:
    """All but the bytes that fill a group up."""
    end = act.comp_off + 4 * act.ks * act.group
    return raw.reshape(-1, act.group_bytes)[:, :end]


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", COMBINES, ids=registry.name)
def test_combine(spec: Combine, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """A product or a sum for each slot and each of the two others, and 3 for the sigmoid."""
    n = 5
    stride = spec.k + 3
    n_slots = n * spec.n_used
    y = rng.standard_normal((n_slots + 4, stride)).astype(np.float32)
    weights = rng.uniform(0, 1, n_slots).astype(np.float32)
    places = rng.permutation(n_slots + 4)[:n_slots].astype(np.int32)
    residual, shared = (rng.standard_normal((n, stride)).astype(np.float32) for _ in range(2))
    gate = rng.standard_normal((n, 5)).astype(np.float32)
    optional = {"places": places, "residual": residual, "shared": shared, "gate": gate}
    given = {name: a for name, a in optional.items() if getattr(spec, name)}
    given |= {"y": y, "weights": weights}
    sizes = {"stride": stride, "gate_stride": 5}
    expected = np.full((n, stride), np.nan)
    sums = np.full((n, stride), np.nan)
    spec.run_ref(spec.args(**given, **sizes, out=expected), Run(n))
    magnitudes: dict[str, Any] = {name: np.abs(a) for name, a in given.items()}
    spec.run_ref(spec.args(**{**magnitudes, "gate": gate}, **sizes, out=sums), Run(n))
    out = memory.array((n, stride), np.float32, name="out")
    copies = {name: memory.copy(a, name=name) for name, a in given.items()}
    call(spec, isa, memory, {**copies, **sizes, "out": out}, Run(n), n * -(-spec.k // PIECE))
    tolerance = (spec.n_used + 6) * U32 * np.nan_to_num(sums) + 1e-37
    assert_close(out, expected, tolerance, spec.name)


# -- products -------------------------------------------------------------------------------------

COUNTS = (3, 0, 19, 1)  # rows of each expert
HEIGHT = 50


def problems(spec: Matmul, isa: Isa, rng: np.random.Generator) -> list[Problem]:
    """Each expert's product by itself, of one row where it has none."""
    dense = replace(spec, experts=0)
    made = [random(dense, isa, rng, max(n, 1), [HEIGHT] * spec.segments) for n in COUNTS]
    for each in made:
        each.factors = list(rng.uniform(0.1, 10.0, spec.segments)) if spec.factor else []
    return made


def stacked(
    parts: list[Problem], memory: Memory
) -> tuple[list[tuple[np.ndarray, ...]], list[np.ndarray]]:
    """Weights and biases of all experts, a tensor for each segment."""
    fmt = parts[0].spec.fmt
    w = []
    biases = []
    for s in range(parts[0].spec.segments):
        split = fmt.split(np.concatenate([p.weights[s] for p in parts]))
        w.append(tuple(memory.copy(np.ascontiguousarray(a)) for a in split))
        bias = np.zeros(len(parts) * HEIGHT + 256, np.float32)
        bias[: len(parts) * HEIGHT] = np.concatenate([p.biases[s] for p in parts])
        biases.append(memory.copy(bias))
    return w, biases


def compare(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Rows of y are to the bit those of the expert's own product; the twin's are near them."""
    parts = problems(spec, isa, rng)
    layout = spec.layout()
    if isinstance(spec, Gemm):
        block = spec.nr  # rows of a tile
        most = 3 * spec.nr
        firsts = np.cumsum([0, *(round_up(n, block) for n in COUNTS[:-1])])
        made = [(e, int(at), n) for e, (at, n) in enumerate(zip(firsts, COUNTS, strict=True)) if n]
        cut = [(e, at + i, min(most, n - i)) for e, at, n in made for i in range(0, n, most)]
        tiles = np.array([len(cut), *np.array(cut).ravel()])
        n_rows = sum(round_up(n, block) for n in COUNTS)
        n_items = len(cut)
        tokens = 0
        source = np.arange(n_rows)
    else:  # two rows of y of each row of x
        slots = [e for e, n in enumerate(COUNTS) for _ in range(n)] + [0]
        tiles = np.array(slots, np.int32)
        n_rows = len(slots)
        tokens = 2
        n_items = n_rows
        source = np.arange(n_rows) // 2
        made = []
        for e, n in enumerate(COUNTS):
            made += [(e, slots.index(e), n)] if n else []
    x = np.zeros((int(source[-1]) + 1, spec.k), np.float32)
    for e, at, n in made:
        if isinstance(spec, Gemm):
            x[at : at + n] = parts[e].x
    if not isinstance(spec, Gemm):
        x = rng.standard_normal(x.shape).astype(np.float32)
        for e, at, n in made:
            parts[e].x = x[source[at : at + n]]
    raw = np.zeros(layout.n_bytes(len(x)), np.uint8)
    layout.write_ref(raw, x)
    w, biases = stacked(parts, memory)
    like = parts[0]
    factors = np.array([p.factors for p in parts], np.float32).T  # of a segment's experts
    y = memory.array((n_rows, like.stride), np.float32, name="y")
    args = {
        "x": memory.copy(raw),
        "y": y,
        "stride": like.stride,
        "tokens": tokens,
        "tiles": memory.copy(tiles),
        "w": w,
        "bias": biases,
        "factor": [memory.copy(some, name="factor") for some in factors],
        "rows": like.heights,
        "column": like.columns,
        "pitch": like.heights,
    }
    run = Run(n_rows // spec.experts)
    call(spec, isa, memory, args, run, n_items * like.strips)
    twin = np.full(y.shape, np.nan)
    spec.run_ref(spec.args(**{**args, "x": raw, "y": twin}), run)
    for e, at, n in made:
        many = n if isinstance(spec, Gemm) else 1  # a gemv's rows, one by one
        for i in range(0, n, many):
            for column in like.columns:
                here = slice(at + i, at + i + many), slice(column, column + HEIGHT)
                near = 1e-4 * np.abs(twin[here]).max()
                assert np.abs(y[here] - twin[here]).max() <= near, (spec.name, e)
            if i % 4 and i + many < n:
                continue  # the same code once more
            p = parts[e]
            own = replace(p, n=many, x=p.x[i : i + many], residual=p.residual[i : i + many])
            want = own.compute(memory)
            for column in like.columns:
                alone = want[:, column : column + HEIGHT]
                here = slice(at + i, at + i + many), slice(column, column + HEIGHT)
                assert np.array_equal(y[here], alone), (spec.name, e)


def with_experts(spec: Matmul, i: int) -> Matmul:
    options = (
        {"bias": True},
        {"segments": 2, "factor": True},
        {},
        {"segments": 2, "bias": True, "factor": True},
    )[i % 4]
    return replace(spec, experts=2, residual=False, outputs=False, **options)


NAMES = [f.name for f in FORMATS.values() if f.codes or f.load]
BOTH = ("Q8_0", "Q4_K", "MXFP4", "F32")


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for i, n in enumerate(NAMES) if i % 2 or n in BOTH])
def test_gemm_of_experts(name: str, memory: Memory, rng: np.random.Generator) -> None:
    fmt = by_name(name)
    isa = rows.VECTORS[-1]
    spec = select.gemm(fmt, isa, 3 * max(fmt.block, 32), matrix=False)
    compare(with_experts(spec, NAMES.index(name)), isa, memory, rng)


@pytest.mark.slow
@pytest.mark.parametrize("isa", rows.MATRICES, ids=rows.name)
@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "MXFP4"])
def test_gemm_of_experts_on_matrix_registers(
    name: str, tokens: int, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """As bytes and as bf16."""
    fmt = by_name(name)
    spec = select.matmul(fmt, isa, 3 * max(fmt.block, 32), tokens)
    assert isinstance(spec, BytesGemm if tokens == 16 else MatrixGemm)
    compare(with_experts(spec, NAMES.index(name)), isa, memory, rng)


@pytest.mark.slow
@pytest.mark.parametrize(("nr", "groups"), [(8, 1), (16, 2)])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_gemm_of_experts_in_lanes(
    name: str, nr: int, groups: int, memory: Memory, rng: np.random.Generator
) -> None:
    fmt = by_name(name)
    spec = LanesGemm(name, "q8", 3 * max(fmt.block, 32), 4, nr, groups=groups)
    compare(with_experts(spec, NAMES.index(name)), rows.VECTORS[-1], memory, rng)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "nr", "groups"), [("F32", 8, 1), ("BF16", 32, 2), ("F16", 32, 2)])
def test_gemm_of_experts_of_floats(
    name: str, nr: int, groups: int, memory: Memory, rng: np.random.Generator
) -> None:
    isa = rows.VECTORS[-1]
    spec = FloatLanes(name, gemm_act(by_name(name), isa), 96, 4, nr, groups=groups)
    compare(with_experts(spec, NAMES.index(name)), isa, memory, rng)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for i, n in enumerate(NAMES) if i % 2 == 0 or n in BOTH])
def test_gemv_of_experts(name: str, memory: Memory, rng: np.random.Generator) -> None:
    fmt = by_name(name)
    isa = rows.VECTORS[-1]
    spec = select.gemv(fmt, isa, 3 * max(fmt.block, 32), 1)
    compare(with_experts(spec, NAMES.index(name)), isa, memory, rng)


def test_gated_of_experts(memory: Memory, rng: np.random.Generator) -> None:
    """With biases; the result's groups begin anew for each expert."""
    isa = rows.VECTORS[-1]
    m = 64
    spare = 96
    spec = Gated(
        "Q8_0", "q8", 96, 2, 4, 2, True, experts=2, fn="swiglu_clamped", m=m, to="f32", to_group=8
    )
    counts = (3, 9)
    firsts = (0, 8)
    n_rows = 24
    x = (4 * rng.standard_normal((n_rows, spec.k))).astype(np.float32)
    raw = np.zeros(spec.layout().n_bytes(n_rows), np.uint8)
    layout = spec.layout()
    layout.write_ref(raw, x)
    # Both halves are in one tensor, and there are rows of neither.
    fmt = by_name("Q8_0")
    pitch = 2 * m + spare
    whole = fmt.quantize_rows(rng.standard_normal((2 * pitch, spec.k)).astype(np.float32))
    bias = rng.standard_normal(2 * pitch + 128).astype(np.float32)
    parts = [(memory.copy(whole[first:]),) for first in (0, m)]
    out = memory.array(spec.result().n_bytes(n_rows), name="out")
    tiles = np.array([2, 0, 0, 3, 1, 8, 9])
    args = {
        "x": memory.copy(raw),
        "y": out,
        "stride": 0,
        "tokens": 0,
        "tiles": memory.copy(tiles),
        "w": parts,
        "bias": [memory.copy(bias[first:]) for first in (0, m)],
        "rows": [m] * 2,
        "column": [0, 0],
        "pitch": [pitch] * 2,
    }
    call(spec, isa, memory, args, Run(6), 2 * spec.strips([m] * 2, isa.lanes))
    twin = np.zeros_like(out)
    spec.run_ref(spec.args(**{**args, "x": raw, "y": twin}), Run(6))
    made, near = (spec.result().read_ref(a, n_rows) for a in (out, twin))
    weights = fmt.dequantize_rows(whole).astype(np.float64)
    for e, (at, n) in enumerate(zip(firsts, counts, strict=True)):
        here = slice(at, at + n)
        g, u = (
            layout.read_ref(raw, n_rows)[here] @ weights[first : first + m].T
            + bias[first : first + m]
            for first in (e * pitch, e * pitch + m)
        )
        g = np.minimum(g, 7.0)
        exact = g / (1 + np.exp(-1.702 * g)) * (np.clip(u, -7, 7) + 1)
        for found in (made, near):
            assert np.abs(found[here] - exact).max() <= 1e-5 * np.abs(exact).max()
    assert np.abs(u).max() > 7  # what is clamped is seen


def test_a_gemv_of_experts_in_any_cut(memory: Memory, rng: np.random.Generator) -> None:
    """Items of one row of y are cut anywhere between threads."""
    spec = Gemv("Q8_0", "q8", 96, 2, 1, experts=2)
    compare(spec, rows.ALL[0], memory, rng)

"""The matrix products of a GPU in the emulator, against their numpy twins: every weight format,
ragged heights, guard pages around all memory, NaN where nothing may be written or read.

Whole numbers must come out exactly, random ones within the bounds of tests/kernels/test_matmul.py.
Where activations are f32 in a tile, each operand is two bf16: a product of them lacks that of both
lesser parts, 2**-18, and each operand what is left beyond 16 bits, 2**-17.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.devices.cuda.machine import EVERYTHING, ISA, some
from tests.kernels.harness import Memory
from tests.kernels.test_experts import compare
from tests.kernels.test_latent import compare as compare_heads
from tests.kernels.test_matmul import Problem, bound, is_simple, random, whole
from treadle.devices.cuda.kernels import gemm, gemv
from treadle.devices.cuda.kernels.gemm import LARGE, SMALL, SimtGemm
from treadle.devices.cuda.kernels.gemv import SimtGemv
from treadle.formats import FORMATS, by_name
from treadle.formats.mlx import mlx
from treadle.isa.nvptx import SM_80
from treadle.kernels.matmul import select
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.spec import Grid
from treadle.plan.plan import Plan, Step

FIRST = ("Q4_0", "Q4_K", "BF16", "F16")
ALL = [f.name for f in FORMATS.values()] + [mlx(4, 64, "BF16").name, mlx(3, 128, "F16").name]
NAMES = [*FIRST, *(name for name in ALL if name not in FIRST)]


def width(w: str, n: int) -> int:
    """A row of about ``n`` values: of floats, and of small blocks, no whole number of units."""
    block = by_name(w).block
    return n + 4 if block == 1 else -(-n // block) * block


def gemvs(w: str) -> list[SimtGemv]:
    """One token, two with all that is added, four in several segments."""
    return [
        SimtGemv(w, "f32", width(w, 352), 2, 1),
        SimtGemv(w, "f32", width(w, 96), 1, 2, bias=True, residual=True),
        SimtGemv(w, "f32", width(w, 1200), 1, 4, segments=3, outputs=True),
    ]


def gemms(w: str) -> list[SimtGemm]:
    """Both tiles, with K that fills no step of theirs, one step, and several."""
    act = "bf16" if by_name(w).codes or by_name(w).act == "bf16" else "f32"
    return [
        SimtGemm(w, act, width(w, 352), *LARGE, residual=True),
        SimtGemm(w, act, width(w, 544), *SMALL, bias=True, segments=2),
        SimtGemm(w, act, width(w, 96), *SMALL),
        SimtGemm(w, act, width(w, 32), *LARGE, segments=2, bias=True),
    ]


def off(problem: Problem) -> np.ndarray:
    """What random numbers may miss."""
    tolerance = bound(problem)
    if isinstance(problem.spec, SimtGemm) and problem.spec.act == "f32":
        x = np.abs(problem.x.astype(np.float64))
        for w, m, column in zip(problem.weights, problem.heights, problem.columns, strict=True):
            values = np.abs(problem.spec.fmt.dequantize_rows(w)).astype(np.float64)
            tolerance[:, column : column + m] += (2.0**-18 + 2 * 2.0**-17) * (x @ values.T)
    return tolerance


def check(spec: Matmul, n: int, ms: list[int], blocks: Memory, rng: np.random.Generator) -> None:
    if is_simple(spec):
        whole(spec, ISA, rng, n, ms).check(blocks, 0)
    problem = random(spec, ISA, rng, n, ms)
    problem.front = n % 2 == 1
    problem.check(blocks, off(problem))


@pytest.mark.parametrize("w", some(NAMES, len(FIRST)))
def test_gemv(w: str, blocks: Memory, rng: np.random.Generator) -> None:
    for spec in some(gemvs(w), 2 if w == "Q4_0" else 1):
        check(spec, spec.nr, [5, 50, 1][: spec.segments], blocks, rng)


@pytest.mark.parametrize("w", some(NAMES, len(FIRST)))
def test_gemm(w: str, blocks: Memory, rng: np.random.Generator) -> None:
    """Without the whole grid, each tile with some formats."""
    first = FIRST.index(w) % 2 if w in FIRST else 0
    for spec in gemms(w) if EVERYTHING else gemms(w)[first : first + 1]:
        for n in (5, 70, 16) if EVERYTHING else (37,):
            check(spec, n, [50, 33][: spec.segments], blocks, rng)


def test_several_rows_of_a_token(blocks: Memory, rng: np.random.Generator) -> None:
    check(SimtGemm("F16", "f32", 96, *SMALL, per=3), 33, [50], blocks, rng)


@pytest.mark.parametrize("k", [24, 88])
@pytest.mark.parametrize(("w", "act"), [("F32", "f32"), ("BF16", "bf16")])
def test_rows_whose_last_values_are_half_a_product(
    w: str, act: str, k: int, blocks: Memory, rng: np.random.Generator
) -> None:
    """Of 16 values that are multiplied together a row ends with eight."""
    check(SimtGemm(w, act, k, *SMALL), 5, [33], blocks, rng)


@pytest.mark.parametrize(
    "spec",
    [SimtGemv("Q4_0", "f32", 96, 2, 1), SimtGemm("Q8_0", "bf16", 96, *SMALL)],
    ids=lambda spec: spec.op,
)
def test_products_of_experts(spec: Matmul, blocks: Memory, rng: np.random.Generator) -> None:
    """To the bit those of each expert's rows by themselves, with a factor of each expert."""
    compare(replace(spec, experts=2, bias=True, factor=True, segments=2), ISA, blocks, rng)


@pytest.mark.parametrize(
    ("spec", "n"),
    [
        (SimtGemv("Q4_0", "f32", 96, 1, 4, heads=3), 4),
        (SimtGemm("Q8_0", "bf16", 64, *SMALL, heads=2), 21),
    ],
    ids=lambda given: getattr(given, "op", ""),
)
def test_products_by_head(spec: Matmul, n: int, blocks: Memory, rng: np.random.Generator) -> None:
    """To the bit those of each head by itself."""
    compare_heads(spec, ISA, blocks, rng, n)


@pytest.mark.parametrize("w", ["Q4_0", "F16"])
def test_plans_take_them(w: str) -> None:
    """A step that the CPU's lowering has made for the row becomes one with the same arguments, and
    items enough for its rows and tokens.
    """
    for tokens, kind in ((1, SimtGemv), (16, SimtGemm), (512, SimtGemm)):
        spec = select.matmul(by_name(w), SM_80, 512, tokens, segments=2)
        heights = [300, 70]
        args = {"rows": heights, "tokens": 512}
        grid = Grid(spec.strips(heights, SM_80.lanes), "n_tokens", 512)
        made = (gemv.swap if tokens == 1 else gemm.swap)(
            Step("ffn", spec, args, grid), Plan(tokens, 1), SM_80
        )
        assert made is not None
        assert isinstance(made.spec, kind)
        assert made.spec.layout() == spec.layout()
        assert made.grid.base == made.spec.strips(heights, SM_80.lanes)
        if kind is SimtGemm:
            assert (made.spec.mr, made.spec.nr) == (SMALL if tokens == 16 else LARGE)
            assert made.grid.per == made.args["tokens"] == made.spec.nr


def test_same_bits_whatever_the_order_of_threads(blocks: Memory, rng: np.random.Generator) -> None:
    """And of blocks, and however tokens are cut."""
    for spec, n in ((gemvs("Q4_0")[0], 1), (gemms("Q4_0")[1], 37)):
        problem = random(spec, ISA, rng, n, [105, 50][: spec.segments])
        first = problem.compute(blocks)
        for chunk in (spec.nr, 2 * spec.nr):
            assert (problem.compute(blocks, chunk).view("u4") == first.view("u4")).all()


def test_names_are_their_own() -> None:
    spec = gemms("Q4_0")[0]
    assert spec.name == "simt_gemm_Q4_0_bf16_k352_mr8_nr64_residual"
    assert replace(spec, mr=2).name != spec.name

"""The fused gate, up and activation of a GPU in the emulator, against the products and the
activation; see tests/kernels/test_gated.py for what may differ.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.devices.cuda.machine import ISA, some
from tests.kernels.harness import U32, Memory
from tests.kernels.test_elementwise import check_act
from tests.kernels.test_gated import Problem
from treadle.devices.cuda.kernels import gated
from treadle.devices.cuda.kernels.gated import SimtGated
from treadle.devices.cuda.kernels.gemm import LARGE, SMALL
from treadle.formats import by_name
from treadle.isa.nvptx import SM_80
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.matmul import select
from treadle.kernels.spec import Grid
from treadle.plan.plan import Plan, Step

SPECS = [
    SimtGated("Q4_0", "bf16", 96, *SMALL, 2, fn="silu", m=96, to="bf16"),
    SimtGated("BF16", "bf16", 100, *LARGE, 2, fn="gelu", m=96, to="f32"),
    SimtGated("Q4_K", "bf16", 512, *LARGE, 2, fn="silu", m=64, to="bf16"),
    SimtGated("MXFP4", "bf16", 352, *SMALL, 2, fn="swiglu_clamped", m=64, to="bf16"),
    SimtGated("Q8_0", "bf16", 352, *LARGE, 2, fn="silu", m=160, to="bf16"),
]


@pytest.mark.parametrize("spec", some(SPECS, 2), ids=lambda spec: spec.name)
def test_against_the_products(spec: SimtGated, blocks: Memory, rng: np.random.Generator) -> None:
    for front, n in enumerate((5, 70)):
        problem = Problem(spec, ISA, rng, n)
        exact, off = problem.exact()
        out = problem.compute(blocks, chunk=spec.nr, front=front == 1)
        check_act(out, spec.result(), exact, 8 * U32, spec.name, off)


def test_plans_take_it() -> None:
    out = ActivationLayout("bf16", 96)
    for tokens, tile in ((16, SMALL), (512, LARGE)):
        spec = select.gated(by_name("Q4_0"), SM_80, 512, 96, "silu", out, tokens)
        assert spec is not None
        args = {"rows": [96, 96], "tokens": 512}
        grid = Grid(spec.strips([], SM_80.lanes), "n_tokens", 512)
        made = gated.swap(Step("ffn", spec, args, grid), Plan(tokens, 1), SM_80)
        assert made is not None
        assert isinstance(made.spec, SimtGated)
        assert (made.spec.mr, made.spec.nr) == tile
        assert made.grid.base == -(-96 // (8 * tile[0]))
        assert (made.spec.layout(), made.spec.result()) == (spec.layout(), out)

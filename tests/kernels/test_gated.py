"""The fused gate, up and activation against its numpy twin, on every instruction set.

Tolerance: both products have the error of theirs (see test_matmul), which the activation's slope
(below 1.13) and the other factor carry on; the activation itself and the last product add a few
roundings of the result, and being written what its kind does (see test_elementwise).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, Run, call
from tests.kernels.pairwise import covering, parametrized
from tests.kernels.test_elementwise import check_act
from tests.kernels.test_matmul import bound, poison, random
from treadle.formats import FORMATS, by_name
from treadle.isa.isa import Isa
from treadle.kernels.activation_layout import WORDS, ActivationLayout
from treadle.kernels.activations import activated
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.strips import StripGemm
from treadle.kernels.run_state import GEMV_TOKENS, round_up

GATED = [
    Gated("Q8_0", "q8", 352, 2, 4, 2, fn="silu", m=96, to="q8", to_group=4),
    Gated("Q8_0", "q8", 64, 1, 6, 2, fn="gelu", m=32, to="q8", to_group=1),
    Gated("Q4_1", "q8", 352, 2, 8, 2, fn="silu", m=64, to="f32", to_group=6),
    Gated("Q4_0", "q8", 352, 4, 3, 2, fn="silu", m=96, to="bf16", to_group=12),
    Gated("Q6_K", "q8", 256, 2, 6, 2, fn="gelu", m=96, to="q8", to_group=8, to_sub=16),
    Gated("Q4_K", "q8", 512, 2, 8, 2, fn="silu", m=64, to="q8", to_group=6, to_sub=16),
    Gated("Q2_K", "q8", 256, 2, 8, 2, folded=True, fn="silu", m=64, to="q8", to_group=8, to_sub=16),
    Gated("Q3_K", "q8", 256, 2, 8, 2, folded=True, fn="silu", m=64, to="q8", to_group=8),
    Gated("F32", "f32", 172, 2, 5, 2, fn="gelu", m=64, to="f32", to_group=5),
    Gated("F16", "f32", 352, 2, 12, 2, fn="silu", m=96, to="q8", to_group=8),
    Gated("Q8_0", "q16", 352, 2, 4, 2, fn="silu", m=96, to="q8", to_group=4),
    Gated("BF16", "q16", 172, 2, 4, 2, fn="gelu", m=64, to="f32", to_group=5),
    Gated("BF16", "bf16", 172, 2, 12, 2, fn="silu", m=64, to="bf16", to_group=12),
    Gated("Q8_0", "bf16", 352, 8, 32, 2, matrix=True, fn="silu", m=96, to="bf16", to_group=32),
    Gated("Q4_K", "bf16", 256, 16, 32, 2, matrix=True, fn="gelu", m=96, to="q8", to_group=8),
    Gated("BF16", "bf16", 172, 8, 32, 2, matrix=True, fn="silu", m=64, to="f32", to_group=12),
    Gated("F16", "bf16x2", 172, 8, 32, 2, matrix=True, fn="silu", m=96, to="bf16x2", to_group=32),
    Gated("F16", "bf16x2", 352, 16, 32, 2, matrix=True, fn="gelu", m=64, to="bf16", to_group=32),
    Gated("F32", "bf16x3", 172, 8, 32, 2, matrix=True, fn="silu", m=96, to="bf16x3", to_group=32),
    Gated("MLX4_G64", "q8", 128, 2, 8, 2, fn="gelu", m=64, to="q8", to_group=8),
    Gated("Q4_0", "q8", 352, 2, 8, 2, unit=8, fn="silu", m=96, to="q8", to_group=6, to_unit=8),
    Gated("Q4_K", "q8", 256, 8, 6, 2, unit=1, fn="silu", m=96, to="q8", to_group=6),
    Gated("F16", "q16n", 172, 2, 4, 2, fn="gelu", m=64, to="f32", to_group=5),
]
CASES = [
    (spec, isa)
    for spec in GATED
    for isa in (rows.MATRICES if spec.matrix else rows.VECTORS)
    if (spec.act != "bf16" or isa.dot_bf16 or spec.matrix) and (spec.act not in WORDS or isa.shorts)
]
SLOPE = 1.13  # the largest of either activation


class Problem:
    """Inputs of one fused kernel, and what it ought to make of them."""

    def __init__(self, spec: Gated, isa: Isa, rng: np.random.Generator, n: int) -> None:
        self.spec = spec
        self.isa = isa
        self.n = n
        self.products = random(replace(spec.product, segments=2), isa, rng, n, [spec.m] * 2)
        for b in self.products.biases:
            b[:] = 0
        self.products.residual[:] = 0

    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 ``[n, m]``, and how far the kernel may be off before it writes."""
        p = self.products
        m = self.spec.m
        fn = self.spec.fn
        y = p.reference()
        error = bound(p)
        (g, u), (dg, du) = ([a[:, column : column + m] for column in p.columns] for a in (y, error))
        off = SLOPE * dg * (np.abs(u) + du) + np.abs(activated(fn, g)) * du
        return activated(fn, g) * u, off + 16 * U32 * np.abs(g * u)

    def compute(self, memory: Memory, chunk: int = 0, front: bool = False) -> np.ndarray:
        """The result's bytes."""
        spec = self.spec
        p = self.products
        layout = spec.layout()
        result = spec.result()
        raw = np.full(layout.n_bytes(self.n), 0xFF, np.uint8)
        layout.write_ref(raw, p.x)
        poison(raw, layout, self.n)
        x = memory.copy(raw, name="x", front=front)
        out = memory.array(result.n_bytes(self.n), name="out", front=front)
        chunk = chunk or round_up(self.n, spec.nr)
        args = {"x": x, "y": out, "stride": 0, "tokens": chunk, "rows": [spec.m] * 2}
        args |= {"column": [0, 0], "w": p.copies(memory, front)}
        n_items = spec.strips([spec.m] * 2, self.isa.lanes) * -(-self.n // chunk)
        call(spec, self.isa, memory, args, Run(n_tokens=self.n), n_items)
        return out


@pytest.mark.slow
@parametrized(covering(CASES, together=("w", "act")))
def test_against_the_products_and_the_activation(
    spec: Gated, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    for front, n in enumerate((1, spec.nr - 1, spec.nr, 2 * spec.nr + 13)):
        problem = Problem(spec, isa, rng, n)
        exact, off = problem.exact()
        out = problem.compute(memory, front=front % 2 == 1)
        # A block's scale is as far off as its largest value may be.
        if spec.to == "q8":
            off = off + off.reshape(n, -1, 32).max(-1).repeat(32, -1)
        if spec.to_sub == 32:
            check_act(out, spec.result(), exact, 8 * U32, f"{spec.name} on {isa.name}", off)
        else:
            top = np.abs(exact).reshape(n, -1, 32).max(-1).repeat(32, -1)
            got = spec.result().read_ref(out, n)
            assert (np.abs(got - exact) <= off + top / 127 * 0.51).all()


@pytest.mark.parametrize("spec", GATED, ids=lambda spec: spec.name)
def test_the_twin_says_the_same(spec: Gated, memory: Memory, rng: np.random.Generator) -> None:
    """Its own run_ref, which whole plans are checked with."""
    problem = Problem(spec, rows.ALL[0], rng, 5)
    exact, _ = problem.exact()
    plain = replace(spec, to="f32", to_group=1, to_sub=32)
    layout = spec.layout()
    out = np.zeros(plain.result().n_bytes(5), np.uint8)
    x = np.zeros(layout.n_bytes(5), np.uint8)
    layout.write_ref(x, problem.products.x)
    w = [spec.fmt.split(w) for w in problem.products.weights]
    plain.run_ref(plain.args(x=x, y=out, w=w, rows=[spec.m] * 2), Run(n_tokens=5))
    assert np.allclose(plain.result().read_ref(out, 5), exact, rtol=1e-6, atol=1e-30)


def test_same_bits_for_every_cut(memory: Memory, rng: np.random.Generator) -> None:
    for spec in (GATED[0], GATED[5], GATED[6], GATED[11]):
        isa = (rows.MATRICES if spec.matrix else rows.VECTORS)[-1]
        problem = Problem(spec, isa, rng, 2 * spec.nr + 13)
        first = problem.compute(memory)
        for chunk in (spec.nr, 2 * spec.nr):
            assert (problem.compute(memory, chunk) == first).all(), spec.name


def test_what_fills_up_a_group_is_its_last_token(memory: Memory, rng: np.random.Generator) -> None:
    """Not what an earlier run left there, which may be slow to multiply: see Act.grid."""
    isa = rows.ALL[-1]
    spec = replace(GATED[3], to="f32")
    out = Problem(spec, isa, rng, 13).compute(memory)
    values = spec.result().read_ref(out, 24)
    assert (values[13:] == values[12]).all()


@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_the_choice_is_the_products_own(fmt: object, isa: Isa) -> None:
    """Its activations are laid out for the gemm that it stands for, so both can follow one norm."""
    fmt = by_name(fmt.name)  # type: ignore[attr-defined]
    for n in (GEMV_TOKENS[-1] + 1, 512):
        made = select.gated(fmt, isa, 2048, 5632, "silu", ActivationLayout("q8", 5632, 8), n)
        like = select.matmul(fmt, isa, 2048, n)
        assert isinstance(like, Gemm)
        if isinstance(like, StripGemm):
            assert made is None
            continue
        assert made is not None
        assert (made.layout(), made.folded) == (like.layout(), like.folded)
        assert (
            select.gated(fmt, isa, 2048, 5632 + 16, "silu", ActivationLayout("q8", 5648, 8), n)
            is None
        )

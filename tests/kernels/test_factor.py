"""Products times a factor: to the bit those without, multiplied, before bias and residual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, assert_close
from tests.kernels.test_matmul import random
from treadle.formats import by_name
from treadle.jit.language import Isa
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm

TOKENS = (1, 2, 4, 8, 16, 64, 512)  # that a kernel is chosen for
HEIGHTS = [50, 33]
FACTORS = [0.37, 1234.5]


NAMES = ("NVFP4", "Q4_K", "F32")
# Pairs of a format, a number of tokens and a row: the best row meets all formats and numbers, of
# the others each number meets one format.
CASES = [
    pytest.param(name, tokens, isa, id=f"{name}-{tokens}-{isa.name}")
    for i, isa in enumerate(reversed(rows.ALL))
    for j, tokens in enumerate(TOKENS)
    for name in (NAMES if i == 0 else NAMES[(i + j) % 3 :][:1])
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens", "isa"), CASES)
def test_a_factor(
    name: str, tokens: int, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    fmt = by_name(name)
    bare = select.matmul(fmt, isa, 3 * max(fmt.block, 32), tokens, segments=2)
    plain = random(bare, isa, rng, bare.nr, HEIGHTS)
    own: dict[str, Any] = {"spec": replace(bare, factor=True), "factors": FACTORS}
    expected = plain.compute(memory)
    for m, column, factor in zip(HEIGHTS, plain.columns, FACTORS, strict=True):
        expected[:, column : column + m] *= np.float32(factor)
    assert np.array_equal(replace(plain, **own).compute(memory), expected, equal_nan=True)
    added = np.zeros_like(expected)
    for m, column, bias in zip(HEIGHTS, plain.columns, plain.biases, strict=True):
        added[:, column : column + m] = bias + plain.residual[: plain.n, column : column + m]
    own["spec"] = replace(own["spec"], bias=True, residual=True)
    whole = replace(plain, **own)
    made = whole.compute(memory)
    twin = whole.reference()
    tolerance = 4 * U32 * (np.abs(expected) + np.abs(added) + 8)
    assert_close(made, expected + added, tolerance, whole.spec.name)
    near = 1e-4 * np.nanmax(np.abs(twin))
    assert np.nanmax(np.abs(made - twin)) <= near


@pytest.mark.parametrize("isa", rows.VECTORS[-1:], ids=rows.name)
@pytest.mark.parametrize("name", ["NVFP4", "F32"])
def test_a_factor_where_k_is_cut(
    name: str, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """A tile that goes on from sums that have the factor would multiply them again."""
    fmt = by_name(name)
    bare = select.gemm(fmt, isa, 3 * max(fmt.block, 32), matrix=False)
    assert isinstance(bare, Gemm)
    plain = random(bare, isa, rng, bare.nr, HEIGHTS[:1])
    expected = plain.compute(memory)
    own = replace(plain, spec=replace(bare, factor=True, kc=64), factors=FACTORS[:1])
    assert np.allclose(own.compute(memory), expected * FACTORS[0], rtol=1e-4, equal_nan=True)

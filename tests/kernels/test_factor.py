"""Products times a factor: to the bit those without, multiplied, before bias and residual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, assert_close
from tests.kernels.pairwise import parametrized
from tests.kernels.test_matmul import random
from treadle.formats import by_name
from treadle.jit.language import Isa
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.matmul import Matmul

TOKENS = (1, 2, 4, 8, 16, 64, 512)  # that a kernel is chosen for
HEIGHTS = [50, 33]
FACTORS = [0.37, 1234.5]


NAMES = ("NVFP4", "Q4_K", "F32")


def chosen() -> list[tuple[Matmul, Isa]]:
    """All products that the best row chooses, and one of each kind of every other row's, formats in
    turns: sums are multiplied by code of the kind, which knows nothing of formats.
    """
    found: dict[object, tuple[Matmul, Isa]] = {}
    for i, isa in enumerate(reversed(rows.ALL)):
        for j, tokens in enumerate(TOKENS):
            for turn in range(len(NAMES)):
                fmt = by_name(NAMES[(i + j + turn) % len(NAMES)])
                spec = select.matmul(fmt, isa, 3 * max(fmt.block, 32), tokens, segments=2)
                found.setdefault((spec if i == 0 else type(spec), isa.name), (spec, isa))
    return list(found.values())


@pytest.mark.slow
@parametrized(chosen())
def test_a_factor(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    plain = random(spec, isa, rng, spec.nr, HEIGHTS)
    own: dict[str, Any] = {"spec": replace(spec, factor=True), "factors": FACTORS}
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

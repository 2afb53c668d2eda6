"""Buckets of distances, and the numbers that they become for each distance."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from tests.kernels.registry import RELATIVE_LOGITS
from treadle.jit.language import Isa
from treadle.kernels.attention.relative_bias import biases_by_distance, buckets, row_values
from treadle.kernels.attention.relative_logits import RelativeLogits, by_place, relative_values
from treadle.kernels.run_state import PAGE
from treadle.models.archs import REACH


def test_buckets_of_t5() -> None:
    """32 for distances up to 128, counted by hand: 8 near ones, then four for each factor of 4."""
    first = [8, 12, 16, 23, 32, 46, 64, 91]  # tokens where the far buckets of a half begin
    found = buckets(np.arange(-300, 301), 32, REACH)
    for distance, bucket in zip(range(-300, 301), found, strict=True):
        n = abs(distance)
        far = 7 + sum(n >= at for at in first)
        assert bucket == (n if n < 8 else far) + 16 * (distance > 0), distance


@pytest.mark.parametrize(("n", "reach"), [(32, 128), (64, 256), (16, 64), (34, 128), (4, 128)])
def test_buckets_are_those_of_transformers(n: int, reach: int) -> None:
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = np.arange(-3 * reach, 3 * reach)
    theirs = t5.T5Attention._relative_position_bucket(torch.tensor(distances), True, n, reach)
    assert np.array_equal(buckets(distances, n, reach), theirs.numpy())


def test_numbers_by_distance() -> None:
    """A row for each head; as many values past the reach, to both sides, as a page has keys."""
    matrix = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    made = biases_by_distance(matrix, REACH)
    assert made.shape == (3, row_values(REACH))
    middle = REACH + PAGE  # distance 0
    for head in range(3):
        assert made[head, middle] == matrix[0, head]
        assert made[head, middle - 5] == matrix[5, head]
        assert made[head, middle + 5] == matrix[21, head]
        assert set(made[head, : middle - 91 + 1]) == {matrix[15, head]}
        assert set(made[head, middle + 91 :]) == {matrix[31, head]}


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", RELATIVE_LOGITS, ids=registry.name)
def test_relative_logits(
    spec: RelativeLogits, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """A sum of ``rank`` products, each rounded once; zeros beyond the reach."""
    n = 5
    column = 3
    stride = spec.n_head * spec.rank + 6
    x = rng.standard_normal((n, stride)).astype(np.float32)
    proj = rng.standard_normal((spec.rank, spec.reach)).astype(np.float32)
    width = spec.n_head * relative_values(spec.reach)
    expected = np.full(n * width, np.nan)
    args = {"stride": stride, "column": column}
    spec.run_ref(spec.args(x=x, proj=by_place(proj).ravel(), out=expected, **args), Run(n))
    mixes = x[2, column : column + spec.n_head * spec.rank].reshape(spec.n_head, -1)
    third = expected.reshape(n, spec.n_head, -1)[2]
    assert np.allclose(third[:, PAGE + spec.reach - 1], mixes @ proj[:, 0])  # distance 0
    assert np.allclose(third[:, PAGE], mixes @ proj[:, -1])
    out = memory.array((n * width,), np.float32, name="out")
    given = {"x": memory.copy(x), "proj": memory.copy(by_place(proj)), "out": out}
    call(spec, isa, memory, {**args, **given}, Run(n), n * spec.n_head)
    allowed = spec.rank * U32 * 2 * spec.rank * np.abs(x).max() * np.abs(proj).max()
    assert_close(out, expected, allowed, spec.name)

"""Pooling against its numpy twin.

A mean is a sum in one chain of n terms: n u of the mean magnitude. Its length comes of a mean
square, whose relative error is that of Norm's (``test_elementwise.norm_error``).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.pooling import Pooling
from treadle.kernels.run_state import PART
from treadle.selftest.rounding_bounds import norm_error

SPECS = [
    Pooling(how, k, unit)
    for how in ("mean", "first", "last")
    for k, unit in ((7, False), (64, True), (1041, True))
]


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=lambda isa: isa.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_pooling(spec: Pooling, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    lengths = 5, 1, 40
    stride = spec.k + 9
    out_stride = spec.k + 2
    n = sum(lengths)
    x = memory.array((n, stride), np.float32, name="x")
    x[:, : spec.k] = rng.standard_normal((n, spec.k)) + 0.5
    starts = np.cumsum([0, *lengths[:-1]])
    parts = np.array(
        [(at, m, 0, 0, 0, 0) for at, m in zip(starts, lengths, strict=True)],
        PART,
    )
    out = memory.array((len(lengths), out_stride), np.float32, name="out")
    expected = out.astype(np.float64)
    run = Run(parts=parts)
    strides = {"stride": stride, "out_stride": out_stride}
    spec.run_ref(spec.args(x=x, out=expected, **strides), run)
    call(spec, isa, memory, {"x": x, "out": out, **strides}, run, len(lengths))
    relative = norm_error(spec.k, isa) if spec.unit else 0.0
    top = np.abs(x[:, : spec.k]).max() / (np.sqrt(spec.k) / 2 if spec.unit else 1)
    tolerance = np.abs(expected) * relative + (max(lengths) + 2) * U32 * top
    assert_close(out, expected, tolerance, spec.name)  # the columns behind k are still NaN


def test_zeros_stay_zeros() -> None:
    memory = Memory()
    spec = Pooling("mean", 64, unit=True)
    x = memory.copy(np.zeros((3, 64), np.float32), name="x")
    out = memory.array((1, 64), np.float32, name="out")
    run = Run(parts=np.array([(0, 3, 0, 0, 0, 0)], PART))
    args = {"x": x, "out": out, "stride": 64, "out_stride": 64}
    call(spec, rows.ALL[-1], memory, args, run, 1)
    assert not out.any()

"""MediaRowsKernel against its numpy twin: copies are exact, and a sum has one rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import U32, Memory, Run, assert_close, call
from treadle.isa.isa import Isa
from treadle.kernels.elementwise.media_rows import MediaRowsKernel
from treadle.kernels.run_state import MEDIA_HEAD

N = 7  # tokens


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("spec", registry.MEDIA_ROWS, ids=registry.name)
def test_media_rows(
    spec: MediaRowsKernel, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Rows of media tokens only, and nothing behind the columns."""
    stride = spec.k + 3
    media_stride = MEDIA_HEAD + spec.first + spec.k + 1
    x = rng.standard_normal((N, stride)).astype(np.float32)
    media = rng.standard_normal((N, media_stride)).astype(np.float32)
    media[:, 0] = [0, 1, 1, 0, 0, 1, 0]
    here = media[:, 0] > 0
    values = media[:, MEDIA_HEAD + spec.first :][:, : spec.k].astype(np.float64)
    wanted = x.astype(np.float64)
    wanted[here, : spec.k] = (wanted[here, : spec.k] if spec.add else 0.0) + values[here]
    expected = x.astype(np.float64)
    given: dict[str, Any] = {"stride": stride, "media_stride": media_stride}
    spec.run_ref(spec.args(x=expected, media=media.ravel(), **given), Run(N))
    assert_close(expected, wanted, 0.0, "twin")
    for front in (False, True):
        out = memory.copy(x, name="x", front=front)
        args = {"x": out, "media": memory.copy(media, front=front), **given}
        call(spec, isa, memory, args, Run(N), N)
        assert_close(out, expected, (U32 if spec.add else 0.0) * np.abs(expected), spec.name)
        assert np.array_equal(out[:, spec.k :], x[:, spec.k :])
        assert np.array_equal(out[~here], x[~here])

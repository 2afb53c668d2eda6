"""Which bytes the system is asked for."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.asked import ADVICE, Asked
from tests.kernels.harness import Memory, Run, call
from treadle.isa.isa import Isa
from treadle.kernels.matmul.matmul import TILE
from treadle.kernels.moe.page_in_experts import Fetch


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.skipif("TREADLE_TEST_ROW" in os.environ, reason="calls a function of this process")
def test_kernel(isa: Isa, tiled: bool, memory: Memory) -> None:
    """Whole pages from where an expert begins; the last argument of each array is its own."""
    experts = [3, 0, 3, 6]
    page = 4096
    asked = Asked()
    given: dict[str, Any] = {"chosen": np.array(experts, np.int32)}
    if tiled:
        tiles = np.zeros(len(experts), TILE)
        tiles["expert"] = experts
        given = {"tiles": np.concatenate([[len(experts)], tiles.view(np.int64)])}
    copies = {name: memory.copy(a, name=name) for name, a in given.items()}
    arrays = {"w": [1 << 20, 5_000_123], "length": [300, 9000], "pitch": [300, 20_000]}
    args = {**copies, "call": asked.address, "advice": ADVICE, "page": page, **arrays}
    call(Fetch(2, tiled), isa, memory, args, Run(len(experts)), len(experts))
    expected = []
    for expert in experts:
        for w, length, pitch in zip(*arrays.values(), strict=True):
            begin = w + expert * pitch
            expected.append((begin - begin % page, length + begin % page, ADVICE))
    assert sorted(asked) == sorted(expected)

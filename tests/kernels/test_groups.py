"""Gemvs of a few rows of an expert together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels import rows
from tests.kernels.harness import Memory, Run, call
from tests.kernels.test_experts import (
    BOTH,
    FIRST,
    HEIGHT,
    NAMES,
    problems,
    sorted_rows,
    stacked,
    with_experts,
)
from treadle.formats import by_name
from treadle.isa.isa import Isa
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemv import GROUPED, GroupGemv
from treadle.kernels.matmul.matmul import Matmul, tiles_of
from treadle.kernels.moe.route import Sort

CHOSEN = (0, 2, 3, 0, 2, 0, 0, 3, 2, 0)  # of five, none, three and two rows


@pytest.mark.parametrize("name", [n for i, n in enumerate(NAMES) if i % 4 == 1 or n in BOTH])
def test_gemv_of_groups(name: str, memory: Memory, rng: np.random.Generator) -> None:
    fmt = by_name(name)
    isa = rows.VECTORS[-1]
    spec = select.group_gemv(fmt, isa, 3 * max(fmt.block, 32))
    compare(with_experts(spec, NAMES.index(name)), isa, memory, rng)


@pytest.mark.slow
@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "F16"])
def test_gemv_of_groups_on_every_row(
    name: str, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """K is whole spans, which some rows multiply two or more tokens by."""
    spec = select.group_gemv(by_name(name), isa, 512)
    compare(with_experts(spec, 2), isa, memory, rng)


def compare(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Rows of y are to the bit what a gemv of as many tokens makes; the twin's are near them."""
    assert isinstance(spec, GroupGemv)
    parts = problems(spec, isa, rng)
    layout = spec.layout()
    chosen = np.array(CHOSEN, np.int32)
    sort = Sort(len(parts), spec.experts, 1, GROUPED)
    tiles, sources, _ = sorted_rows(sort, chosen, memory, None)
    w, biases = stacked(parts, memory)
    like = parts[0]
    n = len(chosen)
    for of_tokens in (True, False):  # x has a row of each token, or of each slot
        some = replace(spec, of_tokens=of_tokens)
        token_of = sources[2:] if of_tokens else np.arange(n)
        x = rng.standard_normal((int(token_of.max()) + 1, spec.k)).astype(np.float32)
        raw = np.zeros(layout.n_bytes(len(x)), np.uint8)
        layout.write_ref(raw, x)
        y = memory.array((FIRST + n, like.stride), np.float32, name="y")
        factors = np.array([p.factors for p in parts], np.float32).T
        args = {
            "x": memory.copy(raw),
            "y": y,
            "stride": like.stride,
            "tokens": 0,
            "tiles": memory.copy(tiles),
            "sources": memory.copy(sources) if of_tokens else None,
            "first": FIRST,
            "w": w,
            "bias": biases,
            "factor": [memory.copy(each, name="factor") for each in factors],
            "rows": like.heights,
            "column": like.columns,
            "pitch": like.heights,
        }
        run = Run(n // spec.experts)
        call(some, isa, memory, args, run, int(tiles[0]) * like.strips)
        twin = np.full(y.shape, np.nan)
        some.run_ref(some.args(**{**args, "x": raw, "y": twin}), run)
        seen = []
        for expert, here in tiles_of(tiles):
            one = replace(spec.gemv_for({3: 4}.get(len(here), len(here))), experts=0)
            none = np.zeros((len(here), like.stride), np.float32)
            mine = x[token_of[here]]
            own = replace(parts[expert], spec=one, n=len(here), x=mine, residual=none)
            want = own.compute(memory)
            seen.append(len(here))
            for column in like.columns:
                at = FIRST + here, slice(column, column + HEIGHT)
                alone = want[:, column : column + HEIGHT]
                assert np.array_equal(y[at], alone), (spec.name, expert)
                near = 1e-4 * np.abs(twin[at]).max()
                assert np.abs(alone - twin[at]).max() <= near, (spec.name, expert)
        assert sorted(seen) == [1, 2, 3, 4]

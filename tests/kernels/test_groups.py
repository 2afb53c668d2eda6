"""Slots in groups that meet the same expert, and gemvs of these."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import Memory, Run, call
from tests.kernels.registry import SLOT_GROUPS
from tests.kernels.test_experts import BOTH, HEIGHT, NAMES, problems, stacked, with_experts
from treadle.formats import by_name
from treadle.isa.isa import Isa
from treadle.kernels import choice
from treadle.kernels.gemv import GroupGemv
from treadle.kernels.matmul import GROUP, ROWS, Matmul, groups_of
from treadle.kernels.route import Group, tiles_most

CHOSEN = (0, 2, 3, 0, 2, 0, 0, 3, 2, 0)  # of three, five, two and no slots


@pytest.mark.parametrize("isa", rows.VECTORS[-1:], ids=rows.name)
@pytest.mark.parametrize("spec", SLOT_GROUPS, ids=registry.name)
def test_group(spec: Group, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """All numbers are whole: exact. Most experts have no slot, or each has some."""
    few = np.full(3 * spec.n_used, spec.n - 1, np.int32)
    for chosen in (few, rng.integers(0, spec.n, 41 * spec.n_used).astype(np.int32)):
        exact, made = (grouped(spec, chosen, memory, with_isa) for with_isa in (None, isa))
        size = 1 + int(exact[0]) * (2 + ROWS)
        assert np.array_equal(made[:size], exact[:size])
        seen = []
        for expert, slots in groups_of(exact):
            assert (chosen[slots] == expert).all()
            assert 1 <= len(slots) <= ROWS
            seen += slots.tolist()
        assert sorted(seen) == list(range(len(chosen)))
        assert int(exact[0]) == sum(-(-n // ROWS) for n in np.bincount(chosen))


def grouped(spec: Group, chosen: np.ndarray, memory: Memory, isa: Isa | None) -> np.ndarray:
    """Groups: by the kernel, or without ``isa`` by its twin."""
    most = tiles_most(len(chosen), spec.n, ROWS)
    groups = memory.array(1 + most * (GROUP.itemsize // 8), np.int64, name="groups")
    args, run = {"chosen": memory.copy(chosen), "groups": groups}, Run(len(chosen) // spec.n_used)
    if isa is None:
        spec.run_ref(spec.args(**args), run)
    else:
        call(spec, isa, memory, args, run, 1)
    return groups


@pytest.mark.parametrize("name", [n for i, n in enumerate(NAMES) if i % 4 == 1 or n in BOTH])
def test_gemv_of_groups(name: str, memory: Memory, rng: np.random.Generator) -> None:
    fmt, isa = by_name(name), rows.VECTORS[-1]
    spec = choice.group_gemv(fmt, isa, 3 * max(fmt.block, 32))
    compare(with_experts(spec, NAMES.index(name)), isa, memory, rng)


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "F16"])
def test_gemv_of_groups_on_every_row(
    name: str, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """K is whole spans, which some rows multiply two or more tokens by."""
    spec = choice.group_gemv(by_name(name), isa, 512)
    compare(with_experts(spec, 2), isa, memory, rng)


def compare(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Rows of y are to the bit what a gemv of as many tokens makes; the twin's are near them."""
    assert isinstance(spec, GroupGemv)
    parts, layout, chosen = problems(spec, isa, rng), spec.layout(), np.array(CHOSEN, np.int32)
    groups = grouped(Group(len(parts), spec.experts), chosen, memory, None)
    w, biases = stacked(parts, memory)
    like, n = parts[0], len(chosen)
    for tokens in (1, spec.experts):  # slots of the same row of x
        x = rng.standard_normal((n // tokens, spec.k)).astype(np.float32)
        raw = np.zeros(layout.n_bytes(len(x)), np.uint8)
        layout.write_ref(raw, x)
        y = memory.array((n, like.stride), np.float32, name="y")
        factors = np.array([p.factors for p in parts], np.float32).T
        args = {
            "x": memory.copy(raw),
            "y": y,
            "stride": like.stride,
            "tokens": tokens,
            "tiles": memory.copy(groups),
            "w": w,
            "bias": biases,
            "factor": [memory.copy(some, name="factor") for some in factors],
            "rows": like.heights,
            "column": like.columns,
            "pitch": like.heights,
        }
        run = Run(n // spec.experts)
        call(spec, isa, memory, args, run, int(groups[0]) * like.strips)
        twin = np.full(y.shape, np.nan)
        spec.run_ref(spec.args(**{**args, "x": raw, "y": twin}), run)
        for expert, slots in groups_of(groups):
            some = slots // tokens
            one = replace(spec.of({3: 4}.get(len(some), len(some))), experts=0)
            none = np.zeros((len(some), like.stride), np.float32)
            own = replace(parts[expert], spec=one, n=len(some), x=x[some], residual=none)
            want = own.compute(memory)
            for column in like.columns:
                here = slots, slice(column, column + HEIGHT)
                alone = want[:, column : column + HEIGHT]
                assert np.array_equal(y[here], alone), (spec.name, expert)
                near = 1e-4 * np.abs(twin[here]).max()
                assert np.abs(alone - twin[here]).max() <= near, (spec.name, expert)

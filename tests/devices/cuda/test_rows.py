"""What is done row by row by blocks of threads: norms, packs and rope, by the CPU's
tests.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.devices.cuda.machine import ISA, some
from tests.kernels import registry, test_elementwise, test_top
from tests.kernels import test_rope as tests_of_rope
from tests.kernels.harness import Memory, Picked
from tests.kernels.registry import NORMS, PACKS, ROPES
from treadle.devices.cuda.kernels import attention, norm, rope
from treadle.devices.cuda.kernels.block import convert_spec
from treadle.devices.cuda.kernels.norm import SimtNorm, SimtPack
from treadle.devices.cuda.kernels.rope import SimtRopeStore
from treadle.devices.cuda.kernels.top import SimtJoinTop, SimtTop
from treadle.kernels.activation_layout import BLOCK, DWORD
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.elementwise.elementwise import Norm, Pack
from treadle.kernels.elementwise.top_logits import SLICE
from treadle.kernels.spec import Grid
from treadle.plan.plan import Step


def plain(specs: list[Any], first: tuple[int, ...]) -> list[Any]:
    """As the lowering for a GPU has them: rows of f32 or bf16; those at ``first`` in front."""
    order = [*first, *(i for i in range(len(specs)) if i not in first)]
    made = [
        replace(specs[i], act=act, group=1, sub=BLOCK, unit=DWORD)
        for i, act in product(order, ("bf16", "f32"))
    ]
    return list({spec.name: spec for spec in made}.values())


@pytest.mark.parametrize("spec", some(plain(NORMS, (2, 7, 12, 13, 15, 17)), 12), ids=registry.name)
def test_norm(spec: Norm, blocks: Memory, rng: np.random.Generator) -> None:
    made = convert_spec(SimtNorm, spec)
    test_elementwise.test_norm(made, ISA, blocks, rng)


@pytest.mark.parametrize("spec", some(plain(PACKS, (1, 3, 16, 20)), 8), ids=registry.name)
def test_pack(spec: Pack, blocks: Memory, rng: np.random.Generator) -> None:
    made = convert_spec(SimtPack, spec)
    test_elementwise.test_pack(made, ISA, blocks, rng)


FIRST = (4, 5, 9, 14, 16, 17, 19)
TURNED = [ROPES[i] for i in FIRST] + [spec for i, spec in enumerate(ROPES) if i not in FIRST]


@pytest.mark.parametrize("spec", some(TURNED, len(FIRST)), ids=registry.name)
def test_rope(spec: RopeStore, blocks: Memory, rng: np.random.Generator) -> None:
    made = convert_spec(SimtRopeStore, spec)
    tests_of_rope.test_rope_store(made, ISA, blocks, rng)


TOPS = (SimtTop(), SimtJoinTop())


@pytest.mark.parametrize("k", some([SLICE + 1, 31, 320, 64, 65, 3 * SLICE + 77], 3))
def test_the_largest_of_any_length(k: int, blocks: Memory, rng: np.random.Generator) -> None:
    picked = [Picked(1), Picked(0), Picked(0, rng.random(k) < 0.5), Picked(1, None, first=True)]
    test_top.check(test_top.spread(rng, 2, k), ISA, picked, kernels=TOPS, memory=blocks)


@pytest.mark.parametrize(
    "shape", some(["few values", "40 left", "equal", "one row", "all ruled out", "huge"], 3)
)
def test_the_largest_of_any_values(shape: str, blocks: Memory, rng: np.random.Generator) -> None:
    x = test_top.shaped(shape, test_top.spread(rng, SLICE + 300), rng)[None]
    picked = [Picked(0, mask) for mask in (None, np.zeros(x.shape[1], bool))]
    picked += [look._replace(first=True) for look in picked]
    test_top.check(x, ISA, picked, kernels=TOPS, memory=blocks)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_comes_first(
    bad: float, blocks: Memory, rng: np.random.Generator
) -> None:
    x = test_top.spread(rng, 1, 1000)
    x[0, [700, 70]] = bad
    nothing = Picked(0, np.zeros(1000, bool))
    (found,) = test_top.largest(x, ISA, [nothing], kernels=TOPS, memory=blocks)
    assert found["ids"][:2].tolist() == [70, 700]
    assert np.array_equal(found["values"][:2], [bad] * 2, equal_nan=True)


def test_what_no_kernel_of_blocks_does_stays_as_it_is() -> None:
    """Pages of two dims a byte, values that are keys, rows that begin at odd places."""
    plan: Any = None

    def swapped(swap: Any, spec: Any, **args: int) -> bool:
        return swap(Step("L0", spec, args, Grid(1)), plan, ISA) is not None

    turned = RopeStore("neox", "f16", 4, 2, 64, 64, 1.0)
    attended = Attention("f16", 4, 2, 64, 16)
    assert swapped(rope.swap, turned)
    assert not swapped(rope.swap, replace(turned, kv="q4_0"))
    assert swapped(attention.swap, attended, stride=512)
    assert not swapped(attention.swap, attended, stride=510)
    assert not swapped(attention.swap, replace(attended, kv="q4_0"))
    assert swapped(norm.swap_norm, Norm("bf16", 352, 1, 1e-5))
    assert not swapped(norm.swap_norm, Norm("q8", 352, 1, 1e-5))
    assert not swapped(norm.swap_pack, Pack("silu", "bf16", 352, 16))

"""What is done row by row by blocks of threads: norms and packs, in the tests of the CPU's."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.gpu.machine import ISA, some
from tests.kernels import registry, test_elementwise
from tests.kernels.harness import Memory
from tests.kernels.registry import NORMS, PACKS
from treadle.gpu.kernels.block import instead
from treadle.gpu.kernels.norm import SimtNorm, SimtPack
from treadle.kernels.act import BLOCK, DWORD
from treadle.kernels.elementwise import Norm, Pack


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
    made = instead(SimtNorm, spec)
    test_elementwise.test_norm(made, ISA, blocks, rng)


@pytest.mark.parametrize("spec", some(plain(PACKS, (1, 3, 16, 20)), 8), ids=registry.name)
def test_pack(spec: Pack, blocks: Memory, rng: np.random.Generator) -> None:
    made = instead(SimtPack, spec)
    test_elementwise.test_pack(made, ISA, blocks, rng)

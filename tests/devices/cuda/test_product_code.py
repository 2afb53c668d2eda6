"""The machine code of the products: tensor cores, matrix loads and asynchronous copies are there,
and all of a thread's values are in registers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices.cuda.machine import EVERYTHING
from tests.devices.cuda.ptxas import assemble
from tests.devices.cuda.test_products import NAMES
from treadle.devices.cuda.kernels.gemm import LARGE, SMALL, SimtGemm
from treadle.devices.cuda.kernels.gemv import SimtGemv, rows_together
from treadle.formats import by_name
from treadle.isa import nvptx
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.select_activation import gemm_act

pytestmark = pytest.mark.slow  # ptxas comes with the extra dev


def gemv(w: str, tokens: int) -> SimtGemv:
    return SimtGemv(w, "f32", 2048, rows_together(by_name(w), tokens), tokens)


def gemm(w: str, tile: tuple[int, int]) -> SimtGemm:
    return SimtGemm(w, gemm_act(by_name(w), nvptx.SM_80), 2048, *tile, residual=True)


CASES: list[Matmul] = [gemv("Q4_K", 1), gemm("Q4_0", LARGE), gemm("F16", SMALL)]
if EVERYTHING:
    CASES = [gemv(w, n) for w in NAMES for n in (1, 2, 4)]
    CASES += [gemm(w, tile) for w in NAMES for tile in (LARGE, SMALL)]


@pytest.mark.parametrize("isa", ["sm_80", "sm_90"])
@pytest.mark.parametrize("spec", CASES, ids=lambda spec: spec.name)
def test_products_are_on_the_units_for_them(spec: Matmul, isa: str, tmp_path: Path) -> None:
    row = {"sm_80": nvptx.SM_80, "sm_90": nvptx.SM_90}[isa]
    made = assemble(spec, row, tmp_path)
    assert made.spills == 0, made
    ops = made.opcodes()
    if isinstance(spec, SimtGemv):
        rounds = spec.group.bit_length() - 1  # the lanes' sums, in a tree
        assert ops["SHFL"] >= rounds * spec.mr * spec.nr
        assert "HMMA" not in ops
        return
    assert made.registers < 255, made
    planes = 1 if spec.act == "bf16" else 3
    rows = 16 * spec.mr
    tokens = spec.nr
    per_warp = rows * tokens * 64 // (16 * 8 * 16) * planes  # of 64 values of K
    assert ops["HMMA"] >= (per_warp // 4 if spec.mr == LARGE[0] else per_warp)
    assert ops["LDSM"] >= 4 * 3
    assert ("LDGSTS" in ops) == (spec.act == "bf16")

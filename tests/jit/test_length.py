"""How long a register is reaches LLVM, for rows that know."""

from __future__ import annotations

import re
from dataclasses import replace

from treadle.isa import ROWS
from treadle.jit.compile import emit_assembly
from treadle.jit.kernel import trace
from treadle.kernels.matmul.gemv import Gemv


def test_whole_registers_are_loaded_where_their_length_is_known() -> None:
    spec = Gemv("F32", "f32", 64, 4, 1)
    row = ROWS["rvv256"]
    loads = {}
    for exact in (True, False):
        isa = replace(row, exact=exact)
        loads[exact] = len(re.findall(r"\tvl1r\.v\t", emit_assembly(trace(spec, isa), isa)))
    assert loads[True] > 0
    assert loads[False] == 0

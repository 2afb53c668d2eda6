"""The instruction sets that this machine can run, as test parameters."""

from __future__ import annotations

from dataclasses import replace

from treadle.isa import portable, runnable
from treadle.isa.isa import Isa
from treadle.jit.compile import host_features

ALL: list[Isa] = runnable(host_features())
VECTORS: list[Isa] = [row for row in ALL if row.matrix is None]
# What such registers do must be right on any machine, so they are also made of memory.
MADE_UP: Isa = replace(VECTORS[-1], name=f"{VECTORS[-1].name}_matrix", matrix=portable.MATRIX)
MATRICES: list[Isa] = [MADE_UP, *(row for row in ALL if row.matrix)]


def _distinct() -> list[Isa]:
    """One row of each vector width and way to convert f16: all that a kernel without dot products
    can tell apart.
    """
    return list({(row.vector_bits, row.widen_f16, row.narrow_f16): row for row in ALL}.values())


DISTINCT: list[Isa] = _distinct()


def name(row: Isa) -> str:
    return row.name

"""The instruction sets that this machine can run, as test parameters; or the emulated one that
``TREADLE_TEST_ROW`` names.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.isa import portable, runnable
from treadle.isa.isa import Isa
from treadle.jit.host import host_features
from treadle.jit.types import i8

if TYPE_CHECKING:
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val


def _runnable() -> list[Isa]:
    name = os.environ.get("TREADLE_TEST_ROW")
    if not name:
        return runnable(host_features())
    from tests.emulated.rows import EMULATED

    return [EMULATED[name].isa]


ALL: list[Isa] = _runnable()
VECTORS: list[Isa] = [row for row in ALL if row.matrix is None] or [replace(ALL[-1], matrix=None)]
# What such registers do must be right on any machine, so they are also made of memory.
MADE_UP: Isa = replace(VECTORS[-1], name=f"{VECTORS[-1].name}_matrix", matrix=portable.MATRIX)
MATRICES: list[Isa] = [MADE_UP, *(row for row in ALL if row.matrix)]


def _signed_dot4(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """What a machine whose dot takes signed bytes only can do."""
    assert w_max <= 127
    return portable.dot4(k, acc, w.bits(i8.like(w.ty)), x, w_max)


# As ARM's cores before i8mm have it: no machine here does.
SIGNED: Isa = replace(
    VECTORS[-1],
    name=f"{VECTORS[-1].name}_signed",
    dot4=_signed_dot4,
    dot4_least=-128,
    dot4_top=127,
)


def _distinct() -> list[Isa]:
    """One row of each vector width and way to convert f16: all that a kernel without dot products
    can tell apart.
    """
    return list({(row.vector_bits, row.widen_f16, row.narrow_f16): row for row in ALL}.values())


DISTINCT: list[Isa] = _distinct()
NARROW: Isa = next(row for row in reversed(ALL) if row.vector_bits <= 256)
_DOTS: Isa = replace(NARROW, name=f"{NARROW.name}_words", dot_words=portable.dot_words)
# Vectors of 16 lanes as well, which head dims need not fill: LLVM takes them apart where it must.
WORDS: list[Isa] = [
    _DOTS,
    replace(_DOTS, name=f"{NARROW.name}_wide_words", vector_bits=512),
    *(row for row in ALL if row.dot_words),
]


def name(row: Isa | None) -> str:
    return row.name if row else "none"

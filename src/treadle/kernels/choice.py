"""Which matrix product serves a weight format, an instruction set and a number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treadle.kernels.gemm import Gemm
from treadle.kernels.gemv import Gemv
from treadle.kernels.matmul import Matmul

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.isa.isa import Isa

# Batches up to these sizes have a gemv of their own; larger ones are packed and tiled.
GEMV_TOKENS = (1, 2, 4)
# Tiles that beat the formula's. Without VNNI a dot holds both halves of w and x: 8 tokens run at
# 89 GOP/s, 4 at 143.
MEASURED = {("avx512", "q8"): (2, 4)}
# Rows that a gemv walks together, by activation kind and tokens.
GEMV_ROWS = {"q8": {1: 8, 2: 4, 4: 2}, "f32": {1: 4, 2: 4, 4: 2}}


def matmul(fmt: Format, isa: Isa, k: int, tokens: int, **fields: Any) -> Matmul:
    """The product for batches of up to ``tokens`` tokens (one of GEMV_TOKENS, or more)."""
    if tokens in GEMV_TOKENS:
        act = gemv_act(fmt)
        return Gemv(fmt.name, act, k, GEMV_ROWS[act][tokens], tokens, **fields)
    act = gemm_act(fmt, isa)
    mr, nr = tile(isa, act)
    return Gemm(fmt.name, act, k, mr, nr, **fields)


def gemv_act(fmt: Format) -> str:
    """Decoding waits for memory, so floats keep all of their activations' bits."""
    return "q8" if fmt.codes else "f32"


def gemm_act(fmt: Format, isa: Isa) -> str:
    """The activations of packed products: the narrowest that the weights lose nothing by."""
    if fmt.codes:
        return "q8"
    return "bf16" if fmt.act == "bf16" and isa.dot_bf16 else "f32"


def tile(isa: Isa, act: str) -> tuple[int, int]:
    """Vectors of rows and tokens of a tile: what the register file holds.

    q8 keeps i32 sums of a block beside the f32 sums, so it has about half the registers.
    """
    if (isa.name, act) in MEASURED:
        return MEASURED[isa.name, act]
    if isa.regs >= 32:
        return (2, 8) if act == "q8" else (2, 12)
    return (2, 2) if act == "q8" else (2, 5)

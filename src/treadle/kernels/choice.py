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
GEMV_TOKENS = (1, 2, 4, 8)
GEMV_ROWS = {1: 4, 2: 4, 4: 2, 8: 2}


def matmul(fmt: Format, isa: Isa, k: int, tokens: int, **fields: Any) -> Matmul:
    """The product for batches of up to ``tokens`` tokens (one of GEMV_TOKENS, or more)."""
    if tokens in GEMV_TOKENS:
        return Gemv(fmt.name, gemv_act(fmt), k, GEMV_ROWS[tokens], tokens, **fields)
    act = gemm_act(fmt, isa)
    mr, nr = tile(isa, act)
    return Gemm(fmt.name, act, k, mr, nr, **fields)


def gemv_act(fmt: Format) -> str:
    """Decoding waits for memory, so floats keep all of their activations' bits."""
    return "q8" if fmt.codes else "f32"


def gemm_act(fmt: Format, isa: Isa) -> str:
    if fmt.codes:
        return "q8"
    return "bf16" if fmt.act == "bf16" and isa.dot_bf16 else "f32"


def tile(isa: Isa, act: str) -> tuple[int, int]:
    """Vectors of rows and tokens of a tile: what the register file holds.

    q8 keeps i32 sums of a block beside the f32 sums, so it has about half the registers.
    """
    if isa.regs >= 32:
        return (2, 8) if act == "q8" else (2, 12)
    return (2, 2) if act == "q8" else (2, 5)

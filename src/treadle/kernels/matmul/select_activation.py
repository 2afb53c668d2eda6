"""Choice of the activation kind for a weight format on an instruction set."""

from __future__ import annotations

import numpy as np

from treadle.formats import Format
from treadle.formats.format import Codes
from treadle.jit.language import Isa
from treadle.kernels.activation_layout import BLOCK, DWORD
from treadle.kernels.matmul.panel import code_size, code_top
from treadle.kernels.matmul.tile_outer import OUTER, adds_in_i16


def gemv_act(fmt: Format, isa: Isa, *, fine: bool = False) -> str:
    """Return the activation kind of a gemv. Decoding waits for memory, so float weights keep f32
    activations. Formats whose prefill multiplies words (``prefers_q16``) do so here, too, if their
    codes are in order. ``fine``: other formats use ``q8x2`` where that costs little.
    """
    if fmt.codes is None or not isa.rounds:
        return "f32"
    whole = fmt.codes.scales is None and fmt.codes.groups(fmt.block) == [[*range(BLOCK // DWORD)]]
    if whole and prefers_q16(fmt, isa):
        return "q16"
    return "q8x2" if fine and prefers_q8x2(fmt.codes, isa) else "q8"


def prefers_q8x2(codes: Codes, isa: Isa) -> bool:
    """Whether a gemv's activations may be ``q8x2`` at little cost: if a dot of bytes is one
    instruction; or two, where codes are so small that dots are added up in i16, and scales need no
    instruction between the two.
    """
    if isa.dot4_single:
        return True
    small = isa.shorts is not None and isa.shorts.room(code_size(codes, isa)) > 1
    return small and codes.steps is None


def gemm_act(fmt: Format, isa: Isa) -> str:
    """Return the activation kind of a gemm in vectors: the narrowest whose products lose no bits of
    the weights.
    """
    if fmt.codes and isa.rounds:
        return "q8"
    return "bf16" if (fmt.codes or fmt.act == "bf16") and isa.dot_bf16 else "f32"


def prefers_q16(fmt: Format, isa: Isa) -> bool:
    """Whether a gemm of prefill multiplies as ``q16``, with a scale for each span of weights and
    activations: for codes with a scale for every 32 if no two of their dots fit an i16 together,
    and for BF16. F16 would lose bits, and codes from a lookup grid are no faster.
    """
    if not isa.shorts or not isa.tiles.words[0]:
        return False
    if codes := fmt.codes:
        plain = codes.sub == BLOCK and not codes.has_m and not codes.gathers
        return plain and isa.shorts.room(code_size(codes, isa)) < 2
    return fmt.act == "bf16"


def float_words(fmt: Format, isa: Isa) -> bool:
    """Whether a gemm of F16 weights may multiply as ``q16n``, i16 with spans scaled by their
    lengths: it loses as much as f16 activations would, and a dot of i16 is faster than one of f32.
    """
    half = fmt.codes is None and np.dtype(fmt.dtype) == np.float16
    return half and isa.dot_words is not None and bool(isa.tiles.words[0])


def has_matrix_act(fmt: Format, isa: Isa) -> bool:
    """Whether a gemm of this format can use matrix registers: if there is a ``matrix_act``."""
    return isa.matrix is not None and matrix_act(fmt, isa) is not None


def matrix_act(fmt: Format, isa: Isa) -> str | None:
    """Return the kind of weights and activations on matrix registers: "bf16", or if that would lose
    bits of the weights, two bf16 each (F16) or three (F32). None for weights with more bits, or if
    that many products take longer than vectors.
    """
    if fmt.codes or fmt.act == "bf16":
        return "bf16"
    n = {np.dtype(np.float16): 2, np.dtype(np.float32): 3}.get(np.dtype(fmt.dtype))
    return f"bf16x{n}" if n and isa.matrix is not None and n <= isa.matrix.parts else None


def matrix_words(fmt: Format, isa: Isa) -> bool:
    """Whether F16 weights may be multiplied as ``q16x2`` on matrix registers: half the time of
    their three products of bf16.
    """
    half = fmt.codes is None and np.dtype(fmt.dtype) == np.float16
    return half and isa.matrix is not None and isa.matrix.dot_bytes is not None


def folds(fmt: Format, isa: Isa) -> bool:
    """Whether a gemm's panels hold integer codes already multiplied by their sub-blocks' integer
    scales (``Codes.folded``): if the format allows it and dots of such large codes cost no more.
    """
    folded = fmt.codes.folded if fmt.codes else None
    if folded is None:
        return False
    if isa.tiles.unit == OUTER:
        return adds_in_i16(folded)
    if isa.shorts:  # signed codes cost more than scaling twice as often
        return folded.top <= isa.dot4_top
    return code_top(folded, isa) <= isa.dot4_top

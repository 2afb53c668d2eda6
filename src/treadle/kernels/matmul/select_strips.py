"""Choice of the strip product for a weight format, an instruction set and a number of tokens."""

from __future__ import annotations

from typing import Any

from treadle.formats import Format
from treadle.jit.language import Isa
from treadle.kernels.matmul.matrix import SIDE
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.matmul.panel import is_staged, short_dots
from treadle.kernels.matmul.select_activation import folds, gemm_act
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.matmul.strips import StripGemm
from treadle.kernels.matmul.vector_bytes import LanesGemm
from treadle.kernels.matmul.vector_floats import FloatLanes

# Most tokens on matrix registers; vectors of rows of an item; groups of tokens in vectors.
STRIP_TOKENS = 16
STRIP_ROWS = 8
STRIP_GROUPS = 16


def strip_product(fmt: Format, isa: Isa, k: int, tokens: int, **fields: Any) -> StripGemm | None:
    """Return the strip product, which reads rows of ``k`` weights in file order, for batches of up
    to ``tokens``, more than a gemv handles. None if there is none, or it is slower. ``fields``:
    other fields of the product.
    """
    unit = isa.matrix
    codes = fmt.codes
    few = tokens <= isa.lanes // 2
    if codes is None:
        return float_lanes(fmt, isa, k, tokens, **fields)
    if not isa.rounds:
        return None
    if unit is None:
        if tokens > isa.tiles.lanes or folds(fmt, isa) or (few and not is_staged(fmt)):
            return None
        if isa.shorts and short_dots(codes, isa) < 2:  # signed codes: a dot takes five instructions
            return None
        nr, groups = (isa.lanes // 2, 1) if few else (tokens_per_group(isa), STRIP_GROUPS)
        return LanesGemm(fmt.name, "q8", k, STRIP_ROWS, nr, groups=groups, **fields)
    if unit.dot_bytes is None or tokens > STRIP_TOKENS or codes.top - codes.offset > 127:
        return None
    return BytesGemm(fmt.name, "q8", k, STRIP_ROWS, STRIP_TOKENS, **fields)


def tokens_per_group(isa: Isa) -> int:
    """Return the tokens of a group for strip products of bytes in vectors: one vector, or two
    narrow ones that share the broadcast of a row's dword.
    """
    return max(isa.lanes, 16)


def float_lanes(fmt: Format, isa: Isa, k: int, tokens: int, **fields: Any) -> FloatLanes | None:
    """Return the strip product of float weights, rows of ``k``, for batches of up to ``tokens``;
    None if there is none. ``fields``: other fields of the product.
    """
    act = gemm_act(fmt, isa)
    if tokens > isa.tiles.float_lanes or (act == "bf16" and k % 2):
        return None
    few = tokens <= isa.lanes // 2
    nr, groups = (isa.lanes // 2, 1) if few else (2 * isa.lanes, STRIP_GROUPS // 2)
    return FloatLanes(fmt.name, act, k, STRIP_ROWS, nr, groups=groups, **fields)


def fits_strips(spec: StripGemm, isa: Isa) -> bool:
    """Whether a strip product of this shape can be used on ``isa``."""
    rows = spec.rows_per_item(isa.lanes)
    few = isa.lanes // 2
    if isinstance(spec, BytesGemm):
        fits = isa.matrix is not None and spec.nr == STRIP_TOKENS
    elif isinstance(spec, FloatLanes):
        fits = spec.nr in (few, 2 * isa.lanes)
    else:
        fits = isa.matrix is None and spec.nr in (few, tokens_per_group(isa))
    return fits and rows > 0 and COLUMNS % rows == rows % SIDE == 0

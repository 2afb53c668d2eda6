"""ik_llama.cpp's IQ2_K to IQ6_K: super-blocks of 256 weights in 16 sub-blocks of 16, with an f16
scale ``d``; ``w = d * step * table[code]`` (``ik_codes.py``).

Bit i of ``extra`` chooses the table of sub-block i.

- IQ2_K: codes as Q2_K; a step is a nibble of ``scales`` less 8.
- IQ3_K: codes as Q3_K, with ``qh`` for ``hmask``; a step is odd: twice a nibble of ``scales_l``
  plus 1, negative where bit i of ``scales_h`` is set.
- IQ4_K: codes as IQ4_XS; a step has six bits less 32, the lower four in nibbles of ``scales_l``,
  the upper two in pairs of ``scales_h``, both in order, the lowest bits first.
- IQ5_K: codes as Q5_K, steps as IQ4_K.
- IQ6_K: nibbles as Q4_K, the upper two bits as Q2_K; a step is a signed byte. The numbers are those
  of ik_llama.cpp's products, a table of integers. Its ``dequantize_row_iq6_k`` evaluates a
  polynomial instead, whose values differ from them by up to half a unit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import Blocks, Builder, Codes, Emit, Field, Format, Isa, Val
from treadle.formats.ik_codes import (
    FIVE,
    FOUR,
    IQ2_TABLE,
    IQ3_TABLE,
    IQ4_TABLE,
    IQ5_TABLE,
    IQ6_TABLE,
    SIX,
    THREE,
    TWO,
    CodePacking,
    ShiftedTable,
    StepCodes,
    encoder,
    flags_in,
    flags_of,
    join_flags,
    read_flags,
    with_flags,
)
from treadle.formats.kernel_grids import nibble_steps
from treadle.formats.kernel_scales import halves, in_floats
from treadle.formats.numbers import super_blocks
from treadle.formats.packing import join_words, split_words
from treadle.formats.scale_search import FormatCoder
from treadle.jit.types import i8, i32

U8Array = npt.NDArray[np.uint8]
SUBS = 16
SUB = 16


def _flags(k: Builder, field: Field, value: int) -> Val:
    return flags_of(k, field("extra"), range(SUBS), 2, value)


def coder_of(table: ShiftedTable, sub: int, ladder: Any, shares: Any, d_type: str) -> FormatCoder:
    """Return the search of a format with the code table ``table`` and ``sub`` weights to a
    sub-block.

    ``ladder``: the allowed steps; ``shares``: the fractions of the largest sub-block scale tried
    for d, with both signs; ``d_type``: "<f2" or "<f4". Either end of the table may get the largest
    weight.
    """
    share = np.geomspace(0.75, 1.25, 12 if table.bits < 5 else 7) / -table.steps[0]
    return FormatCoder(
        sub=sub,
        ladder=np.array(ladder, np.float32),
        encode=encoder(table),
        scales=np.concatenate([share, -share]).astype(np.float32),
        shares=np.concatenate([shares, -shares]).astype(np.float32),
        d_type=d_type,
    )


def step_format(
    name: str,
    ggml_id: int,
    fields: list[tuple[Any, ...]],
    table: ShiftedTable,
    packing: CodePacking,
    ladder: Any,
    shares: Any,
    read_steps: Callable[[Blocks], Any],
    write_steps: Callable[[Blocks, U8Array], None],
    steps: Emit,
) -> Format:
    """Return a format of super-blocks of the fields ``d`` (f16), ``extra`` (table flags) and
    ``fields``, in 16 sub-blocks of 16. ``table``, ``packing``: of the codes; ``ladder``: the
    allowed steps.

    ``read_steps``: blocks [...] -> indices of ``ladder``, [..., 16]; ``write_steps`` packs such
    indices [n, 16] into blocks [n]; ``steps`` emits ``Codes.steps``. ``shares``: see ``coder_of``.
    """
    layout = np.dtype([("d", "<f2"), ("extra", "<u2"), *fields])
    values = table.values
    rungs = np.array(ladder, np.float32)

    def read(blocks: Blocks) -> tuple[Any, Any]:
        flags = read_flags(blocks["extra"], SUBS)
        codes = with_flags(packing.split(blocks), flags, table.bits)
        return rungs[read_steps(blocks)], values[codes]

    def write(out: Blocks, found: Any) -> None:
        out["extra"] = join_flags(flags_in(found.codes, SUB, table.bits))
        packing.join(out, found.codes.astype(np.uint8))
        write_steps(out, found.steps)

    mine = StepCodes(table, packing, SUB, _flags)
    codes = Codes(
        mine.unpack,
        table.offset,
        table.top,
        run=packing.run,
        order=packing.order,
        sub=SUB,
        scales=in_floats(steps),
        steps=steps,
        in_halves=mine.in_halves,
    )
    search = coder_of(table, SUB, ladder, shares, "<f2")
    return super_blocks(name, ggml_id, layout, read, write, search, codes)


# -- steps of a nibble -------------------------------------------------------------------------


def read_nibbles(blocks: Blocks) -> Any:
    """Unpack the nibbles of ``scales``, the low one of each byte first: the ladder indices of the
    steps, [..., 16].
    """
    return split_words(blocks["scales"], 2, 4)


def write_nibbles(out: Blocks, rungs: U8Array) -> None:
    """Pack the ladder indices of the steps, [n, 16], all below 16, into the nibbles of ``scales``
    of blocks [n].
    """
    out["scales"] = join_words(rungs, 2, 4, "u1")


def _steps_2(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    sc = nibble_steps(k, field("scales")).to(i32) - 8
    return sc, halves(k, isa, field("d")), None, None


IQ2_K = step_format(
    "IQ2_K",
    137,
    [("scales", "u1", (8,)), ("qs", "u1", (64,))],
    IQ2_TABLE,
    TWO,
    range(-8, 8),
    1 / np.linspace(5.5, 9, 8),
    read_nibbles,
    write_nibbles,
    _steps_2,
)


# -- odd steps with a sign ---------------------------------------------------------------------


def _read_odd(blocks: Blocks) -> Any:
    half = split_words(blocks["scales_l"], 2, 4)
    negative = read_flags(blocks["scales_h"], SUBS).astype(np.bool_)
    return np.where(negative, np.uint8(15) - half, np.uint8(16) + half)


def _write_odd(out: Blocks, rungs: U8Array) -> None:
    negative = rungs < 16
    half = np.where(negative, np.uint8(15) - rungs, rungs - np.uint8(16))
    out["scales_l"] = join_words(half, 2, 4, "u1")
    out["scales_h"] = join_flags(negative)


def _steps_3(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    odd = nibble_steps(k, field("scales_l")).to(i32) * 2 + 1
    # All ones where the step is negative: x ^ -1 is -x - 1.
    sign = flags_of(k, field("scales_h"), range(SUBS), 2, 255)
    sign = sign.bits(i8.like(sign.ty)).to(i32)
    return (odd ^ sign) - sign, halves(k, isa, field("d")), None, None


IQ3_K = step_format(
    "IQ3_K",
    138,
    [("scales_h", "<u2"), ("scales_l", "u1", (8,)), ("qs", "u1", (64,)), ("qh", "u1", (32,))],
    IQ3_TABLE,
    THREE,
    range(-31, 32, 2),
    1 / np.linspace(23, 36, 10),
    _read_odd,
    _write_odd,
    _steps_3,
)


# -- steps of six bits -------------------------------------------------------------------------


def _read_six(blocks: Blocks) -> Any:
    low = split_words(blocks["scales_l"], 2, 4)
    return low | split_words(blocks["scales_h"], 4, 2) << np.uint8(4)


def _write_six(out: Blocks, rungs: U8Array) -> None:
    out["scales_l"] = join_words(rungs & np.uint8(15), 2, 4, "u1")
    out["scales_h"] = join_words(rungs >> np.uint8(4), 4, 2, "u1")


def _steps_six(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    low = nibble_steps(k, field("scales_l")).to(i32)
    packed = field("scales_h")
    pairs = k.each(packed, 1, 4).to(i32)
    pairs = (pairs >> k.const([0, 2, 4, 6] * packed.ty.lanes, pairs.ty)) & 3
    return (low | (pairs << 4)) - 32, halves(k, isa, field("d")), None, None


SIX_BITS: list[tuple[Any, ...]] = [("scales_h", "u1", (4,)), ("scales_l", "u1", (8,))]
SIX_SHARES = 1 / np.linspace(24, 36, 10)

IQ4_K = step_format(
    "IQ4_K",
    139,
    [*SIX_BITS, ("qs", "u1", (128,))],
    IQ4_TABLE,
    FOUR,
    range(-32, 32),
    SIX_SHARES,
    _read_six,
    _write_six,
    _steps_six,
)
IQ5_K = step_format(
    "IQ5_K",
    140,
    [*SIX_BITS, ("qs", "u1", (128,)), ("qh", "u1", (32,))],
    IQ5_TABLE,
    FIVE,
    range(-32, 32),
    SIX_SHARES,
    _read_six,
    _write_six,
    _steps_six,
)


# -- steps of a signed byte --------------------------------------------------------------------


def _read_bytes(blocks: Blocks) -> Any:
    return blocks["scales"].astype(np.int16) + np.int16(128)


def _write_bytes(out: Blocks, rungs: U8Array) -> None:
    out["scales"] = rungs.astype(np.int16) - np.int16(128)


def _steps_6(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    sc = field("scales")
    return sc.bits(i8.like(sc.ty)), halves(k, isa, field("d")), None, None


IQ6_K = step_format(
    "IQ6_K",
    141,
    [("scales", "i1", (16,)), ("qs", "u1", (128,)), ("qh", "u1", (64,))],
    IQ6_TABLE,
    SIX,
    range(-128, 128),
    1 / np.linspace(110, 127, 5),
    _read_bytes,
    _write_bytes,
    _steps_6,
)

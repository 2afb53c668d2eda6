"""ik_llama.cpp's IQ1_KT to IQ4_KT: blocks of 256 weights in 8 sub-blocks of 32, with one f32 scale
``d`` for a whole row, before its first block. The values of a group are computed from its index.

With ``x = index + 4096``, the j-th value of a group is the sum of the four bytes of ``x * A ** (j +
1) mod 2**32``, each without its upper two bits, less 126: -126 to 126, about normally distributed.
``w = d * step * value``. Except in IQ3_KT and IQ4_KT, a step is one of IQ4_NL's 16 values, -127 to
113, and stored as a nibble.

- IQ1_KT: groups of 8 with 13 bits: ``ql``, a nibble of ``qh`` (low for sub-blocks 0 to 3), and bit
  4 + i of ``sh`` for the i-th group of a sub-block. The lower nibble of ``sh`` is the step.
- IQ2_KT: groups of 8 with 16 bits, ``ql``. ``scales`` has the nibbles of sub-blocks 0 to 3 (low)
  and 4 to 7 (high).
- IQ3_KT: as IQ2_KT, but only the magnitudes of the values are used; bit i of byte j of ``qh`` is
  the sign of weight j of sub-block i, and a nibble is a step of 0 to 15.
- IQ4_KT: groups of 4 with 15 bits: ``ql``, a nibble of ``qh``, and three bits of ``shb`` from bit
  8 + 3 i on. Bit 0 of ``shb`` adds 32768 to the index; bits 1 to 7 are the step plus 64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.formats.format import (
    Blocks,
    Builder,
    Codes,
    Emit,
    F32Array,
    Field,
    Format,
    Isa,
    Val,
)
from treadle.formats.ik_codes import flags_of
from treadle.formats.ik_rows import SUBS, row_format, row_scale
from treadle.formats.iq4 import STEPS, TABLE
from treadle.formats.kernel_scales import in_floats
from treadle.formats.packing import join_bits, split_bits, split_words
from treadle.formats.trellis_search import PointCells, TrellisSearch
from treadle.jit.types import i8, i32, u8, u16, u32

Index = npt.NDArray[np.uint32]

FACTOR = 0xCBAC1FED
FIRST = 4096
SECOND = 32768  # more, for the second table of IQ4_KT
MIDDLE = 126
OFFSET = 128  # of kernels' codes, which are values plus this
NIBBLES = tuple(float(v) for v in STEPS)  # the ladder of steps that are a nibble


def powers(n: int) -> list[int]:
    """Return the factors of a group's ``n`` values: ``FACTOR ** (j + 1) mod 2**32`` for j below
    n.
    """
    return [pow(FACTOR, j + 1, 1 << 32) for j in range(n)]


def values_of(x: Index, n: int) -> npt.NDArray[np.int16]:
    """Return the ``n`` values of each group, int16 [..., n]; ``x`` [...]: the groups' indices plus
    FIRST.
    """
    made = x.astype(np.uint32)[..., None] * np.array(powers(n), np.uint32)
    sums = (made & np.uint32(0x3F3F3F3F)) * np.uint32(0x01010101) >> np.uint32(24)
    return sums.astype(np.int16) - np.int16(MIDDLE)


def _cells(bits: int, group: int, *, base: int, short: int, long: int, **kinds: Any) -> PointCells:
    return PointCells(partial(points, bits, group, **kinds), base, short, long)


def points(bits: int, group: int, table: int = 0, magnitudes: bool = False) -> F32Array:
    """Return the values of all indices of a table, float32 [2 ** bits, group]. ``bits``: of an
    index; ``group``: weights that share it; ``table``: 0, or 1 for IQ4_KT's second table;
    ``magnitudes``: without signs.
    """
    x = np.arange(1 << bits, dtype=np.uint32) + np.uint32(FIRST + (table << bits))
    values = values_of(x, group).astype(np.float32)
    return np.abs(values) if magnitudes else values


# -- kernels -----------------------------------------------------------------------------------


def _unpacked(k: Builder, x: Val, n: int) -> Val:
    """Emit the ``n`` values of each group, in order, as one u8 vector; MIDDLE is added to each of
    them. ``x``: u32, each group's index plus FIRST.

    On vectors of over 128 bits, four vectors get the sums of every fourth value, and are merged by
    shifts: narrowing would cross 128-bit lanes.
    """
    factors = powers(n)
    apart = 4 if k.isa.vector_bits > 128 else 1
    each = k.each(x, 1, n // apart)
    sums = []
    for i in range(apart):
        made = each * k.const(factors[i::apart] * x.ty.lanes, each.ty)
        sums.append(_byte_sums(k, made & 0x3F3F3F3F))
    if apart == 1:
        return sums[0].to(u8)
    whole = sums[0]
    for i, more in enumerate(sums[1:], 1):
        whole = whole | (more << 8 * i)
    return whole.bits(u8 * (4 * each.ty.lanes))


def _byte_sums(k: Builder, words: Val) -> Val:
    """Emit the sum of the four bytes of each u32 word; bytes are below 64.

    A multiplication does it, except on x86 with a dot product of bytes in one instruction: there
    this is faster, since a multiplication of words takes two operations.
    """
    isa = k.isa
    if not (isa.dot4_single and isa.memory_operands):
        return (words * 0x01010101) >> 24
    lanes = min(isa.lanes, words.ty.lanes)
    out = []
    for part in k.split(words, lanes):
        ones = k.const(1, i8 * (4 * lanes))
        summed = isa.dot4(k, k.zero(i32 * lanes), part.bits(u8 * (4 * lanes)), ones, 63)
        out.append(summed.bits(part.ty))
    return k.concat(*out)


def _in_halves(unpack: Emit) -> Emit:
    """Return a ``Codes.in_halves`` made of ``unpack``, which emits all codes as one vector, in
    order.
    """

    def in_halves(k: Builder, field: Field) -> list[Val]:
        (whole,) = unpack(k, field)
        starts = [(16 * i, 128 + 16 * i) for i in range(SUBS)]
        return [
            k.shuffle(whole, whole, [a + j for a in both for j in range(16)]) for both in starts
        ]

    return in_halves


def _codes(unpack: Emit, steps: Emit) -> Codes:
    return Codes(
        unpack,
        OFFSET,
        OFFSET + MIDDLE,
        order=(tuple(range(SUBS)),),
        scales=in_floats(steps),
        steps=steps,
        in_halves=_in_halves(unpack),
        long_scales=True,
    )


def _from_table(k: Builder, index: Val) -> Val:
    """Emit the values of IQ4_NL's table at ``index``, i32, as i32."""
    n = index.ty.lanes
    wide = index if n >= 16 else k.shuffle(index, index, [i % n for i in range(16)])
    found = k.lookup(TABLE, wide)
    found = found if n >= 16 else k.shuffle(found, found, range(n))
    return found.to(i32) - 128


def _halved(k: Builder, packed: Val, n: int) -> Val:
    """Emit the low nibbles of each ``n`` bytes of ``packed``, then their high nibbles, as bytes."""
    twice = k.each(packed, n, 2)
    low = k.const(([0] * n + [255] * n) * (packed.ty.lanes // n), twice.ty)
    return (twice & 15 & (low ^ 255)) | ((twice >> 4) & low)


def _trellis(
    name: str,
    ggml_id: int,
    fields: list[tuple[Any, ...]],
    search: TrellisSearch,
    unpack: Emit,
    steps: Emit,
    read: Callable[[Blocks], tuple[Any, Any]],
    write: Callable[[Blocks, Any], None],
) -> Format:
    codes = _codes(unpack, steps)
    return row_format(name, ggml_id, "<f4", np.dtype(fields), codes, read, write, search)


def _nibble_search(cells: PointCells) -> TrellisSearch:
    return TrellisSearch(
        group=8,
        ladder=NIBBLES,
        tables=(cells,),
        scales=(0.9, 1.2, -0.9, -1.2),
        moves=tuple(float(i) for i in range(-9, 10)),
    )


# -- IQ1_KT ------------------------------------------------------------------------------------


def _read_1(blocks: Blocks) -> tuple[Any, Any]:
    sh = blocks["sh"]
    index = blocks["ql"] | split_bits(blocks["qh"], 4, 16).astype(np.uint32) << np.uint32(8)
    index = index | split_words(sh >> np.uint8(4), 4, 1).astype(np.uint32) << np.uint32(12)
    values = values_of(index + np.uint32(FIRST), 8)
    return STEPS[sh & np.uint8(15)], values.reshape(*blocks.shape, 256)


def _write_1(out: Blocks, found: Any) -> None:
    index = found.codes.astype(np.uint32)
    out["ql"] = index & np.uint32(255)
    out["qh"] = join_bits(index >> np.uint32(8) & np.uint32(15), 4, 16)
    top = (index >> np.uint32(12) & np.uint32(1)).reshape(-1, SUBS, 4) << np.arange(4, 8)
    out["sh"] = found.steps | top.sum(-1).astype(np.uint8)


def _unpack_1(k: Builder, field: Field) -> list[Val]:
    top = flags_of(k, field("sh"), [8 * i + 4 + j for i in range(SUBS) for j in range(4)], 8, 16)
    high = _halved(k, field("qh"), 16) | top
    index = field("ql").to(u32) | (high.to(u32) << 8)
    return [_unpacked(k, index + FIRST, 8) + (OFFSET - MIDDLE)]


def _steps_1(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    return _from_table(k, field("sh") & 15), row_scale(k, isa, field, "<f4"), None, None


IQ1_KT = _trellis(
    "IQ1_KT",
    158,
    [("sh", "u1", (8,)), ("ql", "u1", (32,)), ("qh", "u1", (16,))],
    _nibble_search(_cells(13, 8, base=2, short=8, long=32)),
    _unpack_1,
    _steps_1,
    _read_1,
    _write_1,
)


# -- IQ2_KT ------------------------------------------------------------------------------------


def _read_2(blocks: Blocks) -> tuple[Any, Any]:
    values = values_of(blocks["ql"].astype(np.uint32) + np.uint32(FIRST), 8)
    return STEPS[split_bits(blocks["scales"], 4, 4)], values.reshape(*blocks.shape, 256)


def _write_2(out: Blocks, found: Any) -> None:
    out["ql"] = found.codes
    out["scales"] = join_bits(found.steps, 4, 4)


def _index_2(k: Builder, field: Field) -> Val:
    packed = field("ql")
    return packed.bits(u16 * (packed.ty.lanes // 2)).to(u32)


def _unpack_2(k: Builder, field: Field) -> list[Val]:
    return [_unpacked(k, _index_2(k, field) + FIRST, 8) + (OFFSET - MIDDLE)]


def _steps_2(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    nibbles = _halved(k, field("scales"), 4)
    return _from_table(k, nibbles), row_scale(k, isa, field, "<f4"), None, None


IQ2_KT = _trellis(
    "IQ2_KT",
    153,
    [("scales", "u1", (4,)), ("ql", "<u2", (32,))],
    _nibble_search(_cells(16, 8, base=2, short=4, long=8)),
    _unpack_2,
    _steps_2,
    _read_2,
    _write_2,
)


# -- IQ3_KT ------------------------------------------------------------------------------------


def _read_3(blocks: Blocks) -> tuple[Any, Any]:
    sizes = np.abs(values_of(blocks["ql"].astype(np.uint32) + np.uint32(FIRST), 8))
    sizes = sizes.reshape(*blocks.shape, 256)
    minus = split_bits(blocks["qh"], 1, 32).astype(np.bool_)
    # As floats: a negative zero is one.
    values = np.where(minus, -sizes.astype(np.float32), sizes.astype(np.float32))
    return split_bits(blocks["scales"], 4, 4), values


def _write_3(out: Blocks, found: Any) -> None:
    _write_2(out, found)
    out["qh"] = join_bits(found.negative.reshape(-1, 256), 1, 32)


def _unpack_3(k: Builder, field: Field) -> list[Val]:
    value = _unpacked(k, _index_2(k, field) + FIRST, 8)
    size = k.max(value, MIDDLE) - k.min(value, MIDDLE)
    signs = field("qh")
    n = signs.ty.lanes // 32
    each = k.each(signs, 32, SUBS)
    bits = k.const([1 << i for i in range(SUBS) for _ in range(32)] * n, each.ty)
    return [k.select((each & bits).eq(0), size + OFFSET, OFFSET - size)]


def _steps_3(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    nibbles = _halved(k, field("scales"), 4)
    return nibbles.bits(i8.like(nibbles.ty)).to(i32), row_scale(k, isa, field, "<f4"), None, None


IQ3_KT = _trellis(
    "IQ3_KT",
    154,
    [("scales", "u1", (4,)), ("ql", "<u2", (32,)), ("qh", "u1", (32,))],
    TrellisSearch(
        group=8,
        ladder=tuple(float(i) for i in range(16)),
        tables=(_cells(16, 8, base=2, short=4, long=16, magnitudes=True),),
        scales=(0.85, 1.0, 1.2, 1.4),
        moves=tuple(i / 4 for i in range(-6, 7)),
        magnitudes=True,
    ),
    _unpack_3,
    _steps_3,
    _read_3,
    _write_3,
)


# -- IQ4_KT ------------------------------------------------------------------------------------


def _read_4(blocks: Blocks) -> tuple[Any, Any]:
    shb = blocks["shb"]
    index = blocks["ql"] | split_bits(blocks["qh"], 4, 32).astype(np.uint32) << np.uint32(8)
    index = index | split_words(shb >> np.uint32(8), 8, 3) << np.uint32(12)
    first = np.uint32(FIRST) + (shb & np.uint32(1)) * np.uint32(SECOND)
    values = values_of(index + np.repeat(first, 8, axis=-1), 4)
    steps = (shb >> np.uint32(1) & np.uint32(127)).astype(np.int16) - np.int16(64)
    return steps, values.reshape(*blocks.shape, 256)


def _write_4(out: Blocks, found: Any) -> None:
    index = found.codes.astype(np.uint32)
    out["ql"] = index & np.uint32(255)
    out["qh"] = join_bits(index >> np.uint32(8) & np.uint32(15), 4, 32)
    top = (index >> np.uint32(12) & np.uint32(7)).reshape(-1, SUBS, 8)
    top = top << np.arange(8, 32, 3, dtype=np.uint32)
    second = index.reshape(-1, SUBS, 8)[..., 0] >> np.uint32(15)
    out["shb"] = (
        second | found.steps.astype(np.uint32) << np.uint32(1) | top.sum(-1, dtype=np.uint32)
    )


def _sub_words(field: Field) -> Val:
    """Emit ``shb`` as u32, one word for each sub-block."""
    packed = field("shb")
    return packed.bits(u32 * (packed.ty.lanes // 4))


def _unpack_4(k: Builder, field: Field) -> list[Val]:
    words = _sub_words(field)
    each = k.each(words, 1, 8)
    shifts = k.const([*range(8, 32, 3)] * words.ty.lanes, each.ty)
    index = field("ql").to(u32) | (_halved(k, field("qh"), 32).to(u32) << 8)
    index = index | (((each >> shifts) & 7) << 12)
    return [_unpacked(k, index + ((each & 1) << 15) + FIRST, 4) + (OFFSET - MIDDLE)]


def _steps_4(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    words = _sub_words(field)
    steps = ((words >> 1) & 127).bits(i32 * words.ty.lanes) - 64
    return steps, row_scale(k, isa, field, "<f4"), None, None


IQ4_KT = _trellis(
    "IQ4_KT",
    155,
    [("shb", "<u4", (8,)), ("ql", "u1", (64,)), ("qh", "u1", (32,))],
    TrellisSearch(
        group=4,
        ladder=tuple(float(i) for i in range(-64, 64)),
        tables=tuple(_cells(15, 4, base=4, short=2, long=6, table=i) for i in (0, 1)),
        scales=(1.0, 1.15, 1.3, 1.5, 1.8, -1.0, -1.15, -1.3, -1.5, -1.8),
        moves=tuple(i / 2 for i in range(-9, 10)),
    ),
    _unpack_4,
    _steps_4,
    _read_4,
    _write_4,
)

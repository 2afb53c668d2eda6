"""ik_llama.cpp's IQ2_KS to IQ5_KS and IQ4_KSS: blocks of 256 weights in 8 sub-blocks of 32, with
one scale ``d`` for a whole row, before its first block; ``w = d * step * table[code]``
(``ik_codes.py``). ``d`` is f16 in IQ2_KS and IQ3_KS, else f32.

- IQ2_KS: codes as Q2_K; a step has five bits less 16: a nibble of ``scales``, in order, and bit
  8 + i of ``extra`` above it. Bit i of ``extra`` chooses the table.
- IQ3_KS: codes as Q3_K, with ``qh`` for ``hmask``; a step has five bits less 16: ``scales`` has the
  nibbles of sub-blocks 0 to 3 (low) and 4 to 7 (high), bit i of ``extra`` the fifth. Bit 8 + i of
  ``extra`` chooses the table.
- IQ4_KS, IQ5_KS: codes as IQ4_XS, as Q5_K. Bit 0 of a byte of ``scales`` chooses the table; a step
  is the byte without it, less 127: odd.
- IQ4_KSS: four bits a weight in all. A word of ``qs`` has four codes: its upper 15 bits are the
  code of their 16 bits by exclusive or with the next higher bit, so that the number of ones in the
  four codes is even. The lowest bits of a sub-block's eight words are the byte that IQ4_KS has in
  ``scales``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
    Search,
    Val,
)
from treadle.formats.ik_blocks import coder_of, read_nibbles, write_nibbles
from treadle.formats.ik_codes import (
    FIVE,
    FOUR,
    IQ2_TABLE,
    IQ3_TABLE,
    IQ4_TABLE,
    IQ5_TABLE,
    THREE,
    TWO,
    CodePacking,
    Encode,
    Flags,
    ShiftedTable,
    StepCodes,
    cells_of,
    flags_in,
    flags_of,
    in_halves_nibbles,
    join_flags,
    nearest_codes,
    pick_table,
    read_flags,
    with_flags,
)
from treadle.formats.iq4 import XS_ORDER
from treadle.formats.kernel_grids import nibble_steps
from treadle.formats.kernel_scales import halves, in_floats
from treadle.formats.numbers import scale, with_steps
from treadle.formats.packing import join_bits, join_words, split_bits, split_words
from treadle.formats.scale_search import FormatCoder
from treadle.jit.types import f32, i32, u8, u16

U8Array = npt.NDArray[np.uint8]
SUBS = 8
SUB = 32


def row_scale(k: Builder, isa: Isa, field: Field, d_type: str) -> Val:
    """Emit the rows' scale ``d`` as f32, one lane for each block; ``d_type``: "<f2" or "<f4"."""
    d = field("d")
    return d.bits(f32 * (d.ty.lanes // 4)) if d_type == "<f4" else halves(k, isa, d)


def row_format(
    name: str,
    ggml_id: int,
    d_type: str,
    layout: np.dtype[Any],
    codes: Codes,
    read: Callable[[Blocks], tuple[Any, Any]],
    write: Callable[[Blocks, Any], None],
    search: Any,
) -> Format:
    """Return the format with one ``d`` of type ``d_type`` ("<f2" or "<f4") per row, and blocks of
    ``layout``.

    ``read``: blocks [...] -> steps [..., 8] and values before scaling [..., 256]; ``write`` packs a
    search's result into blocks [n]. ``search.run`` quantises float32 [n_rows, k].
    """
    head = np.dtype([("d", d_type)])
    whole = np.dtype([*head.descr, *layout.descr])

    def quantize(
        x: F32Array, weights: F32Array | None = None, given: Search | None = None
    ) -> Blocks:
        n = x.shape[-1] // 256
        out = np.empty((*x.shape[:-1], n), whole)
        if not out.size:
            return out
        if weights is not None:
            weights = np.ascontiguousarray(np.broadcast_to(weights, x.shape))
            weights = weights.reshape(-1, x.shape[-1])
        found = (given or search.run)(x.reshape(-1, x.shape[-1]), weights)
        blocks = out.reshape(-1)
        blocks["d"] = found.d.repeat(n)
        steps, numbers = found.steps.reshape(-1, SUBS), found.codes.reshape(len(blocks), -1)
        write(blocks, found._replace(steps=steps, codes=numbers))
        return out

    return Format(
        name,
        ggml_id,
        256,
        layout,
        with_steps(read),
        quantize,
        "q8",
        codes,
        search=search,
        aware=True,
        head=head,
        sub_scales=lambda blocks: scale(blocks) * read(blocks)[0].astype(np.float32),
    )


def _make_format(
    name: str,
    ggml_id: int,
    d_type: str,
    fields: list[tuple[Any, ...]],
    table: ShiftedTable,
    packing: CodePacking,
    ladder: range,
    shares: Any,
    read_steps: Callable[[Blocks], tuple[Any, U8Array]],
    write_steps: Callable[[Blocks, U8Array, U8Array], None],
    steps: Emit,
    flags: Flags,
) -> Format:
    """Return a ``row_format`` whose weights have independent codes of ``table``, unlike those of
    IQ4_KSS. ``fields``, ``packing``: of the blocks; ``ladder``: the allowed steps.

    ``read_steps``: blocks [...] -> indices of ``ladder`` and table flags, both [..., 8];
    ``write_steps`` packs such arrays [n, 8] into blocks [n]; ``steps`` emits ``Codes.steps``, and
    ``flags`` the table flags; ``shares``: see ``coder_of``.
    """
    values = table.values
    rungs = np.array(ladder, np.float32)

    def read(blocks: Blocks) -> tuple[Any, Any]:
        found, chosen = read_steps(blocks)
        return rungs[found], values[with_flags(packing.split(blocks), chosen, table.bits)]

    def write(out: Blocks, found: Any) -> None:
        packing.join(out, found.codes.astype(np.uint8))
        write_steps(out, found.steps, flags_in(found.codes, SUB, table.bits))

    mine = StepCodes(table, packing, SUB, flags)
    codes = _codes(table, packing.run, packing.order, mine.unpack, mine.in_halves, steps)
    if d_type == "<f2":  # 11 bits times five
        codes = replace(codes, long_scales=False)
    search = coder_of(table, SUB, ladder, shares, d_type)
    return row_format(name, ggml_id, d_type, np.dtype(fields), codes, read, write, search)


def _codes(
    table: ShiftedTable, run: int, order: Any, unpack: Emit, in_halves: Emit, steps: Emit
) -> Codes:
    return Codes(
        unpack,
        table.offset,
        table.top,
        run=run,
        order=order,
        scales=in_floats(steps),
        steps=steps,
        in_halves=in_halves,
        long_scales=True,
    )


# -- steps of five bits ------------------------------------------------------------------------


def _read_2(blocks: Blocks) -> tuple[Any, U8Array]:
    high = read_flags(blocks["extra"], SUBS, 8)
    return read_nibbles(blocks) | high << np.uint8(4), read_flags(blocks["extra"], SUBS)


def _write_2(out: Blocks, rungs: U8Array, chosen: U8Array) -> None:
    write_nibbles(out, rungs & np.uint8(15))
    out["extra"] = join_flags(np.concatenate([chosen, rungs >> np.uint8(4)], axis=-1))


def _steps_2(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    high = flags_of(k, field("extra"), range(8, 16), 2, 16)
    sc = nibble_steps(k, field("scales")) | high
    return sc.to(i32) - 16, row_scale(k, isa, field, "<f2"), None, None


IQ2_KS = _make_format(
    "IQ2_KS",
    145,
    "<f2",
    [("extra", "<u2"), ("scales", "u1", (4,)), ("qs", "u1", (64,))],
    IQ2_TABLE,
    TWO,
    range(-16, 16),
    1 / np.linspace(11, 18, 10),
    _read_2,
    _write_2,
    _steps_2,
    lambda k, field, value: flags_of(k, field("extra"), range(8), 2, value),
)


def _read_3(blocks: Blocks) -> tuple[Any, U8Array]:
    low = split_bits(blocks["scales"], 4, 4)
    rungs = low | read_flags(blocks["extra"], SUBS) << np.uint8(4)
    return rungs, read_flags(blocks["extra"], SUBS, 8)


def _write_3(out: Blocks, rungs: U8Array, chosen: U8Array) -> None:
    out["scales"] = join_bits(rungs & np.uint8(15), 4, 4)
    out["extra"] = join_flags(np.concatenate([rungs >> np.uint8(4), chosen], axis=-1))


def _steps_3(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    packed = field("scales")
    twice = k.each(packed, 4, 2)
    low = twice.to(i32) >> k.const(
        [0, 0, 0, 0, 4, 4, 4, 4] * (packed.ty.lanes // 4), i32.like(twice.ty)
    )
    high = flags_of(k, field("extra"), range(8), 2, 16).to(i32)
    return ((low & 15) | high) - 16, row_scale(k, isa, field, "<f2"), None, None


IQ3_KS = _make_format(
    "IQ3_KS",
    156,
    "<f2",
    [("extra", "<u2"), ("scales", "u1", (4,)), ("qs", "u1", (64,)), ("qh", "u1", (32,))],
    IQ3_TABLE,
    THREE,
    range(-16, 16),
    1 / np.linspace(11, 18, 10),
    _read_3,
    _write_3,
    _steps_3,
    lambda k, field, value: flags_of(k, field("extra"), range(8, 16), 2, value),
)


# -- steps of a byte ---------------------------------------------------------------------------

ODD = range(-127, 128, 2)
ODD_SHARES = 1 / np.linspace(108, 127, 6)
EVERY_BYTE = [8 * i for i in range(SUBS)]  # bit 0 of eight bytes


def _read_byte(blocks: Blocks) -> tuple[Any, U8Array]:
    return blocks["scales"] >> np.uint8(1), blocks["scales"] & np.uint8(1)


def _write_byte(out: Blocks, rungs: U8Array, chosen: U8Array) -> None:
    out["scales"] = rungs << np.uint8(1) | chosen


def _odd(k: Builder, packed: Val) -> Val:
    return (packed & 254).to(i32) - 127


def _steps_byte(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    return _odd(k, field("scales")), row_scale(k, isa, field, "<f4"), None, None


def _flags_byte(k: Builder, field: Field, value: int) -> Val:
    return flags_of(k, field("scales"), EVERY_BYTE, 8, value)


IQ4_KS = _make_format(
    "IQ4_KS",
    144,
    "<f4",
    [("scales", "u1", (8,)), ("qs", "u1", (128,))],
    IQ4_TABLE,
    FOUR,
    ODD,
    ODD_SHARES,
    _read_byte,
    _write_byte,
    _steps_byte,
    _flags_byte,
)
IQ5_KS = _make_format(
    "IQ5_KS",
    152,
    "<f4",
    [("scales", "u1", (8,)), ("qs", "u1", (128,)), ("qh", "u1", (32,))],
    IQ5_TABLE,
    FIVE,
    ODD,
    ODD_SHARES,
    _read_byte,
    _write_byte,
    _steps_byte,
    _flags_byte,
)


# -- IQ4_KSS -----------------------------------------------------------------------------------

KSS_LAYOUT = np.dtype([("qs", "<u2", (64,))])
PARITY = np.array([i.bit_count() & 1 for i in range(32)], np.uint8)
# Four codes of a word: two neighbours, and those 16 weights further on.
WORD_SHAPE = 2, 8, 2


def _even_encoder(table: ShiftedTable) -> Encode:
    """Return a ``FormatCoder.encode`` for IQ4_KSS: the four codes of every word have an even number
    of ones.

    Codes are the nearest ones; in a word with an odd number, the code whose change costs least
    becomes the nearest code with the other parity.
    """
    values = table.values
    n = len(table.steps)
    parity = PARITY[:n]
    nearest = []
    for first in (0, n):
        best = nearest_codes(values, range(first, first + n))
        by_parity = [
            nearest_codes(values, (np.flatnonzero(parity == p) + first).tolist()) for p in (0, 1)
        ]
        other = np.where(parity[best - first] == 1, *by_parity)
        nearest.append((best, other.astype(np.uint8)))

    def even(u: F32Array, weights: F32Array | None, best: U8Array, other: U8Array) -> U8Array:
        cell = cells_of(u)
        codes, flipped = best.take(cell), other.take(cell)
        more = np.square(u - values.take(flipped)) - np.square(u - values.take(codes))
        if weights is not None:
            more = more * weights
        shape = (len(u), *WORD_SHAPE)
        words = [
            a.reshape(shape).transpose(0, 2, 1, 3).reshape(-1, 4) for a in (codes, flipped, more)
        ]
        odd = np.bitwise_xor.reduce(PARITY[words[0] & np.uint8(15)], axis=1).astype(np.bool_)
        least = words[2].argmin(axis=1)
        flip = odd[:, None] & (least[:, None] == np.arange(4))
        made = np.where(flip, words[1], words[0])
        made = made.reshape(len(u), 8, 2, 2).transpose(0, 2, 1, 3)
        return np.ascontiguousarray(made).reshape(u.shape)

    def encode(u: F32Array, weights: F32Array | None, careful: bool) -> tuple[U8Array, F32Array]:
        found = [even(u, weights, *both) for both in nearest]
        return pick_table(u, weights, [(q, values.take(q)) for q in found])

    return encode


def _read_kss(blocks: Blocks) -> tuple[Any, Any]:
    words = blocks["qs"]
    upper = words & np.uint16(0xFFFE)
    upper = upper ^ upper >> np.uint16(1)
    packed = np.ascontiguousarray(upper).view(np.uint8).reshape(*blocks.shape, 128)
    bits = (words & np.uint16(1)).reshape(*blocks.shape, SUBS, 8)
    scales = join_words(bits, 8, 1, "u1")[..., 0]
    codes = with_flags(split_bits(packed, 4, 16), scales & np.uint8(1), 4)
    return np.array(ODD, np.float32)[scales >> np.uint8(1)], IQ4_TABLE.values[codes]


def _write_kss(out: Blocks, found: Any) -> None:
    codes = found.codes.astype(np.uint8)
    words = np.ascontiguousarray(join_bits(codes & np.uint8(15), 4, 16)).view("<u2")
    for by in (1, 2, 4, 8):  # undo the exclusive or of each bit with the next higher one
        words = words ^ words >> np.uint16(by)
    scales = found.steps << np.uint8(1) | flags_in(codes, SUB, 4)
    bits = split_words(scales, 8, 1).astype(np.uint16)
    out["qs"] = words.reshape(-1, 64) & np.uint16(0xFFFE) | bits.reshape(-1, 64)


def _plain(k: Builder, packed: Val) -> Val:
    """Emit the bytes ``packed`` of ``qs`` in the packing of IQ4_XS: the exclusive or of the words
    is undone.
    """
    words = packed.bits(u16 * (packed.ty.lanes // 2)) & 0xFFFE
    return (words ^ (words >> 1)).bits(packed.ty)


def _scales_kss(k: Builder, field: Field) -> Val:
    """Emit the bytes that IQ4_KS stores in ``scales``, one for each sub-block: the lowest bits of
    its eight words.
    """
    packed = field("qs")
    words = packed.bits(u16 * (packed.ty.lanes // 2)) & 1
    bits = words << k.const([*range(8)] * (words.ty.lanes // 8), words.ty)
    for _ in range(3):
        even, odd = k.evens(bits, 1)
        bits = even | odd
    return bits.to(u8)


def _flags_kss(k: Builder, field: Field, value: int) -> Val:
    packed = field("qs")
    first = k.shuffle(packed, packed, range(0, packed.ty.lanes, 16))
    return flags_of(k, first, EVERY_BYTE, 8, value)


def _steps_kss(k: Builder, isa: Isa, field: Field) -> tuple[Val, Val, None, None]:
    return _odd(k, _scales_kss(k, field)), row_scale(k, isa, field, "<f4"), None, None


def _plain_field(k: Builder, field: Field) -> Field:
    """Return ``field`` with its bytes passed through ``_plain``: ``qs`` in the packing of
    IQ4_XS.
    """
    return lambda *what: _plain(k, field(*what))


KSS_PACKING = CodePacking(
    lambda blocks: split_bits(blocks["qs"], 4, 16),
    lambda out, q: None,
    lambda k, field: FOUR.unpack(k, _plain_field(k, field)),
    lambda k, field: in_halves_nibbles(k, _plain_field(k, field)),
    16,
    XS_ORDER,
)
_KSS = StepCodes(IQ4_TABLE, KSS_PACKING, SUB, _flags_kss)
_KSS_ODD = coder_of(IQ4_TABLE, SUB, ODD, ODD_SHARES, "<f4")
IQ4_KSS = row_format(
    "IQ4_KSS",
    146,
    "<f4",
    KSS_LAYOUT,
    _codes(IQ4_TABLE, 16, XS_ORDER, _KSS.unpack, _KSS.in_halves, _steps_kss),
    _read_kss,
    _write_kss,
    FormatCoder(
        SUB,
        _KSS_ODD.ladder,
        _even_encoder(IQ4_TABLE),
        _KSS_ODD.scales,
        _KSS_ODD.shares,
        d_type="<f4",
    ),
)

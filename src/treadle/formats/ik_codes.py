"""Codes of ik_llama.cpp's formats: indices into one of two tables of unevenly spaced values.

``w = d * step * table[code]``, with an integer ``step`` for each sub-block. A table has ``2 **
bits`` values, denser around zero. A bit of each sub-block (its *flag*) chooses between the table
and the same table moved up by ``shift``, so that both ends of an uneven range can be used. Codes
below index both tables, one after the other: the flag is a code's top bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.formats.format import Blocks, Builder, Emit, F32Array, Field, Val
from treadle.formats.iq4 import STEPS, XS_ORDER
from treadle.formats.k_low import in_halves_2, in_halves_3, unpack_3
from treadle.formats.k_quants import Q4_ORDER, in_halves_4, in_halves_5, unpack_5
from treadle.formats.kernel_bits import bit_extract, load_halves, nibbles
from treadle.formats.kernel_scales import TWO_BITS, two_bits
from treadle.formats.packing import join_bits, join_words, split_bits, split_words

U8Array = npt.NDArray[np.uint8]

CELLS = 512  # of width 0.5, centred on 0: midpoints of steps are multiples of a half


@dataclass(frozen=True)
class ShiftedTable:
    """A format's table of values, and the same table moved up by ``shift``."""

    steps: tuple[int, ...]  # rising
    shift: int
    offset: int  # added to values in kernels, so that they are unsigned bytes

    @property
    def bits(self) -> int:
        """Bits of a code without its top bit, the choice of the table."""
        return (len(self.steps) - 1).bit_length()

    @property
    def values(self) -> F32Array:
        """The values of both tables, float32 [2 << bits]."""
        low = np.array(self.steps, np.float32)
        return np.concatenate([low, low + np.float32(self.shift)])

    @property
    def top(self) -> int:
        """The largest code of kernels: the largest value plus ``offset``."""
        return self.steps[-1] + self.shift + self.offset

    @property
    def flag(self) -> int:
        """The number that kernels add for the weights of shifted sub-blocks: to the index, if a
        look-up table of 16 has room for both tables, else to the value.
        """
        return 1 << self.bits if self.bits < 4 else self.shift

    def looked_up(self, k: Builder, index: Val, flags: Val) -> Val:
        """Emit the look-up of ``index``, codes without their top bit: values plus ``offset``, u8.
        ``flags`` has ``flag`` in the lanes of shifted sub-blocks, else 0.
        """
        table = [v + self.offset for v in self.steps]
        if self.bits < 4:
            both = [*table, *(v + self.shift for v in table)]
            return k.lookup(both * (16 // len(both)), index | flags)
        parts = [k.lookup(table[i : i + 16], index) for i in range(0, len(table), 16)]
        bit = 16
        while len(parts) > 1:
            low = (index & bit).eq(0)
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [k.select(low, a, b) for a, b in pairs]
            bit *= 2
        return parts[0] + flags


def nearest_codes(values: F32Array, chosen: Sequence[int]) -> U8Array:
    """Return uint8 [CELLS]: for each cell of ``cells_of``, the code among ``chosen`` whose value in
    ``values`` is nearest to the cell's centre.
    """
    cells = (np.arange(CELLS) - (CELLS / 2 - 0.5)) / 2
    codes = np.array(chosen, np.uint8)
    best: U8Array = codes[np.abs(cells[:, None] - values[codes]).argmin(axis=1)]
    return best


def cells_of(u: F32Array) -> npt.NDArray[np.uint16]:
    """Return the cells that the numbers ``u`` [...] lie in, 0 to CELLS - 1: cells of width 0.5,
    centred on 0. Numbers outside belong to the nearest cell.
    """
    cell = u * np.float32(2)
    cell += np.float32(CELLS // 2)
    np.clip(cell, 0, CELLS - 1, out=cell)
    return cell.astype(np.uint16)


Encode = Callable[[F32Array, "F32Array | None", bool], tuple[U8Array, F32Array]]


def pick_table(
    u: F32Array, weights: F32Array | None, found: list[tuple[U8Array, F32Array]]
) -> tuple[U8Array, F32Array]:
    """Return codes and values, both [n, sub], of the better of the two encodings ``found`` (by the
    plain and by the shifted table): for each sub-block of ``u`` [n, sub] that of less squared
    error, weighted by ``weights`` if given.
    """

    def error(y: F32Array) -> F32Array:
        r = u - y
        return np.asarray(np.vecdot(r, r if weights is None else r * weights))

    (codes, y), (other, z) = found
    worse = (error(z) < error(y))[:, None]
    return np.where(worse, other, codes), np.where(worse, z, y)


def encoder(table: ShiftedTable) -> Encode:
    """Return a ``FormatCoder.encode`` for ``table``: float32 [n, sub] -> codes and values, both [n,
    sub].
    """
    values = table.values
    n = len(table.steps)
    nearest = [nearest_codes(values, range(i * n, i * n + n)) for i in (0, 1)]

    def encode(u: F32Array, weights: F32Array | None, careful: bool) -> tuple[U8Array, F32Array]:
        cell = cells_of(u)
        codes = [part.take(cell) for part in nearest]
        return pick_table(u, weights, [(q, values.take(q)) for q in codes])

    return encode


IQ2_TABLE = ShiftedTable((-31, -13, 1, 17), 5, 32)
IQ3_TABLE = ShiftedTable((-63, -40, -23, -10, 1, 13, 28, 47), 4, 64)
IQ4_TABLE = ShiftedTable(tuple(int(v) for v in STEPS), 4, 128)
# fmt: off
IQ5_TABLE = ShiftedTable(
    (
        -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6,
        -1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121,
    ),
    2,
    128,
)
IQ6_TABLE = ShiftedTable(
    (
        -127, -121, -115, -109, -104, -98, -93, -88, -84, -79, -74, -70, -66, -62, -58, -54,
        -51, -47, -44, -40, -37, -34, -31, -28, -25, -22, -19, -16, -13, -11, -8, -5,
        -2, 0, 3, 6, 9, 12, 14, 17, 20, 23, 27, 30, 33, 36, 40, 44,
        47, 51, 55, 59, 63, 68, 72, 77, 82, 87, 92, 98, 103, 109, 115, 121,
    ),
    1,
    128,
)
# fmt: on


# -- packings of 256 codes ---------------------------------------------------------------------


@dataclass(frozen=True)
class CodePacking:
    """Packing of a block's 256 codes in ``qs`` and ``qh``: ``split`` and ``join`` for numpy, the
    other fields for kernels, as in ``Codes``.
    """

    split: Callable[[Blocks], U8Array]  # blocks [...] -> codes [..., 256]
    join: Callable[[Blocks, U8Array], None]  # writes codes [n, 256] into blocks [n]
    unpack: Emit
    in_halves: Emit
    run: int
    order: tuple[tuple[int, ...], ...]


def _join_2(out: Blocks, q: U8Array) -> None:
    out["qs"] = join_bits(q & np.uint8(3), 2, 32)


def _join_3(out: Blocks, q: U8Array) -> None:
    _join_2(out, q)
    out["qh"] = join_bits(q >> np.uint8(2) & np.uint8(1), 1, 32)


def _join_4(out: Blocks, q: U8Array) -> None:
    out["qs"] = join_bits(q & np.uint8(15), 4, 16)


def _join_5(out: Blocks, q: U8Array) -> None:
    out["qs"] = join_bits(q & np.uint8(15), 4, 32)
    out["qh"] = join_bits(q >> np.uint8(4) & np.uint8(1), 1, 32)


def _join_6(out: Blocks, q: U8Array) -> None:
    out["qs"] = join_bits(q & np.uint8(15), 4, 32)
    out["qh"] = join_bits(q >> np.uint8(4) & np.uint8(3), 2, 32)


def _unpack_6(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.unpack``: emit codes 0..63, in the order of ``k_quants.unpack_4``."""
    lower = k.evens(field("qs"), 16)
    upper = [k.each(v, 16, 2) for v in k.evens(field("qh"), 16)]
    out = []
    for odd in (0, 1):
        for first, pairs in zip(lower, upper, strict=True):
            high = bit_extract(k, pairs, [2 * odd + i for i in (0, 0, 4, 4)], 2, 4)
            out.append(bit_extract(k, first, 4 * odd, 4) | high)
    return out


def in_halves_nibbles(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_halves`` for nibbles in runs of 16 (Q4_0's packing): emit codes
    0..15.
    """
    both = [load_halves(k, field, "qs", at, 64) for at in (0, 16, 32, 48)]
    return [bit_extract(k, v, at, 4) for v in both for at in (0, 4)]


def _in_halves_6(k: Builder, field: Field) -> list[Val]:
    """Implement ``Codes.in_halves``: emit codes 0..63."""
    pairs = [load_halves(k, field, "qh", at, 32) for at in (0, 16)]
    lower = enumerate(in_halves_4(k, field))
    return [low | bit_extract(k, pairs[i % 2], i // 2 * 2, 2, 4) for i, low in lower]


TWO = CodePacking(
    lambda blocks: split_bits(blocks["qs"], 2, 32),
    _join_2,
    lambda k, field: two_bits(k, field("qs")),
    in_halves_2,
    8,
    TWO_BITS,
)
THREE = CodePacking(
    lambda b: split_bits(b["qs"], 2, 32) | split_bits(b["qh"], 1, 32) << np.uint8(2),
    _join_3,
    lambda k, field: unpack_3(k, field, "qh"),
    lambda k, field: in_halves_3(k, field, "qh"),
    8,
    TWO_BITS,
)
FOUR = CodePacking(
    lambda blocks: split_bits(blocks["qs"], 4, 16),
    _join_4,
    nibbles,
    in_halves_nibbles,
    16,
    XS_ORDER,
)
FIVE = CodePacking(
    lambda b: split_bits(b["qs"], 4, 32) | split_bits(b["qh"], 1, 32) << np.uint8(4),
    _join_5,
    unpack_5,
    in_halves_5,
    16,
    Q4_ORDER,
)
SIX = CodePacking(
    lambda b: split_bits(b["qs"], 4, 32) | split_bits(b["qh"], 2, 32) << np.uint8(4),
    _join_6,
    _unpack_6,
    _in_halves_6,
    16,
    Q4_ORDER,
)


# -- flags of sub-blocks in kernels ------------------------------------------------------------


def flags_of(k: Builder, packed: Val, bits: Sequence[int], n_bytes: int, value: int) -> Val:
    """Emit bytes ``u8 * (n_blocks * len(bits))``: ``value`` where bit ``bits[i]`` of a block's
    ``n_bytes`` bytes in ``packed`` is set, else 0.
    """
    blocks = packed.ty.lanes // n_bytes
    held = k.shuffle(packed, packed, [b * n_bytes + i // 8 for b in range(blocks) for i in bits])
    clear = (held & k.const([1 << i % 8 for i in bits] * blocks, held.ty)).eq(0)
    return k.select(clear, k.zero(held.ty), k.const(value, held.ty))


def repeat_flags(k: Builder, flags: Val, n_subs: int, subs: Sequence[int], run: int) -> Val:
    """Emit each sub-block's flag repeated for its codes: ``subs`` lists the sub-block of each run
    of ``run`` codes; ``flags`` has ``n_subs`` bytes per block.
    """
    blocks = flags.ty.lanes // n_subs
    lanes = [b * n_subs + sub for b in range(blocks) for sub in subs for _ in range(run)]
    return k.shuffle(flags, flags, lanes)


Flags = Callable[[Builder, Field, int], Val]  # (k, field, value) -> a byte per sub-block


@dataclass(frozen=True)
class StepCodes:
    """Implementations of ``Codes.unpack`` and ``Codes.in_halves`` for a format with a
    ShiftedTable.
    """

    table: ShiftedTable
    packing: CodePacking
    sub: int  # weights of a sub-block
    flags: Flags  # emits the flag of each sub-block

    def unpack(self, k: Builder, field: Field) -> list[Val]:
        """Emit the table's values plus ``offset``, u8, in the order of the packing."""
        flags = self.flags(k, field, self.table.flag)
        vectors = zip(self.packing.unpack(k, field), self.packing.order, strict=True)
        out = []
        for index, runs in vectors:
            subs = [r * self.packing.run // self.sub for r in runs]
            each = repeat_flags(k, flags, 256 // self.sub, subs, self.packing.run)
            out.append(self.table.looked_up(k, index, each))
        return out

    def in_halves(self, k: Builder, field: Field) -> list[Val]:
        """Emit the table's values plus ``offset``, u8, in the order of ``Codes.in_halves``."""
        flags = self.flags(k, field, self.table.flag)
        out = []
        for i, index in enumerate(self.packing.in_halves(k, field)):
            subs = [16 * at // self.sub for at in (i, i + 8)]
            each = repeat_flags(k, flags, 256 // self.sub, subs, 16)
            out.append(self.table.looked_up(k, index, each))
        return out


# -- flags of sub-blocks in numpy --------------------------------------------------------------


def read_flags(words: npt.NDArray[Any], n: int, first: int = 0) -> U8Array:
    """Unpack bits ``first`` to ``first + n - 1`` of each word: [...] -> uint8 [..., n]."""
    return split_words(words[..., None] >> words.dtype.type(first), n, 1).astype(np.uint8)


def join_flags(flags: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Pack up to 16 flags into a word: [m, n] -> uint16 [m]; the inverse of ``read_flags``."""
    return join_words(flags, flags.shape[-1], 1, "<u2")[..., 0]


def with_flags(codes: U8Array, flags: U8Array, bits: int) -> U8Array:
    """Put each sub-block's flag, [..., n_subs], above the lower ``bits`` bits of its codes [...,
    256].
    """
    sub = codes.shape[-1] // flags.shape[-1]
    return codes | np.repeat(flags, sub, axis=-1) << np.uint8(bits)


def flags_in(codes: npt.NDArray[Any], sub: int, bits: int) -> U8Array:
    """Return the flags in the top bits of codes [n, 256]: uint8 [n, 256 / sub]."""
    return (codes[:, ::sub] >> bits).astype(np.uint8)

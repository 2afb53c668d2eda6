"""Access to a format's blocks in a kernel: addresses, fields, codes and scales of one or several
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd

from treadle.base.fast_classes import dataclass
from treadle.formats import Format
from treadle.formats.format import Codes
from treadle.jit.language import Builder, Operand, Val
from treadle.jit.types import Ty, f16, f32, i16, i32, u8
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.run_state import LINE

WORDS = 32  # words in a table that ``Isa.lookup_words`` takes


@dataclass(frozen=True)
class BlockAddress:
    """Address of a row or a block of weights. ``parts``: one address for each array of the format,
    usually one. ``head``: start of the block's row, for formats that keep scales there; None for a
    row.
    """

    fmt: Format
    parts: tuple[Val, ...]
    head: Val | None = None

    @property
    def codes(self) -> Codes:
        """The format's codes; the format must be one that has them."""
        assert self.fmt.codes is not None, self.fmt.name
        return self.fmt.codes

    def row(self, i: Val, k: int) -> BlockAddress:
        """Return the address of the ``i``-th row of ``k`` weights after this row."""
        strides = self.fmt.row_strides(k)
        return BlockAddress(
            self.fmt, tuple(p + i * n for p, n in zip(self.parts, strides, strict=True))
        )

    def block(self, i: Val | int, each: int = 1) -> BlockAddress:
        """Return the address of the block ``i * each`` blocks after this one. From a row's address
        it is a block of the row.
        """
        fmt = self.fmt
        parts = self.parts
        head = self.head
        if fmt.head_bytes and head is None:
            (head,) = parts
            parts = (head + fmt.head_bytes,)
        steps = (each * stride for stride in fmt.strides)
        return BlockAddress(fmt, tuple(p + i * n for p, n in zip(parts, steps, strict=True)), head)

    def has(self, field: str) -> bool:
        """Whether ``field`` is kept at the start of the row, not in each block."""
        return self.fmt.head is not None and field in (self.fmt.head.names or ())

    def load_head(self, k: Builder, field: str, ty: Ty) -> Val:
        """Load a ``ty`` from a field at the start of this block's row."""
        assert self.fmt.head is not None, self.fmt.name
        assert self.fmt.head.fields is not None, self.fmt.name
        assert self.head is not None, self.fmt.name
        offset = int(self.fmt.head.fields[field][1])
        align = gcd(*self.fmt.strides, self.fmt.head_bytes, offset, k.isa.aligned)
        return k.load(self.head, ty, offset=offset, align=align)

    def load(self, k: Builder, field: str, ty: Ty, at: int = 0) -> Val:
        """Load a ``ty`` from a field of this block, ``at`` bytes after the field's start."""
        part, offset = self.fmt.place(field)
        offset += at
        align = gcd(self.fmt.strides[part], offset, self.fmt.head_bytes, k.isa.aligned)
        return k.load(self.parts[part], ty, offset=offset, align=align)

    def prefetch(self, k: Builder, ahead: int, n: int, locality: int) -> None:
        """Prefetch ``n`` blocks, from the one ``ahead`` blocks after this, line by line.
        ``locality``: as in ``Builder.prefetch``.
        """
        for p, stride in zip(self.parts, self.fmt.strides, strict=True):
            for line in range(0, n * stride, LINE):
                k.prefetch(p + (ahead * stride + line), locality)


@dataclass(frozen=True)
class WeightRows:
    """Rows of the matrix ``weights [m, k]`` from row ``first`` on. Row numbers past the last row
    mean the last row.
    """

    weights: BlockAddress
    first: Val
    m: Val
    k: int

    def row(self, k: Builder, r: Operand) -> BlockAddress:
        return self.weights.row(k.min(self.first + r, self.m - 1), self.k)

    def offset_by(self, n: Operand) -> WeightRows:
        """Return the rows that begin ``n`` rows later."""
        return replace(self, first=self.first + n)

    @property
    def values(self) -> tuple[Val, ...]:
        """The run-time values in the fields, for ``with_values`` within an outlined function."""
        return *self.weights.parts, self.first, self.m

    def with_values(self, values: Sequence[Val]) -> WeightRows:
        """Return a copy whose run-time values are ``values``, in the order of ``values`` above."""
        *parts, first, m = values
        return WeightRows(BlockAddress(self.weights.fmt, tuple(parts)), first, m, self.k)


def fields_of(k: Builder, blocks: list[BlockAddress], run: int = 0) -> Callable[..., Val]:
    """Return the function ``field(name, n_bytes=0, at=0)`` with which a format reads its fields. It
    returns the field's bytes from all ``blocks`` (a power of two), concatenated; only ``n_bytes``
    of each from byte ``at`` if given. Each ``run`` blocks are adjacent in memory; 0: all of them.
    """
    fmt = blocks[0].fmt
    reach = k.isa.vector_bits // 8
    size = fmt.dtype.itemsize

    def field(name: str, n_bytes: int = 0, at: int = 0) -> Val:
        if blocks[0].has(name):
            assert fmt.head is not None
            ty = u8 * fmt.head[name].itemsize
            return k.concat(*(block.load_head(k, name, ty) for block in blocks))
        offset = fmt.place(name)[1] + at
        if fmt.parts:  # adjacent blocks' fields are contiguous
            each = run or len(blocks)
            ty = u8 * (fmt.dtype[name].itemsize * each)
            return k.concat(*(block.load(k, name, ty) for block in blocks[::each]))
        n_bytes = n_bytes or fmt.dtype[name].itemsize
        assert offset + n_bytes <= size, (fmt.name, name, n_bytes)
        # One load and one shuffle, if a register holds all of them and nothing past their end.
        if run > 1 and (run - 1) * size + offset + n_bytes <= reach <= run * size and n_bytes <= 4:
            held = [i * size + offset + j for i in range(run) for j in range(n_bytes)]
            whole = [k.load(block.parts[0], u8 * reach) for block in blocks[::run]]
            return k.concat(*(k.shuffle(v, v, held) for v in whole))
        return k.concat(*(block.load(k, name, u8 * n_bytes, at) for block in blocks))

    return field


def unpack_codes(k: Builder, blocks: list[BlockAddress]) -> list[Val]:
    """Return the codes of several blocks, vectors of ``u8``, in the order of the format's
    ``Codes.groups``.
    """
    parts: list[Val] = blocks[0].codes.unpack(k, fields_of(k, blocks))
    return parts


def ordered_codes(k: Builder, *blocks: BlockAddress) -> list[Val]:
    """Return the codes of adjacent blocks in the order of the weights, as one or more vectors of
    ``u8``.
    """
    codes = blocks[0].codes
    if codes.in_order is None:
        return [codes_in_order(k, *blocks)]
    return [v for block in blocks for v in codes.in_order(k, fields_of(k, [block]))]


def codes_in_order(k: Builder, *blocks: BlockAddress) -> Val:
    """Return the codes of adjacent blocks in the order of the weights, one vector ``u8 * (n *
    block)``.
    """
    fmt = blocks[0].fmt
    codes = blocks[0].codes
    parts = unpack_codes(k, [*blocks])
    groups = codes.groups(fmt.block, len(blocks))
    if len(parts) == 1:
        (whole,) = parts
    else:
        whole = k.concat(*parts)
    held = [g for part in groups for g in part]
    if held == sorted(held):
        return whole
    places = [held.index(g) for g in range(len(held))]
    return k.shuffle(whole.bits(i32 * len(held)), k.zero(i32 * len(held)), places).bits(whole.ty)


def scales_of(k: Builder, blocks: list[BlockAddress], run: int = 0) -> tuple[Val, Val | None]:
    """Return the scales of ``blocks``, f32, one for every ``codes.sub`` weights, and their minimums
    or None, one for every ``codes.sum_sub`` weights. ``run``: as in ``fields_of``.
    """
    codes = blocks[0].codes
    if codes.scales is not None:
        d, m = codes.scales(k, k.isa, fields_of(k, blocks, run))
        return d, m
    d = load_scales(k, blocks, codes.d)
    return d, load_scales(k, blocks, codes.m) if codes.m else None


def load_weights(k: Builder, block: BlockAddress) -> list[Val]:
    """Return the dequantised weights of one block, vectors of ``f32 * 32``."""
    codes = block.codes
    assert codes.sum_sub == codes.sub
    whole = codes_in_order(k, block)
    d, m = scales_of(k, [block])
    out = []
    for b in range(block.fmt.block // BLOCK):
        lanes = [(b * BLOCK + i) // codes.sub for i in range(BLOCK)]
        x = k.shuffle(whole, whole, range(b * BLOCK, (b + 1) * BLOCK)).to(i32) - codes.offset
        x = x.to(f32) * k.shuffle(d, d, lanes)
        out.append(x if m is None else x + k.shuffle(m, m, lanes))
    return out


def load_narrow(k: Builder, block: BlockAddress) -> list[Val]:
    """Return the dequantised weights of one block as bf16, vectors of ``i16 * 32``. The few
    distinct weights of a sub-block are rounded to bf16, then looked up by code.
    """
    codes = block.codes
    table_ty = f32 * (WORDS // 2)
    look_up = k.isa.lookup_words
    assert look_up is not None
    assert codes.words is not None
    # Spreading scales that share a register takes a shuffle each, the bottleneck; loads from memory
    # broadcast them for free.
    scales = [v for v in scales_of(k, [block]) if v is not None]
    rooms = [k.room(v.ty.n_bytes, name) for v, name in zip(scales, ("d", "m"), strict=False)]
    several = block.fmt.block > codes.sub
    if several:
        for v, room in zip(scales, rooms, strict=True):
            k.store(room, v)
        k.fence(*rooms)

    def spread(i: int) -> list[Val]:
        if not several:
            return [k.shuffle(v, v, [0] * (WORDS // 2)) for v in scales]
        return [k.splat(k.load(room, f32, offset=4 * i), table_ty) for room in rooms]

    levels = codes.levels * max(1, WORDS // 2 // len(codes.levels))
    out = []
    for b, places in enumerate(codes.words(k, fields_of(k, [block]))):
        halves = []
        for half in range(2):
            at = half * (WORDS // 2) % len(levels)
            d, *m = spread((b * BLOCK + half * (BLOCK // 2)) // codes.sub)
            some = k.const(levels[at : at + WORDS // 2], table_ty) * d
            halves.append(some + m[0] if m else some)
        if codes.sub < BLOCK:
            assert len(levels) == WORDS // 2, block.fmt.name
            seconds = k.const([0] * (WORDS // 2) + [WORDS // 2] * (WORDS // 2), places.ty)
            places = (places & (WORDS // 2 - 1)) | seconds
        out.append(look_up(k, k.isa.narrow_bf16(k, k.concat(*halves)), places))
    return out


def load_scales(
    k: Builder, blocks: list[BlockAddress], field: str, lanes: Sequence[int] = ()
) -> Val:
    """Return the f16 field ``field`` of several blocks as a vector of f32. ``lanes``: for each lane
    the index of its block, ascending, each block equally often; empty: one lane a block.
    """
    if lanes:
        repeat = len(lanes) // len(blocks)
        halves = k.concat(*(k.splat(at.load(k, field, f16), f16 * repeat) for at in blocks))
        in_turn = [i for i in range(len(blocks)) for _ in range(repeat)]
        assert list(lanes) == in_turn, "blocks of other formats have scales of their own"
    else:
        bits = k.zero(i16 * len(blocks))
        for lane, at in enumerate(blocks):
            bits = k.insert(bits, at.load(k, field, i16), lane)
        halves = bits.bits(f16 * len(blocks))
    return k.isa.widen_f16(k, halves)


def across_scales(k: Builder, blocks: list[BlockAddress]) -> tuple[Val, Val | None]:
    """Return the f32 scales of blocks that need not be adjacent, and their minimums or None, a lane
    a block. Where a block has its minimum right behind its scale, both are loaded at once.
    """
    fmt = blocks[0].fmt
    codes = blocks[0].codes
    n = len(blocks)
    if codes.scales is not None:
        d, m = codes.scales(k, k.isa, fields_of(k, blocks, 1))
        return d, m
    if not codes.m:
        return load_scales(k, blocks, codes.d), None
    (part, d_at), (m_part, m_at) = fmt.place(codes.d), fmt.place(codes.m)
    if part != m_part or m_at != d_at + 2:
        return load_scales(k, blocks, codes.d), load_scales(k, blocks, codes.m)
    words = k.zero(i32 * n)
    for lane, at in enumerate(blocks):
        words = k.insert(words, at.load(k, codes.d, i32), lane)
    halves = words.bits(f16 * (2 * n))
    d, m = (k.shuffle(halves, halves, range(first, 2 * n, 2)) for first in (0, 1))
    return k.isa.widen_f16(k, d), k.isa.widen_f16(k, m)


def load_scale_run(k: Builder, at: BlockAddress, n: int, field: str, lanes: Sequence[int]) -> Val:
    """Return the f16 field ``field`` of ``n`` adjacent blocks from ``at`` on as f32; lane i has
    that of block ``lanes[i]``. Emits one load and one shuffle if a vector register holds all ``n``
    blocks' fields and the load reads nothing past the last block.
    """
    (part, offset), n_bytes = at.fmt.place(field), k.isa.vector_bits // 8
    size = at.fmt.strides[part]
    if n == 1 or size % 2 or offset % 2 or offset > 6:
        return load_scales(k, [at.block(i) for i in range(n)], field, lanes)
    first = at.parts[part]
    if (n - 1) * size + offset + 2 <= n_bytes <= n * size:
        words = k.load(first, i16 * (n_bytes // 2))
        stride = size
    else:  # the first 8 bytes of each block, where formats keep their scales
        heads = k.concat(*(k.load(first + i * size, u8 * 8) for i in range(n)))
        words = heads.bits(i16 * (4 * n))
        stride = 8
    order = [(i * stride + offset) // 2 for i in lanes]
    return k.isa.widen_f16(k, k.shuffle(words, words, order).bits(f16 * len(order)))

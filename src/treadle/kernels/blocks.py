"""Reading a format's blocks in a kernel: where they lie, and fields of one or several of them side
by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.jit.types import f16, f32, i16, i32, u8
from treadle.kernels.act import BLOCK
from treadle.kernels.spec import LINE

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.types import Ty
    from treadle.jit.values import Val


@dataclass(frozen=True)
class At:
    """Where a row or a block begins: an address in each array of its format, which for most is
    one.
    """

    fmt: Format
    parts: tuple[Val, ...]

    def row(self, i: Val, k: int) -> At:
        """The ``i``-th row of ``k`` weights from here on."""
        return self.block(i, k // self.fmt.block)

    def block(self, i: Val | int, each: int = 1) -> At:
        """The ``i``-th block from here on, or ``i``-th run of ``each`` blocks."""
        steps = (each * stride for stride in self.fmt.strides)
        return At(self.fmt, tuple(p + i * n for p, n in zip(self.parts, steps, strict=True)))

    def load(self, k: Builder, field: str, ty: Ty) -> Val:
        """``ty`` from where the field of this block begins."""
        part, offset = self.fmt.place(field)
        return k.load(self.parts[part], ty, offset=offset)

    def prefetch(self, k: Builder, ahead: int, n: int, locality: int) -> None:
        """Ask for ``n`` blocks, ``ahead`` blocks from here, line by line."""
        for p, stride in zip(self.parts, self.fmt.strides, strict=True):
            for line in range(0, n * stride, LINE):
                k.prefetch(p + (ahead * stride + line), locality)


def fields_of(k: Builder, fmt: Format, blocks: list[At], run: int = 0) -> Callable[..., Val]:
    """What formats are handed: the bytes of a field of several blocks (a power of two), or as many
    from there on. ``run`` blocks at a time are neighbours; 0: all of them.
    """
    size, reach = fmt.dtype.itemsize, k.isa.vector_bits // 8

    def field(name: str, n_bytes: int = 0) -> Val:
        offset = fmt.place(name)[1]
        if fmt.parts:  # neighbours' fields follow each other
            each = run or len(blocks)
            ty = u8 * (fmt.dtype[name].itemsize * each)
            return k.concat(*(at.load(k, name, ty) for at in blocks[::each]))
        n_bytes = n_bytes or fmt.dtype[name].itemsize
        assert offset + n_bytes <= size, (fmt.name, name, n_bytes)
        # One load and one shuffle, where a register holds them all and nothing past their end.
        if run > 1 and (run - 1) * size + offset + n_bytes <= reach <= run * size and n_bytes <= 4:
            held = [i * size + offset + j for i in range(run) for j in range(n_bytes)]
            whole = [k.load(at.parts[0], u8 * reach) for at in blocks[::run]]
            return k.concat(*(k.shuffle(v, v, held) for v in whole))
        return k.concat(*(at.load(k, name, u8 * n_bytes) for at in blocks))

    return field


def unpack_codes(k: Builder, fmt: Format, blocks: list[At]) -> list[Val]:
    """The codes of several blocks, vectors of ``u8`` in the order of ``codes.groups``."""
    assert fmt.codes is not None
    parts: list[Val] = fmt.codes.unpack(k, fields_of(k, fmt, blocks))
    return parts


def codes_in_order(k: Builder, fmt: Format, block: At) -> Val:
    """The codes of one block as they follow each other, ``u8 * block``."""
    assert fmt.codes is not None
    parts, groups = unpack_codes(k, fmt, [block]), fmt.codes.groups(fmt.block)
    if len(parts) == 1:
        (whole,) = parts
    else:
        whole = k.concat(*parts)
    held = [g for part in groups for g in part]
    if held == sorted(held):
        return whole
    places = [held.index(g) for g in range(len(held))]
    return k.shuffle(whole.bits(i32 * len(held)), k.zero(i32 * len(held)), places).bits(whole.ty)


def scales_of(
    k: Builder, isa: Isa, fmt: Format, blocks: list[At], run: int = 0
) -> tuple[Val, Val | None]:
    """f32 scales, and minimums where there are any, one for every ``sub`` and ``sum_sub`` codes."""
    codes = fmt.codes
    assert codes is not None
    if codes.scales is not None:
        d, m = codes.scales(k, isa, fields_of(k, fmt, blocks, run))
        return d, m
    d = load_scales(k, isa, fmt, blocks, codes.d)
    return d, load_scales(k, isa, fmt, blocks, codes.m) if codes.m else None


def load_weights(k: Builder, isa: Isa, fmt: Format, block: At) -> list[Val]:
    """The weights of one block, ``f32 * 32`` each."""
    codes = fmt.codes
    assert codes is not None
    assert codes.sum_sub == codes.sub
    whole = codes_in_order(k, fmt, block)
    d, m = scales_of(k, isa, fmt, [block])
    out = []
    for b in range(fmt.block // BLOCK):
        lanes = [(b * BLOCK + i) // codes.sub for i in range(BLOCK)]
        x = k.shuffle(whole, whole, range(b * BLOCK, (b + 1) * BLOCK)).to(i32) - codes.offset
        x = x.to(f32) * k.shuffle(d, d, lanes)
        out.append(x if m is None else x + k.shuffle(m, m, lanes))
    return out


def load_scales(
    k: Builder, isa: Isa, fmt: Format, blocks: list[At], field: str, lanes: Sequence[int] = ()
) -> Val:
    """One f16 field of several blocks as f32; ``lanes``: whose each lane holds, or in turn."""
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
    wide: Val = isa.widen_f16(k, halves)
    return wide


def load_scale_run(
    k: Builder, isa: Isa, fmt: Format, at: At, n: int, field: str, lanes: Sequence[int]
) -> Val:
    """The same of ``n`` neighbouring blocks: one load and one shuffle where a register holds all
    of their scales and nothing past their end.
    """
    (part, offset), n_bytes = fmt.place(field), isa.vector_bits // 8
    size = fmt.strides[part]
    if n == 1 or size % 2 or offset % 2 or offset > 6:
        return load_scales(k, isa, fmt, [at.block(i) for i in range(n)], field, lanes)
    first = at.parts[part]
    if (n - 1) * size + offset + 2 <= n_bytes <= n * size:
        words, stride = k.load(first, i16 * (n_bytes // 2)), size
    else:  # the first 8 bytes of each, where formats keep their scales
        heads = k.concat(*(k.load(first + i * size, u8 * 8) for i in range(n)))
        words, stride = heads.bits(i16 * (4 * n)), 8
    order = [(i * stride + offset) // 2 for i in lanes]
    wide: Val = isa.widen_f16(k, k.shuffle(words, words, order).bits(f16 * len(order)))
    return wide

"""Reading a format's blocks in a kernel: fields of one or several blocks side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.jit.types import f16, i16, u8

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val


def unpack_codes(k: Builder, fmt: Format, blocks: list[Val]) -> list[Val]:
    """The codes of several blocks (a power of two), in ``codes.parts`` vectors of ``u8``.

    Part j holds codes ``32 / parts * j`` and on of the first block, then those of the next.
    """
    assert fmt.codes is not None

    def field(name: str) -> Val:
        assert fmt.dtype.fields is not None
        dtype, offset = fmt.dtype.fields[name][:2]
        return k.concat(*(k.load(p, u8 * dtype.itemsize, offset=int(offset)) for p in blocks))

    parts: list[Val] = fmt.codes.unpack(k, field)
    return parts


def load_scales(
    k: Builder, isa: Isa, fmt: Format, blocks: list[Val], field: str, repeat: int = 1
) -> Val:
    """One f16 field of several blocks as f32, each in ``repeat`` lanes."""
    offset = fmt.field_offset(field)
    if repeat > 1:
        halves = k.concat(*(k.splat(k.load(p, f16, offset=offset), f16 * repeat) for p in blocks))
    else:
        bits = k.zero(i16 * len(blocks))
        for lane, p in enumerate(blocks):
            bits = k.insert(bits, k.load(p, i16, offset=offset), lane)
        halves = bits.bits(f16 * len(blocks))
    wide: Val = isa.widen_f16(k, halves)
    return wide

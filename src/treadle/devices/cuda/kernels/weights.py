"""Weights read by one GPU thread: some blocks of a row, as floats.

A *unit* is the weights that a thread reads at once: a block of codes, or several small ones, or a
few floats.
"""

from __future__ import annotations

from math import gcd

from treadle.base.fast_classes import dataclass
from treadle.formats import Format
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, u32
from treadle.kernels.format_blocks import BlockAddress, scales_of, unpack_codes

FLOATS = 8  # values of a unit of floats
LEAST = 32  # values of a unit of codes
SPAN = 64  # values that a thread unpacks at once: they fit its registers
MAGIC = 8388608.0  # 2**23: or-ing an integer into its low bits adds it
MAGIC_BITS = 0x4B000000  # the bits of MAGIC


def unit_of(fmt: Format, k: int) -> int:
    """Return the number of weights in a unit of a format: whole blocks, whose number divides that
    of a row of ``k`` weights; FLOATS for a format without codes.
    """
    if fmt.codes is None:
        return FLOATS
    n = max(1, LEAST // fmt.block)
    return fmt.block * (n if k // fmt.block % n == 0 else 1)


@dataclass
class CodeRun:
    """Codes that share a scale, and perhaps a minimum: ``w = scale * (code - offset) + minimum``.

    ``minimum``: None if there is none. ``fours``: u32 words of four codes, each with the index of
    its first code in the unit.
    """

    scale: Val
    minimum: Val | None
    fours: list[tuple[int, Val]]


def read_runs(k: Builder, at: BlockAddress, unit: int) -> list[CodeRun]:
    """Emit the loads of the codes of the unit of ``unit`` weights that begins at ``at``; return its
    runs in order.
    """
    fmt = at.fmt
    codes = at.codes
    blocks = [at.block(i) for i in range(unit // fmt.block)]
    d, m = scales_of(k, blocks)
    held: dict[int, list[tuple[int, Val]]] = {}
    vectors = unpack_codes(k, blocks)
    for v, fours in zip(vectors, codes.groups(fmt.block, len(blocks)), strict=True):
        words = v.bits(u32 * (v.ty.lanes // 4))
        for i, four in enumerate(fours):
            one = 4 * four, k.extract(words, i)
            held.setdefault(4 * four // codes.sum_sub, []).append(one)
    return [
        CodeRun(
            k.extract(d, i * codes.sum_sub // codes.sub),
            None if m is None else k.extract(m, i),
            sorted(fours, key=lambda one: one[0]),
        )
        for i, fours in sorted(held.items())
    ]


def four_floats(k: Builder, word: Val, offset: int) -> list[Val]:
    """Emit the four codes of ``word``, a byte each, as f32 minus ``offset``, exactly; the code in
    the lowest byte first.
    """
    wide = ((word >> 8 * i if i else word) & 0xFF for i in range(4))
    return [(v | MAGIC_BITS).bits(f32) - (MAGIC + offset) for v in wide]


def read_floats(k: Builder, at: BlockAddress, row: int, n: int) -> list[Val]:
    """Emit the loads of the first ``n`` weights of the unit of floats that begins at ``at``, as
    f32; ``row``: the number of values in a row, for the alignment.
    """
    load = at.fmt.load
    assert load is not None, at.fmt.name
    size = at.fmt.dtype.itemsize
    align = gcd(row * size, FLOATS * size, k.isa.aligned)
    v = load(k, k.isa, at.parts[0], FLOATS, n, align)
    return [k.extract(v, i) for i in range(n)]

"""Data of a scale search in scratch: columns of vectors; and rounding of codes and f16 scales."""

from __future__ import annotations

from treadle.formats.k_search import F16_MAX, HUGE
from treadle.jit.language import Builder, Val
from treadle.jit.types import Ty, f16, f32, i16


class ScratchColumns:
    """Named arrays of f32 vectors in scratch, from ``base`` on; ``sizes``: the number of vectors in
    each array, by its name. A lane is a super-block.
    """

    def __init__(self, k: Builder, base: Val, sizes: dict[str, int]) -> None:
        self.k = k
        self.base = base
        self.sizes = sizes
        self.ty: Ty = f32 * k.isa.lanes
        self.starts = {}
        at = 0
        for name, n in sizes.items():
            self.starts[name] = at
            at = at + n

    def pointer(self, name: str, i: Val | int = 0) -> Val:
        """Return the address of the ``i``-th vector of the array ``name``."""
        size = self.ty.n_bytes
        return self.base + self.starts[name] * size + i * size

    def load(self, name: str, i: Val | int = 0) -> Val:
        return self.k.load(self.pointer(name, i), self.ty, align=self.ty.n_bytes)

    def store(self, name: str, value: Val, i: Val | int = 0) -> None:
        self.k.store(self.pointer(name, i), value, align=self.ty.n_bytes)


def rounded(k: Builder, u: Val, lo: float, hi: float) -> Val:
    """Return the whole number nearest to ``u``, clamped to ``lo`` to ``hi``, as f32."""
    return k.round(k.min(k.max(u, lo), hi))


def inverse(k: Builder, d: Val) -> Val:
    """Return 1 / d, and 0 for d = 0."""
    return k.select(d.eq(0.0), k.zero(d.ty), 1.0 / d)


def or_huge(k: Builder, scale: Val) -> Val:
    """Return ``scale``, or where it is 0 a scale so large that all codes become 0."""
    return k.select(scale.eq(0.0), k.const(float(HUGE), scale.ty), scale)


def near_f16(k: Builder, d: Val) -> Val:
    """Round ``d`` to the nearest finite f16 value; return it as f32."""
    d = k.min(k.max(d, -F16_MAX), F16_MAX)
    return widened(k, k.isa.narrow_f16(k, d))


def wide_f16(k: Builder, largest: Val, top: Val) -> Val:
    """Return an f16 scale (as f32) for ``largest / top``: the nearest, or the next one up if
    ``top`` times it is below 0.998 ``largest``.
    """
    d = near_f16(k, k.max(largest / top, 0.0))
    short = (d * top < largest * 0.998) & (d < F16_MAX)
    return k.select(short, next_f16(k, d, 1), d)


def adjacent_f16(k: Builder, d: Val, step: int) -> Val:
    """Return the next f16 away from 0 for ``step`` 1, towards 0 for -1, ``d`` itself for 0."""
    if not step:
        return d
    stays = d.eq(0.0) if step < 0 else k.abs(d).eq(F16_MAX)
    return k.select(stays, d, next_f16(k, d, step))


def next_f16(k: Builder, d: Val, step: int) -> Val:
    """Return the f16 (as f32) whose bits, as an integer, are those of ``d`` plus ``step``."""
    bits = k.isa.narrow_f16(k, d).bits(i16.like(d.ty)) + step
    return widened(k, bits.bits(f16.like(d.ty)))


def widened(k: Builder, half: Val) -> Val:
    """Convert ``half``, bits of f16, to f32."""
    wide: Val = k.isa.widen_f16(k, half)
    return wide

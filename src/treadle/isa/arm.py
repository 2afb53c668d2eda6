"""64-bit Arm: NEON, then rows with dots of bytes, of mixed-sign bytes, and of bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.isa import portable, sme
from treadle.isa.isa import Op, Tiles
from treadle.jit.types import bf16, i8, i16, i32, u8

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Val

NEON = "llvm.aarch64.neon"
WIDE = 16  # bytes in a register


def _parts(k: Builder, acc: Val, *operands: Val) -> list[tuple[Val, ...]]:
    """Cut an accumulator and its operands into registers; return (accumulator, operands ...) for
    each.
    """
    cut = [k.split(acc, WIDE // 4), *(k.split(v, WIDE) for v in operands)]
    return list(zip(*cut, strict=True))


def _smull(k: Builder, acc: Val, w: Val, x: Val) -> Val:
    """Add dots of four signed bytes of ``w`` and ``x`` to ``acc`` by ``smull``, ``addp`` and
    ``sadalp``: a product is at most 128 * 127, so a pair's sum fits i16.
    """

    def long(a: Val, b: Val) -> Val:
        return k.call(f"{NEON}.smull.v8i16", i16 * 8, [a.ir, b.ir])

    sums = []
    for c, a, b in _parts(k, acc, w, x):
        (a0, a1), (b0, b1) = k.split(a, 8), k.split(b, 8)
        pairs = k.call(f"{NEON}.addp.v8i16", i16 * 8, [long(a0, b0).ir, long(a1, b1).ir])
        sums.append(c + k.call(f"{NEON}.saddlp.v4i32.v8i16", i32 * 4, [pairs.ir]))
    return k.concat(*sums)


def _dot(k: Builder, name: str, acc: Val, w: Val, x: Val) -> Val:
    parts = _parts(k, acc, w, x)
    return k.concat(*(k.call(name, c.ty, [c.ir, a.ir, b.ir]) for c, a, b in parts))


def _sdot(k: Builder, acc: Val, w: Val, x: Val) -> Val:
    return _dot(k, f"{NEON}.sdot.v4i32.v16i8", acc, w, x)


def _by_signed(dot: Op, k: Builder, acc: Val, w: Val, x: Val, w_max: int) -> Val:
    """Implement ``Isa.dot4`` with ``dot(k, acc, w, x)``, a dot of signed bytes.

    Weights above 127 are reduced by 128, and 128 times the sum of x is added back. Of the formats
    only those of 8 bits with minimums have such weights, as ``dot4_least`` is -128 here.
    """
    if w.ty.lanes % WIDE:  # narrower than a register
        return portable.dot4(k, acc, w, x, w_max)
    signed = w.bits(i8.like(w.ty))
    if w.ty.is_signed or w_max <= 127:
        return dot(k, acc, signed, x)
    sums = dot(k, k.zero(acc.ty), k.const(1, signed.ty), x)
    return dot(k, acc + (sums << 7), signed ^ -128, x)


def dot4_smull(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` by 16-bit products: four instructions for 16 bytes. ``w_max``: the
    largest weight.
    """
    return _by_signed(_smull, k, acc, w, x, w_max)


def dot4_sdot(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` with ``sdot``; ``w_max``: the largest weight."""
    return _by_signed(_sdot, k, acc, w, x, w_max)


def dot4_usdot(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` with ``usdot``, which takes unsigned weights as they are."""
    if w.ty.lanes % WIDE:
        return portable.dot4(k, acc, w, x, w_max)
    return _dot(k, f"{NEON}.usdot.v4i32.v16i8", acc, w, x)


def pairs(k: Builder, acc: Val, w: Val, x: Val) -> Val:
    """Implement ``Isa.pairs`` with ``smmla`` or ``usmmla``."""
    name = "smmla" if w.ty.is_signed else "usmmla"
    return k.call(f"{NEON}.{name}.v4i32.v16i8", acc.ty, [acc.ir, w.ir, x.ir])


def dot_bf16(k: Builder, acc: Val, a: Val, b: Val) -> Val:
    """Implement ``Isa.dot_bf16`` with ``bfdot``, which rounds a pair's sum and the total to odd,
    and flushes values below 2**-126 to zero.
    """
    bits = (bf16.like(v.ty) for v in (a, b))
    a, b = (v.bits(ty) for v, ty in zip((a, b), bits, strict=True))
    cut = zip(k.split(acc, 4), k.split(a, 8), k.split(b, 8), strict=True)
    name = f"{NEON}.bfdot.v4f32.v8bf16"
    return k.concat(*(k.call(name, c.ty, [c.ir, p.ir, q.ir]) for c, p, q in cut))


def narrow_bf16(k: Builder, x: Val) -> Val:
    """Implement ``Isa.narrow_bf16`` with ``bfcvtn``."""
    return x.to(bf16).bits(i16.like(x.ty))


def pause(k: Builder) -> None:
    """Implement ``Isa.pause`` with ``isb``, which stalls a core for about ten cycles; on most cores
    ``yield`` is a no-op.
    """
    k.call("llvm.aarch64.isb", None, [k.const(15, i32).ir])


def lookup(k: Builder, table: Sequence[int], index: Val) -> Val:
    """Implement ``Isa.lookup`` with the instruction ``tbl``."""
    same = k.const([*table], u8 * WIDE)
    parts = k.split(index & 15, WIDE)
    return k.concat(*(k.call(f"{NEON}.tbl1.v16i8", p.ty, [same.ir, p.ir]) for p in parts))


PLAIN = replace(
    portable.PORTABLE,
    name="neon",
    needs=frozenset({"neon"}),
    triple="aarch64-unknown-linux-gnu",
    regs=32,
    fused=True,
    dot4=dot4_smull,
    dot4_least=-128,
    dot4_top=127,
    widen_f16=portable.fpext_f16,  # fcvtl
    narrow_f16=portable.fptrunc_f16,  # fcvtn
    pause=pause,
    lookup=lookup,
    tiles=Tiles(floats=(4, 4), bytes=(1, 4), bytes16=(1, 4), peak=(4, 4), by_lane=True),
)
DOTPROD = PLAIN.above(
    "neon_dotprod",
    "dotprod",
    dot4=dot4_sdot,
    dot4_single=True,
    tiles=replace(PLAIN.tiles, bytes=(2, 4), bytes16=(2, 4)),
)
I8MM = DOTPROD.above(
    "neon_i8mm",
    "i8mm",
    dot4=dot4_usdot,
    dot4_least=0,
    dot4_top=255,
    pairs=pairs,
    tiles=replace(DOTPROD.tiles, bytes=(2, 6), bytes16=(2, 6), unit=8),
)
BF16 = I8MM.above("neon_bf16", "bf16", dot_bf16=dot_bf16, narrow_bf16=narrow_bf16)
# LLVM has no feature name for a streaming vector's length; detection supplies ``svl``. Cores share
# the unit (four of an M4 do). This row is not measured, so it is used only on request.
SME = replace(
    BF16.above("sme", "sme", matrix=sme.MATRIX, slow_with=frozenset({"sme"})),
    needs=BF16.needs | {"sme", f"svl{sme.LENGTH}"},
)
ROWS = (PLAIN, DOTPROD, I8MM, BF16, SME)

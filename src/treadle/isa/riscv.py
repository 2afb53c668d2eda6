"""64-bit RISC-V with vectors (RVV 1.0): a row for each register length, from 128 bits on.

A register's length is known when kernels are compiled, so its vectors are plain LLVM vectors of
that width. ``zvl256b`` tells LLVM that they fill a register; ``Isa.exact`` tells it that registers
are no longer. The 512-bit rows run on longer registers too, and leave the rest of each idle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.isa import portable
from treadle.isa.isa import Isa, Tiles
from treadle.jit.types import bf16, f32, i16, i32, i64, u32

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Val

LENGTHS = (128, 256, 512)  # bits in a register


def dot4(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` by products of 16 bits (255 * 127 fits). Neighbours are added in lanes
    twice as wide, twice, because moving lanes is slow here.
    """
    n = w.ty.lanes
    products = (w.to(i16) * x.to(i16)).bits(i32 * (n // 2))
    pairs = ((products << 16 >> 16) + (products >> 16)).bits(i64 * (n // 4))
    return acc + (pairs.to(i32) + (pairs >> 32).to(i32))


def dot4_vqdot(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` with ``vqdot`` or ``vqdotsu``: sums of four neighbours. LLVM's
    operation may add up any lanes; for RISC-V with this extension it becomes that instruction (a
    test checks it).
    """
    n = acc.ty.lanes
    wide = i32 * w.ty.lanes
    products = (w.to(i32) * x.to(i32)).ir
    name = f"llvm.vector.partial.reduce.add.{acc.ty.mangled}.{wide.mangled}"
    assert wide.lanes == 4 * n
    return k.call(name, acc.ty, [acc.ir, products])


def dot_bf16(k: Builder, acc: Val, a: Val, b: Val) -> Val:
    """Implement ``Isa.dot_bf16`` with ``vfwmaccbf16``, for the first of each pair, then the second.
    Narrowing shifts extract them from dwords.
    """
    n = acc.ty.lanes

    def half(v: Val, shift: int) -> Val:
        return (v.bits(u32 * n) >> shift).to(i16).bits(bf16 * n).to(f32)

    for shift in (0, 16):
        acc = k.fma(half(a, shift), half(b, shift), acc)
    return acc


def pause(k: Builder) -> None:
    """Implement ``Isa.pause`` with the instruction ``pause``, a hint; cores without it execute an
    empty fence.
    """
    k.call("llvm.riscv.pause", None, [])


def _vectors(length: int) -> Isa:
    exact = length < LENGTHS[-1]
    return replace(
        portable.PORTABLE,
        name=f"rvv{length}",
        needs=frozenset({"v", f"vlen{length}" if exact else f"zvl{length}b"}),
        exact=exact,
        triple="riscv64-unknown-linux-gnu",
        features=f"+v,+zvl{length}b,+zihintpause",  # pause is a fence on cores without it
        vector_bits=length,
        regs=32,
        fused=True,
        dot4=dot4,
        gather=portable.masked_gather,  # vluxei64.v
        pause=pause,
        # Multiply-adds an instruction at 256 bits: 1.8 with dots of dwords, of nine instructions
        # each; 18.5 with outer products (vwmacc.vx), 10.2 if these need i32 sums.
        tiles=Tiles(
            floats=(4, 6),
            bytes=(8, 6),
            bytes16=(8, 6),
            bytes_i32=(4, 6),
            gemv=((1, 2), (2, 2), (4, 1)),
            peak=(4, 6),
            unit=1,
        ),
    )


def _halves(row: Isa) -> Isa:
    """Return ``row`` for machines with vectors of f16, of which only the conversions are used."""
    return row.above(
        f"{row.name}_zvfh",
        "zvfh",
        widen_f16=portable.fpext_f16,  # vfwcvt.f.f.v
        narrow_f16=portable.fptrunc_f16,  # vfncvt.f.f.w
    )


RVV = [made for length in LENGTHS for row in [_vectors(length)] for made in (row, _halves(row))]
# With dots of bf16: 3.1 products an instruction, against 5.0 with weights widened to f32. So this
# row is used only on request, and exists for one length only.
BF16 = RVV[3].above(
    f"{RVV[2].name}_zvfbfwma",
    "zvfbfwma",
    dot_bf16=dot_bf16,
    slow_with=frozenset({"zvfbfwma"}),
    tiles=replace(RVV[3].tiles, floats=(2, 4)),  # 4 by 6 spills: LLVM widens shared operands
)
# With dots of four bytes. The extension is not ratified; no CPU or emulator here has it, and no
# system reports it. This row only makes its code readable.
VQDOT = RVV[3].above(
    f"{RVV[2].name}_vqdot",
    "experimental-zvqdotq",
    dot4=dot4_vqdot,
    dot4_single=True,
    tiles=replace(RVV[3].tiles, bytes=(2, 3), bytes16=(2, 3), unit=4),
)
ROWS = (*RVV, BF16, VQDOT)

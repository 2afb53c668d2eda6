"""x86-64 with AVX2 and the AVX-512 families: each row extends the one before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.isa import amx, portable
from treadle.isa.isa import Shorts, Tiles
from treadle.jit.types import bf16, i8, i16, u8, u16

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Val

# Intrinsics for 128, 256 and 512 bits.
MADDUBS = {16: "ssse3.pmadd.ub.sw.128", 32: "avx2.pmadd.ub.sw", 64: "avx512.pmaddubs.w.512"}
PSIGNB = {16: "ssse3.psign.b.128", 32: "avx2.psign.b"}
MADDUBS_TOP = 32767 // (2 * 127)
MADDWD = {8: "sse2.pmadd.wd", 16: "avx2.pmadd.wd", 32: "avx512.pmaddw.d.512"}
MULHRS = {8: "ssse3.pmul.hr.sw.128", 16: "avx2.pmul.hr.sw", 32: "avx512.pmul.hr.sw.512"}
RCP14 = {4: i8, 8: i8, 16: i16}  # types of the masks
PSHUFB = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}


def by_register(k: Builder, v: Val, one: Callable[[Val, int], Val]) -> Val:
    """Apply ``one(part, i)`` to the part of ``v`` in each register, number ``i``, or to ``v``
    itself if it is narrower; concatenate the results.
    """
    n = min(v.ty.lanes, k.isa.vector_bits // v.ty.bits)
    return k.concat(*(one(part, i) for i, part in enumerate(k.split(v, n))))


def short_dot(k: Builder, acc: Val | None, w: Val, x: Val, size: Val | None = None) -> Val:
    """Implement ``Shorts.dot`` with ``vpmaddubsw``, which takes w unsigned: x gets the sign of w.
    If ``size`` (|x|) is given, w gets the sign of x instead, and ``size`` is the unsigned operand.
    """
    n = w.ty.lanes
    if size is not None and n in PSIGNB:
        w, x = size, k.call(f"llvm.x86.{PSIGNB[n]}", x.ty, [w.ir, x.ir])
    elif w.ty.is_signed:
        if n in PSIGNB:
            x = k.call(f"llvm.x86.{PSIGNB[n]}", x.ty, [x.ir, w.ir])
        else:
            x = k.select(w < 0, -x, x)
        w = k.abs(w).bits(u8 * n)
    result = k.call(f"llvm.x86.{MADDUBS[n]}", i16 * (n // 2), [w.ir, x.ir])
    return result if acc is None else k.pin(acc + result, "v")


def dot2(k: Builder, acc: Val, w: Val, x: Val) -> Val:
    """Implement ``Shorts.scale`` and ``Isa.dot_words`` with ``vpmaddwd``: ``acc[i] += w[2i] x[2i] +
    w[2i+1] x[2i+1]`` of i16, in i32.
    """
    return k.pin(acc + k.call(f"llvm.x86.{MADDWD[w.ty.lanes]}", acc.ty, [w.ir, x.ir]), "v")


def high_short(k: Builder, a: Val, b: Val) -> Val:
    """Implement ``Shorts.high`` with ``vpmulhrsw``: ``(a[i] b[i] + 2**14) >> 15`` of i16."""
    return k.call(f"llvm.x86.{MULHRS[a.ty.lanes]}", a.ty, [a.ir, b.ir])


def widen_short(k: Builder, acc: Val, s: Val) -> Val:
    """Implement ``Shorts.widen`` with ``vpmaddwd`` and a vector of ones: ``acc[i] += s[2i] +
    s[2i+1]`` of i16, in i32.
    """
    return dot2(k, acc, s, k.const(1, s.ty))


def dot4_maddubs(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` with ``vpmaddubsw``, then pairs by ``vpmaddwd``: for signed weights,
    and for weights so small that no i16 pair sum saturates.

    Other weights are multiplied as i16, even and odd bytes apart: two products and two sums for
    each accumulator. The rest depends on one operand only, and a tile shares it.
    """
    if w.ty.is_signed or w_max <= MADDUBS_TOP:
        return widen_short(k, acc, short_dot(k, None, w, x))
    words = w.ty.lanes // 2
    w = w.bits(u16 * words)
    x = x.bits(i16 * words)
    acc = dot2(k, acc, (w & 0xFF).bits(i16 * words), (x << 8) >> 8)
    return dot2(k, acc, (w >> 8).bits(i16 * words), x >> 8)


def dot4_vnni(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` with ``vpdpbusd``, at the width of the operands."""
    bits = w.ty.lanes * 8
    return k.call(f"llvm.x86.avx512.vpdpbusd.{bits}", acc.ty, [acc.ir, w.ir, x.ir])


def dot_words_vnni(k: Builder, acc: Val, a: Val, b: Val) -> Val:
    """Implement ``Isa.dot_words`` with ``vpdpwssd``, at the width of the operands."""
    bits = a.ty.lanes * 16
    return k.call(f"llvm.x86.avx512.vpdpwssd.{bits}", acc.ty, [acc.ir, a.ir, b.ir])


def dot_bf16(k: Builder, acc: Val, a: Val, b: Val) -> Val:
    """Implement ``Isa.dot_bf16`` with ``vdpbf16ps``, at the width of the operands."""
    bits = a.ty.lanes * 16
    ty = bf16 * a.ty.lanes
    return k.call(
        f"llvm.x86.avx512bf16.dpbf16ps.{bits}", acc.ty, [acc.ir, a.bits(ty).ir, b.bits(ty).ir]
    )


def narrow_bf16(k: Builder, x: Val) -> Val:
    """Implement ``Isa.narrow_bf16`` with ``vcvtne2ps2bf16``, for two registers at once."""
    n = k.isa.lanes
    if x.ty.lanes % (2 * n):
        return portable.narrow_bf16(k, x)
    parts = k.split(x, n)
    ty = bf16 * (2 * n)
    name = f"llvm.x86.avx512bf16.cvtne2ps2bf16.{32 * n}"
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return k.concat(*(k.call(name, ty, [b.ir, a.ir]).bits(i16 * (2 * n)) for a, b in pairs))


def pause(k: Builder) -> None:
    """Implement ``Isa.pause`` with the instruction ``pause``."""
    k.call("llvm.x86.sse2.pause", None, [])


def lookup(k: Builder, table: Sequence[int], index: Val) -> Val:
    """Implement ``Isa.lookup`` with ``vpshufb``, which looks up within every 16 bytes of a
    register.
    """

    def one(part: Val, i: int) -> Val:
        n = part.ty.lanes
        same = k.const([*table] * (n // 16), part.ty)
        return k.call(f"llvm.x86.{PSHUFB[n]}", part.ty, [same.ir, part.ir])

    return by_register(k, index & 15, one)


def multishift(k: Builder, v: Val, at: Sequence[int]) -> Val:
    """Implement ``Isa.multishift`` with ``vpmultishiftqb``."""
    if v.ty.lanes < 16:  # narrower than a register
        return portable.multishift(k, v, at)

    def one(part: Val, i: int) -> Val:
        n = part.ty.lanes
        first = k.const([at[(i * n + j) % len(at)] % 64 for j in range(n)], part.ty)
        return k.call(f"llvm.x86.avx512.pmultishift.qb.{8 * n}", part.ty, [first.ir, part.ir])

    return by_register(k, v, one)


def bit_spread(k: Builder, v: Val, at: Sequence[int], to: int) -> Val:
    """Implement ``Isa.bit_spread`` with ``multishift``: take 8 bits of the 64 for each byte, placed
    so that a mask leaves the wanted one.
    """
    return multishift(k, v, [bit - to for bit in at]) & (1 << to)


def lookup_words(k: Builder, table: Val, index: Val) -> Val:
    """Implement ``Isa.lookup_words`` with ``vpermw``."""
    args = [table.ir, index.bits(table.ty).ir]
    return k.call("llvm.x86.avx512.permvar.hi.512", table.ty, args)


def lookup_any(k: Builder, table: Sequence[int], index: Val) -> Val:
    """Implement ``Isa.lookup`` with ``vpermb``, which looks up in the whole register. The table is
    repeated in it, so the index need not be masked.
    """

    def one(part: Val, i: int) -> Val:
        n = part.ty.lanes
        same = k.const([*table] * (n // 16), part.ty)
        return k.call(f"llvm.x86.avx512.permvar.qi.{8 * n}", part.ty, [same.ir, part.ir])

    return by_register(k, index, one)


def reciprocal(k: Builder, x: Val) -> Val:
    """Implement ``Isa.reciprocal`` with ``vrcp14ps`` and one Newton step, for twice its bits: a
    division of 16 lanes occupies the core for 16 cycles.
    """
    if x.ty.lanes < min(RCP14):
        return portable.reciprocal(k, x)

    def one(part: Val, i: int) -> Val:
        n = part.ty.lanes
        args = [part.ir, k.zero(part.ty).ir, k.const(-1, RCP14[n]).ir]
        near = k.call(f"llvm.x86.avx512.rcp14.ps.{32 * n}", part.ty, args)
        return k.fma(k.fma(-part, near, k.const(1.0, part.ty)), near, near)

    return by_register(k, x, one)


def bit_extract(k: Builder, v: Val, shift: Sequence[int], width: int, to: int) -> Val:
    """Implement ``Isa.bit_extract`` with ``vgf2p8affineqb``: each bit of a byte becomes a sum of
    any of its bits. A matrix serves 8 bytes; its rows go from the highest bit to the lowest.
    """
    if v.ty.lanes < 16 or set(shift) == {to}:  # narrower than a register; a mask alone
        return portable.bit_extract(k, v, shift, width, to)
    whole = (1 << width) - 1
    rows = [
        [1 << (bit - to + s) if whole << to >> bit & 1 else 0 for bit in reversed(range(8))]
        for s in shift
    ]

    def one(part: Val, i: int) -> Val:
        n = part.ty.lanes
        at = [rows[(i * n // 8 + q) % len(shift)] for q in range(n // 8)]
        matrix = k.const([byte for row in at for byte in row], part.ty)
        args = [part.ir, matrix.ir, k.const(0, u8).ir]  # the last operand is added to every byte
        return k.call(f"llvm.x86.vgf2p8affineqb.{8 * n}", part.ty, args)

    return by_register(k, v, one)


AVX2 = replace(
    portable.PORTABLE,
    name="avx2",
    needs=frozenset({"avx2", "fma", "f16c", "bmi2"}),
    cpu="x86-64-v3",
    vector_bits=256,
    dot4=dot4_maddubs,
    dot4_least=-128,
    dot4_top=MADDUBS_TOP,
    dot_words=dot2,
    shorts=Shorts(short_dot, widen_short, dot2, high_short),
    # Zen 3, one core, Q8_0 and Q4_0: 2 x 4 gives 115 and 187 GOP/s, 2 x 5 119 and 205, but eight
    # sequences leave a fifth of two of its tiles empty. One row of large blocks at a time spills
    # less than two: K-quants were 1.05 to 1.13 times as fast, with two sequences 1.16 to 1.37.
    # Runs of rows are for F32, F16, BF16 and Q8_0: one sequence 1.2 to 1.4 times.
    tiles=Tiles(
        bytes=(2, 4),
        bytes16=(2, 4),
        words=(2, 4),
        gemv_large=((1, 1), (2, 1), (4, 1)),
        gemv_ahead=1024,
        lanes=16,
        float_lanes=32,
    ),
    fused=True,
    memory_operands=True,
    halves=True,
    widen_f16=portable.fpext_f16,  # vcvtph2ps
    narrow_f16=portable.fptrunc_f16,  # vcvtps2ph
    pause=pause,
    lookup=lookup,
)
VNNI: dict[str, Any] = {
    "dot4": dot4_vnni,
    "dot4_least": 0,
    "dot4_top": 255,
    "dot4_single": True,
    "shorts": None,
    "dot_words": dot_words_vnni,
}
AVX2_VNNI = AVX2.above(
    "avx2_vnni",
    "avxvnni",
    **VNNI,
    # Lanes, runs and single rows were not measured with these dots.
    tiles=replace(
        AVX2.tiles, gemv_large=((1, 2), (2, 2), (4, 1)), gemv_ahead=0, lanes=0, words=(2, 5)
    ),
)
# Tiles for 32 registers. Four runs of rows are 1.2 times as fast as four adjacent rows on Sapphire
# Rapids, 1.02 to 1.15 times on Zen 4. Five tokens times F16 take 0.4 times as long by a gemv of
# eight as by strips of rows or on matrix registers (Sapphire Rapids, one thread): both read 16 rows
# side by side, and wait for memory.
WIDE = Tiles(
    floats=(2, 12),
    bytes=(2, 8),
    bytes16=(2, 6),
    words=(4, 6),
    gemv=((1, 4), (2, 4), (4, 4), (8, 2)),
    float_gemv=8,
    gemv_large=((1, 4), (2, 2), (4, 1)),
    gemv_ahead=2048,
    peak=(4, 6),
    lanes=128,
    float_lanes=128,
)
# x86-64-v4 prefers 256-bit vectors, which would split every 512-bit one.
AVX512 = replace(
    AVX2,
    name="avx512",
    needs=AVX2.needs | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"},
    cpu="x86-64-v4",
    features="-prefer-256-bit",
    vector_bits=512,
    halves=False,
    dot_words=None,  # not measured without vpdpwssd
    lookup_words=lookup_words,
    gather=portable.masked_gather,  # vpgatherd*; LLVM splits it again on earlier CPUs
    reciprocal=reciprocal,
    regs=32,
    tiles=replace(WIDE, bytes=(2, 4), bytes16=(2, 4), words=(0, 0), lanes=0),
)
AVX512_VNNI = AVX512.above("avx512_vnni", "avx512vnni", **VNNI, tiles=WIDE)
# One instruction for any order of bytes, and for any bits in bytes.
AVX512_VBMI = AVX512_VNNI.above(
    "avx512_vbmi",
    "avx512vbmi avx512bitalg gfni",
    bit_extract=bit_extract,
    multishift=multishift,
    bit_spread=bit_spread,
    lookup=lookup_any,
)
AVX512_BF16 = AVX512_VBMI.above(
    "avx512_bf16",
    "avx512bf16",
    dot_bf16=dot_bf16,
    narrow_bf16=narrow_bf16,
    # Intel's cores with AMX run vdpbf16ps at half the speed of FMA products: 114 GFLOP/s a core
    # against 195 in f32 (Sapphire Rapids; `doctor`). AMD's run it at twice the speed.
    slow_with=frozenset({"amx-bf16"}),
    tiles=replace(WIDE, gemv_ahead=1024),
)
# Matrix registers are used in prefill (F16 and F32 in several parts), strip products of bytes,
# attention and chunked recurrences; everything else as in AVX512_VBMI.
AMX_BF16 = AVX512_VBMI.above(
    "amx_bf16",
    "avx512bf16 amx-tile amx-bf16",
    narrow_bf16=narrow_bf16,
    matrix=amx.MATRIX,
)
# `prefetchw`, products of bytes: such CPUs always have them, even under a hypervisor that does not
# report them.
AMX_BF16 = replace(AMX_BF16, features=f"{AMX_BF16.features},+prfchw,+amx-int8")
ROWS = (AVX2, AVX2_VNNI, AVX512, AVX512_VNNI, AVX512_VBMI, AVX512_BF16, AMX_BF16)

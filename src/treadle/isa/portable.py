"""Reference code of every operation of ``Isa``, in plain vector arithmetic that each LLVM back end
can lower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from treadle.isa.isa import Isa, MatrixUnit
from treadle.jit.types import Ty, f16, f32, i16, i32, i64, u8, u16, u32, u64

if TYPE_CHECKING:
    from treadle.jit.language import Builder, Operand, Val


def dot4(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` by products of bytes widened to i16, in i32; neighbours are added
    twice.
    """
    n = w.ty.lanes
    wide_w = w.to(i16)
    wide_x = x.to(i16)
    even = range(0, n, 2)
    odd = range(1, n, 2)

    def part(v: Val, lanes: range) -> Val:
        return k.shuffle(v, v, lanes).to(i32)

    pairs = part(wide_w, even) * part(wide_x, even) + part(wide_w, odd) * part(wide_x, odd)
    half = range(0, n // 2, 2), range(1, n // 2, 2)
    return acc + (k.shuffle(pairs, pairs, half[0]) + k.shuffle(pairs, pairs, half[1]))


def dot_words(k: Builder, acc: Val, a: Val, b: Val) -> Val:
    """Implement ``Isa.dot_words`` by products in i32, then sums of neighbours."""
    halves = range(0, a.ty.lanes, 2), range(1, a.ty.lanes, 2)
    even, odd = (k.shuffle(a, a, at).to(i32) * k.shuffle(b, b, at).to(i32) for at in halves)
    return acc + (even + odd)


def pairs(k: Builder, acc: Val, w: Val, x: Val) -> Val:
    """Implement ``Isa.pairs`` by products in i32 of each row's eight values with each token's;
    neighbours are added three times.
    """
    rows = [8 * i + at for i in (0, 1) for _ in (0, 1) for at in range(8)]
    products = k.shuffle(w, w, rows).to(i32) * k.concat(x, x).to(i32)
    while products.ty.lanes > acc.ty.lanes:
        n = products.ty.lanes
        even, odd = (k.shuffle(products, products, range(half, n, 2)) for half in (0, 1))
        products = even + odd
    return acc + products


def widen_f16(k: Builder, h: Val) -> Val:
    """Implement ``Isa.widen_f16`` by integer arithmetic: shift the fields into place, rescale by
    2**112, then fix infinities and NaNs.
    """
    bits = h.bits(u16.like(h.ty)).to(u32)
    sign = (bits & 0x8000) << 16
    field = (bits & 0x7FFF) << 13
    scaled = (field.bits(f32.like(h.ty)) * 5.192296858534828e33).bits(u32.like(h.ty))
    special = (bits & 0x7C00) >= 0x7C00
    return (k.select(special, field | 0x7F800000, scaled) | sign).bits(f32.like(h.ty))


def narrow_f16(k: Builder, x: Val) -> Val:
    """Implement ``Isa.narrow_f16`` by integer arithmetic, rounding to nearest even."""
    bits = x.bits(u32.like(x.ty))
    sign = (bits & 0x80000000) >> 16
    mag = bits & 0x7FFFFFFF
    # Normal numbers: round the 13 lost bits to even, then shift the exponent's bias from 127 to 15.
    even = (mag >> 13) & 1
    normal = (mag + even + 0xFFF - (112 << 23)) >> 13
    # Subnormal results: adding 0.5 makes the FPU round at bit 2**-24.
    small = (mag.bits(f32.like(x.ty)) + 0.5).bits(u32.like(x.ty)) - 0x3F000000
    magnitude = k.select(mag < (113 << 23), small, normal)
    overflow = k.const(0x7C00, mag.ty)
    magnitude = k.select(mag >= 0x47800000, overflow, magnitude)
    magnitude = k.select(mag > 0x7F800000, k.const(0x7E00, mag.ty), magnitude)
    return (magnitude | sign).to(i16).bits(f16.like(x.ty))


def narrow_bf16(k: Builder, x: Val) -> Val:
    """Implement ``Isa.narrow_bf16`` by adding half a unit of the last place kept, less one if that
    would round a tie up to an odd number.
    """
    bits = x.bits(u32.like(x.ty))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(i16)


def dot_bf16(k: Builder, acc: Val, a: Val, b: Val) -> Val:
    """Implement ``Isa.dot_bf16`` by two multiply-adds: bf16 is the upper half of f32."""
    a, b = (v.bits(u32.like(acc.ty)) for v in (a, b))
    for part in ((a << 16, b << 16), (a & 0xFFFF0000, b & 0xFFFF0000)):
        x, y = (v.bits(acc.ty) for v in part)
        acc = k.fma(x, y, acc)
    return acc


def pause(k: Builder) -> None:
    """Implement ``Isa.pause`` without an instruction: a fence that keeps LLVM from removing the
    loop around it.
    """
    k.fence()


def lookup(k: Builder, table: Sequence[int], index: Val) -> Val:
    """Implement ``Isa.lookup`` by a tree of selects: each of four bits of the index halves the rest
    of the table.
    """
    left = [k.const(v, index.ty) for v in table]
    for bit in (1, 2, 4, 8):
        zero = (index & bit).eq(0)
        left = [k.select(zero, a, b) for a, b in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def gather(k: Builder, table: Val, index: Val, ty: Ty) -> Val:
    """Implement ``Isa.gather`` by one load for each lane."""
    found = k.zero(ty)
    for lane in range(ty.lanes):
        at = k.extract(index, lane).to(i64) * ty.scalar.n_bytes
        found = k.insert(found, k.load(table, ty.scalar, offset=at), lane)
    return found


def reciprocal(k: Builder, x: Val) -> Val:
    """Implement ``Isa.reciprocal`` by a division."""
    return 1.0 / x


def bit_extract(k: Builder, v: Val, shift: Sequence[int], width: int, to: int) -> Val:
    """Implement ``Isa.bit_extract`` by a shift, then a mask."""
    lanes = v.ty.lanes
    mask = ((1 << width) - 1) << to
    if len(set(shift)) == 1:
        by = shift[0] - to
        moved = v >> by if by > 0 else v << -by if by < 0 else v
        return moved & mask
    words = v.bits(u64 * (lanes // 8))  # bits that cross into another byte are masked off below
    by_word = [shift[i % len(shift)] - to for i in range(lanes // 8)]
    for part, down in ((by_word, True), ([-by for by in by_word], False)):
        if any(by > 0 for by in part):
            n = k.const([max(by, 0) for by in part], words.ty)
            words = words >> n if down else words << n
    return words.bits(v.ty) & mask


def multishift(k: Builder, v: Val, at: Sequence[int]) -> Val:
    """Implement ``Isa.multishift``: put the two bytes that hold the bits side by side, and shift
    them.
    """
    bits = [at[i % len(at)] % 64 for i in range(v.ty.lanes)]
    pairs = [i // 8 * 8 + (bit // 8 + j) % 8 for i, bit in enumerate(bits) for j in (0, 1)]
    words = k.shuffle(v, v, pairs).bits(u16 * v.ty.lanes)
    return (words >> k.const([bit % 8 for bit in bits], words.ty)).to(u8)


def bit_spread(k: Builder, v: Val, at: Sequence[int], to: int) -> Val:
    """Implement ``Isa.bit_spread``: select the byte that holds the bit, and test it."""
    bits = [at[i % len(at)] for i in range(v.ty.lanes)]
    held = k.shuffle(v, v, [i // 8 * 8 + bit // 8 for i, bit in enumerate(bits)])
    zero = (held & k.const([1 << bit % 8 for bit in bits], v.ty)).eq(0)
    return k.select(zero, k.zero(v.ty), k.const(1 << to, v.ty))


# Most machines have an instruction for these, which LLVM selects by itself.


def fpext_f16(k: Builder, h: Val) -> Val:
    """Implement ``Isa.widen_f16`` by LLVM's ``fpext``."""
    return h.bits(f16.like(h.ty)).to(f32)


def fptrunc_f16(k: Builder, x: Val) -> Val:
    """Implement ``Isa.narrow_f16`` by LLVM's ``fptrunc``, rounding to nearest even."""
    return x.to(f16)


def masked_gather(k: Builder, table: Val, index: Val, ty: Ty) -> Val:
    """Implement ``Isa.gather`` by LLVM's gather intrinsic."""
    return k.masked_gather(table, index, ty)


MATRIX_BYTES = 1024  # bytes of one register


# Bytes a row of a, for functions whose registers are configured for bytes.
_BYTES: WeakKeyDictionary[Builder, int] = WeakKeyDictionary()


def matrix_begin(k: Builder, p: Val) -> None:
    """Implement ``MatrixUnit.begin``: emit nothing; the registers are the function's own stack
    memory.
    """


def matrix_begin_bytes(k: Builder, p: Val, n: int) -> None:
    """Implement ``MatrixUnit.begin_bytes``: emit nothing, but record that rows of a have ``n``
    bytes, so that loads read no further.
    """
    _BYTES[k] = n


def matrix_end(k: Builder) -> None:
    """Implement ``MatrixUnit.end``: emit nothing."""


def matrix_scope(k: Builder, name: str, args: Sequence[Val], build: Callable[..., None]) -> None:
    """Implement ``MatrixUnit.scope``: emit ``build`` in place."""
    build(k, *args)


def _row(k: Builder, r: int, i: Val) -> Val:
    return k.room(8 * MATRIX_BYTES, "registers") + MATRIX_BYTES * r + i * 64


def matrix_zero(k: Builder, r: int) -> None:
    """Implement ``MatrixUnit.zero`` without matrix instructions: store zeros in the 16 rows of
    register ``r``, which is memory here.
    """
    with k.loop(16) as i:
        k.store(_row(k, r, i), k.zero(i32 * 16))


def matrix_load(k: Builder, r: int, p: Val, stride: int) -> None:
    """Implement ``MatrixUnit.load`` and ``load_passing``: copy the rows from memory to the
    register, which is memory too, one by one.
    """
    n = _BYTES.get(k, 64)
    rows = n // 4 if r >= 6 else 16
    dwords = n // 4 if r in (4, 5) else 16
    with k.loop(rows) as i:
        k.store(_row(k, r, i), k.load(p + i * stride, i32 * dwords))


def matrix_store(k: Builder, r: int, p: Val, stride: Operand) -> None:
    """Implement ``MatrixUnit.store``: copy the 16 rows of the register to memory, one by one."""
    with k.loop(16) as i:
        k.store(p + i * stride, k.load(_row(k, r, i), i32 * 16))


def matrix_dots_bf16(k: Builder) -> None:
    """Implement ``MatrixUnit.dots_bf16``: add its four products, one after the other."""
    for c in range(4):
        _dot_bf16(k, c, 4 + c // 2, 6 + c % 2)


def _dot_bf16(k: Builder, c: int, a: int, b: int) -> None:
    """Add the product of registers ``a`` and ``b`` to register ``c``. The even and the odd values
    of K are summed separately, one row of b after the other.
    """
    high = 0xFFFF0000
    ty = f32 * 16
    with k.loop(16) as i:
        even = k.var(k.zero(ty))
        odd = k.var(k.zero(ty))
        with k.loop(16) as j:
            x = k.splat(k.load(_row(k, a, i) + j * 4, u32), u32 * 16)
            w = k.load(_row(k, b, j), u32 * 16)
            even.v = k.fma((x << 16).bits(ty), (w << 16).bits(ty), even.v)
            odd.v = k.fma((x & high).bits(ty), (w & high).bits(ty), odd.v)
        k.store(_row(k, c, i), k.load(_row(k, c, i), ty) + (even.v + odd.v))


def matrix_dot_bytes(k: Builder, c: int, a: int, b: int) -> None:
    """Implement ``MatrixUnit.dot_bytes``: add the products of one dword of a's rows after the
    other.
    """
    with k.loop(16) as i:
        total = k.var(k.load(_row(k, c, i), i32 * 16))
        with k.loop(_BYTES[k] // 4) as j:
            x = k.splat(k.load(_row(k, a, i) + j * 4, i32), i32 * 16)
            w = k.load(_row(k, b, j), i32 * 16)
            for at in (24, 16, 8, 0):  # sign-extends one byte
                total.v = total.v + (x << at >> 24) * (w << at >> 24)
        k.store(_row(k, c, i), total.v)


# Emulated matrix registers, in memory; slower than vectors.
MATRIX = MatrixUnit(
    begin=matrix_begin,
    end=matrix_end,
    zero=matrix_zero,
    load=matrix_load,
    load_passing=matrix_load,
    store=matrix_store,
    dots_bf16=matrix_dots_bf16,
    scope=matrix_scope,
    begin_bytes=matrix_begin_bytes,
    dot_bytes=matrix_dot_bytes,
    ordered=True,
)
PORTABLE = Isa(
    name="portable",
    needs=frozenset(),
    cpu="",
    features="",
    vector_bits=128,
    regs=16,
    dot4=dot4,
    pairs=pairs,
    dot_bf16=None,
    widen_f16=widen_f16,
    narrow_f16=narrow_f16,
    narrow_bf16=narrow_bf16,
    pause=pause,
    lookup=lookup,
    gather=gather,
    reciprocal=reciprocal,
    bit_extract=bit_extract,
    multishift=multishift,
    bit_spread=bit_spread,
)

"""NVIDIA GPUs, through LLVM's NVPTX: the operations of a thread, and those of a block of threads.

A GPU thread has no vector registers. LLVM splits vectors into registers of four bytes, so
operations on bytes work on words of four here. The driver compiles PTX for the card: a row serves
the first card with the features it needs, and all later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from treadle.isa import portable
from treadle.isa.isa import Isa, Simt, Tiles
from treadle.jit.language import Builder, Val
from treadle.jit.types import Ty, bf16, f16, f32, i16, i32, i64, u32

# LLVM's address spaces
GLOBAL = 1
SHARED = 3
SREG = "llvm.nvvm.read.ptx.sreg"


def _words(v: Val) -> Val:
    """View ``v``, a vector of bytes, as a vector of u32, four bytes each."""
    return v.bits(u32 * (v.ty.lanes // 4))


def _each_word(k: Builder, v: Val, ty: Ty, one: Any) -> Val:
    """Apply ``one(word)``, which returns a u32, to each u32 word of ``v``; return the results as
    one ``ty``.
    """
    words = _words(v)
    made = words
    for i in range(words.ty.lanes):
        made = k.insert(made, one(k.extract(words, i)), i)
    return made.bits(ty)


def prmt(k: Builder, a: Val, b: Val | int, picked: Val | int) -> Val:
    """Pick bytes by ``prmt``: byte i of the result is the byte of ``a`` (0 to 3) or ``b`` (4 to 7)
    whose number is nibble i of ``picked``. A number plus 8 replicates that byte's sign bit instead.
    """
    given = [a, k.val(b, u32), k.val(picked, u32)]
    return k.call("llvm.nvvm.prmt", u32, [v.ir for v in given])


# -- operations of a thread --------------------------------------------------------------------


def dot4(k: Builder, acc: Val, w: Val, x: Val, w_max: int = 255) -> Val:
    """Implement ``Isa.dot4`` with ``dp4a``."""
    n = acc.ty.lanes
    kind = "s" if w.ty.is_signed else "u"
    codes = w.bits(i32 * n)
    values = x.bits(i32 * n)
    result = acc
    for i in range(n):
        each = [k.extract(v, i).ir for v in (codes, values, acc)]
        result = k.insert(result, k.call(f"llvm.nvvm.idp4a.{kind}.s", i32, each), i)
    return result


def narrow_bf16(k: Builder, x: Val) -> Val:
    """Implement ``Isa.narrow_bf16`` with ``cvt.rn.bf16x2.f32``."""
    return x.to(bf16).bits(i16.like(x.ty))


def lookup(k: Builder, table: Sequence[int], index: Val) -> Val:
    """Implement ``Isa.lookup`` with ``prmt`` in each half of the table: picks are nibbles; then the
    half is chosen by bit 3 of the index, spread over its byte.
    """
    quarter = [
        k.const(int.from_bytes(bytes(v & 255 for v in table[i : i + 4]), "little"), u32)
        for i in range(0, 16, 4)
    ]

    def four(word: Val) -> Val:
        low = word & 0x07070707
        picked = prmt(k, low | (low >> 4), 0, 0x4420)
        high = prmt(k, word << 4, 0, 0xBA98)
        a, b = (prmt(k, quarter[i], quarter[i + 1], picked) for i in (0, 2))
        return (a & (high ^ 0xFFFFFFFF)) | (b & high)

    return _each_word(k, index, index.ty, four)


def gather(k: Builder, table: Val, index: Val, ty: Ty) -> Val:
    """Implement ``Isa.gather`` by one aligned load for each lane."""
    found = k.zero(ty)
    for lane in range(ty.lanes):
        at = k.extract(index, lane).to(i64) * ty.scalar.n_bytes
        one = k.load(table, ty.scalar, offset=at, align=ty.scalar.n_bytes)
        found = k.insert(found, one, lane)
    return found


def reciprocal(k: Builder, x: Val) -> Val:
    """Implement ``Isa.reciprocal`` with ``rcp.approx``, to 1 unit in the last place."""
    if not x.ty.lanes:
        return k.call("llvm.nvvm.rcp.approx.ftz.f", f32, [x.ir])
    result = x
    for i in range(x.ty.lanes):
        result = k.insert(result, reciprocal(k, k.extract(x, i)), i)
    return result


def bit_extract(k: Builder, v: Val, shift: Sequence[int], width: int, to: int) -> Val:
    """Implement ``Isa.bit_extract`` by shifts of words; bits that cross into another byte are
    masked off.
    """
    if v.ty.lanes % 8:
        return portable.bit_extract(k, v, shift, width, to)
    mask = (((1 << width) - 1) << to) * 0x01010101
    words = _words(v)
    made = _words(v)
    for i in range(words.ty.lanes):
        by = shift[i // 2 % len(shift)] - to
        word = k.extract(words, i)
        moved = word >> by if by > 0 else word << -by if by < 0 else word
        made = k.insert(made, moved & mask, i)
    return made.bits(v.ty)


# -- operations of a block of threads -----------------------------------------------------------


def _register(name: str) -> Any:
    def read(k: Builder) -> Val:
        return k.call(f"{SREG}.{name}", u32, []).to(i64)

    return read


def shared(k: Builder) -> Val:
    """Return the address of the block's dynamic shared memory; the launch decides its size."""
    return k.outside("shared", SHARED, 128)


def barrier(k: Builder) -> None:
    """Implement ``Simt.barrier`` with ``barrier.sync``, for all threads of the block."""
    k.call("llvm.nvvm.barrier.cta.sync.aligned.all", None, [k.const(0, i32).ir])


def copy_async(k: Builder, to: Val, frm: Val, n_bytes: int = 16) -> None:
    """Implement ``Simt.copy_async`` with ``cp.async``; copies of 16 bytes bypass the first-level
    cache.
    """
    kind = "cg" if n_bytes == 16 else "ca"
    name = f"llvm.nvvm.cp.async.{kind}.shared.global.{n_bytes}"
    k.call(name, None, [k.in_space(to, SHARED), k.in_space(frm, GLOBAL)])


def commit(k: Builder) -> None:
    """Implement ``Simt.commit`` with ``cp.async.commit_group``."""
    k.call("llvm.nvvm.cp.async.commit.group", None, [])


def wait(k: Builder, n: int) -> None:
    """Implement ``Simt.wait`` with ``cp.async.wait_group``."""
    k.call("llvm.nvvm.cp.async.wait.group", None, [k.const(n, i32).ir])


def warp_barrier(k: Builder) -> None:
    """Implement ``Simt.warp_barrier`` with ``bar.warp.sync``, for all lanes."""
    k.call("llvm.nvvm.bar.warp.sync", None, [k.const(-1, i32).ir])


def shuffle(k: Builder, v: Val, lanes: int) -> Val:
    """Implement ``Simt.shuffle`` with ``shfl.sync.bfly``."""
    args = [k.const(-1, i32).ir, v.bits(i32).ir, k.const(lanes, i32).ir, k.const(31, i32).ir]
    return k.call("llvm.nvvm.shfl.sync.bfly.i32", i32, args).bits(v.ty)


def load_matrix(k: Builder, p: Val) -> list[Val]:
    """Implement ``Simt.load_matrix`` with ``ldmatrix``."""
    name = "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.b16.p3"
    return k.call_several(name, 4, u32, [k.in_space(p, SHARED)])


def load_matrix_t(k: Builder, p: Val) -> list[Val]:
    """Implement ``Simt.load_matrix_t`` with ``ldmatrix.trans``."""
    name = "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.trans.b16.p3"
    return k.call_several(name, 4, u32, [k.in_space(p, SHARED)])


def mma_f16(k: Builder, c: Sequence[Val], a: Sequence[Val], b: Sequence[Val]) -> list[Val]:
    """Implement ``Simt.mma_f16`` with ``mma.sync``."""
    operands = [v.bits(f16 * 2).ir for v in (*a, *b)] + [v.ir for v in c]
    return k.call_several("llvm.nvvm.mma.m16n8k16.row.col.f32.f32", 4, f32, operands)


def mma_bf16(k: Builder, c: Sequence[Val], a: Sequence[Val], b: Sequence[Val]) -> list[Val]:
    """Implement ``Simt.mma_bf16`` with ``mma.sync``."""
    operands = [v.ir for v in (*a, *b, *c)]
    return k.call_several("llvm.nvvm.mma.m16n8k16.row.col.bf16", 4, f32, operands)


SIMT = Simt(
    tid=_register("tid.x"),
    cta=_register("ctaid.x"),
    n_ctas=_register("nctaid.x"),
    shared=shared,
    barrier=barrier,
    warp_barrier=warp_barrier,
    copy_async=copy_async,
    commit=commit,
    wait=wait,
    shuffle=shuffle,
    load_matrix=load_matrix,
    load_matrix_t=load_matrix_t,
    mma_f16=mma_f16,
    mma_bf16=mma_bf16,
)
SM_80 = replace(
    portable.PORTABLE,
    name="sm_80",
    triple="nvptx64-nvidia-cuda",
    cpu="sm_80",
    features="+ptx70",
    vector_bits=128,  # a thread's widest load
    regs=255,
    fused=True,
    dot4=dot4,
    dot4_least=-128,
    dot_bf16=portable.dot_bf16,
    widen_f16=portable.fpext_f16,
    narrow_f16=portable.fptrunc_f16,
    narrow_bf16=narrow_bf16,
    lookup=lookup,
    gather=gather,
    reciprocal=reciprocal,
    bit_extract=bit_extract,
    simt=SIMT,
    aligned=16,
    # Activations stay floats, in plain rows: a block of threads shares its conversion of them.
    # Tiles are those of ``devices/cuda/kernels/gemm.py``, in units of sixteen rows.
    rounds=False,
    tiles=Tiles(floats=(8, 1), few=(2, 16), gemv=((1, 1), (2, 1), (4, 1))),
)
SM_90 = replace(SM_80, name="sm_90", cpu="sm_90", features="+ptx78")
ROWS = {80: SM_80, 90: SM_90}  # by the compute capability they need, times ten


def row(major: int, minor: int) -> Isa | None:
    """Return the best row for a card of compute capability ``major.minor``; None if the card is too
    old.
    """
    fit = [need for need in ROWS if need <= 10 * major + minor]
    return ROWS[max(fit)] if fit else None

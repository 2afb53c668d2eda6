"""A kernel as PTX, the assembly text that NVIDIA's driver compiles for the GPU."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING

from treadle.devices.cuda.launch_args import emit_entry, gpu_source_hash
from treadle.errors import CacheError
from treadle.jit import cache
from treadle.jit.kernel import CompileStats, begin, describe_spec, isa_key
from treadle.jit.types import i64, ptr

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.spec import Spec

NAME = r"%[\w.]+"
POINTER = re.compile(rf"^( +)({NAME}) = load ptr, ptr ({NAME})(.*)$", re.MULTILINE)
SLOT = re.compile(rf"^ +({NAME}) = alloca ptr", re.MULTILINE)
SHIFT = re.compile(
    rf"^( +)({NAME}) = (lshr|shl) <(\d+) x i8> ({NAME}), <i8 (\d)((?:, i8 \6)*)>$", re.MULTILINE
)


def trace(spec: Spec, isa: Isa) -> str:
    """Return the kernel's LLVM IR, inside an entry for launches (``launch_args.py``)."""
    k, given = begin(spec, isa, (ptr, ptr, ptr, i64, i64, ptr), "ptx_kernel")
    emit_entry(k, isa, spec, *given)
    k.ret()
    return "define".join(_with_address_facts(part) for part in str(k.module).split("define"))


def _with_address_facts(text: str) -> str:
    """Return a function's IR with facts added that LLVM does not infer.

    Addresses that kernels read from memory are marked as global, except those in local variables. A
    shift of a byte vector, which LLVM would do byte by byte, becomes a shift of words and a mask.
    """
    variables = set(SLOT.findall(text))

    def pointer(found: re.Match[str]) -> str:
        space, name, at, rest = found.groups()
        if at in variables:
            return found[0]
        far = f"{name}.global"
        return (
            f"{space}{far} = load ptr addrspace(1), ptr {at}{rest}\n"
            f"{space}{name} = addrspacecast ptr addrspace(1) {far} to ptr"
        )

    def shift(found: re.Match[str]) -> str:
        space, name, way, lanes, v, by, others = found.groups()
        if int(lanes) % 4 or others.count("i8") != int(lanes) - 1:
            return found[0]
        n = int(lanes) // 4
        bits = int(by)
        byte = 0xFF >> bits if way == "lshr" else 0xFF << bits & 0xFF
        every, mask = (
            f"<{', '.join([f'i32 {number}'] * n)}>" for number in (bits, byte * 0x01010101)
        )
        a, b, c = (f"{name}.{part}" for part in ("words", "moved", "kept"))
        return "\n".join(
            f"{space}{line}"
            for line in (
                f"{a} = bitcast <{lanes} x i8> {v} to <{n} x i32>",
                f"{b} = {way} <{n} x i32> {a}, {every}",
                f"{c} = and <{n} x i32> {b}, {mask}",
                f"{name} = bitcast <{n} x i32> {c} to <{lanes} x i8>",
            )
        )

    return SHIFT.sub(shift, POINTER.sub(pointer, text))


def emit_ptx(spec: Spec, isa: Isa, tally: CompileStats | None = None) -> str:
    """Return a kernel's PTX with one entry, ``symbol(spec)``: from the cache, else compiled and
    cached if possible.

    Raises CompileError if LLVM rejects the kernel.
    """
    tally = tally or CompileStats()
    key = f"{isa_key(isa)}\0{gpu_source_hash()}"
    try:
        kept = cache.read(spec.name, key)
    except CacheError:
        kept = None
    if kept is not None:
        tally.n_cached += 1
        return kept.decode()
    from treadle.jit.compile import emit_assembly

    text = emit_assembly(trace(spec, isa), isa)
    tally.n_compiled += 1
    with suppress(CacheError, OSError):  # then in memory only: ``treadle doctor`` says why
        cache.write(spec.name, key, text.encode(), describe_spec(spec, isa))
    return text

"""Features of Arm and RISC-V CPUs that LLVM does not tell of, by LLVM's names.

On Linux LLVM looks for an Arm core's name in /proc/cpuinfo, and names no feature that came after
2011; of a RISC-V CPU it does not tell how long a vector register is. The system knows both.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

assert sys.platform != "win32"  # what follows is for POSIX

AT_HWCAP, AT_HWCAP2 = 16, 26  # entries of the auxiliary vector
# Linux's asm/hwcap.h of arm64: bits of those entries.
ARM_HWCAPS: Mapping[int, Mapping[int, str]] = {
    AT_HWCAP: {1: "neon", 8: "lse", 10: "fullfp16", 20: "dotprod", 22: "sve"},
    AT_HWCAP2: {1: "sve2", 13: "i8mm", 14: "bf16", 23: "sme"},
}
# Linux's asm/hwprobe.h of riscv: a key, and bits of its value.
PR_SME_GET_VL, LENGTH_MASK = 64, 0xFFFF  # linux/prctl.h: bytes of a streaming vector, and flags
RISCV_HWPROBE, IMA_EXT_0 = 258, 4
RISCV_BITS = {2: "v", 3: "zba", 4: "zbb", 5: "zbs", 27: "zfh", 30: "zvfh", 31: "zvfhmin"}
VLENB = bytes.fromhex("732520c2 67800000")  # csrr a0, vlenb; ret
LENGTHS = (128, 256, 512, 1024)  # bits of a vector register, of which code for one runs on longer

Ask = Callable[[int], int]


def features() -> set[str]:
    """Those of this CPU that LLVM may not name; empty on machines that it knows."""
    if platform.machine() == "aarch64":
        return of_arm()
    return of_riscv() if platform.machine() == "riscv64" else set()


def of_hwcaps(ask: Ask) -> set[str]:
    """``ask``: an entry of the auxiliary vector by its number."""
    return {
        name
        for entry, bits in ARM_HWCAPS.items()
        for bit, name in bits.items()
        if ask(entry) >> bit & 1
    }


def of_arm() -> set[str]:
    """From the auxiliary vector; and the length of SME's vectors, for which LLVM has no name."""
    bits = _streaming_bits()
    return of_hwcaps(_auxiliary) | ({f"svl{bits}"} if bits else set())


def of_riscv() -> set[str]:
    """From Linux's hwprobe, which came with version 6.4; before, from /proc/cpuinfo."""
    bits = _hwprobe()
    if bits is None:
        names = of_isa_line(_cpuinfo())
    else:
        names = {name for bit, name in RISCV_BITS.items() if bits >> bit & 1}
    return names | (of_length(_vector_bits()) if "v" in names else set())


def of_isa_line(cpuinfo: str) -> set[str]:
    """``isa : rv64imafdcv_zba_zvfh``: letters, then words."""
    line = re.search(r"^isa\s*:\s*rv64(\w+)", cpuinfo, re.MULTILINE)
    letters, *words = line[1].split("_") if line else [""]
    return set(letters) & {"v"} | set(words) & set(RISCV_BITS.values())


def of_length(n_bits: int) -> set[str]:
    """Registers of ``n_bits`` are at least as long as these; and their length, which LLVM has no
    name for.
    """
    return {f"zvl{length}b" for length in LENGTHS if length <= n_bits} | {f"vlen{n_bits}"}


def _auxiliary(entry: int) -> int:
    """getauxval; 0 where the system has none."""
    ask = getattr(ctypes.CDLL(None), "getauxval", None)
    if ask is None:
        return 0
    ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return int(ask(entry))


def _streaming_bits() -> int:
    """Of a vector in streaming mode, as this process's threads have it; 0 where there is none."""
    none = [ctypes.c_ulong(0)] * 4
    return bits_in(int(ctypes.CDLL(None).prctl(ctypes.c_int(PR_SME_GET_VL), *none)))


def bits_in(answer: int) -> int:
    """The length in what that call answers: bytes and flags, or an error's negative number."""
    return 8 * (answer & LENGTH_MASK) if answer > 0 else 0


def _hwprobe() -> int | None:
    """The extensions that all processors have; None where the kernel does not tell."""
    pair = (ctypes.c_uint64 * 2)(IMA_EXT_0, 0)
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    args = (ctypes.c_long(n) for n in (1, 0, 0, 0))
    failed = call(ctypes.c_long(RISCV_HWPROBE), pair, *args)
    known = not failed and pair[0] == IMA_EXT_0  # a key that the kernel does not know becomes -1
    return int(pair[1]) if known else None


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _vector_bits() -> int:
    """What the CPU's own register says: no system call does."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as pages:
        pages[: len(VLENB)] = VLENB
        held = ctypes.c_char.from_buffer(pages)
        address = ctypes.addressof(held)
        libc = ctypes.CDLL(None)
        args = (ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))
        runs = not libc.mprotect(*args, ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC))
        bits = 8 * int(ctypes.CFUNCTYPE(ctypes.c_long)(address)()) if runs else LENGTHS[0]
        del held  # the mapping cannot be closed while it is seen
    return bits

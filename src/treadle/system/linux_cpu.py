"""Features of Arm and RISC-V CPUs that LLVM does not detect, by LLVM's names.

On Linux, LLVM identifies an Arm core by /proc/cpuinfo, and reports no feature newer than 2011; for
RISC-V CPUs it does not report the length of vector registers. The system provides both.
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

# entries of the auxiliary vector
AT_HWCAP = 16
AT_HWCAP2 = 26
# From Linux's asm/hwcap.h of arm64: bits of those entries.
ARM_HWCAPS: Mapping[int, Mapping[int, str]] = {
    AT_HWCAP: {1: "neon", 8: "lse", 10: "fullfp16", 20: "dotprod", 22: "sve"},
    AT_HWCAP2: {1: "sve2", 13: "i8mm", 14: "bf16", 23: "sme"},
}
# From Linux's asm/hwprobe.h of riscv: a key, and bits of its value.
PR_SME_GET_VL = 64  # linux/prctl.h: returns the bytes of a streaming vector, and flags
LENGTH_MASK = 0xFFFF  # the bytes in that result
RISCV_HWPROBE = 258
IMA_EXT_0 = 4
RISCV_BITS = {2: "v", 3: "zba", 4: "zbb", 5: "zbs", 27: "zfh", 30: "zvfh", 31: "zvfhmin"}
VLENB = bytes.fromhex("732520c2 67800000")  # csrr a0, vlenb; ret
LENGTHS = (128, 256, 512, 1024)  # bits of a vector register; code for one also runs on longer ones

Ask = Callable[[int], int]


def features() -> set[str]:
    """Return features of this CPU that LLVM may not detect; empty on other architectures."""
    if platform.machine() == "aarch64":
        return of_arm()
    return of_riscv() if platform.machine() == "riscv64" else set()


def of_hwcaps(ask: Ask) -> set[str]:
    """Return the Arm features that the auxiliary vector's bits report; ``ask`` returns an entry by
    its number.
    """
    return {
        name
        for entry, bits in ARM_HWCAPS.items()
        for bit, name in bits.items()
        if ask(entry) >> bit & 1
    }


def of_arm() -> set[str]:
    """Return Arm features from the auxiliary vector, and SME's vector length (``svl512``), for
    which LLVM has no name.
    """
    bits = _streaming_bits()
    return of_hwcaps(_auxiliary) | ({f"svl{bits}"} if bits else set())


def of_riscv() -> set[str]:
    """Return RISC-V features from Linux's hwprobe (since version 6.4), else from /proc/cpuinfo."""
    bits = _hwprobe()
    if bits is None:
        names = of_isa_line(_cpuinfo())
    else:
        names = {name for bit, name in RISCV_BITS.items() if bits >> bit & 1}
    return names | (of_length(_vector_bits()) if "v" in names else set())


def of_isa_line(cpuinfo: str) -> set[str]:
    """Return the features in the text of /proc/cpuinfo, from a line ``isa : rv64imafdcv_zba_zvfh``:
    letters, then words; empty without such a line.
    """
    line = re.search(r"^isa\s*:\s*rv64(\w+)", cpuinfo, re.MULTILINE)
    letters, *words = line[1].split("_") if line else [""]
    return set(letters) & {"v"} | set(words) & set(RISCV_BITS.values())


def of_length(n_bits: int) -> set[str]:
    """Return the features for vector registers of ``n_bits``: LLVM's minimum lengths that they
    satisfy (``zvl128b``), and their exact length (``vlen256``), for which LLVM has no name.
    """
    return {f"zvl{length}b" for length in LENGTHS if length <= n_bits} | {f"vlen{n_bits}"}


def _auxiliary(entry: int) -> int:
    """Return the entry with the number ``entry`` of the auxiliary vector; 0 if the system lacks the
    call.
    """
    ask = getattr(ctypes.CDLL(None), "getauxval", None)
    if ask is None:
        return 0
    ask.restype = ctypes.c_ulong
    ask.argtypes = [ctypes.c_ulong]
    return int(ask(entry))


def _streaming_bits() -> int:
    """Return the bits of a vector in SME's streaming mode in this process; 0 without SME."""
    none = [ctypes.c_ulong(0)] * 4
    return bits_in(int(ctypes.CDLL(None).prctl(ctypes.c_int(PR_SME_GET_VL), *none)))


def bits_in(answer: int) -> int:
    """Return a vector length in bits from ``answer``, the result of prctl: bytes and flags, or a
    negative error, which gives 0.
    """
    return 8 * (answer & LENGTH_MASK) if answer > 0 else 0


def _hwprobe() -> int | None:
    """Return the bits of the RISC-V extensions that all processors have (RISCV_BITS); None if the
    kernel lacks the call.
    """
    pair = (ctypes.c_uint64 * 2)(IMA_EXT_0, 0)
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    args = (ctypes.c_long(n) for n in (1, 0, 0, 0))
    failed = call(ctypes.c_long(RISCV_HWPROBE), pair, *args)
    known = not failed and pair[0] == IMA_EXT_0  # the kernel sets an unknown key to -1
    return int(pair[1]) if known else None


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _vector_bits() -> int:
    """Return the vector length in bits from the ``vlenb`` register; no system call reports it."""
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as pages:
        pages[: len(VLENB)] = VLENB
        held = ctypes.c_char.from_buffer(pages)
        address = ctypes.addressof(held)
        libc = ctypes.CDLL(None)
        args = (ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE))
        runs = not libc.mprotect(*args, ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC))
        bits = 8 * int(ctypes.CFUNCTYPE(ctypes.c_long)(address)()) if runs else LENGTHS[0]
        del held  # the mapping cannot be closed while a view exists
    return bits

"""The answers of the x86-64 instruction CPUID. Emulators such as valgrind answer it with their own
CPU, while /proc/cpuinfo describes the one below them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

# void read(uint32 leaf, uint32 subleaf, uint32 answer[4]), by the System V calling convention:
# push rbx; mov eax, edi; mov ecx, esi; mov r8, rdx; cpuid; the four stores; pop rbx; ret
CODE = bytes.fromhex("53 89f8 89f1 4989d0 0fa2 418900 41895804 41894808 4189500c 5b c3")
EXTENDED = 0x8000_0000
# Leaf, subleaf, and the registers (of eax, ebx, ecx, edx) that say what the CPU is and can do; the
# rest differ between the cores of one CPU, such as their numbers.
LEAVES = (
    (0, 0, (1, 2, 3)),  # the vendor
    (1, 0, (0, 2, 3)),
    (7, 0, (1, 2, 3)),
    (7, 1, (0, 1, 2, 3)),
    (0xD, 0, (0, 3)),  # states that XCR0 may enable
    (0xD, 1, (0,)),
    (0x14, 0, (1, 2)),
    (0x19, 0, (0, 1, 2)),
    (0x1E, 1, (0,)),
    (0x24, 0, (1,)),  # AVX10
    (0x8000_0001, 0, (2, 3)),
    (0x8000_0008, 0, (1,)),
)

LoadCode = Callable[[bytes, int], int | None]  # as ``System.load_code``


def cpuid_text(load_code: LoadCode) -> str:
    """Return the answers of CPUID for LEAVES, as hexadecimal numbers; "" if code cannot be run
    here. ``load_code``: as ``System.load_code``. Only for x86-64 and systems with the System V
    calling convention.
    """
    at = load_code(CODE, len(CODE))
    if at is None:
        return ""
    call = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(at)
    answer = (ctypes.c_uint32 * 4)()
    most = {}
    for base in (0, EXTENDED):  # above its highest leaf, a CPU repeats the answer of another one
        call(base, 0, answer)
        most[base] = answer[0]
    found = []
    for leaf, subleaf, registers in LEAVES:
        if leaf <= most[leaf & EXTENDED]:
            call(leaf, subleaf, answer)
            found += [f"{answer[i]:x}" for i in registers]
        else:
            found.append("-")
    return " ".join(found)

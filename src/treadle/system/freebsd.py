"""FreeBSD: waiting on an address, sysctl, processor affinity. The rest is POSIX.

Written from FreeBSD's manual pages and headers; tested with fakes of the calls, never run there.
"""

from __future__ import annotations

import ctypes
import platform
import sys

assert sys.platform != "win32"

from treadle.system.posix import LIBC, Posix, address_of
from treadle.system.sysctl import sysctl_number, sysctl_text

# sys/umtx.h and sys/syscall.h; the word has 32 bits, and is not shared between processes.
UMTX_OP = 454
WAIT_UINT_PRIVATE = 15
WAKE_PRIVATE = 16
# sys/cpuset.h. A set has the kernel's compiled size: 1024 processors since 14.0, 256 before.
CPU_LEVEL_WHICH = 3
CPU_WHICH_PID = 2
THIS_ONE = -1
SET_BYTES = (128, 32)
# sys/elf_common.h. The bits of these entries are those of Linux, but the entries' numbers differ.
AT_HWCAP = 25
AT_HWCAP2 = 26


class FreeBSD(Posix):
    """FreeBSD implementation of ``protocol.System``."""

    def __init__(self) -> None:
        self.wait = getattr(LIBC, "_umtx_op", None)
        self.SLEEP_POLLS = self.wait is None

    def calls(self) -> dict[str, int]:
        found = super().calls()
        if self.wait is not None:
            found |= {"wake": address_of(LIBC.syscall), "futex": UMTX_OP, "how": WAKE_PRIVATE}
        return found

    def sleep(self, word: int, seen: int) -> None:
        if self.wait is None:
            super().sleep(word, seen)
            return
        value = ctypes.c_ulong(seen & 0xFFFF_FFFF)
        nothing = ctypes.c_void_p(None)
        self.wait(ctypes.c_void_p(word), ctypes.c_int(WAIT_UINT_PRIVATE), value, nothing, nothing)

    def affinity(self) -> list[int]:
        ask = getattr(LIBC, "cpuset_getaffinity", None)
        if ask is not None:
            which = ctypes.c_int(CPU_LEVEL_WHICH), ctypes.c_int(CPU_WHICH_PID)
            for n_bytes in SET_BYTES:
                found = ctypes.create_string_buffer(n_bytes)
                if not ask(*which, ctypes.c_int64(THIS_ONE), ctypes.c_size_t(n_bytes), found):
                    bits = int.from_bytes(found.raw, "little")
                    return [i for i in range(8 * n_bytes) if bits >> i & 1]
        return super().affinity()

    def cores(self) -> tuple[int, int] | None:
        n_cores = sysctl_number("kern.smp.cores")
        return (n_cores, n_cores) if n_cores else None

    def memory(self) -> tuple[int, int]:
        names = "vm.stats.vm.v_free_count", "vm.stats.vm.v_inactive_count"
        return sysctl_number("hw.physmem"), sum(map(sysctl_number, names)) * sysctl_number(
            "hw.pagesize"
        )

    def cpu_name(self) -> str:
        return sysctl_text("hw.model")

    def cpu_features(self) -> set[str]:
        if platform.machine() != "arm64":
            return set()  # LLVM detects x86-64's; vectors of RISC-V CPUs are not supported here
        from treadle.system import linux_cpu

        words = {linux_cpu.AT_HWCAP: AT_HWCAP, linux_cpu.AT_HWCAP2: AT_HWCAP2}
        return linux_cpu.of_hwcaps(lambda entry: auxiliary(words[entry]))


def auxiliary(entry: int) -> int:
    """Return the entry with the number ``entry`` of the auxiliary vector; 0 if the system has
    none.
    """
    ask = getattr(LIBC, "elf_aux_info", None)
    word = ctypes.c_ulong()
    if ask is None or ask(ctypes.c_int(entry), ctypes.byref(word), ctypes.c_int(8)):
        return 0
    return word.value

"""macOS: waiting on an address (since 14.4), and sysctl. The rest is POSIX.

Written from Apple's headers and manual pages; tested with fakes of the calls, never run on a Mac.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what the module signal wraps
import ctypes
import platform
import sys
from pathlib import Path

assert sys.platform != "win32"

from treadle.system.posix import LIBC, Posix, address_of
from treadle.system.sysctl import sysctl_number, sysctl_text

WORD = 4  # bytes of the word that threads wait on
# sysctl names of Arm's features; every Arm Mac has NEON.
ARM_FEATURES = {
    "fullfp16": "hw.optional.arm.FEAT_FP16",
    "dotprod": "hw.optional.arm.FEAT_DotProd",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "bf16": "hw.optional.arm.FEAT_BF16",
    "sme": "hw.optional.arm.FEAT_SME",
}


class MacOS(Posix):
    """macOS implementation of ``protocol.System``."""

    def __init__(self) -> None:
        self.wait = getattr(LIBC, "os_sync_wait_on_address", None)
        self.SLEEP_POLLS = self.wait is None

    def calls(self) -> dict[str, int]:
        found = super().calls()
        if self.wait is not None:
            found["wake"] = address_of(LIBC.os_sync_wake_by_address_all)
        return found

    def sleep(self, word: int, seen: int) -> None:
        if self.wait is None:
            super().sleep(word, seen)
            return
        value = ctypes.c_uint64(seen & 0xFFFF_FFFF)
        self.wait(ctypes.c_void_p(word), value, ctypes.c_size_t(WORD), ctypes.c_uint32(0))

    def cores(self) -> tuple[int, int] | None:
        physical = sysctl_number("hw.physicalcpu")
        fast = sysctl_number("hw.perflevel0.physicalcpu")  # absent if all cores are of one kind
        return (physical, fast or physical) if physical else None

    def memory(self) -> tuple[int, int]:
        total = sysctl_number("hw.memsize")
        free_percent = sysctl_number("kern.memorystatus_level")
        return total, total * free_percent // 100

    def peak_bytes(self) -> int | None:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS

    def cache_bytes(self) -> int:
        names = "hw.l2cachesize", "hw.l3cachesize", "hw.perflevel0.l2cachesize"
        return max(map(sysctl_number, names))

    def cpu_name(self) -> str:
        return sysctl_text("machdep.cpu.brand_string")

    def cpu_features(self) -> set[str]:
        if platform.machine() != "arm64":
            return set()  # LLVM detects them
        found = {name for name, key in ARM_FEATURES.items() if sysctl_number(key)}
        if n_bytes := sysctl_number("hw.optional.arm.sme_max_svl_b"):
            found.add(f"svl{8 * n_bytes}")
        return {"neon"} | found

    def cache_folder(self) -> Path:
        return Path.home() / "Library" / "Caches"

    def sigbus(self) -> dict[str, int] | None:
        if sys.platform != "darwin":
            return None  # on another system the layout is too short
        return {
            "number": int(_signal.SIGBUS),
            "n_bytes": 16,
            "flags_off": 12,
            "flags": 0x51,
            "address_off": 24,
            "map_flags": 0x1012,
        }

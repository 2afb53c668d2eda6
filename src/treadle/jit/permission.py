"""What a process must ask its operating system for before it may use a CPU's instructions."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Set

# Intel's matrix registers, which Linux on x86-64 lends to those that ask.
ASKED_FOR = frozenset({"amx-tile"})
SYS_ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18


def permitted(features: Set[str]) -> frozenset[str]:
    """``features`` (LLVM's names) without those that are not to be had. A CPU that has none to ask
    for costs no call.
    """
    refused = ASKED_FOR if features & ASKED_FOR and not _tiles() else frozenset()
    return frozenset(features) - refused


def _tiles() -> bool:
    """Ask for matrix registers, for all threads of this process: of those that use them the
    system has to keep 8 KB more.
    """
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(SYS_ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0)

"""What macOS' and the BSDs' kernels say under a name."""

from __future__ import annotations

import ctypes
import sys

assert sys.platform != "win32"

from treadle.system.posix import LIBC


def sysctl(name: str) -> bytes:
    """What the kernel says under this name; empty where it says nothing."""
    ask = getattr(LIBC, "sysctlbyname", None)
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    if ask is None or ask(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return b""
    return value.raw[: size.value]


def sysctl_number(name: str) -> int:
    """The same as a number, of 4 or 8 bytes; 0 where it says nothing."""
    return int.from_bytes(sysctl(name), "little")


def sysctl_text(name: str) -> str:
    """The same as text."""
    return sysctl(name).rstrip(b"\0").decode("utf-8", "replace")

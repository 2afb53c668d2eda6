"""Access to ``sysctl`` values of macOS and the BSDs."""

from __future__ import annotations

import ctypes
import sys

assert sys.platform != "win32"

from treadle.system.posix import LIBC


def sysctl(name: str) -> bytes:
    """Return the bytes of the kernel's value called ``name``; empty if there is none."""
    ask = getattr(LIBC, "sysctlbyname", None)
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    if ask is None or ask(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return b""
    return value.raw[: size.value]


def sysctl_number(name: str) -> int:
    """Return the kernel's value called ``name`` as a number, of 4 or 8 bytes; 0 if there is
    none.
    """
    return int.from_bytes(sysctl(name), "little")


def sysctl_text(name: str) -> str:
    """Return the kernel's value called ``name`` as text; empty if there is none."""
    return sysctl(name).rstrip(b"\0").decode("utf-8", "replace")

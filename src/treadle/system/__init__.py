"""Operating-system layer: one file each for Linux, macOS, Windows and FreeBSD.

::

    protocol.py        System: the interface that each system's class implements
    posix.py           calls that Linux, macOS and the BSDs share; also for other POSIX systems
    linux.py           Linux: futexes, memfd files, page-cache advice
    linux_cpu.py       CPU features of Arm and RISC-V that LLVM does not detect
    cpuid.py           the answers of x86-64's CPUID
    macos.py           macOS
    freebsd.py         FreeBSD
    sysctl.py          sysctl values of macOS and the BSDs
    windows.py         Windows, and its consoles
    posix_terminal.py  terminals of POSIX systems
    fork_server.py     a process that forks children on command
    forked_workers.py  worker processes forked from this one, which answer messages

``SYSTEM`` is the implementation in use of the ``System`` protocol (``protocol.py``). The rest of
treadle uses it, and never ``sys.platform`` or a module that some system lacks.

``TREADLE_SYSTEM`` (linux, darwin, win32, freebsd, posix) selects another system's file. Missing
calls are then replaced by portable ones, such as short sleeps for wake-ups; tests fake them.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.system.protocol import System

HERE = sys.platform  # the actual system, whichever file is in use
NAME = os.environ.get("TREADLE_SYSTEM") or HERE
SYSTEM: System

# The type checker evaluates these conditions too, and checks only files for its own platform.
if sys.platform == "win32" or NAME == "win32":
    from treadle.system.windows import Windows

    SYSTEM = Windows()
elif sys.platform == "darwin" or NAME == "darwin":
    from treadle.system.macos import MacOS

    SYSTEM = MacOS()
elif sys.platform.startswith("freebsd") or NAME.startswith("freebsd"):  # its version follows
    from treadle.system.freebsd import FreeBSD

    SYSTEM = FreeBSD()
elif sys.platform == "linux" and NAME == "linux":
    from treadle.system.linux import Linux

    SYSTEM = Linux()
else:
    from treadle.system.posix import Posix

    SYSTEM = Posix()

OTHER_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}  # names on Windows and macOS


def machine() -> str:
    """Return LLVM's name of this machine's architecture."""
    name = platform.machine().lower()
    return OTHER_NAMES.get(name, name)

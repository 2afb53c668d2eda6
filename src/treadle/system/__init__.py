"""The operating system: what Linux, macOS, Windows and FreeBSD each do in their own way, a
file for each.

``SYSTEM`` is the one in use, with all that ``System`` (``protocol.py``) lists. The rest of treadle
asks it, and never ``sys.platform`` or a module that some system lacks.

``TREADLE_SYSTEM`` (linux, darwin, win32, freebsd, posix) takes another system's file. Calls that
are not there are then replaced by what works everywhere, such as naps for wake-ups; tests fake
them.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.system.protocol import System

HERE = sys.platform  # what runs the code, whichever file is in use
NAME = os.environ.get("TREADLE_SYSTEM") or HERE
SYSTEM: System

# The type checker reads these conditions too: it checks what the system it checks for can use.
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

OTHER_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}  # Windows', macOS'


def machine() -> str:
    """The architecture by LLVM's name, whatever this system calls it."""
    name = platform.machine().lower()
    return OTHER_NAMES.get(name, name)

"""Interpreter, import path and settings of processes that treadle starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from treadle.errors import TreadleError


def interpreter() -> str:
    """Return the path of a Python interpreter for a child process: the one that was set with
    ``multiprocessing.set_executable``; else this program, if it is Python; else (in a program that
    embeds Python) that of the installation. Raises TreadleError if there is none.
    """
    spawn = sys.modules.get("multiprocessing.spawn")
    named = os.fsdecode(spawn.get_executable() or "") if spawn else ""
    if named and named != sys.executable:
        return named
    if os.path.basename(sys.executable or "").lower().startswith(("python", "pypy")):
        return sys.executable
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for prefix in (sys.exec_prefix, sys.base_exec_prefix):
        path = os.path.join(prefix, "bin", version)
        if os.path.exists(path):
            return path
    raise TreadleError(
        "a Python process is needed, and no interpreter was found: set one with "
        "multiprocessing.set_executable"
    )


def detached() -> dict[str, Any]:
    """Return keyword arguments of ``subprocess.Popen`` for a child that Ctrl-C in the terminal does
    not reach.
    """
    flags = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", None)  # of Windows
    return {"start_new_session": True} if flags is None else {"creationflags": flags}


def import_path() -> list[str]:
    """Return the folders of this process's import path, for a child's PYTHONPATH, and treadle's
    folder in case an import hook found it.

    The working directory ("" in ``sys.path``) is left out: it may have changed, and may hold
    anything.
    """
    root = str(Path(__file__).parents[2])
    return [os.path.abspath(p) for p in [*sys.path, root] if isinstance(p, str) and p]

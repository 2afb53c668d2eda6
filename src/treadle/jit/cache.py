"""Compiled kernels kept on disk: raw objects, named by everything that went into them.

The key hashes contents (the sources of ``isa``, ``jit``, ``kernels`` and ``formats``), never times. The folder holds code that
will be run, so it must belong to the user and be closed to others; anything else is refused.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from treadle.errors import CacheError

_SOURCES = ("isa", "jit", "kernels", "formats", "runtime")


def folder() -> Path:
    """Where compiled kernels are kept: ``TREADLE_CACHE``, or ``treadle`` in the user's cache directory."""
    own = os.environ.get("TREADLE_CACHE")
    if own:
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "treadle"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle"


@lru_cache(maxsize=1)
def source_hash() -> str:
    """One hash of every source that can change a kernel's code, and of the versions of llvmlite and LLVM."""
    import llvmlite

    root = Path(__file__).resolve().parent.parent
    state = hashlib.sha256(llvmlite.__version__.encode())
    for part in _SOURCES:
        for path in sorted((root / part).glob("*.py")):
            state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def checked_folder(path: Path | None = None) -> Path:
    """The cache folder, made if absent; CacheError when it is not the user's own or others may write to it."""
    path = path or folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise CacheError(f"{path}: cannot be used as the kernel cache: {error.strerror}") from error
    if not hasattr(os, "getuid"):
        return path
    if info.st_uid != os.getuid():
        raise CacheError(f"{path}: the kernel cache belongs to another user, and it holds code: refused")
    if stat.S_IMODE(info.st_mode) & 0o022:
        raise CacheError(f"{path}: others may write to the kernel cache, and it holds code: refused")
    return path


def path_of(name: str, isa_key: str) -> Path:
    """The file of one kernel for one instruction set."""
    key = hashlib.sha256(f"{source_hash()}\0{isa_key}\0{name}".encode()).hexdigest()[:32]
    return checked_folder() / f"{key}.o"


def read(name: str, isa_key: str) -> bytes | None:
    """A kernel's object, or None."""
    try:
        return path_of(name, isa_key).read_bytes()
    except FileNotFoundError:
        return None


def write(name: str, isa_key: str, code: bytes) -> None:
    """Keep a kernel's object; readers see the whole of it or nothing."""
    target = path_of(name, isa_key)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

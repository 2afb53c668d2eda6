"""Compiled kernels kept on disk: raw objects, named by everything that went into them.

The key hashes contents (the sources of ``isa``, ``jit``, ``kernels`` and ``formats``), never times.
The folder holds code that will be run, so it must belong to the user and be closed to others;
anything else is refused. A file is an object, what ``treadle kernels`` tells of it as JSON, and a
footer with a checksum over both: one file, so that no crash leaves a part of it, and still an
object to ``objdump -d``.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from treadle.base.fast_dataclass import dataclass
from treadle.errors import CacheError
from treadle.system import HERE, SYSTEM, machine

ROOT = Path(__file__).resolve().parent.parent
# Folders and modules whose sources can change a kernel's code.
SOURCES = ("base", "formats", "isa", "jit", "kernels", "devices.cpu", "profiling")
_FOOTER = struct.Struct("<QQ32s8s")  # bytes of the object, bytes of JSON, sha256 of both, MAGIC
MAGIC = b"treadle1"


class CachedKernel(NamedTuple):
    """A kernel that this version of treadle would use from the cache."""

    name: str
    n_bytes: int  # of its object
    isa: str


@dataclass(frozen=True)
class KernelRecord:
    """One sound file of the cache. ``about`` is what was said of the kernel when it was written."""

    path: Path
    n_bytes: int  # of the file
    n_code: int  # of the object in it
    about: Mapping[str, Any]

    @property
    def current(self) -> bool:
        """Whether today's sources would look for this file: another version's kernels stay beside
        it.
        """
        return self.path.stem == _key(str(self.about.get("name")), str(self.about.get("isa_key")))


@dataclass(frozen=True)
class CacheState:
    """The cache as ``treadle doctor`` tells of it. ``problem`` is None where kernels are kept."""

    folder: str
    n_kernels: int = 0
    n_bytes: int = 0
    n_stale: int = 0  # files of other versions of treadle, or damaged ones: nothing reads them
    stale_bytes: int = 0
    problem: str | None = None


def folder() -> Path:
    """Where compiled kernels are kept: ``TREADLE_CACHE``, or ``treadle`` in the user's cache
    directory.
    """
    own = os.environ.get("TREADLE_CACHE")
    if own:
        return Path(own)
    try:
        return SYSTEM.cache_folder() / "treadle"
    except RuntimeError as error:
        raise CacheError(
            "no home directory to keep compiled kernels in: set TREADLE_CACHE"
        ) from error


@lru_cache(maxsize=1)
def source_hash() -> str:
    """One hash of every source that can change a kernel's code, of llvmlite's version (which fixes
    LLVM's), and of the machine: a home directory may be shared by machines of several kinds.
    """
    import llvmlite

    kind = f"{llvmlite.__version__}\0{HERE}\0{machine()}\0{hash_of_sources(*SOURCES)}"
    return hashlib.sha256(kind.encode()).hexdigest()


def hash_of_sources(*names: str) -> str:
    """A hash of treadle's Python files under ``names``: modules, and packages with all that is
    below them. A file counts with its contents and its path.
    """
    state = hashlib.sha256()
    for name in names:
        place = ROOT.joinpath(*name.split("."))
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]:
            state.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


def checked_folder(path: Path | None = None) -> Path:
    """The cache folder, made if absent; CacheError when it is not the user's own or others may
    write to it.
    """
    path = path or folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise CacheError(f"{path}: cannot be used as the kernel cache: {error.strerror}") from error
    who = SYSTEM.intruder(info)
    if who == "another user":
        raise CacheError(
            f"{path}: the kernel cache belongs to another user, and it holds code: refused"
        )
    if who is not None:
        raise CacheError(
            f"{path}: others may write to the kernel cache, and it holds code: refused"
        )
    return path


def _key(name: str, isa_key: str) -> str:
    return hashlib.sha256(f"{source_hash()}\0{isa_key}\0{name}".encode()).hexdigest()[:32]


def path_of(name: str, isa_key: str) -> Path:
    """The file of one kernel for one instruction set. Raises CacheError for a folder that is
    refused.
    """
    return checked_folder() / f"{_key(name, isa_key)}.o"


def _parts(data: bytes) -> tuple[bytes, bytes] | None:
    """A file's object and JSON, or None if a byte of it is not what was written."""
    if len(data) < _FOOTER.size:
        return None
    n_code, n_about, digest, magic = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
    body = data[: -_FOOTER.size]
    if magic != MAGIC or n_code + n_about != len(body) or hashlib.sha256(body).digest() != digest:
        return None
    return body[:n_code], body[n_code:]


def read(name: str, isa_key: str) -> bytes | None:
    """A kernel's object; None where there is none, or none that is whole (a linker may crash on
    half of one).

    Raises CacheError for a folder that is refused.
    """
    try:
        data = path_of(name, isa_key).read_bytes()
    except OSError:
        return None
    parts = _parts(data)
    return parts[0] if parts else None


def write(name: str, isa_key: str, code: bytes, about: Mapping[str, Any] | None = None) -> None:
    """Keep a kernel's object; readers see the whole of it or nothing. ``about`` is for ``records``.

    Raises CacheError for a folder that is refused, OSError where it cannot be written.
    """
    target = path_of(name, isa_key)
    body = code + json.dumps({"name": name, "isa_key": isa_key, **(about or {})}).encode()
    footer = _FOOTER.pack(len(code), len(body) - len(code), hashlib.sha256(body).digest(), MAGIC)
    write_whole(target, body + footer)


def write_whole(path: Path, *pieces: bytes) -> None:
    """Write a file that its user alone can read, whole or not at all. Raises OSError."""
    import tempfile  # only who writes needs it

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def records() -> Iterator[KernelRecord]:
    """Every sound file of the cache. Raises CacheError for a folder that is refused."""
    for path in sorted(checked_folder().glob("*.o")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        parts = _parts(data)
        if parts:
            yield KernelRecord(path, len(data), len(parts[0]), json.loads(parts[1]))


def entries() -> list[CachedKernel]:
    """The kernels that today's treadle would use. Raises CacheError for a folder that is
    refused.
    """
    return [
        CachedKernel(str(r.about["name"]), r.n_code, str(r.about.get("isa", "")))
        for r in records()
        if r.current
    ]


def state() -> CacheState:
    """What the cache holds, and what keeps it from holding more; never raises."""
    try:
        where = str(folder())
    except CacheError as error:
        return CacheState(folder="none", problem=str(error))
    try:
        path = checked_folder()
        current = [record for record in records() if record.current]
        sizes = [file.stat().st_size for file in path.iterdir() if file.is_file()]
    except CacheError as error:
        return CacheState(folder=where, problem=str(error))
    except OSError as error:
        return CacheState(folder=where, problem=f"{where}: cannot be read: {error.strerror}")
    n_bytes = sum(record.n_bytes for record in current)
    return CacheState(
        folder=where,
        n_kernels=len(current),
        n_bytes=n_bytes,
        n_stale=len(sizes) - len(current),
        stale_bytes=sum(sizes) - n_bytes,
        problem=None if os.access(path, os.W_OK | os.X_OK) else f"{where}: cannot be written to",
    )

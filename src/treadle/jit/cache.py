"""On-disk cache of compiled kernels: object files named by a hash of their inputs.

The hash covers the contents of the sources in ``SOURCES``, never their times; times only tell that
a file is unchanged since it was hashed. The hash is that of the sources that this process has
imported: once a file has changed since then, as by an update under a running server, the process
stores nothing, and if it had not hashed its sources before, it reads nothing either.

The folder holds code that will be run, so it must belong to the user and be closed to others; any
other folder is refused. A file is an object, then JSON for ``treadle kernels``, then a footer with
a checksum of both. As both are one file, a crash cannot separate them, and ``objdump -d`` still
reads it.
"""

from __future__ import annotations

import json
import marshal
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import treadle
from treadle.base.fast_classes import NamedTuple, dataclass
from treadle.errors import CacheError
from treadle.system import HERE, SYSTEM, machine

# BLAKE2 from Python's own C module: ``hashlib`` loads OpenSSL too, a fiftieth of a start.
if TYPE_CHECKING:
    from hashlib import blake2b as blake2b
else:
    try:
        from _blake2 import blake2b
    except ImportError:  # a Python built without it
        from hashlib import blake2b as blake2b

DIGEST_BYTES = 16  # of keys and names of files
ROOT = Path(__file__).resolve().parent.parent
# Folders and modules whose sources can change a kernel's code.
SOURCES = ("base", "formats", "isa", "jit", "kernels", "devices.cpu", "profiling")
_FOOTER = struct.Struct("<QQ32s8s")  # bytes of the object, bytes of JSON, BLAKE2 of both, MAGIC
MAGIC = b"treadle1"
KNOWN = "sources-"  # names of files that keep a hash of sources begin so
CHECKED_S = 1.0
SETTLED_NS = 2_000_000_000  # file systems tell times apart that lie further from each other
_hashed: dict[tuple[str, ...], str] = {}  # states of sources as they were when hashed, by names
_checked_s: float | None = None  # when ``check_sources`` last found them as they were


def hex_digest(data: Any) -> str:
    """Return a hash of ``data``, bytes or an array, in ``2 * DIGEST_BYTES`` hexadecimal digits."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class CachedKernel(NamedTuple):
    """A kernel in the cache that this version of treadle would use."""

    name: str
    n_bytes: int  # of its object
    isa: str


@dataclass(frozen=True)
class KernelRecord:
    """One undamaged file of the cache. ``about``: the JSON that was written with the kernel."""

    path: Path
    n_bytes: int  # of the file
    n_code: int  # of the object in it
    about: Mapping[str, Any]

    @property
    def current(self) -> bool:
        """Whether this version of treadle, on this machine, would load the file. Kernels of other
        versions stay in the folder too.
        """
        return self.path.stem == _key(str(self.about.get("name")), str(self.about.get("isa_key")))


@dataclass(frozen=True)
class CacheState:
    """The cache's state, for ``treadle doctor``. ``problem``: why kernels cannot be stored; None if
    they can.
    """

    folder: str
    n_kernels: int = 0
    n_bytes: int = 0
    n_stale: int = 0  # unused files: of other versions of treadle, or damaged
    stale_bytes: int = 0
    problem: str | None = None


def folder() -> Path:
    """Return the folder for compiled kernels: ``TREADLE_CACHE``, or ``treadle`` in the user's cache
    directory. Raises CacheError if there is no home directory.
    """
    own = os.environ.get("TREADLE_CACHE")
    if own:
        return Path(own)
    try:
        return SYSTEM.cache_folder() / "treadle"
    except RuntimeError as error:
        raise CacheError(
            "no home directory for the kernel cache: set TREADLE_CACHE to a folder"
        ) from error


@lru_cache(maxsize=1)
def source_hash() -> str:
    """Return one hash of all that can change a kernel's code, besides its spec and instruction set:
    the sources, llvmlite's version (which fixes LLVM's), and the system and architecture, because
    machines of several kinds may share a home directory.
    """
    import llvmlite

    kind = f"{llvmlite.__version__}\0{HERE}\0{machine()}\0{hash_of_sources(*SOURCES)}"
    return blake2b(kind.encode(), digest_size=32).hexdigest()


def hash_of_sources(*names: str) -> str:
    """Return a hash of the Python files of the dotted ``names``: modules, and packages with
    everything below them. The hash covers each file's contents and path.

    The cache folder keeps the hash with the files' states (inode, size, times), so that a start
    need not read megabytes of sources. If a file has changed since this process imported treadle,
    the result is a text of this process alone.
    """
    found = _found(names)
    states, newest = _states(found)
    _hashed.setdefault(names, states)
    if _changed_since_import(newest):
        return f"changed {treadle.IMPORTED_NS}"  # no other process has this hash
    known = f"{KNOWN}{hex_digest(os.fsencode(str(_places(names))))}"
    with suppress(OSError, CacheError):
        # Decoded from bytes: an open file's decoder would be imported.
        kept = (checked_folder() / known).read_bytes().decode("latin-1")
        then, _, sources = kept.partition(" ")
        if then == states:
            return sources
    state = blake2b(digest_size=32)
    for path in found:
        with open(path, "rb") as file:
            relative = path[len(str(ROOT)) + 1 :].replace(os.sep, "/")
            state.update(relative.encode() + b"\0" + file.read())
    sources = state.hexdigest()
    # A file that has just been written may be written again without a difference in its state.
    if time.time_ns() - newest > SETTLED_NS:
        with suppress(OSError, CacheError):
            write_whole(checked_folder() / known, f"{states} {sources}".encode())
    return sources


def check_sources() -> None:
    """Raise CacheError if sources have changed since this process imported or hashed them: what it
    makes may come of others than its hash says. They are looked at at most once in ``CHECKED_S``: a
    cold start stores dozens of kernels, and each look takes a millisecond.
    """
    global _checked_s
    if _checked_s is not None and time.monotonic() - _checked_s < CHECKED_S:
        return
    for names, hashed in _hashed.items():
        try:
            states, newest = _states(_found(names))
        except OSError:  # removed, or being replaced
            states = ""
        if states != hashed or _changed_since_import(newest):
            raise CacheError(
                "treadle's sources have changed since this process imported them, so it stores "
                "nothing in the cache: restart it"
            )
    _checked_s = time.monotonic()


def _changed_since_import(newest: int) -> bool:
    """Return whether ``newest``, the time of the last change of sources in ns, lies between the
    import of treadle and now. A time to come is the mistake of a clock.
    """
    return treadle.IMPORTED_NS < newest <= time.time_ns()


def _places(names: Sequence[str]) -> list[str]:
    """Return the paths of the dotted ``names``, without ``.py``."""
    return [os.path.join(ROOT, *name.split(".")) for name in names]


def _found(names: Sequence[str]) -> list[str]:
    """Return the paths of the Python files of the dotted ``names``."""
    return [
        each
        for place in _places(names)
        for each in (sorted(_sources_below(place)) if os.path.isdir(place) else [place + ".py"])
    ]


def _states(paths: Sequence[str]) -> tuple[str, int]:
    """Return a hash of the states (inode, size, times) of the files ``paths``, and the time of the
    last change to any of them, in ns.
    """
    states = []
    newest = 0
    stat = os.stat
    for path in paths:
        at = stat(path)
        modified = at.st_mtime_ns
        changed = at.st_ctime_ns
        newest = max(newest, modified, changed)
        states.append((path, at.st_dev, at.st_ino, at.st_size, modified, changed))
    # Version 2: its bytes depend on the values alone. A text takes three times as long.
    return hex_digest(marshal.dumps(states, 2)), newest


def _checksum(body: bytes) -> bytes:
    return blake2b(body, digest_size=32).digest()


def _sources_below(folder: str) -> Iterator[str]:
    """Yield the Python files of a folder and of those below it. Every start needs them, and pathlib
    takes several times as long.
    """
    for entry in os.scandir(folder):
        if entry.name.endswith(".py"):
            yield entry.path
        elif entry.name != "__pycache__" and entry.is_dir():
            yield from _sources_below(entry.path)


def checked_folder(path: Path | None = None) -> Path:
    """Return the cache folder (or ``path``), created if absent. Raises CacheError if it cannot be
    created, belongs to another user, or others may write to it.
    """
    path = path or folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise CacheError(
            f"kernel cache {path}: {error.strerror}; set TREADLE_CACHE to a writable folder"
        ) from error
    who = SYSTEM.other_writer(info)
    if who == "another user":
        raise CacheError(
            f"kernel cache {path} belongs to another user; refused, because its files are "
            "executed. Set TREADLE_CACHE to a folder of your own"
        )
    if who is not None:
        raise CacheError(
            f"kernel cache {path} is writable by other users; refused, because its files are "
            "executed. Run chmod go-w on it"
        )
    return path


def _key(name: str, isa_key: str) -> str:
    return hex_digest(f"{source_hash()}\0{isa_key}\0{name}".encode())


def tuned_folder() -> Path:
    """Return the folder of tuned kernel parameters. Raises CacheError if there is no home
    directory.
    """
    return folder() / "tuned"


def has_tuned_rows() -> bool:
    """Return whether the folder of tuned kernel parameters exists; False where that cannot
    be read.
    """
    try:
        return tuned_folder().is_dir()
    except (CacheError, OSError):
        return False


def path_of(name: str, isa_key: str) -> Path:
    """Return the cache file of kernel ``name`` for the instruction set with ``isa_key``. Raises
    CacheError if the folder is refused.
    """
    return checked_folder() / f"{_key(name, isa_key)}.o"


def _parts(data: bytes) -> tuple[bytes, bytes] | None:
    """Return the object and the JSON in ``data``, the bytes of a cache file; None if the footer or
    its checksum does not match.
    """
    if len(data) < _FOOTER.size:
        return None
    n_code, n_about, digest, magic = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
    body = data[: -_FOOTER.size]
    if magic != MAGIC or n_code + n_about != len(body) or _checksum(body) != digest:
        return None
    return body[:n_code], body[n_code:]


def read(name: str, isa_key: str) -> bytes | None:
    """Return the object of kernel ``name`` for the instruction set with ``isa_key``; None if there
    is none or its file is damaged (a linker may crash on half of one).

    Raises CacheError if the folder is refused.
    """
    try:
        data = path_of(name, isa_key).read_bytes()
    except OSError:
        return None
    parts = _parts(data)
    return parts[0] if parts else None


def has(name: str, isa_key: str) -> bool:
    """Return whether the cache has a file of kernel ``name`` for the instruction set with
    ``isa_key``; the file may be damaged. Never raises.
    """
    try:
        return path_of(name, isa_key).exists()
    except (CacheError, OSError):
        return False


def write(name: str, isa_key: str, code: bytes, about: Mapping[str, Any] | None = None) -> None:
    """Store a kernel's object ``code``; readers see the whole of it or nothing. ``about``: stored
    as JSON with it, and returned by ``records``; None: only the names.

    Raises CacheError if the folder is refused, or treadle's sources have changed; OSError if it
    cannot be written.
    """
    target = path_of(name, isa_key)
    check_sources()
    body = code + json.dumps({"name": name, "isa_key": isa_key, **(about or {})}).encode()
    footer = _FOOTER.pack(len(code), len(body) - len(code), _checksum(body), MAGIC)
    write_whole(target, body + footer)


def write_whole(path: Path, *pieces: bytes) -> None:
    """Write ``pieces``, one after another, as a file that only its user can read, whole or not at
    all. Raises OSError if that fails.
    """
    import tempfile  # only needed to write

    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(pieces)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def records() -> Iterator[KernelRecord]:
    """Yield a record of each file of the cache, without those that are damaged or unreadable.
    Raises CacheError if the folder is refused.
    """
    for path in sorted(checked_folder().glob("*.o")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        parts = _parts(data)
        if parts:
            yield KernelRecord(path, len(data), len(parts[0]), json.loads(parts[1]))


def entries() -> list[CachedKernel]:
    """Return the kernels in the cache that this version of treadle would use. Raises CacheError if
    the folder is refused.
    """
    return [
        CachedKernel(str(r.about["name"]), r.n_code, str(r.about.get("isa", "")))
        for r in records()
        if r.current
    ]


def state() -> CacheState:
    """Return the number and size of the cache's files, and the problem, if any, that keeps kernels
    from being stored. Never raises.
    """
    try:
        where = str(folder())
    except CacheError as error:
        return CacheState(folder="none", problem=str(error))
    try:
        path = checked_folder()
        current = [record for record in records() if record.current]
        files = [file for file in path.iterdir() if file.is_file()]
        sizes = [file.stat().st_size for file in files if not file.name.startswith(KNOWN)]
    except CacheError as error:
        return CacheState(folder=where, problem=str(error))
    except OSError as error:
        return CacheState(
            folder=where, problem=f"cannot read the kernel cache {where}: {error.strerror}"
        )
    n_bytes = sum(record.n_bytes for record in current)
    return CacheState(
        folder=where,
        n_kernels=len(current),
        n_bytes=n_bytes,
        n_stale=len(sizes) - len(current),
        stale_bytes=sum(sizes) - n_bytes,
        problem=None
        if os.access(path, os.W_OK | os.X_OK)
        else f"kernel cache {where} is not writable",
    )

"""Files of a folder in the kernels' cache that keep what later starts need of a model: headers
(``stored_header.py``), configurations (``models/stored_config.py``) and plans
(``devices/cpu/stored_plan.py``).

A file's name is a hash of all that it was made of: the model's files (device, inode, size, times),
the sources, and more. Headers and configurations are pickles, which Python reads in few steps and
without a constructor for each object. Reading a pickle can run code, as the kernels in the same
cache are run: a folder that belongs to somebody else, or that others may write to, is refused.

Beside them are records of a model, such as the time of its last use (``catalog/records.py``).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import CacheError
from treadle.files.mapping import state_of
from treadle.jit.cache import (
    DIGEST_BYTES,
    blake2b,
    check_sources,
    checked_folder,
    folder,
    hash_of_sources,
    hex_digest,
    source_hash,
    write_whole,
)

if TYPE_CHECKING:
    from treadle.files.mapping import MappedFile

# Sources that can change an entry, besides those that can change a kernel's code.
SOURCES = ("plan", "models", "files", "kvcache", "engine", "devices.protocol")
MAGIC = b"entry001"
HEAD_BYTES = len(MAGIC) + DIGEST_BYTES
MOST_FILES = 384  # the oldest are removed
SECOND = 1_000_000_000  # ns
USED = ".used"  # the end of the name of a record whose time is that of the model's last use
# Tables, by module, that a program may change at run time (docs/add-an-architecture.md). Each has
# ``is_changed``; one that was not imported is as it was.
TABLES = {
    "treadle.isa": "ROWS",
    "treadle.formats": "FORMATS",
    "treadle.models.archs": "ARCHS",
    "treadle.models.graphs": "GRAPHS",
    "treadle.models.mixers": "MIXERS",
    "treadle.models.ffns": "FFNS",
}


def are_stored() -> bool:
    """Return whether entries are stored and used: unless ``TREADLE_PLANS=0``, or the program has
    changed a table of instruction sets, formats, architectures, graphs or sublayers, whose rows are
    in no key.
    """
    if os.environ.get("TREADLE_PLANS") == "0":
        return False
    # A module that another thread is importing may lack its table yet; one that makes its table
    # when it is first asked for need not make it here.
    modules = ((sys.modules.get(module), name) for module, name in TABLES.items())
    tables = [vars(module).get(name) for module, name in modules if module is not None]
    return not any(table.is_changed() for table in tables if table is not None)


def identity(file: MappedFile) -> tuple[int, ...] | None:
    """Return device, inode, size and times of a mapped file, and where the model begins in it. None
    if its path now has another file, or a changed one, or if these do not tell files apart: without
    inodes, and where times are whole seconds. Two writes may then have the same time, and images of
    file systems (SquashFS) may be alike in all of them, with another model inside.
    """
    try:
        about = os.stat(file.path)
    except OSError:
        return None
    if file.state != state_of(about):
        return None
    if not about.st_ino or not (about.st_mtime_ns % SECOND or about.st_ctime_ns % SECOND):
        return None
    return (*file.state, about.st_ctime_ns, file.start, len(file))


@lru_cache(maxsize=1)
def all_sources() -> tuple[str, str]:
    """Return two hashes of sources that can change an entry: of those that can change a kernel's
    code (``jit/cache.py``), and of SOURCES.
    """
    return source_hash(), hash_of_sources(*SOURCES)


def key_of(*given: object) -> str:
    """Return a hash, in hexadecimal digits, of ``given``: values whose ``repr`` is equal in every
    process.
    """
    return hex_digest(repr(given).encode())


def entries_folder() -> Path:
    """Return the folder of entries, inside that of kernels. Raises CacheError if it cannot be
    created, belongs to another user, or others may write to it.
    """
    return checked_folder(checked_folder() / "plans")


def read_entry(name: str) -> memoryview | None:
    """Return the contents of the entry in file ``name``; None if it is missing or damaged."""
    try:
        data = memoryview((entries_folder() / name).read_bytes())
    except (OSError, CacheError):
        return None
    body = data[HEAD_BYTES:]
    return body if data[:HEAD_BYTES] == MAGIC + _digest([body]) else None


def write_entry(name: str, *parts: Any) -> None:
    """Write an entry to file ``name``. ``parts``: its contents, bytes or arrays, one after another.
    Does nothing where the folder cannot be written to, or treadle's sources have changed.
    """
    with contextlib.suppress(OSError, CacheError):  # a read-only or full disk
        check_sources()
        where = entries_folder()
        write_whole(where / name, MAGIC + _digest(parts), *parts)
        _remove_oldest(where)


def read_object(key: str, suffix: str) -> Any:
    """Return the object stored under ``key``; None if there is none, or it is damaged. ``suffix``:
    the end of the file's name, one for each kind of object.
    """
    body = read_entry(key + suffix)
    if body is None:
        return None
    try:
        stored, found = pickle.loads(body)
    except Exception:  # whatever a pickle of other classes raises
        return None
    return found if stored == key else None


def write_object(key: str, suffix: str, given: Any) -> None:
    """Store the object ``given`` under ``key``, as a pickle; ``suffix`` as in ``read_object``."""
    write_entry(key + suffix, pickle.dumps((key, given), protocol=4))


def _digest(parts: Iterable[Any]) -> bytes:
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


def _remove_oldest(folder: Path) -> None:
    found = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(folder)]
    for _, path in sorted(found)[:-MOST_FILES]:
        os.unlink(path)


# -- records of models (``catalog/records.py``) ----------------------------------------------------


def record_key(path: Path) -> str:
    """Return the KEY of a model's records, from its file, its first shard or, for a folder, the
    first ``*.safetensors`` in it. Raises OSError if there is no such file.
    """
    if path.is_dir():
        path = min(path.glob("*.safetensors"), default=path)
    real = os.path.realpath(path)
    info = os.stat(real)
    about = f"{real}\0{info.st_size}\0{info.st_mtime_ns}"
    return hex_digest(os.fsencode(about))


def records_folder() -> Path:
    """Return the folder of all records. Raises CacheError without a home directory."""
    return folder() / "models"


def record_path(path: Path, name: str) -> Path | None:
    """Return the path of a model's record, whose file's name ends in ``name``; None without a cache
    folder or model.
    """
    try:
        return records_folder() / (record_key(path) + name)
    except (CacheError, OSError):
        return None


def writable_record(path: Path, name: str) -> Path | None:
    """Return the path of a model's record ``name``, and create its folder; None if that fails."""
    found = record_path(path, name)
    try:
        checked_folder()
        if found is not None:
            found.parent.mkdir(exist_ok=True)
    except (CacheError, OSError):
        return None
    return found


def note_use(path: Path) -> None:
    """Record that a model is used now. Does nothing where records cannot be written."""
    found = writable_record(path, USED)
    with contextlib.suppress(OSError):
        if found is not None:
            found.touch()

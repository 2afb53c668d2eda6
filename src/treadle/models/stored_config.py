"""Configurations on disk, beside the stored plans (``devices/cpu/stored_plan.py``), and the files
that both are kept in.

A stored configuration is used as it is: no graph is imported, and no key or tensor is checked
again. It is what ``load_config`` made of the same bytes: the name of its file is a hash of the
model's files (device, inode, size, times), of the names in its header and of the sources.

The file is a pickle, which Python reads without compiling a constructor for each class. Reading a
pickle can run code, like the kernels' files in the same cache: the folder is refused if it belongs
to somebody else or if others may write to it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.base.digest import blake2b
from treadle.errors import CacheError
from treadle.files.gguf import GGUF
from treadle.jit.cache import checked_folder, hash_of_sources, source_hash, write_whole

if TYPE_CHECKING:
    from treadle.models.config import Config

# Sources that can change a configuration or a plan, besides those that can change a kernel's code.
SOURCES = ("plan", "models", "files", "kvcache", "engine", "devices.protocol")
SUFFIX = ".config"
MAGIC = b"entry001"
DIGEST_BYTES = 16
HEAD_BYTES = len(MAGIC) + DIGEST_BYTES
MOST_FILES = 256  # configurations and plans; the oldest are removed
N_NAMED = 4  # tensors in a warning


def open_config(gguf: GGUF) -> Config:
    """Return the configuration of a language model as ``load_config`` does, with the same errors
    and warnings: stored by an earlier process, or read and then stored. Tensors in ``gguf`` are
    renamed to the graph's names.
    """
    key = _key(gguf)
    config = None if key is None else _read(key, gguf)
    if config is None:
        from treadle.models.load import load_config  # imports the graphs and all architectures

        config = load_config(gguf, warn=False)
        if key is not None:
            _write(key, gguf, config)
    warn_of_unread(gguf, config)
    return config


def warn_of_unread(gguf: GGUF, config: Config) -> None:
    """Log, once per process and file, the tensors that are not used, if there are some."""
    if config.unread:
        _warn(gguf.path, config.unread)


@lru_cache
def _warn(path: Path, names: tuple[str, ...]) -> None:
    from logging import getLogger

    more = f" and {len(names) - N_NAMED} more" if len(names) > N_NAMED else ""
    getLogger("treadle").warning(
        "%s: unused tensors: %s%s (see treadle inspect)",
        path,
        ", ".join(names[:N_NAMED]),
        more,
    )


def _key(gguf: GGUF) -> str | None:
    """Return the key of a file's configuration. None if it is not stored: of models that are not
    unchanged GGUF files, and under ``TREADLE_PLANS=0``.
    """
    if not is_on() or not (files := identity(gguf)):
        return None
    names = "\0".join((*gguf.tensors, "", *gguf.metadata))
    return key_of(source_hash(), plan_sources(), files, names)


def _read(key: str, gguf: GGUF) -> Config | None:
    """Return the configuration stored under ``key``, and rename the tensors of ``gguf``; None if
    there is none, or it is damaged.
    """
    body = read_entry(key + SUFFIX)
    if body is None:
        return None
    try:
        stored, names, config = pickle.loads(body)
    except Exception:
        return None
    if stored != key or len(names) != len(gguf.tensors):
        return None
    gguf.tensors = dict(zip(names, gguf.tensors.values(), strict=True))
    found: Config = config
    return found


def _write(key: str, gguf: GGUF, config: Config) -> None:
    """Store ``config`` with all that starts ask of its graph, and the new names of the tensors."""
    # Computed here, they are among the attributes that pickle stores.
    with contextlib.suppress(TypeError):  # a field that has no digest
        asked = config.pools, config.main_output, config.unread, config.digest
        assert asked
        write_entry(key + SUFFIX, pickle.dumps((key, [*gguf.tensors], config), protocol=4))


# -- files of configurations and plans ----------------------------------------------------------


def is_on() -> bool:
    """Return whether configurations and plans are stored and used: unless ``TREADLE_PLANS=0``."""
    return os.environ.get("TREADLE_PLANS") != "0"


def identity(gguf: GGUF) -> list[tuple[int, ...]] | None:
    """Return device, inode, size and times of a GGUF model's files. None if a file changed or a
    tensor was replaced in memory, and for other kinds of models, whose tensors also depend on other
    files.
    """
    if type(gguf) is not GGUF or not gguf.is_in_place:
        return None
    found: list[tuple[int, ...]] = []
    for file in gguf.mapped_files:
        try:
            about = os.stat(file.path)
        except OSError:
            return None
        if file.state != (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns):
            return None
        found.append((*file.state, about.st_ctime_ns))
    return found or None


@lru_cache(maxsize=1)
def plan_sources() -> str:
    """Return a hash of SOURCES."""
    return hash_of_sources(*SOURCES)


def key_of(*given: object) -> str:
    """Return a hash of values whose ``repr`` is equal in every process."""
    return blake2b(repr(given).encode(), digest_size=DIGEST_BYTES).hexdigest()


def read_entry(name: str) -> memoryview | None:
    """Return the contents of a file of the folder; None if there is none, or it is damaged."""
    try:
        data = memoryview((entries_folder() / name).read_bytes())
    except (OSError, CacheError):
        return None
    body = data[HEAD_BYTES:]
    return body if data[:HEAD_BYTES] == MAGIC + _digest([body]) else None


def write_entry(name: str, *parts: Any) -> None:
    """Write a file of the folder, bytes or arrays; a folder that cannot be written to is
    ignored.
    """
    with contextlib.suppress(OSError, CacheError):  # a read-only or full disk
        folder = entries_folder()
        write_whole(folder / name, MAGIC + _digest(parts), *parts)
        _remove_oldest(folder)


def entries_folder() -> Path:
    """Return the folder of configurations and plans, inside that of kernels. Raises CacheError."""
    return checked_folder(checked_folder() / "plans")


def _digest(parts: Iterable[Any]) -> bytes:
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(part)
    return state.digest()


def _remove_oldest(folder: Path) -> None:
    found = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(folder)]
    for _, path in sorted(found)[:-MOST_FILES]:
        os.unlink(path)

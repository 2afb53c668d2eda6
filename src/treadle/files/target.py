"""Where a file is to be written: refused before any work, where that would cost something."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeAlias

from treadle.base.humanize import n_bytes, why
from treadle.errors import FileError, TreadleError
from treadle.files.splits import shards_beside

Name: TypeAlias = str | os.PathLike[str]

ABSENT = (errno.ENOENT, errno.ENOTDIR)  # no such file
LONGEST = 255  # bytes of a file's name, where systems set a limit
ADDED = 32  # at most so many are added to a name until its file is complete


def file_name(path: Name | bytes, of: str = "path") -> Path:
    """``path``, which must name something: ``Path("")`` is the current folder. Bytes are names as
    the system has them. ``of``: the argument, for errors.

    Raises FileError for what can be no name here, or leads through what may not be read.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TreadleError(f"{of}={path!r:.80}: expected a path") from None
    if not text:
        raise FileError("an empty name", path="''", expected="a file name")
    if "\0" in text:
        raise FileError("its name holds a NUL byte", path=text)
    try:
        os.stat(text)
    except UnicodeEncodeError:
        raise FileError("its name has no bytes in this system's encoding", path=text) from None
    except OSError as error:  # pathlib's own questions raise what is none of these two
        if error.errno not in ABSENT:
            raise FileError(why(error), path=text) from error
    return Path(text)


def check_target(path: Name, sources: Iterable[Path] = (), *, force: bool = False) -> None:
    """Raise FileError unless a new file may take the place of whatever ``path`` names.

    A finished file is renamed over its target, and a rename replaces all but folders: a device or a
    pipe would be gone, and so would one of the ``sources``, the files that are read.
    """
    path = Path(path)
    if str(path) == "-":  # what other commands call standard output
        raise FileError(
            "cannot be a stream: the output is renamed into place when it is complete",
            path=path,
            expected="a name for the new file",
        )
    check_not_read(path, sources)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in ABSENT:  # a name that is too long is no name for the part's rename
            raise FileError(f"cannot be written: {why(error)}", path=path) from error
        mode = stat.S_IFREG  # what else may be wrong, the folder tells
    if stat.S_ISDIR(mode):
        raise FileError("is a folder", path=path, expected="a name for the new file")
    if not stat.S_ISREG(mode):
        raise FileError("is no regular file", path=path, expected="a name for the new file")
    if os.path.lexists(path) and not force:
        raise FileError("exists already", path=path, expected="--force to replace it")
    check_folder(path)


def check_not_read(path: Name, sources: Iterable[Path]) -> None:
    """Raise FileError where ``path`` is one of the ``sources``, under whatever name."""
    if os.path.exists(path) and any(s.exists() and s.samefile(path) for s in sources):
        raise FileError("is also the input: choose another name for the output", path=path)


def check_folder(path: Name) -> None:
    """Raise FileError unless a file can be made beside ``path``."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileError("cannot be written: its folder does not exist", path=path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError("cannot be written: its folder is not writable", path=path)


def check_room(path: Name, need: int) -> None:
    """Raise FileError unless ``need`` bytes fit on the disk beside ``path``: not after hours."""
    import shutil  # brings compressors along

    if need > shutil.disk_usage(Path(path).parent).free:
        raise FileError(f"not enough disk space: {room(path, need)}", path=path)


def room(path: Name, need: int) -> str:
    """What a file of ``need`` bytes needs, and what the disk has."""
    import shutil

    return f"{n_bytes(need)} needed, {n_bytes(shutil.disk_usage(Path(path).parent).free)} free"


def part_of(path: Path, mark: str = "") -> Path:
    """Where a file grows until it is complete: hidden, beside it. ``mark``: one part of several."""
    name = path.name
    if len(os.fsencode(name)) > LONGEST - ADDED:
        import hashlib  # brings OpenSSL along

        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return path.with_name(f".{name}{mark}.part")


@contextmanager
def new_file(path: Name, need: int = 0, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``path`` when ``with`` ends: whole, or not at all.

    It is written beside it. Raises FileError where the system refuses; ``need`` is then how many
    bytes it was to have, for a disk that is full; ``mode``: who may read and write it.
    """
    import secrets  # brings OpenSSL along, and readers of files need none of it

    path = Path(path)
    part = part_of(path, f".{secrets.token_hex(4)}")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as e:
        lacks = f" ({room(path, need)})" if need and e.errno == errno.ENOSPC else ""
        raise FileError(f"cannot be written: {why(e)}{lacks}", path=path) from e
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def files_of(*sources: Name | None) -> list[Path]:
    """The files that models and texts consist of: every shard, all of a Hugging Face folder."""
    return [file for source in sources if source is not None for file in _files(Path(source))]


def _files(source: Path) -> Iterator[Path]:
    if source.name.endswith((".safetensors", ".safetensors.index.json")):
        source = source.parent
    if source.is_dir():
        yield from (p for p in source.iterdir() if p.suffix != ".gguf" and p.is_file())
    else:
        yield source
        yield from shards_beside(source)

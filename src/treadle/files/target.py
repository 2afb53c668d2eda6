"""Output files: checks before the work starts, and atomic writing."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from treadle.base.humanize import n_bytes
from treadle.base.validate import ABSENT, Name
from treadle.errors import FileError, why
from treadle.files.splits import shards_beside

LONGEST = 255  # bytes of a file name, the usual limit of file systems
ADDED = 32  # bytes that ``part_of`` may add to a name


def check_target(path: Name, sources: Iterable[Path] = (), *, force: bool = False) -> None:
    """Raise FileError unless ``path`` can be written as a new file: it is no folder, device, pipe
    or one of ``sources``, its folder is writable, and it does not exist unless ``force``.

    A finished file is renamed over its target. A rename replaces anything but a folder, so without
    this check it could delete one of the files that are read.
    """
    path = Path(path)
    if str(path) == "-":  # other programs' name for standard output
        raise FileError(
            "cannot be a stream: the output is renamed into place when it is complete",
            path=path,
            expected="a name for the new file",
        )
    check_not_read(path, sources)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in ABSENT:  # such as a name that is too long
            raise FileError(f"cannot be written: {why(error)}", path=path) from error
        mode = stat.S_IFREG  # a missing folder is found by check_folder
    if stat.S_ISDIR(mode):
        raise FileError("is a folder", path=path, expected="a name for the new file")
    if not stat.S_ISREG(mode):
        raise FileError("is no regular file", path=path, expected="a name for the new file")
    if os.path.lexists(path) and not force:
        raise FileError("exists already", path=path, expected="--force to replace it")
    check_folder(path)


def check_not_read(path: Name, sources: Iterable[Path]) -> None:
    """Raise FileError if ``path`` is the same file as one of ``sources``, under any name."""
    if os.path.exists(path) and any(s.exists() and s.samefile(path) for s in sources):
        raise FileError("is also the input: choose another name for the output", path=path)


def check_folder(path: Name) -> None:
    """Raise FileError unless a file can be created in the folder of ``path``."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileError("cannot be written: its folder does not exist", path=path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError("cannot be written: its folder is not writable", path=path)


def check_room(path: Name, need: int) -> None:
    """Raise FileError unless ``need`` bytes are free on the disk of ``path``."""
    import shutil  # imported late: it imports compressors

    if need > shutil.disk_usage(Path(path).parent).free:
        raise FileError(f"not enough disk space: {describe_space(path, need)}", path=path)


def describe_space(path: Name, need: int) -> str:
    """Return a message with the space needed (``need`` bytes) and the free space on the disk of
    ``path``.
    """
    import shutil

    return f"{n_bytes(need)} needed, {n_bytes(shutil.disk_usage(Path(path).parent).free)} free"


def part_of(path: Path, mark: str = "") -> Path:
    """Return the hidden temporary path for an unfinished file, in the folder of ``path``. ``mark``
    distinguishes several of them.
    """
    name = path.name
    if len(os.fsencode(name)) > LONGEST - ADDED:
        import hashlib  # imported late: it loads OpenSSL

        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return path.with_name(f".{name}{mark}.part")


@contextmanager
def new_file(path: Name, need: int = 0, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a new file that atomically replaces ``path`` when the ``with`` block ends without an
    error.

    It is written to a temporary file in the same folder. ``need``: expected size in bytes, for the
    message if the disk is full; ``mode``: permissions. Raises FileError if the system refuses.
    """
    import secrets  # imported late: it loads OpenSSL, which readers do not need

    path = Path(path)
    part = part_of(path, f".{secrets.token_hex(4)}")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as e:
        lacks = f" ({describe_space(path, need)})" if need and e.errno == errno.ENOSPC else ""
        raise FileError(f"cannot be written: {why(e)}{lacks}", path=path) from e
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, with the permissions of the one that it replaces; a device or
    pipe directly. Raises FileError.
    """
    mode = 0o666
    if path.exists() and not path.is_file():  # a device or a pipe cannot be replaced atomically
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise FileError(f"cannot be written: {why(error)}", path=path) from error
        return
    exists = False
    with suppress(OSError):  # a new file
        mode = path.stat().st_mode & 0o777
        exists = True
    with new_file(path.resolve(), mode=mode) as file:
        if exists:
            with suppress(OSError):  # file systems without permissions
                os.chmod(file.name, mode)  # the umask has removed some
        file.write(text.encode("utf-8"))


def files_of(*sources: Name | None) -> list[Path]:
    """Return all files of the given models and other inputs: every shard of a GGUF file, every file
    of a folder except GGUF files.
    """
    return [file for source in sources if source is not None for file in _files(Path(source))]


def _files(source: Path) -> Iterator[Path]:
    if source.name.endswith((".safetensors", ".safetensors.index.json")):
        source = source.parent
    if source.is_dir():
        yield from (p for p in source.iterdir() if p.suffix != ".gguf" and p.is_file())
    else:
        yield source
        yield from shards_beside(source)

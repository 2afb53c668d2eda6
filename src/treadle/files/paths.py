"""Checks of file names that callers give."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TypeAlias

from treadle.errors import FileError, TreadleError, why

Name: TypeAlias = str | os.PathLike[str]

ABSENT = (errno.ENOENT, errno.ENOTDIR)  # no such file


def file_name(path: Name | bytes, of: str = "path") -> Path:
    """Return ``path`` as a Path. An empty name is refused, since ``Path("")`` is the current
    folder.

    Bytes are decoded as file names. ``of`` is the argument's name, for errors. Raises FileError for
    an invalid name, or one in a folder that may not be read; TreadleError for a value that is no
    path.
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
    except OSError as error:  # errors other than ABSENT would make pathlib's queries raise
        if error.errno not in ABSENT:
            raise FileError(why(error), path=text) from error
    return Path(text)

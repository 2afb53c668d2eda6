"""Files as memory: pages of them are read when they are touched, and shared with whoever else maps
them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from pathlib import Path

from treadle.errors import FileError
from treadle.words import why


def map_file(path: Path, expected: str) -> mmap.mmap:
    """The file's pages, read-only.

    Raises FileError, which says what was ``expected``, for what is not a regular file, is empty or
    cannot be opened.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            raise FileError("not a regular file", path=path, expected=expected)
        with path.open("rb") as f:
            if os.fstat(f.fileno()).st_size == 0:
                raise FileError("an empty file", path=path, offset=0, expected=expected)
            mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name, a file emptied meanwhile
        raise FileError(f"cannot be opened: {why(e)}", path=path, expected=expected) from e
    # Where the file system can, pages that are read from now on come 2 MB at a time: a cold file
    # loads in two thirds of the time, and decoding walks it a tenth faster.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped

"""Sequential reader of untrusted mapped files.

Every count, length and offset is checked against the rest of the file before it is used in a loop
or an allocation.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError, why
from treadle.files.mapping import MappedFile, map_file

Bytes = npt.NDArray[np.uint8]


def read_head(path: Path, n: int, expected: str) -> bytes:
    """Return the first ``n`` bytes of a file, or all of a shorter one. Raises FileError, with the
    text ``expected``, if it cannot be read.
    """
    try:
        with path.open("rb") as f:
            return f.read(n)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise FileError(f"cannot be opened: {why(e)}", path=path, expected=expected) from e


class MappedReader:
    """Base class of file readers: a mapped file (``file``: its bytes as uint8) with bounds checks
    and errors.
    """

    tensors: Any = ()  # by name

    def __init__(self, path: Path, expected: str, mapped: MappedFile | None = None) -> None:
        """Map the file, unless it is ``mapped`` already. Raises FileError, with the text
        ``expected``, on failure.
        """
        self.path = path
        self.map = map_file(path, expected) if mapped is None else mapped
        self.file: Bytes = np.frombuffer(self.map, np.uint8)

    def close(self) -> None:
        """Close the file. It stays mapped until the last view of it is dropped."""
        self.tensors, self.file = {}, np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self.map.close()

    def check_inside(self, at: int, n_bytes: int, where: str) -> None:
        """Raise FileError unless the file has ``n_bytes`` bytes from byte ``at``; ``where`` names
        the part.
        """
        if at + n_bytes > len(self.file):
            what = f"cut short: the file has {len(self.file)} bytes: fetch it again"
            raise self.error(what, at, where, str(at + n_bytes))

    def error(
        self,
        what: str,
        offset: int | None = None,
        where: str | None = None,
        expected: str | None = None,
    ) -> FileError:
        """Return a FileError about this file: ``what`` was found at byte ``offset``, in the part
        ``where``, and what was ``expected``.
        """
        return FileError(what, path=self.path, offset=offset, where=where, expected=expected)


class FileReader(MappedReader):
    """A sequential reader. ``at`` is the next byte to read, and the offset in errors unless another
    is given. The argument ``where`` of methods names the part of the file that is read, for errors.
    Reading past the end raises FileError.
    """

    def __init__(self, path: Path, expected: str, mapped: MappedFile | None = None) -> None:
        """Map the file, unless it is ``mapped`` already, and start at byte 0."""
        super().__init__(path, expected, mapped)
        self.at = 0

    def take(self, n: int, where: str) -> bytes:
        """Read the next ``n`` bytes. Raises FileError if fewer are left."""
        left = len(self.file) - self.at
        if n > left:
            raise self.error(f"cut short: {left} bytes left", where=where, expected=f"{n} bytes")
        self.at += n
        return self.map[self.at - n : self.at]

    def uint(self, where: str, n_bytes: int = 4) -> int:
        """Read an unsigned little-endian integer of ``n_bytes``."""
        return int.from_bytes(self.take(n_bytes, where), "little")

    def count(self, where: str, item_bytes: int, n_bytes: int) -> int:
        """Read a count, an integer of ``n_bytes``, of items that follow. Raises FileError if the
        file has no room for so many items of at least ``item_bytes`` each.
        """
        at = self.at
        n = self.uint(where, n_bytes)
        left = len(self.file) - self.at
        need = n * item_bytes
        if need > left:
            what = f"cut short, or damaged: a count of {n}, but {left} bytes left"
            raise self.error(what, at, where, f"{need} bytes or more")
        return n

    def text(self, n: int, where: str, at: int) -> str:
        """Read the next ``n`` bytes as UTF-8; errors have the byte offset ``at``."""
        raw = self.take(n, where)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{raw[:80]!r}", at, where, "UTF-8") from None

    def error(
        self,
        what: str,
        offset: int | None = None,
        where: str | None = None,
        expected: str | None = None,
    ) -> FileError:
        """Return a FileError about this file, as ``MappedReader.error`` does, but with the current
        offset by default.
        """
        return super().error(what, self.at if offset is None else offset, where, expected)

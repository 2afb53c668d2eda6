"""A mapped file, read from front to back; none of its bytes is trusted.

Every count, length and offset is held against what is left of the file before anything is looped
over or allocated by it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.humanize import why
from treadle.errors import FileError
from treadle.files.mapping import map_file

Bytes = npt.NDArray[np.uint8]


def read_head(path: Path, n: int, expected: str) -> bytes:
    """The first ``n`` bytes of a file, all of a shorter one. FileError where it cannot be read."""
    try:
        with path.open("rb") as f:
            return f.read(n)
    except (OSError, ValueError) as e:  # ValueError: a NUL in the name
        raise FileError(f"cannot be opened: {why(e)}", path=path, expected=expected) from e


class MappedReader:
    """A file in memory: what every reader of one begins with."""

    tensors: Any = ()  # by name

    def __init__(self, path: Path, expected: str) -> None:
        """Map it. FileError, which says what was ``expected``, where that fails."""
        self.path = path
        self.map = map_file(path, expected)
        self.file: Bytes = np.frombuffer(self.map, np.uint8)

    def close(self) -> None:
        """Let go of the file; views still in use keep it mapped."""
        self.tensors, self.file = {}, np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self.map.close()

    def check_inside(self, at: int, n_bytes: int, where: str) -> None:
        """Raise FileError unless the ``n_bytes`` from ``at`` on are in the file."""
        if at + n_bytes > len(self.file):
            what = f"cut short: the file has {len(self.file)} bytes"
            raise self.error(what, at, where, str(at + n_bytes))

    def error(
        self,
        what: str,
        offset: int | None = None,
        where: str | None = None,
        expected: str | None = None,
    ) -> FileError:
        """A FileError about this file."""
        return FileError(what, path=self.path, offset=offset, where=where, expected=expected)


class FileReader(MappedReader):
    """Reads it from front to back; ``where`` is what to call a part in an error.

    An error is about byte ``at``, where the reader stands, unless it names another.
    """

    def __init__(self, path: Path, expected: str) -> None:
        """Stand at the first byte."""
        super().__init__(path, expected)
        self.at = 0

    def take(self, n: int, where: str) -> bytes:
        """The next ``n`` bytes."""
        left = len(self.file) - self.at
        if n > left:
            raise self.error(f"cut short: {left} bytes left", where=where, expected=f"{n} bytes")
        self.at += n
        return self.map[self.at - n : self.at]

    def uint(self, where: str, n_bytes: int = 4) -> int:
        """An unsigned integer, little-endian."""
        return int.from_bytes(self.take(n_bytes, where), "little")

    def count(self, where: str, item_bytes: int, n_bytes: int) -> int:
        """A count, ``n_bytes`` wide, of things of at least ``item_bytes`` each that follow."""
        at, n = self.at, self.uint(where, n_bytes)
        left, need = len(self.file) - self.at, n * item_bytes
        if need > left:
            what = f"cut short, or damaged: a count of {n}, but {left} bytes left"
            raise self.error(what, at, where, f"{need} bytes or more")
        return n

    def text(self, n: int, where: str, at: int) -> str:
        """The next ``n`` bytes, which are UTF-8, of what began at byte ``at``."""
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
        """A FileError about this file."""
        return super().error(what, self.at if offset is None else offset, where, expected)

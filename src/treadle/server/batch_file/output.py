"""The output file of a batch job: append-only, one answer a line, resumable after any crash.

The n-th line answers the n-th request. If the process is killed while it writes, the last line has
no newline, and the next start cuts it off. All others are whole, so no line is written twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO

from treadle.errors import FileError, TreadleError
from treadle.server.batch_file.lines import HEAD, InputLine
from treadle.system import SYSTEM

FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | SYSTEM.BINARY


class Output:
    """The output file, locked against a second job; ``path`` "-" is standard output, which cannot
    be resumed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.n_earlier = 0
        self._fd = 1 if path == "-" else os.open(path, FLAGS, 0o666)
        if path == "-":
            sys.stdout.flush()
        else:
            try:
                self._lock()
            except BaseException:
                self.close()
                raise

    def _lock(self) -> None:
        with contextlib.suppress(OSError):  # a pipe, or a file system without locks
            if not SYSTEM.lock(self._fd):
                raise TreadleError(f"{self.path}: another treadle batch is writing to it")

    def skip(self, lines: Iterator[InputLine]) -> None:
        """Take from ``lines`` those that the file already answers, and cut off an incomplete last
        answer. Raises FileError if the file holds answers to other requests.
        """
        if self.path == "-" or not _is_file(self._fd):
            return
        at = 0
        with open(self._fd, "rb", closefd=False) as file:
            for raw in file:
                if not raw.endswith(b"\n"):
                    self._check_cut(raw)
                    break
                self.n_earlier += 1
                self._check(raw, next(lines, None))
                at += len(raw)
        if at < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, at)

    def _check(self, raw: bytes, line: InputLine | None) -> None:
        found: object = None
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(raw)
        name = found.get("id") if isinstance(found, dict) else None
        if line is None or name != line.id:
            what = (
                "does not answer any line of the input"
                if line is None
                else "answers a different line"
            )
            raise FileError(
                f"{what}: the file belongs to another job",
                path=self.path,
                where=f"line {self.n_earlier}",
                expected=f"the answer to line {line.number}" if line else "no more lines",
            )

    def _check_cut(self, raw: bytes) -> None:
        """Raise FileError unless the last line, ``raw``, may be the beginning of an answer: other
        files may lack a last newline too. A disk that lost its cache leaves zeros.
        """
        begun = raw.rstrip(b"\0")[: len(HEAD)]
        if not HEAD.startswith(begun):
            where = f"line {self.n_earlier + 1}"
            what = "is not an answer: the file belongs to another job"
            raise FileError(
                what, path=self.path, where=where, expected="answers of this job, or a new file"
            )

    def append(self, data: bytes) -> None:
        """Write ``data``, a line with its newline. Raises OSError with the file's name; a part of
        the line may have been written.
        """
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            error.filename = self.path
            raise

    def close(self) -> None:
        """Flush the file to disk and close it. Idempotent."""
        if self._fd > 1:
            with contextlib.suppress(OSError):
                os.fsync(self._fd)
            os.close(self._fd)
        self._fd = -1


def _is_file(fd: int) -> bool:
    import stat

    return stat.S_ISREG(os.fstat(fd).st_mode)


def open_input(path: str) -> BinaryIO:
    """Open the file of requests; "-" is standard input."""
    if path == "-":
        # Not sys.stdin: a thread may be blocked in it when the process ends.
        return open(0, "rb", closefd=False)
    return open(path, "rb")


def check_apart(source: str, target: str) -> None:
    """Raise TreadleError if the output path ``target`` is the same file as the input path
    ``source``.
    """
    if "-" not in (source, target) and os.path.exists(target) and os.path.samefile(source, target):
        raise TreadleError(f"{target}: the output must not be the input file")

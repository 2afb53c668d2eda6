"""The partial file of a conversion: next to its target, sparse, and resumable.

``.NAME.part`` has its full size from the start and fills up tensor by tensor. The journal next to
it, ``.NAME.part.journal``, lists the complete tensors: a line with the digest of the job, then one
line for each tensor. A line is written only after its tensor is on the disk, so a crash or power
loss costs only the data written since the last line.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from treadle.errors import FileError
from treadle.files.target import part_of
from treadle.system import SYSTEM

ZERO_PAGE_BYTES = 4096  # bytes: a page of zeros is left out
SYNC = 256 << 20  # bytes written between two entries of the journal
CANNOT = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}
FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
FULL[errno.EFBIG] = "the file would exceed the maximum file size"
JOURNAL = "treadle-convert-1"

Bytes = npt.NDArray[np.uint8]


class PartFile:
    """The part file of one file of the output, ``target``: ``n_bytes`` long, open for writing and
    locked against other conversions.
    """

    def __init__(self, target: Path, n_bytes: int) -> None:
        self.target = target
        self.path = part_of(target)
        self.n_bytes = n_bytes
        self.fd = self._open()

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | SYSTEM.BINARY | getattr(os, "O_NOFOLLOW", 0)
        while True:
            fd = os.open(self.path, flags, 0o666)
            if not SYSTEM.lock(fd):
                os.close(fd)
                raise FileError("another conversion is writing this file", path=self.target)
            with contextlib.suppress(FileNotFoundError):  # the other conversion has renamed it
                if os.path.samestat(os.fstat(fd), os.lstat(self.path)):
                    return fd
            os.close(fd)

    def clear(self) -> None:
        """Truncate the file to a single hole of ``n_bytes``."""
        os.ftruncate(self.fd, 0)
        os.ftruncate(self.fd, self.n_bytes)

    def write(self, data: Bytes, at: int) -> None:
        """Write uint8 ``data`` at byte offset ``at``; whole pages of zeros stay holes."""
        head = min(-at % ZERO_PAGE_BYTES, len(data))
        self._write(data[:head], at)
        n_pages = (len(data) - head) // ZERO_PAGE_BYTES
        body = data[head : head + n_pages * ZERO_PAGE_BYTES].reshape(n_pages, ZERO_PAGE_BYTES)
        # Three bytes rule out most pages that are not zero, so the check is cheap.
        maybe = np.flatnonzero((body[:, 0] | body[:, -1] | body[:, ZERO_PAGE_BYTES // 2]) == 0)
        zeros = maybe[~body[maybe].any(axis=1)]
        start = 0
        for page in [*zeros.tolist(), n_pages]:
            self._write(body[start:page].reshape(-1), at + head + start * ZERO_PAGE_BYTES)
            start = page + 1
        tail = head + n_pages * ZERO_PAGE_BYTES
        self._write(data[tail:], at + tail)

    def _write(self, data: Bytes, at: int) -> None:
        view = memoryview(data.data)
        while view:
            n = SYSTEM.write_at(self.fd, view, at)
            view = view[n:]
            at = at + n

    def copy(self, source: int, offset: int, n_bytes: int, at: int) -> bool:
        """Let the kernel copy ``n_bytes`` from byte ``offset`` of file descriptor ``source`` to
        byte ``at``. Return False if it cannot; the caller then writes them.

        A file system with reflinks shares blocks if both offsets are block-aligned. A hole of the
        source becomes a hole.
        """
        end = offset + n_bytes
        if not hasattr(os, "copy_file_range"):
            return False
        while offset < end:
            begin, stop = SYSTEM.next_data(source, offset, end)
            at = at + begin - offset
            offset = begin
            while offset < stop:
                try:
                    n = os.copy_file_range(source, self.fd, stop - offset, offset, at)
                except OSError as e:
                    if e.errno in CANNOT:
                        return False
                    raise
                if n == 0:
                    return False  # the source became shorter: reading it raises the error
                offset = offset + n
                at = at + n
        return True

    def replace_target(self) -> None:
        """Rename the part to its target. Raises OSError."""
        if not SYSTEM.RENAMES_OPEN:
            self.close()
        self.path.replace(self.target)

    def close(self, *, discard_empty: bool = False) -> None:
        """Close the file and release its lock; with ``discard_empty``, delete an empty file."""
        if self.fd >= 0:
            if discard_empty and os.fstat(self.fd).st_size == 0:
                self.path.unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = -1


class Journal:
    """The list of a job's complete tensors, by index; ``done`` has those that an earlier, killed
    run wrote. ``job``: the digest of the job. A journal of another job is begun anew; without
    ``resume``, any.
    """

    def __init__(self, parts: Sequence[PartFile], job: str, *, resume: bool) -> None:
        self.parts, self.path = parts, Path(f"{parts[0].path}.journal")
        self.discarded = False  # a part of another job was found and cleared
        self._waiting: list[int] = []
        self._n_unsaved = 0
        self.done = self._read(job) if resume else set()
        if not self.done:
            self._begin(job)
        self._file = self.path.open("a", encoding="ascii")

    def _read(self, job: str) -> set[int]:
        try:
            lines = self.path.read_text("ascii").split("\n")[:-1]  # drops a cut line
        except (FileNotFoundError, UnicodeDecodeError):
            return set()
        whole = all(os.fstat(part.fd).st_size == part.n_bytes for part in self.parts)
        if lines[:1] != [f"{JOURNAL} {job}"] or not whole:
            self.discarded = True
            return set()
        return {int(line) for line in lines[1:] if line.isdecimal()}

    def _begin(self, job: str) -> None:
        self.path.unlink(missing_ok=True)  # first: a journal must never describe other bytes
        try:
            for part in self.parts:
                part.clear()
            with self.path.open("x", encoding="ascii") as f:
                f.write(f"{JOURNAL} {job}\n")
        except OSError:  # file size limit or full disk: nothing to resume
            self._unlink()
            raise

    def add(self, index: int, n_bytes: int) -> None:
        """Queue tensor ``index``, of ``n_bytes``, as written; ``save``, called here after every
        SYNC bytes, records it once it is on the disk.
        """
        self._waiting.append(index)
        self._n_unsaved += n_bytes
        if self._n_unsaved >= SYNC:
            self.save()

    def save(self) -> None:
        """Flush everything written to the disk, then record it."""
        for part in self.parts:
            os.fsync(part.fd)
        self._file.write("".join(f"{index}\n" for index in self._waiting))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._waiting = []
        self._n_unsaved = 0

    def close(self) -> None:
        """Close the journal; it stays for a later run to resume from."""
        self._file.close()

    def remove(self) -> None:
        """Delete the journal, and the parts that have not been moved into place."""
        self.close()
        self._unlink()

    def _unlink(self) -> None:
        for part in self.parts:
            part.path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)


def is_full(error: OSError) -> str | None:
    """Return why ``error`` means that the disk is full or a size limit is reached, as a clause;
    None if it means something else.
    """
    return FULL.get(error.errno or 0)

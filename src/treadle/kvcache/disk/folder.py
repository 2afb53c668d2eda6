"""A folder of small files with a size limit; the least recently used files are removed first.

Several processes may use one folder. The writer makes a file's name of digests, and writes the file
atomically; it is only ever replaced by the same bytes. An unreadable file counts as missing; a file
that cannot be written is skipped, and ``problem`` has the reason. Only the user can access the
files.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from treadle.errors import FileError, why
from treadle.jit.cache import write_whole
from treadle.system import SYSTEM

# hex digits in a name
N_CHAIN = 40
N_VARIANT = 24
NAME = re.compile(rf"[0-9a-f]{{{N_CHAIN}}}-[0-9a-f]{{{N_VARIANT}}}\.\w{{1,40}}\.page", re.ASCII)
PART = re.compile(r"\.new-\w+", re.ASCII)  # temporary files of ``write_whole``
STALE_S = 600.0  # age at which a temporary file is abandoned
QUEUE_BYTES = 64 << 20  # waiting to be written
TOUCHES = 10_000  # queue length beyond which uses are not recorded
RETRY_S = 30.0  # pause after a failed write
KEEP = 15 / 16  # share of the limit to keep when files are removed
RESCAN_SHARE = 64  # rescan after writing this fraction of the limit: other processes write too
OPEN = os.O_RDONLY | SYSTEM.BINARY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
Head = Callable[[bytes], bytes]  # makes a file's header from its data


class Folder:
    """The files of one directory ``path``, which is created if absent, at most ``n_bytes`` in all.
    A background thread writes them.

    Raises FileError for a directory that cannot be used, or that other users may write to.
    """

    def __init__(self, path: Path, n_bytes: int) -> None:
        self.path = path.absolute()
        self.bound = n_bytes
        _check(path)
        self.problem = ""  # why the last write failed
        self.n_written = self.n_left_out = self.n_removed = 0  # files
        self.n_bytes = 0  # in the folder, as far as known
        self.names: frozenset[str] = frozenset()  # of the files, at the last scan
        self._since_seen = 0
        self._queue: deque[tuple[str, bytes, Head | None, int]] = deque()
        self._queued = 0  # bytes
        self._retry_at = 0.0
        self._changed = threading.Condition()
        self._seen = self._closed = self._warned = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="treadle-pages", daemon=True)
        self._thread.start()

    @property
    def _is_forked(self) -> bool:
        """Whether this process is a fork of the writer. A fork has no writer thread, and its copy
        of the lock may never be released, so it only reads.
        """
        return os.getpid() != self._process

    def has(self, name: str, size: int) -> bool:
        """Return whether there is a regular file ``name`` of ``size`` bytes."""
        try:
            info = os.lstat(self.path / name)
        except OSError:
            return False
        return stat.S_ISREG(info.st_mode) and info.st_size == size

    def read(self, name: str, size: int) -> bytes | None:
        """Return a file's bytes, or None if there is no readable file of ``size`` bytes."""
        try:
            handle = os.open(self.path / name, OPEN)
            with os.fdopen(handle, "rb", buffering=0) as file:
                info = os.fstat(handle)
                if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                    return None
                return data if len(data := file.read(size)) == size else None
        except OSError:
            return None

    def remove(self, name: str) -> None:
        """Remove the file ``name``, such as a damaged one, if it exists."""
        with suppress(OSError):
            os.unlink(self.path / name)

    def enqueue(
        self, name: str, data: bytes, head: Head, stamp_ns: int, *, wait_s: float = 0.0
    ) -> bool:
        """Queue the file ``name`` for writing: ``head(data)``, then ``data``, with the time of use
        ``stamp_ns``.

        Return False if it is not queued: the queue stays full for ``wait_s`` seconds, a write
        failed in the last RETRY_S, the file exceeds the size limit, or the folder is closed or
        forked.
        """
        size = len(data)
        if self._is_forked:
            self.n_left_out += 1
            return False

        def fits() -> bool:
            return not self._queue or self._queued + size <= QUEUE_BYTES

        with self._changed:
            if self._closed or size > self.bound or time.monotonic() < self._retry_at:
                self.n_left_out += 1
                return False
            if not fits() and not (wait_s and self._changed.wait_for(fits, wait_s)):
                self.n_left_out += 1
                return False
            self._queue.append((name, data, head, stamp_ns))
            self._queued += size
            self._changed.notify_all()
        return True

    def touch(self, names: Iterable[tuple[str, int]]) -> None:
        """Record uses of files, given as (name, time of use in ns)."""
        if self._is_forked:
            return
        with self._changed:
            if not self._closed and len(self._queue) < TOUCHES:
                self._queue.extend((name, b"", None, stamp) for name, stamp in names)
                self._changed.notify_all()

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until the queue is empty. Return False after ``timeout_s`` seconds, or in a fork.
        After a failed write the queue is empty too, since its files are dropped.
        """
        if self._is_forked:
            return False
        with self._changed:
            return self._changed.wait_for(lambda: self._seen and not self._queue, timeout_s)

    def close(self, timeout_s: float = 30.0) -> None:
        """Wait until the queue is empty, then end the thread; each takes at most ``timeout_s``
        seconds. Idempotent.
        """
        if self._is_forked:
            return
        # called by the garbage collector within the thread
        if threading.current_thread() is self._thread:
            self._closed = True
            return
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    # -- the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        self._scan_and_trim()
        while True:
            with self._changed:
                self._seen = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                name, data, head, stamp = self._queue[0]
            problem = self._write_or_touch(name, data, head, stamp)
            with self._changed:
                self._queue.popleft()
                self._queued -= len(data)
                if problem:  # skip the queue; retry later
                    if problem != self.problem:
                        _warn(
                            "%s: prompts will be recomputed after a restart until writing succeeds",
                            problem,
                        )
                    self.problem, self._retry_at = problem, time.monotonic() + RETRY_S
                    self.n_left_out += 1 + sum(head is not None for _, _, head, _ in self._queue)
                    self._queue.clear()
                    self._queued = 0

    def _write_or_touch(self, name: str, data: bytes, head: Head | None, stamp: int) -> str:
        """Write the file ``name``, ``head(data)`` and then ``data``, and set its time of use to
        ``stamp`` (ns); without ``head`` only set the time. Return the problem, "" if there is none.
        """
        try:
            if head is not None:
                self._write(name, head(data), data)
            os.utime(self.path / name, ns=(stamp, stamp), follow_symlinks=False)
        except OSError as error:
            if self._is_folder(name):
                return ""
            if head is not None:
                return f"{self.path}: cannot be written: {why(error)}"
        return ""

    def _is_folder(self, name: str) -> bool:
        """Return whether a directory has this file's name. Only this file is then skipped, and a
        warning logged once.
        """
        path = self.path / name
        if path.is_symlink() or not path.is_dir():
            return False
        with self._changed:
            self.n_left_out += 1
        if not self._warned:
            self._warned = True
            _warn("%s: is a folder, so these pages are not stored", path)
        return True

    def _write(self, name: str, head: bytes, data: bytes) -> None:
        size = len(head) + len(data)
        if self._since_seen > self.bound // RESCAN_SHARE:
            self._scan_and_trim()
        if self.n_bytes + size > self.bound:
            self._scan_and_trim(need=size)
        write_whole(self.path / name, head, data)
        self.problem = ""
        self.n_written += 1
        self.n_bytes += size
        self._since_seen += size

    def _scan_and_trim(self, need: int = 0) -> None:
        """Scan the folder. If its files and ``need`` more bytes exceed the limit, remove the least
        recently used files, down to KEEP of the limit.
        """
        found: list[tuple[int, int, str]] = []
        late = time.time() - STALE_S
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if NAME.fullmatch(entry.name) and stat.S_ISREG(info.st_mode):
                        found.append((info.st_mtime_ns, info.st_size, entry.name))
                    elif PART.fullmatch(entry.name) and info.st_mtime < late:
                        os.unlink(entry.path)
        total = sum(size for _, size, _ in found)
        if total + need > self.bound:
            found.sort(reverse=True)
            while found and total + need > self.bound * KEEP:
                _, size, name = found.pop()
                self.remove(name)
                self.n_removed += 1
                total -= size
        self.n_bytes = total
        self._since_seen = 0
        self.names = frozenset(name for _, _, name in found)


def _warn(message: str, what: object) -> None:
    from logging import getLogger  # slow to import and rarely needed

    getLogger("treadle").warning(message, what)


def _check(path: Path) -> None:
    """Create the folder. Raises FileError if it is not usable, or if others could write to it:
    their pages could put text into a model's context.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        if os.path.exists(path) and not path.is_dir():
            raise FileError("is not a folder", path=path, expected="a folder for pages") from None
        raise FileError(f"cannot store pages: {why(error)}", path=path) from error
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise FileError("is not writable", path=path, expected="a folder for pages")
    who = SYSTEM.other_writer(info)
    if who == "another user":
        raise FileError("belongs to another user", path=path, expected="a folder of your own")
    if who is not None:
        raise FileError("other users can write to it", path=path, expected="a folder of your own")

"""Detects that a file has changed."""

from __future__ import annotations

import os


class FileWatch:
    """The state (time, size, inode) in which the file ``path`` was last seen."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._seen = self._state()

    def has_changed(self) -> bool:
        """Return whether the file differs from its state at the previous call, or at the
        construction. A missing file counts as unchanged: it is about to be replaced.
        """
        state = self._state()
        if state is None or state == self._seen:
            return False
        self._seen = state
        return True

    def _state(self) -> tuple[int, int, int] | None:
        try:
            about = os.stat(self._path)
        except OSError:
            return None
        return about.st_mtime_ns, about.st_size, about.st_ino

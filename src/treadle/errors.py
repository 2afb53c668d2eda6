"""Every error that treadle raises on purpose.

::

    TreadleError
    ├── FileError          a file that is damaged, hostile, or not what it claims to be
    ├── UnsupportedError   a valid file or request that treadle does not support
    ├── ContextFullError   a prompt longer than the context
    │   └── NoRoomError    no page of keys and values is free now; it may fit later
    ├── TemplateError      a chat template that cannot be parsed or rendered
    ├── GrammarError       a grammar or schema that cannot be enforced
    ├── SamplingError      sampling settings out of their range (a ValueError as well)
    ├── NotFiniteError     a model's logits, vectors or scores that are NaN or infinite
    ├── CompileError       a kernel that cannot be emitted or that LLVM refuses
    ├── CacheError         a kernel cache of another user, or a miss where compiling is forbidden
    ├── DeviceError        a GPU or its driver that is missing, too old, or that failed
    │   └── NoMemoryError  more memory than a GPU has free (a MemoryError as well)
    └── ForkedError        in a forked child: an object that another thread used at the fork

A message says what was found, what was expected, and where: file, byte offset, tensor or key. It
may quote a file, so its text is made safe to print: no control characters, and a bounded length.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_SHOWN = 2000  # characters of an error's text
# Replacements of system messages that do not help or suggest no fix.
WHY = {
    errno.EISDIR: "is a folder: expected a file",
    errno.ELOOP: "a loop of symbolic links",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is too large for the file system or ulimit -f",
    errno.EMFILE: "this process has too many files open (ulimit -n)",
    errno.EIO: "the disk failed to read or write it",
}


def printable(text: str, keep: str = "") -> str:
    """Escape characters that could control a terminal (``\\x1b``) or cannot be written, except
    those in ``keep``. Strings from files may contain any.
    """
    if text.isprintable():
        return text
    safe = (c.isprintable() or c in keep for c in text)
    return "".join(
        c if fine else c.encode("unicode_escape").decode()
        for c, fine in zip(text, safe, strict=True)
    )


def why(error: OSError | ValueError) -> str:
    """Return the reason why a file cannot be opened, read or written, without its path and the
    errno.
    """
    if isinstance(error, OSError):
        return WHY.get(error.errno or 0) or error.strerror or str(error)
    return "its name holds a NUL byte" if "null byte" in str(error) else str(error)


class TreadleError(Exception):
    """The base of all errors that treadle raises on purpose. ``setting``: the name of the argument
    or option that is wrong, None if it is no single one.

    A copy and an unpickled error have the same text and attributes.
    """

    setting: str | None = None

    # Python rebuilds an exception as cls(*args). That fails where __init__ needs keywords; in the
    # parent of a multiprocessing.Pool such a failure ends the thread that collects results, and
    # the parent waits for ever.
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args), self.__dict__ or None

    def __str__(self) -> str:
        text = printable(super().__str__(), keep="\n\t")
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text)} characters)"


def _rebuilt(cls: type[TreadleError], args: tuple[Any, ...]) -> TreadleError:
    """Return an error with these ``args``, without calling its ``__init__``."""
    # Not cls.__new__: where a MemoryError is among the bases, Python finds that one's and refuses.
    return Exception.__new__(cls, *args)


@contextmanager
def of_setting(name: str) -> Iterator[None]:
    """Set ``setting`` to ``name`` in a TreadleError raised within the block, unless it is set
    already.
    """
    try:
        yield
    except TreadleError as error:
        error.setting = error.setting or name
        raise


class FileError(TreadleError):
    """A file that is damaged, hostile, or not what it claims to be.

    ``offset``: a byte offset in ``path``; ``where``: the tensor, key or section; ``expected``: what
    a sound file has there.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str],
        offset: int | None = None,
        where: str | None = None,
        expected: str | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.offset = offset
        self.what = message
        self.where = where
        self.expected = expected
        place = self.path if len(self.path) <= MAX_SHOWN // 2 else f"{self.path[: MAX_SHOWN // 2]}…"
        place = place if offset is None else f"{place} at byte {offset}"
        text = f"{place}: {where}: {message}" if where else f"{place}: {message}"
        super().__init__(f"{text} (expected {expected})" if expected else text)


class UnsupportedError(TreadleError):
    """A valid file or request that treadle does not support."""


class ContextFullError(TreadleError):
    """A prompt longer than the context."""


class NoRoomError(ContextFullError):
    """No page of keys and values is free now: other sequences hold them, and it may fit later."""


class TemplateError(TreadleError):
    """A chat template that cannot be parsed or rendered."""


class GrammarError(TreadleError):
    """A grammar or schema that cannot be enforced."""


class SamplingError(TreadleError, ValueError):
    """Sampling settings out of their range."""


class NotFiniteError(TreadleError, ValueError):
    """A model's logits, vectors or scores that are NaN or infinite."""


class CompileError(TreadleError):
    """A kernel that cannot be emitted or that LLVM refuses."""


class CacheError(TreadleError):
    """A kernel cache of another user, or a miss where compiling is forbidden."""


class DeviceError(TreadleError):
    """A GPU or its driver that is missing, too old, or that failed; ``code``: the driver's error,
    else 0.
    """

    code = 0


class NoMemoryError(DeviceError, MemoryError):
    """More memory than a GPU has free."""


class ForkedError(TreadleError):
    """In a forked child: use of an object that another thread was using at the fork."""

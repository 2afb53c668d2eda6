"""Formatting for messages: sizes, counts, and reasons of file errors."""

from __future__ import annotations

import errno
from collections.abc import Sequence

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


def why(error: OSError | ValueError) -> str:
    """Return the reason why a file cannot be opened, read or written, without its path and the
    errno.
    """
    if isinstance(error, OSError):
        return WHY.get(error.errno or 0) or error.strerror or str(error)
    return "its name holds a NUL byte" if "null byte" in str(error) else str(error)


def scaled(number: float, unit: str = "", *, base: int = 1000) -> str:
    """Format a number with a prefix and a unit: 1.5e9 and "B/s" give ``1.5 GB/s``; with base 1024
    the prefixes are Ki, Mi, ...
    """
    prefixes = ("", "k", "M", "G", "T", "P") if base == 1000 else ("", "Ki", "Mi", "Gi", "Ti", "Pi")
    power = 0
    while abs(number) >= base and power < len(prefixes) - 1:
        number /= base
        power += 1
    digits = 1 if power and abs(number) < 100 else 0
    return f"{number:.{digits}f} {prefixes[power]}{unit}".rstrip()


def listed(names: Sequence[str], most: int) -> str:
    """Return at most ``most`` of the names as one text, with the number of the others: ``a, b and 3
    more``.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(n: int, what: str) -> str:
    """Return a count with its noun ``what``, in the plural unless ``n`` is 1: ``1 token``, ``2
    tokens``.
    """
    return f"{n} {what}{'s' * (n != 1)}"


def n_bytes(number: float) -> str:
    """Return a size in bytes as text: ``1.1 GiB``."""
    return scaled(number, "B", base=1024)


def n_weights(number: float) -> str:
    """Return a number of weights as text, as in model names: ``293K``, ``1.1B``."""
    for letter in ("", "K", "M", "B"):
        if abs(number) < 999.5 or letter == "B":
            break
        number /= 1000
    digits = 1 if letter and abs(number) < 99.95 else 0
    return f"{number:.{digits}f}{letter}"

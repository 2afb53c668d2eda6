"""The command line: one file per command, and nothing here that could slow a start."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 failed with one clear line, 2 wrong usage, 130 interrupted, 141 the reader of our
    output went away.
    """
    try:
        from treadle.cli.app import invoke
    except KeyboardInterrupt:  # Ctrl-C while Python is still importing leaves no traceback either
        return 130
    return invoke(argv)

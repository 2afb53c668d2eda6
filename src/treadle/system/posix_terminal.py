"""Terminals of POSIX systems (termios)."""

from __future__ import annotations

import contextlib
import os
import sys

assert sys.platform != "win32"

import termios


def open_terminal(fd: int) -> Termios | None:
    """Return the terminal of the descriptor ``fd``; None if it is not a terminal."""
    try:
        return Termios(fd)
    except termios.error:
        return None


class Termios:
    """A terminal, with its initial mode. Raises termios.error if ``fd`` is not a terminal."""

    def __init__(self, fd: int) -> None:
        self.fd, self.usual = fd, termios.tcgetattr(fd)

    def show(self, shown: bool, *, lines: bool) -> None:
        """Restore the initial mode if ``shown``; otherwise turn off echo and, unless ``lines``,
        line buffering; see ``protocol.Terminal``.
        """
        mode = list(self.usual)
        if not shown:
            mode[3] &= ~(termios.ECHO | termios.ECHONL)
        if not shown and not lines:
            # Without ICANON keys are delivered one by one; ICRNL would turn Enter into another key.
            mode[0] &= ~termios.ICRNL
            mode[3] &= ~termios.ICANON
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(self.fd, termios.TCSANOW, mode)

    def is_ours(self) -> bool:
        """Return whether this process is in the terminal's foreground; True without job control."""
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # a terminal without job control
            return True

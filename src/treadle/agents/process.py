"""Runs an agent's program on this terminal until it ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from treadle.agents.settings import Agent
from treadle.errors import TreadleError

POLL_S = 1.0
# Typed on the terminal, these reach the agent as well, which knows what to do.
TYPED = ("SIGINT", "SIGQUIT")
SENT = ("SIGTERM", "SIGHUP")  # these reach this process alone, and are passed on


def find_executable(agent: Agent, path: str | None) -> str:
    """Return the path of an agent's program, searched in ``path``, a value of PATH (None: the
    current one). Raises TreadleError, with the command that installs it, if there is none.
    """
    found = shutil.which(agent.executable, path=path)
    if found is None:
        raise TreadleError(
            f"{agent.title} is not installed: no '{agent.executable}' in PATH. Its vendor's "
            f"command: {agent.install}"
        )
    return found


def run_agent(executable: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the program ``executable`` with ``arguments`` and the variables of ``environment`` on
    this terminal. Return its exit code, or 128 plus the number of the signal that ended it. Raises
    OSError if it cannot be started.
    """
    with SignalRelay() as relay:
        process = relay.start([executable, *arguments], environment)
        # A wait without an end would keep handlers from running: on Windows always, elsewhere if
        # the system gave a signal to another thread.
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
    code = process.returncode
    return code if code >= 0 else 128 - code


class SignalRelay:
    """Context manager: this process ignores SIGINT and SIGQUIT, which the terminal sends to the
    agent too, and forwards SIGTERM and SIGHUP to the agent.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []  # before the agent has started
        self._before: dict[int, Any] = {}

    def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start the agent's ``command``, and send it the signals that came before. Raises
        OSError.
        """
        self._process = subprocess.Popen(command, env=environment)
        for number in self._early:
            self._process.send_signal(number)
        return self._process

    def _pass_on(self, number: int, frame: object) -> None:
        if self._process is None:
            self._early.append(number)
        else:
            self._process.send_signal(number)

    def __enter__(self) -> SignalRelay:
        """Install the handlers."""
        for names, handler in ((TYPED, ignore), (SENT, self._pass_on)):
            for number in (getattr(signal, name, None) for name in names):
                if number is not None:  # Windows lacks some
                    self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def ignore(number: int, frame: object) -> None:
    """Ignore a signal. Unlike ``SIG_IGN`` this handler is not inherited by the agent."""

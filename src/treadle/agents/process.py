"""The agent's process: the terminal is its own until it ends."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from treadle.agents.settings import Agent
from treadle.errors import TreadleError

# Typed on the terminal, these reach the agent as well, which knows what to do.
TYPED = ("SIGINT", "SIGQUIT")
SENT = ("SIGTERM", "SIGHUP")  # these reach this process alone, and are passed on


def find_executable(agent: Agent, path: str | None) -> str:
    """Return the file of an agent in the search path. Raises TreadleError, with the command that
    installs it.
    """
    found = shutil.which(agent.executable, path=path)
    if found is None:
        raise TreadleError(
            f"{agent.title} is not installed: no '{agent.executable}' in PATH. Its vendor's "
            f"command: {agent.install}"
        )
    return found


def run_agent(executable: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run an agent on this terminal, and return its exit code; 128 and the number of the signal
    that ended it. Raises OSError if it cannot be started.
    """
    process = subprocess.Popen([executable, *arguments], env=environment)
    with process, signals_for(process):
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def signals_for(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Leave typed signals to ``process``, and pass on those that are sent to this process."""

    def pass_on(number: int, frame: object) -> None:
        process.send_signal(number)

    before = {}
    for names, handler in ((TYPED, ignore), (SENT, pass_on)):
        for name in names:
            number = getattr(signal, name, None)  # Windows lacks some
            if number is not None:
                before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore(number: int, frame: object) -> None:
    """Do nothing. ``SIG_IGN`` would be inherited by the agent's children."""

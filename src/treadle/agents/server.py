"""A server that is started for one agent, and ends with it.

It runs in a session of its own, so that Ctrl-C on the terminal reaches the agent alone. Its
standard input is a pipe that this process holds: when this process ends, however it does, the pipe
is closed, and the server stops.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from treadle.base.python_process import detached, import_path, interpreter
from treadle.errors import TreadleError

POLL_S = 0.1
GRACE_S = 15.0  # to stop; then it is killed
TAIL = 1 << 14  # bytes of its messages that are looked through for the last one
# The first argument is the import path, as JSON: a bundle's modules lie in no usual place.
START = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from treadle.agents.server import watch_parent
from treadle.cli import run_process
watch_parent()
run_process()
"""


class AgentServer:
    """``treadle serve`` with ``arguments``, as a child process; ``api_key``: the key that it
    demands, None for none. A context manager, which stops it.

    Raises TreadleError if no Python interpreter is found, and OSError if it cannot be started.
    """

    def __init__(self, arguments: Sequence[str], api_key: str | None = None) -> None:
        environment = dict(os.environ)
        if api_key:
            environment["TREADLE_API_KEY"] = api_key
        command = [interpreter(), "-c", START, json.dumps(import_path()), "serve", *arguments]
        self._messages: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by stop)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            env=environment,
            **detached(),
        )
        self._url = ""
        self._told = threading.Event()
        threading.Thread(target=self._read_url, name="treadle-agent-server", daemon=True).start()

    def _read_url(self) -> None:
        """Read the one line that the server writes when it is ready."""
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().decode("utf-8", "replace").strip()
        self._told.set()

    def wait(self, waiting: Callable[[], object]) -> str:
        """Wait until the server is ready, and return its address; ``waiting`` is called every
        ``POLL_S`` seconds meanwhile. Raises TreadleError, with the server's own message, if it ends
        before.
        """
        while not self._told.wait(POLL_S):
            waiting()
        if not self._url:
            self._process.wait()
            why = self.last_message() or f"exit code {self._process.returncode}"
            raise TreadleError(f"the server did not start: {why}")
        return self._url

    def has_ended(self) -> bool:
        """Return whether the server has ended by itself."""
        return self._process.poll() is not None

    def last_message(self) -> str:
        """Return the last line that the server wrote to standard error."""
        end = self._messages.seek(0, os.SEEK_END)
        self._messages.seek(max(end - TAIL, 0))
        lines = self._messages.read().decode("utf-8", "replace").split("\n")
        told = [line.strip() for line in lines if line.strip()]
        return told[-1].removeprefix("treadle: error: ") if told else ""

    def stop(self) -> None:
        """Terminate the server; kill it if it still runs after ``GRACE_S`` seconds."""
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._messages):
            if stream is not None:
                stream.close()

    def __enter__(self) -> AgentServer:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the server."""
        self.stop()


def watch_parent() -> None:
    """End this process, as SIGTERM does, when standard input is closed."""
    import signal

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="treadle-parent-watch", daemon=True).start()


def agent_context(n_trained: int, full_kv_bytes: int, free_bytes: int | None) -> int:
    """Return the context length for an agent's server, in tokens: ``GOOD_CONTEXT`` or, if less,
    ``n_trained``. It is halved, but not below ``LEAST_CONTEXT``, until the KV caches of
    ``SEQUENCES`` texts of that length fit in half of ``free_bytes`` (None: unknown, not halved).

    full_kv_bytes: the size of the KV cache of ``n_trained`` tokens.
    """
    n = min(GOOD_CONTEXT, n_trained)
    if free_bytes is not None:
        per_token = full_kv_bytes / n_trained
        while n > LEAST_CONTEXT and SEQUENCES * n * per_token > free_bytes / 2:
            n = max(n // 2, LEAST_CONTEXT)
    return n


GOOD_CONTEXT = 65536
LEAST_CONTEXT = 16384
SEQUENCES = 2  # agents ask for titles and summaries beside the conversation


def folder_of(cache: Path, agent: str, url: str) -> Path:
    """Return the folder below ``cache`` for the files of ``agent`` (its name) with the server at
    ``url``: one for each server, because several may run.
    """
    place = url.partition("://")[2].replace(":", "-").replace("/", "-").strip("-[]")
    return cache / "agents" / agent / place

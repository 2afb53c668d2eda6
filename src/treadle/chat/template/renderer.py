"""Renders the templates of model files in separate processes with time and memory limits.

A template is untrusted code. Most of it runs in C code, which Python can neither measure nor
interrupt from within the process; the system can end a process. A process is started when needed
(60 to 100 ms), answers in a fraction of a millisecond, and ends with this one.
"""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from treadle.base.python_process import import_path, interpreter
from treadle.chat.template.render_process import (
    MAX_TEXT,
    READY,
    REPLY,
    SIZE,
    SPENT_MEMORY,
    SPENT_TIME,
)
from treadle.errors import TemplateError, TreadleError
from treadle.system import SYSTEM

LIMIT_S = 5.0  # seconds for one rendering; normal ones take milliseconds
LIMIT_BYTES = 256 << 20  # memory of a process beyond that at its start
MAX_PROCESSES = 4  # concurrent renderings; further threads wait

_TIME_CODES = (SPENT_TIME, -getattr(signal, "SIGALRM", SPENT_TIME))
# SIGKILL: sent by a system that ran out of memory.
_MEMORY_CODES = (SPENT_MEMORY, -getattr(signal, "SIGKILL", SPENT_MEMORY))
_START = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from treadle.chat.template.render_process import serve; "
    "serve(float(sys.argv[1]), int(sys.argv[2]))"
)


class LimitError(TemplateError):
    """Raised for a template that exceeds its time or memory limit."""


class Renderer:
    """Pool of at most MAX_PROCESSES rendering processes; thread-safe."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._slots = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[_RenderProcess] = []
        self._processes: set[_RenderProcess] = set()

    def prepare(self, source: str) -> None:
        """Start a process that compiles ``source``, without waiting for it. Does nothing if one is
        idle.
        """
        if not self._idle:
            process = self._start()
            process.prepare(_request("compile", source))
            self._idle.append(process)

    def render(self, source: str, variables: Mapping[str, Any], now: datetime) -> str:
        """Return the text that a template renders with ``variables`` (JSON types); ``now``: the
        time that it reads.

        Raises TemplateError for the template's own errors and if no process can be started,
        LimitError beyond the time or memory limit.
        """
        return self._ask(_request("render", source, variables, now.isoformat()))

    def names(self, source: str) -> list[str]:
        """Return the names of variables that a template reads and does not set. Raises as
        ``render`` does.
        """
        return self._ask(_request("names", source)).split()

    def check(self, source: str) -> None:
        """Raise TemplateError for a template that does not compile. Raises as ``render`` does."""
        self._ask(_request("check", source))

    def _ask(self, request: bytes) -> str:
        with self._slots:
            try:
                process = self._idle.pop()
            except IndexError:
                process = self._start()
            try:
                try:
                    fine, text = process.ask(request)
                except _GoneError:
                    self._end(process)
                    process = self._start()
                    fine, text = process.ask(request)
            except BaseException:  # Ctrl-C too: its late reply would be read as the next request's
                self._end(process)
                raise
            self._idle.append(process)
        if not fine:
            raise TemplateError(text)
        return text

    def close(self) -> None:
        """End all processes; the next rendering starts a new one."""
        for process in list(self._processes):
            self._end(process)
        self._idle.clear()

    def forget(self) -> None:
        """Drop the parent's processes and locks in a forked child; the processes go on running."""
        for process in self._processes:
            process.forget()
        self._reset()

    def _start(self) -> _RenderProcess:
        process = _RenderProcess()
        self._processes.add(process)
        return process

    def _end(self, process: _RenderProcess) -> None:
        self._processes.discard(process)
        process.end()


class _GoneError(Exception):
    """Raised when a process had ended before it read this request; another process can
    answer it.
    """


class _RenderProcess:
    """Parent-side handle of a rendering process: one request at a time."""

    def __init__(self) -> None:
        flags = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
        arguments = [str(LIMIT_S), str(LIMIT_BYTES), *import_path()]
        try:
            self._popen = subprocess.Popen(
                [_python(), *flags, "-c", _START, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C and Ctrl-Z of the terminal do not reach it
            )
        except OSError as e:
            raise TemplateError(
                f"cannot start the process that renders chat templates: {e}"
            ) from None
        self._ready = False
        self._preparing = False
        self._answered = False

    def prepare(self, request: bytes) -> None:
        """Send a request that has no reply."""
        self._preparing = True
        with suppress(OSError):  # the next request reports it
            self._send(request)

    def ask(self, request: bytes) -> tuple[bool, str]:
        """Send a request and wait for its reply; return whether it succeeded, and its result or
        error message.

        Raises _GoneError if the process had already ended, TemplateError if it ends during this
        request.
        """
        began = time.monotonic()
        try:
            self._send(request)
            if not self._ready:
                self._ready = self._read(len(READY)) == READY
            fine, size = REPLY.unpack(self._read(REPLY.size))
            if size > 4 * MAX_TEXT:
                raise EOFError
            text = self._read(size).decode("utf-8", "surrogatepass")
        except (OSError, EOFError, UnicodeError) as e:
            if self._preparing or (self._answered and isinstance(e, OSError)):
                raise _GoneError from None
            raise self._ended(time.monotonic() - began) from None
        self._preparing = False
        self._answered = True
        return fine, text

    def _send(self, request: bytes) -> None:
        assert self._popen.stdin is not None
        rest = memoryview(SIZE.pack(len(request)) + request)
        while rest:
            rest = rest[self._popen.stdin.write(rest) :]

    def _read(self, size: int) -> bytes:
        assert self._popen.stdout is not None
        out = bytearray()
        while len(out) < size:
            part = self._popen.stdout.read(size - len(out))
            if not part:
                raise EOFError
            out += part
        return bytes(out)

    def _ended(self, seconds: float) -> TemplateError:
        """Return the error for a process that ended ``seconds`` after a request was sent."""
        try:
            code = self._popen.wait(10)
        except subprocess.TimeoutExpired:
            code = 0
        if not self._ready:
            return TemplateError(
                f"the process that renders chat templates did not start: {_python()} ended with "
                f"exit code {code}"
            )
        # Without a timer, faulthandler ends the process, and may crash on frames that change
        # meanwhile.
        if code in _TIME_CODES or (not SYSTEM.TIMERS and seconds >= LIMIT_S):
            return LimitError(f"chat template: rendering takes more than {LIMIT_S:g} s")
        if code in _MEMORY_CODES:
            return LimitError(
                f"chat template: rendering takes more than {LIMIT_BYTES >> 20} MiB of memory"
            )
        return TemplateError(f"chat template: rendering crashed its process (exit code {code})")

    def end(self) -> None:
        """Kill the process."""
        self._popen.kill()
        self._popen.wait()
        self._close()

    def forget(self) -> None:
        """Close the pipes without ending the process, which belongs to the parent of this fork."""
        self._popen.returncode = 0  # so that Popen does not wait: the parent's child, not ours
        self._close()

    def _close(self) -> None:
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()


def _request(*values: object) -> bytes:
    try:
        return json.dumps(values, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError) as e:  # a number of 5000 digits, lists a thousand deep
        raise TemplateError(
            f"messages, tools or variables cannot be written as JSON: {e}"
        ) from None


def _python() -> str:
    """Return the path of a Python interpreter. Raises TemplateError if there is none."""
    try:
        return interpreter()
    except TreadleError as error:
        raise TemplateError(f"chat templates are rendered in a process: {error}") from None


RENDERER = Renderer()
atexit.register(RENDERER.close)
SYSTEM.after_fork(RENDERER.forget)

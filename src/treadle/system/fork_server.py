"""A process that forks children on command: what they import is imported once.

It has one thread, so that a fork is safe. It reads commands from standard input, one JSON object a
line: ``start`` a child with an ``order``, or send it a ``signal``. It writes a child's ``report``
and its ``exit`` status to standard output. When standard input ends, the children are killed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

assert sys.platform != "win32"  # the type checker skips the rest there

from treadle.system import SYSTEM

PART = 1 << 16
RunChild = Callable[[Mapping[str, Any], int, int], int]


class ForkedChild:
    """A child of the server: its number in the protocol, its process id, and the server's ends of
    two pipes.

    reports: the read end of one. life: the write end of the other; the child reads EOF when the
    server's process has ended.
    """

    def __init__(self, number: int, pid: int, reports: int, life: int) -> None:
        self.number = number
        self.pid = pid
        self.reports = reports
        self.life = life
        self.rest = b""


class ForkServer:
    """Forks children, each of which calls ``run(order, report, life)`` and exits with the status
    that it returns: ``report`` is the descriptor to which it writes lines of JSON; ``life`` one
    that reads EOF when the server's process has ended. ``source``, ``target``: the server's
    descriptors of commands and of reports, by default standard input and output.
    """

    def __init__(self, run: RunChild, source: int = 0, target: int = 1) -> None:
        self.run = run
        self.source = source
        self.target = target
        self.children: dict[int, ForkedChild] = {}
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def serve(self) -> None:
        """Follow the commands until ``source`` (standard input) ends; then kill the children."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self.source, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        self._pass_reports(key.data)
                    elif key.fileobj == self.source:
                        if not self._read_commands():
                            return
                    else:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(PART)
                self._reap()
        finally:
            signal.set_wakeup_fd(-1)  # the children's ends are not waited for
            for child in self.children.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    def _read_commands(self) -> bool:
        data = os.read(self.source, PART)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            command = json.loads(line)
            if "order" in command:
                self._start(command["start"], command["order"])
            else:
                child = self.children.get(command["child"])
                if child is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child.pid, command["signal"])
        return bool(data)

    def _start(self, number: int, order: Mapping[str, Any]) -> None:
        reports, report = os.pipe()
        life, held = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes
            for fd in (reports, report, life, held):
                os.close(fd)
            why = f"a process cannot be started: {error.strerror}"
            self._tell({"child": number, "report": {"failed": why}})
            self._tell({"child": number, "exit": 1})
            return
        if not pid:
            code = 1
            try:
                self._become_child((reports, held))
                code = self.run(order, report, life)
            finally:
                for stream in (sys.stdout, sys.stderr):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()
                os._exit(code)
        os.close(report)
        os.close(life)
        child = ForkedChild(number, pid, reports, held)
        self.children[number] = child
        self._selector.register(reports, selectors.EVENT_READ, child)

    def _become_child(self, unused: tuple[int, ...]) -> None:
        """In a child: reset signals, close the parent's descriptors and ``unused``, detach the
        standard streams.
        """
        SYSTEM.end_with_parent()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for other in self.children.values():
            if other.reports >= 0:  # else it has ended, and was not reaped yet
                os.close(other.reports)
            os.close(other.life)
        for fd in unused:
            os.close(fd)
        self._woken.close()
        self._waker.close()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, self.source)
        os.close(nothing)
        os.dup2(2, self.target)  # nothing that is printed becomes a report
        gc.enable()

    def _pass_reports(self, child: ForkedChild) -> None:
        data = os.read(child.reports, PART)
        *lines, child.rest = (child.rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):  # half a line of one that was killed
                self._tell({"child": child.number, "report": json.loads(line)})
        if not data:
            self._selector.unregister(child.reports)
            os.close(child.reports)
            child.reports = -1

    def _reap(self) -> None:
        """Wait for the children that have ended; pass on their last reports, then write their exit
        statuses.
        """
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            child = next((e for e in self.children.values() if e.pid == pid), None)
            if child is None:
                continue
            if child.reports >= 0:
                os.set_blocking(child.reports, False)
                with contextlib.suppress(BlockingIOError):  # a child of it may hold the pipe open
                    while child.reports >= 0:
                        self._pass_reports(child)
                if child.reports >= 0:
                    self._selector.unregister(child.reports)
                    os.close(child.reports)
            os.close(child.life)
            del self.children[child.number]
            self._tell({"child": child.number, "exit": os.waitstatus_to_exitcode(status)})

    def _tell(self, line: Mapping[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(self.target, data) :]

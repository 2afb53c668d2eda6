"""The process from which engines are forked: its commands, reports, and the end of its children."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks, and asks /proc")

PROGRAM = """
import json, os
from treadle.system.fork_server import ForkServer

def run(order, report, life):
    print("printed by a child")
    for line in ({"pid": os.getpid()}, {"said": order["say"]}):
        os.write(report, json.dumps(line).encode() + b"\\n")
    if order.get("closes"):
        os.close(report)
    if order.get("waits"):
        os.read(life, 1)  # ends with the parent
    return order.get("code", 0)

ForkServer(run).serve()
"""


class Server:
    """The process, and lines to and from it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def send(self, **line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        value: dict[str, Any] = json.loads(self.process.stdout.readline())
        return value

    def start(self, number: int, **order: Any) -> int:
        """Start a child, and return its process id."""
        self.send(start=number, order={"say": "x", **order})
        first, second = self.read(), self.read()
        assert second == {"child": number, "report": {"said": "x"}}
        pid: int = first["report"]["pid"]
        return pid


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with made.process:
        yield made
        if made.process.poll() is None:
            made.process.communicate(timeout=60)  # it ends with its input


def is_there(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_reports_come_before_the_end(server: Server) -> None:
    server.start(7, code=3)
    assert server.read() == {"child": 7, "exit": 3}


def test_a_child_gets_signals(server: Server) -> None:
    server.start(1, waits=True)
    server.start(2, waits=True)
    server.send(child=2, signal=int(signal.SIGTERM))
    assert server.read() == {"child": 2, "exit": -signal.SIGTERM}
    server.send(child=2, signal=int(signal.SIGTERM))  # it has ended: nothing happens
    server.send(child=1, signal=int(signal.SIGKILL))
    assert server.read() == {"child": 1, "exit": -signal.SIGKILL}


def test_children_end_with_it(server: Server) -> None:
    pids = [server.start(number, waits=True) for number in (1, 2)]
    out, err = server.process.communicate(timeout=60)
    assert (server.process.returncode, out) == (0, "")
    assert err.splitlines() == ["printed by a child"] * 2
    while any(map(is_there, pids)):
        time.sleep(0.001)


def test_a_child_is_started_while_another_one_ends(server: Server) -> None:
    """The end of a child's reports is seen before the child is: another is forked between them."""
    server.start(1, closes=True, waits=True)
    for number in (2, 3, 4):
        server.start(number, code=number)
        assert server.read() == {"child": number, "exit": number}

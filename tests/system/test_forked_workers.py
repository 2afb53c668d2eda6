"""Workers forked from a process: one queue, answers by number, no message lost silently."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("it forks", allow_module_level=True)

from treadle.system import forked_workers
from treadle.system.forked_workers import MAX_MESSAGE, ForkedWorkers, work

PATIENCE_S = 60

Start = Callable[[Callable[[Any], bytes], int], ForkedWorkers]


@pytest.fixture
def start() -> Iterator[Start]:
    """Make workers, which are started by the test and ended after it."""
    made: list[ForkedWorkers] = []

    def build(answer: Callable[[Any], bytes], n: int) -> ForkedWorkers:
        made.append(ForkedWorkers(answer, n))
        return made[-1]

    yield build
    for workers in made:
        workers.close()


def answers(workers: ForkedWorkers, n: int) -> dict[int, bytes | None]:
    """The next ``n`` answers, by number."""
    found: dict[int, bytes | None] = {}
    while len(found) < n:
        workers.wait(PATIENCE_S)
        found.update(workers.receive())
    return found


def shout(message: str) -> bytes:
    if message == "nothing":
        raise ValueError(message)
    return message.upper().encode()


def test_messages_are_answered_by_number(start: Start) -> None:
    """Those that were sent before a worker existed too; an exception is a failure, no end."""
    workers = start(shout, 2)
    assert workers.wants() == 4  # each worker has one, and finds a next one
    for number, word in enumerate(["a", "nothing", "b"]):
        assert workers.send(number, word)
    assert workers.wants() == 1
    workers.start()
    assert answers(workers, 3) == {0: b"A", 1: None, 2: b"B"}
    large = "x" * 20_000
    assert workers.send(3, large)
    assert answers(workers, 1) == {3: large.upper().encode()}
    assert workers.wants() == 4


def test_what_cannot_be_sent(start: Start) -> None:
    workers = start(shout, 1)
    assert not workers.send(0, lambda: None)  # cannot be pickled
    assert not workers.send(1, "x" * MAX_MESSAGE)
    workers.start()
    assert workers.send(2, "a")
    assert answers(workers, 1) == {2: b"A"}
    workers.close()
    assert not workers.send(3, "a")
    assert not workers.alive


def kill(message: str) -> bytes:
    if message == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return shout(message)


def test_the_message_of_a_killed_worker_is_lost_and_no_other(start: Start) -> None:
    workers = start(kill, 2)
    for number, word in enumerate(["kill", "a", "b"]):
        workers.send(number, word)
    workers.start()
    assert answers(workers, 3) == {0: None, 1: b"A", 2: b"B"}
    assert len(workers.workers) == 1
    workers.send(3, "kill")
    workers.send(4, "never read")
    assert answers(workers, 2) == {3: None, 4: None}
    assert not workers.alive


def own_state(_: object) -> bytes:
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C in the terminal does to the whole group
    handlers = {int(n) for n in signal.valid_signals() if callable(signal.getsignal(n))}
    kinds = []
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        with suppress(FileNotFoundError):  # that of the list itself
            kinds.append(os.readlink(f"/proc/self/fd/{fd}"))
    return pickle.dumps((handlers, kinds))


def test_a_worker_has_left_its_parent(start: Start) -> None:
    """Ctrl-C is the parent's, as are its signal handlers, its files and its output."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with open(__file__):
            workers = start(own_state, 1)
            workers.send(0, None)
            workers.start()
        handlers, kinds = pickle.loads(answers(workers, 1)[0] or b"")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handlers == set()
    assert kinds[:3] == ["/dev/null"] * 3
    assert {kind.partition(":")[0] for kind in kinds[3:]} == {"socket"}
    assert len(kinds) == 5


def test_workers_end_with_the_pool(start: Start) -> None:
    workers = start(shout, 3)
    workers.start()
    numbers = [worker.pid for worker in workers.workers]
    assert len(numbers) == 3
    workers.close()
    for number in numbers:
        with pytest.raises(ChildProcessError):  # nothing is left to wait for
            os.waitpid(number, 0)


def test_no_process_can_be_forked(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("too many processes")

    workers = start(shout, 2)
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(BlockingIOError):
        workers.start()
    assert not workers.alive


def test_the_loop_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with its queue, and when it has waited long enough for a message."""
    queue, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair()
    with queue, end, ours, theirs:
        for number, word in enumerate(["a", "nothing"]):
            queue.send(pickle.dumps((number, word)))
        monkeypatch.setattr(forked_workers, "IDLE_S", 0.01)
        work(shout, end, theirs)
        frame = forked_workers._FRAME
        taken, failed = -1, -2
        expected = frame.pack(0, taken) + frame.pack(0, 1) + b"A"
        assert ours.recv(1000) == expected + frame.pack(1, taken) + frame.pack(1, failed)
        queue.shutdown(socket.SHUT_WR)
        work(shout, end, theirs)

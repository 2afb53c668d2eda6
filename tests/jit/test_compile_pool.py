"""Kernels that other processes compile: the same bytes, in a good order, and none missing."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("it forks", allow_module_level=True)

from tests.kernels import rows
from treadle.base import fork_safety
from treadle.errors import CompileError
from treadle.isa.portable import PORTABLE
from treadle.jit import cache, compile, compile_pool, kernel
from treadle.jit.compile_pool import FIRST, LATER, CompilePool, CompileQueue, n_processes
from treadle.kernels.elementwise.elementwise import Embed, Norm
from treadle.system.forked_workers import ForkedWorkers

ISA = rows.ALL[-1]
KEY = kernel.isa_key(ISA)
SPECS = [Embed("F32", 32), Norm("f32", 40, 1, 1e-6), Embed("F32", 64)]
NAMES = [spec.name for spec in SPECS]
EMIT = compile.emit_object


@pytest.fixture(autouse=True)
def folder(own_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two processes for the smallest work, and an empty cache. Other threads of the test run hold
    no lock that a kernel needs.
    """
    monkeypatch.setenv("TREADLE_COMPILE_PROCESSES", "2")
    monkeypatch.setattr(kernel, "_pools", [CompilePool()])
    monkeypatch.setattr(compile_pool, "MIN_FORK_MS", 0.0)
    monkeypatch.setattr(fork_safety, "may_fork", lambda: True)
    yield own_kernels
    kernel.end_compile_processes()


def pool() -> CompilePool:
    return kernel._pools[0]


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each kernel that this process compiles."""
    seen: list[int] = []

    def emit(text: str, isa: Any) -> bytes:
        seen.append(1)
        return EMIT(text, isa)

    monkeypatch.setattr(compile, "emit_object", emit)
    return seen


def test_processes_compile_the_same_bytes(folder: Path, compiled_here: list[int]) -> None:
    tally = kernel.CompileStats()
    told: list[tuple[str, int, int]] = []
    addresses = kernel.load_kernels(SPECS, ISA, lambda *step: told.append(step), tally)
    assert list(addresses) == NAMES
    assert all(addresses.values())
    assert compiled_here == []
    assert (tally.n_compiled, tally.n_cached) == (3, 0)
    assert told[-1] == ("compile", 3, 3)
    for spec in SPECS:
        assert cache.read(spec.name, KEY) == EMIT(kernel.trace(spec, ISA), ISA)
    notes = {record.about["name"]: record.about for record in cache.records()}
    assert notes[NAMES[0]]["spec"] == "Embed"
    assert pool().counts == (0, 0)  # the processes have ended
    assert kernel._compiled_elsewhere == {}


def test_what_is_compiled_ahead_is_there_when_it_is_asked_for(compiled_here: list[int]) -> None:
    assert kernel.compile_ahead(SPECS, ISA)
    tally = kernel.CompileStats()
    kernel.load_kernels(SPECS, ISA, tally=tally)
    assert (tally.n_compiled, tally.n_cached, compiled_here) == (3, 0, [])
    assert not kernel.compile_ahead(SPECS, ISA)


def test_processes_stay_for_the_next_plan() -> None:
    with kernel.compile_processes_held():
        kernel.load_kernels(SPECS[:2], ISA)
        assert pool().counts == (2, 2)
        assert kernel.compile_ahead(SPECS[2:], ISA)
        assert pool().counts == (2, 3)
        assert not kernel.compile_ahead(SPECS, PORTABLE)  # kernels of another instruction set
    kernel.load_kernels(SPECS[2:], ISA)
    assert pool().counts == (0, 0)


@pytest.mark.parametrize("victims", [1, 2])
def test_a_killed_process_costs_nothing_but_time(victims: int, compiled_here: list[int]) -> None:
    assert kernel.compile_ahead(SPECS, ISA)
    queue = pool()._queue
    assert queue is not None
    assert isinstance(queue.workers, ForkedWorkers)
    for worker in queue.workers.workers[:victims]:
        os.kill(worker.pid, signal.SIGKILL)
    assert all(kernel.load_kernels(SPECS, ISA).values())
    assert len(compiled_here) >= victims - 1


def test_processes_that_give_no_sign(
    monkeypatch: pytest.MonkeyPatch, compiled_here: list[int]
) -> None:
    assert kernel.compile_ahead(SPECS, ISA)
    queue = pool()._queue
    assert queue is not None
    assert isinstance(queue.workers, ForkedWorkers)
    for worker in queue.workers.workers:
        os.kill(worker.pid, signal.SIGSTOP)
    monkeypatch.setattr(compile_pool, "STUCK_S", 0.05)
    assert all(kernel.load_kernels(SPECS, ISA).values())
    assert compiled_here
    assert pool()._queue is None


def test_what_llvm_refuses_is_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, isa: Any) -> bytes:
        raise CompileError(f"refused in {os.getpid()}")

    monkeypatch.setattr(compile, "emit_object", refuse)
    with pytest.raises(CompileError, match=f"refused in {os.getpid()}"):
        kernel.load_kernels(SPECS, ISA)


def test_a_cache_that_cannot_be_written(
    folder: Path, compiled_here: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    assert all(kernel.load_kernels(SPECS, ISA).values())
    assert compiled_here == []  # the objects came through the pipe
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_where_no_process_is_forked(
    monkeypatch: pytest.MonkeyPatch, compiled_here: list[int]
) -> None:
    """With one core, for little work, beside other threads, or if the system refuses."""
    with monkeypatch.context() as patch:
        patch.setenv("TREADLE_COMPILE_PROCESSES", "1")
        assert not kernel.compile_ahead(SPECS, ISA)
    with monkeypatch.context() as patch:
        patch.setattr(compile_pool, "MIN_FORK_MS", 1e6)
        assert not kernel.compile_ahead(SPECS, ISA)
    with monkeypatch.context() as patch:
        patch.setattr(fork_safety, "may_fork", lambda: False)
        assert not kernel.compile_ahead(SPECS, ISA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", lambda: (_ for _ in ()).throw(BlockingIOError()))
        assert not kernel.compile_ahead(SPECS, ISA)
        assert all(kernel.load_kernels(SPECS, ISA).values())
    assert len(compiled_here) == 3


def test_a_child_of_the_program_leaves_the_processes_to_it() -> None:
    assert kernel.compile_ahead(SPECS, ISA)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = 0 if pool()._queue is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    tally = kernel.CompileStats()
    kernel.load_kernels(SPECS, ISA, tally=tally)
    assert tally.n_compiled == 3


def test_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert n_processes() == 2
    monkeypatch.delenv("TREADLE_COMPILE_PROCESSES")
    for cores, expected in ((1, 1), (6, 6), (64, compile_pool.MOST_PROCESSES)):
        monkeypatch.setattr(compile_pool, "usable_threads", lambda n=cores: (n, "cores"))
        assert n_processes() == expected


def test_forks_only_without_threads_that_hold_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    known = {thread for thread in threading.enumerate() if thread is not threading.current_thread()}
    for thread in known:  # of the test run
        fork_safety.declare_harmless(thread)
    assert fork_safety.may_fork()
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert not fork_safety.may_fork()
        fork_safety.declare_harmless(thread)
        assert fork_safety.may_fork()
    finally:
        over.set()
        thread.join()


class Job(Embed):
    """A kernel that takes so many milliseconds."""

    @property
    def compile_ms(self) -> float:
        return float(self.k)


class SentJobs:
    """In place of workers: what was sent to them."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.alive = True
        self.sent: list[int] = []  # milliseconds
        self.answers: list[tuple[int, bytes | None]] = []

    def wants(self) -> int:
        return self.room - len(self.sent)

    def send(self, number: int, message: Job) -> bool:
        self.sent.append(message.k)
        return True

    def receive(self) -> list[tuple[int, bytes | None]]:
        found = self.answers[:]
        self.answers.clear()
        return found


def jobs(*ms: int) -> list[Job]:
    return [Job("F32", each) for each in ms]


def test_the_slowest_first_and_the_first_plan_before_others() -> None:
    workers = SentJobs(2)
    queue = CompileQueue(ISA, workers)  # type: ignore[arg-type]
    queue.submit(jobs(32, 96, 64), FIRST)
    queue.submit(jobs(512, 128, 64), LATER)
    assert workers.sent == [96, 64]  # no more than they want now
    queue.submit(jobs(128, 256), FIRST)  # one is wanted earlier now
    workers.room = 10
    workers.answers = [(1, b"code"), (2, None)]
    assert queue.receive() == [(Job("F32", 96), b"code")]
    assert workers.sent == [96, 64, 256, 128, 32, 512]  # each once
    assert queue.ranks == dict.fromkeys([spec.name for spec in jobs(32, 128, 256)], FIRST) | {
        Job("F32", 512).name: LATER
    }
    assert len(queue.first) == 5


def test_nothing_is_pending_without_workers() -> None:
    workers = SentJobs(0)
    queue = CompileQueue(ISA, workers)  # type: ignore[arg-type]
    queue.submit(jobs(32, 64), FIRST)
    assert len(queue.ranks) == 2
    workers.alive = False
    queue.receive()
    assert queue.ranks == {}

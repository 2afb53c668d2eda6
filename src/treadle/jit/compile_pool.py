"""Kernels compiled by several processes at once.

The processes are forked when kernels are missing, and share this process's LLVM: importing LLVM
takes longer than most kernels. If a fork is not safe, because other threads run, there are no such
processes, and ``kernel.py`` compiles in this process. It also compiles the kernels whose process
has died.

Kernels that are waited for come before others, and among them the slowest first: then all processes
end at about the same time.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from treadle.base import fork_safety
from treadle.base.interrupts import interrupts_held
from treadle.machine.topology import usable_threads
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.kernels.spec import Spec
    from treadle.system.protocol import WorkerProcesses

MOST_PROCESSES = 16  # with more, the slowest kernel bounds the time, and each takes 10 MB
STUCK_S = 60.0  # after this long without any kernel, this process compiles them itself
MIN_FORK_MS = 150.0  # estimated compile time from which processes are forked, at 2 ms each

FIRST = 0  # rank of kernels that are waited for
LATER = 1


def n_processes() -> int:
    """Return the number of processes that compile at once: ``TREADLE_COMPILE_PROCESSES``, or the
    number of usable cores, at most MOST_PROCESSES.
    """
    given = os.environ.get("TREADLE_COMPILE_PROCESSES", "")
    return int(given) if given.isdigit() else min(usable_threads()[0], MOST_PROCESSES)


class CompileQueue:
    """Queue of the kernels that the child processes compile for one instruction set: by rank
    (FIRST: waited for; LATER: in advance), within a rank the slowest first.
    """

    def __init__(self, isa: Isa, workers: WorkerProcesses) -> None:
        self.isa = isa
        self.workers = workers
        self.ranks: dict[str, int] = {}  # of pending kernels
        self.first: set[str] = set()  # all kernels that were ever of rank FIRST
        self._sent: set[str] = set()  # pending kernels that a worker has
        self._specs: list[Spec] = []  # by number
        self._heap: list[tuple[int, float, int]] = []  # rank, -time, number; ranks may be outdated

    def submit(self, specs: Sequence[Spec], rank: int) -> None:
        """Add kernels with ``rank``. A kernel that is pending already changes only to a better
        rank.
        """
        for spec in specs:
            name = spec.name
            if self.ranks.get(name, LATER + 1) <= rank:
                continue
            self.ranks[name] = rank
            if rank == FIRST:
                self.first.add(name)
            if name not in self._sent:
                heapq.heappush(self._heap, (rank, -spec.compile_ms, len(self._specs)))
                self._specs.append(spec)
        self._send()

    def receive(self) -> list[tuple[Spec, bytes]]:
        """Return the kernels compiled since the last call, with their objects. Kernels that could
        not be compiled are left out, and are no longer pending either.
        """
        arrived = []
        for number, code in self.workers.receive():
            spec = self._specs[number]
            self._sent.discard(spec.name)
            if self.ranks.pop(spec.name, None) is not None and code is not None:
                arrived.append((spec, code))
        self._send()
        return arrived

    def _send(self) -> None:
        """Send waiting kernels to the workers that have room."""
        room = self.workers.wants()
        while room and self._heap:
            rank, _, number = heapq.heappop(self._heap)
            name = self._specs[number].name
            if name in self._sent or self.ranks.get(name) != rank:  # it was put in earlier
                continue
            if self.workers.send(number, self._specs[number]):
                self._sent.add(name)
                room -= 1
            else:
                del self.ranks[name]
        if not self.workers.alive:
            self.ranks.clear()


class CompilePool:
    """The child processes that compile kernels for this process, while there are any.

    Not thread-safe: ``kernel.py`` holds its lock around all calls but ``wait``.
    """

    def __init__(self) -> None:
        self._queue: CompileQueue | None = None
        self._last_arrival = 0.0  # when the last kernel arrived, or the first was submitted
        fork_safety.register_after_fork(self)

    def begin(
        self, specs: Sequence[Spec], isa: Isa, compile: Callable[[Spec], bytes], rank: int = FIRST
    ) -> bool:
        """Let child processes compile ``specs``: each calls ``compile(spec)``, which returns the
        object. ``rank``: FIRST for kernels that are waited for, else LATER. Return False if this
        process must compile them: there is one core, too little to do, a fork is not safe or fails,
        or the processes are compiling for another instruction set.
        """
        if self._queue is not None and not self._queue.workers.alive:
            self.close()
        queue = self._queue
        if queue is None:
            n = n_processes()
            is_worth = sum(spec.compile_ms for spec in specs) >= MIN_FORK_MS
            if not is_worth or n < 2 or not fork_safety.may_fork():
                return False
            with interrupts_held():
                self._queue = open_queue(isa, compile, n, specs, rank)
                self._last_arrival = time.monotonic()
            return self._queue is not None
        if queue.isa != isa:
            return False
        with interrupts_held():
            if not queue.ranks:
                self._last_arrival = time.monotonic()
            queue.submit(specs, rank)
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no kernel is pending."""
        return self._queue is None or not self._queue.ranks

    def is_pending(self, name: str, isa: Isa) -> bool:
        """Return whether a child process has still to compile kernel ``name`` for ``isa``."""
        queue = self._queue
        return queue is not None and name in queue.ranks and queue.isa == isa

    @property
    def counts(self) -> tuple[int, int]:
        """Progress of the kernels that are waited for (rank FIRST): how many are compiled, and how
        many there are.
        """
        if self._queue is None:
            return 0, 0
        first = self._queue.first
        return len(first - self._queue.ranks.keys()), len(first)

    def wait(self, seconds: float) -> None:
        """Wait until a child process has compiled a kernel, at most ``seconds``. Any thread may
        call it.
        """
        queue = self._queue
        if queue is not None:
            queue.workers.wait(seconds)

    def receive(self) -> list[tuple[Isa, Spec, bytes]]:
        """Return the (instruction set, spec, object) of the kernels compiled since the last call.
        End the processes if none has delivered a kernel for STUCK_S seconds.
        """
        queue = self._queue
        if queue is None:
            return []
        with interrupts_held():
            arrived = queue.receive()
            now = time.monotonic()
            if arrived or not queue.ranks:
                self._last_arrival = now
            elif now - self._last_arrival > STUCK_S:
                self.close()
            return [(queue.isa, spec, code) for spec, code in arrived]

    def close(self) -> None:
        """End the child processes; nothing is pending any more."""
        queue = self._queue
        if queue is not None:
            with interrupts_held():
                self._queue = None
                queue.workers.close()

    def after_fork(self) -> None:
        """Forget the processes in a forked child: they belong to the parent."""
        self.close()


def open_queue(
    isa: Isa, compile: Callable[[Spec], bytes], n: int, specs: Sequence[Spec], rank: int
) -> CompileQueue | None:
    """Fork ``n`` child processes, each of which begins to compile ``specs`` as soon as it exists;
    ``rank`` as in ``CompilePool.begin``. Return their queue; None if a fork fails, for want of
    memory or of process numbers.
    """
    try:
        workers = SYSTEM.fork_workers(compile, n)
        queue = CompileQueue(isa, workers)
        queue.submit(specs, rank)
        workers.start()
    except OSError:
        return None
    return queue

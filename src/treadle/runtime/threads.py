"""The thread team: Python starts it, compiled code keeps it.

Each worker is a ``threading.Thread`` that enters the compiled loop (``runner.py``) with the GIL released and stays there. A run
is one call: the caller publishes the job and works beside its team until the last step is done.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from treadle.jit.kernel import load_kernels
from treadle.runtime.runner import CLAIM, GENERATION, ITEM_BITS, JOB, JOB_FIELDS, SLEEPERS, TEAM_BYTES, TIMESPEC, Work

if TYPE_CHECKING:
    from treadle.isa.isa import Isa

SPINS = 20_000  # polls (about a millisecond) that a worker stays awake after a run: longer than a sampler takes
ENTRY = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)
WAIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE, EVERYONE = 128, 129, 1 << 30
FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}


class Memory:
    """Zeroed bytes on a cache-line boundary (``.address``), as numpy sees them (``.bytes``)."""

    def __init__(self, n_bytes: int) -> None:
        raw = np.zeros(n_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.bytes = raw[start : start + n_bytes]
        self.address: int = self.bytes.ctypes.data


class Team:
    """``n_threads`` threads, the caller's included. ``scratch`` is the bytes each has for a kernel's own use."""

    def __init__(self, n_threads: int, isa: Isa, scratch: int) -> None:
        self.n_threads, self.scratch = n_threads, scratch
        self._memory = Memory(TEAM_BYTES)
        self._claim, self._generation, self._sleepers = (
            self._memory.bytes[off : off + 8].view(np.int64) for off in (CLAIM, GENERATION, SLEEPERS)
        )
        self._job = self._memory.bytes[JOB:].view(np.int64)
        self._libc = ctypes.CDLL(None, use_errno=False)
        self._entry = ENTRY(load_kernels([Work()], isa)[Work().name])
        self._scratch = [Memory(scratch) for _ in range(n_threads)]
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._set("spins", SPINS if n_threads > 1 else 0)
        self._set("offer", _address(self._libc.sched_yield))
        self._set("clock", _address(self._libc.clock_gettime))
        # A Python callback sleeps for the worker: it wakes at most once a run, and ctypes drops the GIL in it.
        self._wait = WAIT(self._sleep)
        self._set("wait", _address(self._wait))
        self._set("epoch", 1)

    def _set(self, field: str, value: int) -> None:
        self._job[JOB_FIELDS.index(field)] = value

    def _sleep(self, word: int, seen: int) -> None:
        call = FUTEX_CALL.get(platform.machine()) if sys.platform == "linux" else None
        if call is None:
            threading.Event().wait(0.001)
            return
        null = ctypes.c_void_p(None)
        self._libc.syscall(
            ctypes.c_long(call),
            ctypes.c_void_p(word),
            ctypes.c_int(FUTEX_WAIT_PRIVATE),
            ctypes.c_int(seen),
            null,
            null,
            ctypes.c_int(0),
        )

    def _wake(self) -> None:
        call = FUTEX_CALL.get(platform.machine()) if sys.platform == "linux" else None
        if call is not None and self._sleepers[0]:
            self._libc.syscall(
                ctypes.c_long(call),
                ctypes.c_void_p(self._memory.address + GENERATION),
                ctypes.c_int(FUTEX_WAKE_PRIVATE),
                ctypes.c_int(EVERYONE),
            )

    def _start_workers(self) -> None:
        for scratch in self._scratch[1 + len(self._workers) :]:
            worker = threading.Thread(
                target=self._entry,
                args=(self._memory.address, 0, 0, 0, scratch.address),
                name=f"treadle-{len(self._workers) + 1}",
                daemon=True,
            )
            worker.start()
            self._workers.append(worker)

    def run(self, steps: int, n_steps: int, run: int, times: int = 0) -> None:
        """Do the ``n_steps`` STEP records at address ``steps`` for the RUN_STATE at ``run``; returns when all are done.

        ``times``, where not 0, is the address of ``n_steps + 1`` timespecs: the start of each step, and the end.
        """
        with self._lock:
            if not self._workers and self.n_threads > 1:
                self._start_workers()
            first = (int(self._claim[0]) >> ITEM_BITS) + 1
            # The claim still names no step of any run, so no worker acts on a half-written job.
            for field, value in (("epoch", first), ("n_steps", n_steps), ("steps", steps), ("run", run), ("times", times)):
                self._set(field, value)
            if times:
                self._libc.clock_gettime(1, ctypes.c_void_p(times))
            self._generation.view(np.int32)[0] += 1
            self._claim[0] = first << ITEM_BITS
            self._wake()
            self._entry(self._memory.address, 0, 1, 0, self._scratch[0].address)

    def close(self) -> None:
        """Send the workers home."""
        with self._lock:
            self._set("stop", 1)
            self._generation.view(np.int32)[0] += 1
            self._wake()
            for worker in self._workers:
                worker.join()
            self._workers.clear()
            self._set("stop", 0)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def step_times(times: np.ndarray) -> np.ndarray:
    """Seconds of each step from ``run``'s ``times`` (int64 ``[n_steps + 1, 2]``)."""
    assert times.dtype.itemsize * 2 == TIMESPEC
    at = times[:, 0] + times[:, 1] * 1e-9
    return np.diff(at)

"""The thread team: threads started by Python that run the compiled step loop.

Each worker is a ``threading.Thread`` that enters the compiled loop (``step_loop.py``) with the GIL
released and stays there. A run is one call: the caller publishes the job and works beside its team
until the last step is done, or a signal sets the abort flag.

A forked child has none of its parent's threads: its first run starts new workers.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the C module behind signal
import ctypes
import mmap
import os
import threading
import weakref
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from treadle.base import fork_safety
from treadle.devices.cpu.chosen_isa import row_of
from treadle.devices.cpu.memory_layouts import (
    CALLER,
    JOB,
    JOB_FIELDS,
    LOOP,
    NEXT,
    STOP,
    TEAM_BYTES,
    TIMESPEC,
    WORKER,
)
from treadle.errors import TreadleError
from treadle.jit.kernel import load_cached, load_kernels
from treadle.plan.plan import DeviceMemory
from treadle.system import SYSTEM

if TYPE_CHECKING:
    from treadle.devices.cpu.chosen_isa import ChosenIsa
    from treadle.isa.isa import Isa
    from treadle.jit.kernel import CompileStats


WORD = 8  # bytes of the abort flag that compiled code reads; a ninth signal writes past them
SPINS = 20_000  # polls before a worker sleeps: about a millisecond, longer than a sampler takes
ENTRY = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)
WAIT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)
JOB_AT = {name: at for at, name in enumerate(JOB_FIELDS)}


class AbortFlag:
    """Context manager: while it is active, a signal that Python handles writes its number, which is
    not 0, to the 8 bytes at ``address``; they are 0 otherwise. Compiled code polls them to stop a
    run. Python's own handler still runs, as soon as it can.

    Python's handlers run between two bytecodes, so not during a run, which may take seconds in
    compiled code. But the interpreter's C handler writes the signal's number to a descriptor at
    once (``signal.set_wakeup_fd``). Here that is a memory file that is also mapped: the write is a
    store visible to every thread, and polling needs no waiting thread and no system call.

    ``address`` is 0 in threads other than the main one, where Python handles no signals, and on a
    system without memory files: there signals are handled after the run.
    """

    __slots__ = ("_usual", "_word", "address")

    def __enter__(self) -> AbortFlag:
        self._word: _FlagBytes | None = None
        self.address = 0
        if threading.current_thread() is threading.main_thread():
            self._word = _word()
        if self._word is not None:
            self.address = self._word.address
            self._usual: int = _signal.set_wakeup_fd(self._word.file)
        return self

    @property
    def is_set(self) -> bool:
        """Whether a signal has arrived since the ``with`` block was entered."""
        return self._word is not None and bool(self._word.value[0])

    def __exit__(self, *_: object) -> None:
        if self._word is None:
            return
        _signal.set_wakeup_fd(self._usual)
        if self._word.value[0]:
            numbers = self._word.drain()
            if self._usual >= 0:  # an event loop waits on it
                os.write(self._usual, numbers)


class _FlagBytes:
    """The flag's bytes, and the memory file that holds them."""

    def __init__(self, file: int) -> None:
        self.file = file
        os.ftruncate(self.file, mmap.PAGESIZE)
        self.value = np.frombuffer(mmap.mmap(self.file, mmap.PAGESIZE), np.int64, 1)
        self.address = int(self.value.ctypes.data)

    def __del__(self) -> None:
        os.close(self.file)

    def drain(self) -> bytes:
        """Return the numbers of the signals that arrived, a byte each, and clear the flag."""
        numbers = self.value.tobytes().rstrip(b"\0")
        self.value[0] = 0
        os.lseek(self.file, 0, os.SEEK_SET)  # the next signal is written at the start
        return numbers


@cache
def _word() -> _FlagBytes | None:
    """Return this process's flag bytes; None if the system has no memory files."""
    file = SYSTEM.memory_file()
    return None if file is None else _FlagBytes(file)


# A forked child must not set its parent's flag.
SYSTEM.after_fork(_word.cache_clear)


class HostMemory(DeviceMemory):
    """Zeroed bytes on a cache-line boundary: ``.address``, and ``.bytes`` as a numpy array."""

    bytes: np.ndarray

    def __init__(self, n_bytes: int) -> None:
        raw = np.zeros(n_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        self.n_bytes = n_bytes
        self.bytes = raw[start : start + n_bytes]
        self.address: int = self.bytes.ctypes.data

    @classmethod
    def wrap(cls, array: np.ndarray, address: int | None = None) -> HostMemory:
        """Wrap the memory of ``array``, without a copy. ``address``: that of the array, if
        known.
        """
        result = cls.__new__(cls)
        result.bytes = array
        result.n_bytes = array.nbytes
        result.address = int(array.ctypes.data) if address is None else address
        return result

    def _read(self, at: int, n_bytes: int) -> np.ndarray:
        return self.bytes[at : at + n_bytes]

    def _write(self, at: int, data: np.ndarray) -> None:
        self.bytes[at : at + len(data)] = data


def step_loop(isa: Isa | ChosenIsa, tally: CompileStats | None = None) -> int:
    """Return the address of the compiled step loop (``step_loop.py``). ``tally``: as of
    ``load_kernels``.
    """
    found = load_cached([LOOP], isa, tally)
    if found is None:
        from treadle.devices.cpu.step_loop import StepLoop  # a warm start does not build it

        found = load_kernels([StepLoop()], row_of(isa), tally=tally)
    return found[LOOP]


class _Shared:
    """Memory, compiled loop and threads of a team; it lives as long as the last thread."""

    def __init__(self, isa: Isa | ChosenIsa) -> None:
        self.memory = HostMemory(TEAM_BYTES)
        self.job, self.next = (
            self.memory.bytes[start:stop].view(np.int64)
            for start, stop in ((JOB, NEXT), (NEXT, TEAM_BYTES))
        )
        self.entry = ENTRY(step_loop(isa))
        # Workers sleep in a Python callback, at most once a run; ctypes releases the GIL.
        self.wait = WAIT(SYSTEM.sleep)
        self.workers: list[threading.Thread] = []

    def set(self, field: str, value: int) -> None:
        """Set a field of the job (JOB_FIELDS) while no worker runs; starting a worker publishes
        it.
        """
        self.job[JOB_AT[field]] = value

    def run_role(self, role: int, scratch: HostMemory) -> None:
        """Run the compiled loop in this thread, in the role WORKER, CALLER or STOP
        (``StepLoop``).
        """
        self.entry(self.memory.address, 0, role, 0, scratch.address)

    def dismiss(self) -> None:
        """Stop the workers, and wait until they have ended."""
        self.run_role(STOP, self.memory)
        for worker in self.workers:
            if worker is not threading.current_thread():
                worker.join()
        self.workers.clear()
        self.set("stop", 0)


class Team:
    """``n_threads`` threads, including the caller's, each with ``scratch`` bytes for its kernels.

    Its workers end with ``close``, when the team is garbage collected, or at Python's exit.
    """

    def __init__(self, n_threads: int, isa: Isa | ChosenIsa, scratch: int) -> None:
        self.n_threads = n_threads
        self.scratch = scratch
        self._shared = shared = _Shared(isa)
        self._scratch = [HostMemory(scratch) for _ in range(n_threads)]
        self._lock = threading.Lock()
        shared.set("spins", SPINS if n_threads > 1 else 0)
        shared.set("threads", n_threads)
        # Claims of a round have two thirds of a fair share: a core slower by half delays no other,
        # and streams are rarely cut (whole shares read memory 1 % faster still, halves 1 % slower).
        shared.set("share", max(1, 3 * n_threads // 2))
        for field, value in SYSTEM.calls().items():
            shared.set(field, value)
        shared.set("wait", ctypes.cast(shared.wait, ctypes.c_void_p).value or 0)
        shared.set("epoch", 1)
        self._calm = HostMemory(8)  # the abort flag of a run without one: always 0
        weakref.finalize(self, shared.dismiss)

    def _start_workers(self) -> None:
        workers = self._shared.workers
        workers.clear()
        for i, scratch in enumerate(self._scratch[1:], 1):
            worker = threading.Thread(
                target=self._shared.run_role,
                args=(WORKER, scratch),
                name=f"treadle-{i}",
                daemon=True,
            )
            try:
                worker.start()
            except RuntimeError as error:  # Python does not say why
                self._shared.dismiss()
                raise TreadleError(
                    f"threads={self.n_threads}: only {i} threads could be started; raise ulimit -u "
                    "or -v, or the container's process limit"
                ) from error
            fork_safety.declare_harmless(worker)  # it stays in compiled code
            workers.append(worker)

    def run(self, steps: int, n_steps: int, run: int, times: int = 0, alarm: int = 0) -> None:
        """Run ``n_steps`` STEP records from address ``steps`` on, with the RUN_STATE at address
        ``run``.

        ``times``, unless 0, is the address of ``n_steps + 1`` timespecs: the start of each step,
        and the end. ``alarm``, unless 0, is the address of an abort flag of 8 bytes: once it is not
        0, the remaining work is skipped. Calls from several threads are serialised.
        """
        shared = self._shared
        with self._lock:
            if self.n_threads > 1 and not (shared.workers and shared.workers[0].is_alive()):
                self._start_workers()
            shared.next[:] = n_steps, steps, run, times, alarm or self._calm.address
            shared.run_role(CALLER, self._scratch[0])

    def close(self) -> None:
        """Stop the workers. A later run starts new ones."""
        with self._lock:
            self._shared.dismiss()


def step_times(times: np.ndarray) -> np.ndarray:
    """Return the seconds of each step, float64 ``[n_steps]``, from the timespecs that ``Team.run``
    writes to ``times``: int64 ``[n_steps + 1, 2]``, seconds and nanoseconds.
    """
    assert times.dtype.itemsize * 2 == TIMESPEC
    at = times[:, 0] + times[:, 1] * 1e-9
    return np.diff(at)

"""Times of studied kernels on this machine, caches hot and cold.

A clock may tick as seldom as every 42 ns (24 MHz, on RISC-V boards), as long as an eighth of such
a kernel takes. So a sample is many repetitions, made within machine code.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from bench.kernel_study.spec import Arrays, Study, StudyCase
from bench.kernel_study.sweep import Kernel, SweepResult, mark_best, numbers, problem
from treadle.jit.kernel import load_kernels
from treadle.machine.topology import cache_bytes

if TYPE_CHECKING:
    from treadle.isa.isa import Isa

SAMPLE_S = 2e-3  # at least: a thousandth of it is 48 ticks of 24 MHz
COLD_BYTES = 32 << 20, 256 << 20  # of all copies, at least and at most: four times the cache
CALL = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p
)
Clock = Callable[[], float]


def measure(
    kernel: Kernel,
    isa: Isa,
    repeat: int,
    *,
    cold_bytes: int = 0,
    clock: Clock = time.perf_counter,
) -> list[SweepResult]:
    """Every setting of a kernel: checked, then the least of ``repeat`` samples, hot and cold."""
    low, high = COLD_BYTES
    n_bytes = cold_bytes or min(high, max(low, 4 * cache_bytes()))
    found = []
    for spec in kernel.specs:
        run = CALL(load_kernels([spec], isa)[spec.name])
        case = spec.case(isa, kernel.size, np.random.default_rng(0))
        made = SweepResult(kernel.name, spec, kernel.size, spec.products(isa, kernel.size))
        after = {name: array.copy() for name, array in case.arrays.items()}
        _call(run, spec, case, after, 1, hot=True)()
        made.wrong[isa.vector_bits] = problem(case, after)
        made.hot_ns = _hot(run, spec, case, repeat, clock)
        made.cold_ns = _cold(run, spec, case, repeat, n_bytes, clock)
        found.append(made)
    mark_best(found)
    return found


def _call(
    run: Callable[..., None], spec: Study, case: StudyCase, arrays: Arrays, items: int, *, hot: bool
) -> Callable[[], None]:
    """``items`` repetitions: of the same memory, or each on the next copy of it."""
    given: dict[str, int] = numbers(case)
    if not hot:
        given |= {f"{name}_step": array.nbytes for name, array in case.arrays.items()}
    given |= {name: int(array.ctypes.data) for name, array in arrays.items()}
    slots = np.array([given[name] for name in spec.args.kinds], np.int64)

    def call() -> None:
        run(slots.ctypes.data, None, 0, items, None)

    return call


def _least_s(call: Callable[[], None], repeat: int, clock: Clock) -> float:
    """Seconds of the quickest sample."""
    times = []
    for _ in range(repeat):
        began = clock()
        call()
        times.append(clock() - began)
    return min(times)


def _hot(
    run: Callable[..., None], spec: Study, case: StudyCase, repeat: int, clock: Clock
) -> float:
    """Nanoseconds of one repetition on memory that stays in the first-level cache."""
    arrays = {name: array.copy() for name, array in case.arrays.items()}
    items = 1
    while _least_s(_call(run, spec, case, arrays, items, hot=True), 1, clock) < SAMPLE_S:
        items *= 2
    sample = _call(run, spec, case, arrays, items, hot=True)
    return 1e9 * _least_s(sample, repeat, clock) / items


def _cold(
    run: Callable[..., None], spec: Study, case: StudyCase, repeat: int, n_bytes: int, clock: Clock
) -> float:
    """Nanoseconds of one repetition on memory that no cache holds: the copies are walked in turn,
    so what hardware prefetches is as in a model's layers.
    """
    items = -(-n_bytes // sum(array.nbytes for array in case.arrays.values()))
    arrays = {name: np.tile(array.reshape(-1), items) for name, array in case.arrays.items()}
    sample = _call(run, spec, case, arrays, items, hot=False)
    sample()
    return 1e9 * _least_s(sample, repeat, clock) / items

"""Layouts of the memory that Python and the device's compiled code share: what a team's threads
share, their steps, the job that describes a run, and what the SIGBUS handler reads.

Without that code (``step_loop.py``, ``fault_handler.py``): a start that finds it compiled needs
only its name.
"""

from __future__ import annotations

import numpy as np

from treadle.kernels.run_state import LINE

LOOP = "work"  # the name of the compiled step loop
ITEM_BITS = 24  # of ``claim``: up to 16 million items a step; the other 40 bits are the epoch
MOST_ITEMS = (1 << ITEM_BITS) - 1
# A step has ``base`` items, or with ``count`` (an address) base * ceil(*count / per). If ``whole``
# is not 0, so many neighbouring items are claimed together.
STEP_FIELDS = ("kernel", "args", "base", "count", "per", "whole")
STEP = np.dtype([(name, "i8") for name in STEP_FIELDS])
NEXT_FIELDS = (  # of one run: Python writes them next to the job, the caller publishes them
    "n_steps",
    "steps",  # *STEP
    "run",  # *RUN_STATE
    "times",  # *timespec for each step's start, or 0
    "alarm",  # *i64, the abort flag: once it is not 0, no kernel is called
)
JOB_FIELDS = (
    *NEXT_FIELDS,
    "epoch",  # of the run's first step
    "stop",  # not 0: workers return
    "threads",
    "share",  # a claim of a round takes the items that were left at its beginning, divided by this
    "spins",  # polls without work before a worker sleeps
    "wait",  # void (*)(i32 *generation, i32 seen): sleep while *generation == seen
    # System calls from ``system/``; 0 where there is none.
    "wake",  # void (*)(i64 futex, i32 *generation, i64 how, i64 most): wake sleeping workers
    "futex",  # system call number for ``wake``; 0: that is (*)(i32 *generation, i64 size, i64 0)
    "how",  # the operation of that call
    "offer",  # void (*)(): yield the processor
    "clock",  # int (*)(int clock_number, timespec *)
    "clock_number",
)
# Claim, done, generation and sleepers have a cache line each.
CLAIM, DONE, GENERATION, SLEEPERS, JOB = (LINE * i for i in range(5))
NEXT = JOB + 8 * len(JOB_FIELDS)
TEAM_BYTES = NEXT + 8 * len(NEXT_FIELDS)
# The epoch while a job is written, which belongs to no step. A seqlock: a read of the job is valid
# only if the claim was the same before and after.
CLOSED = -2
WORKER, CALLER, STOP = range(3)  # roles in which ``StepLoop`` is called
EVERYONE = 1 << 30
OFFER_EVERY = 4096  # polls inside a run before a thread yields the processor
TIMESPEC = 16  # bytes

HANDLER = "sigbus"  # what the name of the compiled SIGBUS handler begins with
IGNORE = 1  # SIG_IGN
HANDLER_FIELDS = (
    "faults",  # *row of FAULTS
    "signal",  # SIGBUS
    "previous",  # the previous handler, DEFAULT or IGNORE
    "default",  # *struct sigaction of SIG_DFL
    "mmap",
    "sigaction",
    "raise",
)

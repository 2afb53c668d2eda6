"""Entry of a GPU kernel: distributes a step's items over threads or blocks.

An entry has a kernel's arguments, with the step's grid in place of the range of items: it computes
their number, ``base * ceil(count / per)``, with ``count`` in memory. So the size of a launch is the
same in every run.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING

from treadle.jit.cache import hash_of_sources, source_hash
from treadle.kernels.spec import Spec

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

GENERIC_THREADS = 128  # of a block, for a kernel with one thread per item
MOST_THREADS = 1024  # of a block, on every GPU


class PerBlock(Spec):
    """Base of GPU kernels with one block per item: adds the block's size and shared memory to the
    fields of the CPU kernel that it replaces.

    ``build`` is called with a range of one item, and emits one thread's code for it.
    """

    @property
    def threads(self) -> int:
        """Threads of a block, a multiple of 32."""
        return GENERIC_THREADS

    @property
    def shared_bytes(self) -> int:
        """Bytes of the block's shared memory."""
        return 0

    def scratch(self, lanes: int) -> int:
        """Return 0: these kernels use shared memory. Kernels with scratch are launched with fewer
        blocks.
        """
        return 0


def threads_of(spec: Spec) -> int:
    """Return the number of threads in a block of this kernel."""
    return spec.threads if isinstance(spec, PerBlock) else GENERIC_THREADS


def dynamic_shared_bytes(spec: Spec) -> int:
    """Return the bytes of shared memory in a block of this kernel."""
    return spec.shared_bytes if isinstance(spec, PerBlock) else 0


def emit_entry(
    k: Builder,
    isa: Isa,
    spec: Spec,
    args: Val,
    run: Val,
    count: Val,
    base: Val,
    per: Val,
    scratch: Val,
) -> None:
    """Emit one thread's code of a launch: a loop over the thread's items, or over the block's items
    for a ``PerBlock`` kernel. There are ``base * ceil(count / per)`` items.

    ``args``, ``run``: addresses of the kernel's arguments and of the run's inputs. ``count``:
    address of the grid's count, i64; null means 1. ``scratch``: address of all threads' scratch,
    contiguous, ``spec.scratch(isa.lanes)`` bytes each, rounded up to 64.
    """
    assert isa.simt is not None, isa.name
    simt = isa.simt
    n_threads = threads_of(spec)
    n = k.var(k.i64(1))
    with k.if_(count.eq(k.zero(count.ty)).eq(0)):
        n.v = k.load(count, per.ty, align=8)
    total = base * ((n.v + (per - 1)) // per)
    own = simt.cta(k) * n_threads + simt.tid(k)
    n_scratch = scratch_bytes(spec, isa)
    mine = scratch + own * n_scratch if n_scratch else scratch
    if isinstance(spec, PerBlock):
        start = simt.cta(k)
        with k.loop(total, start=start, step=simt.n_ctas(k)) as item:
            with k.if_(item > start):  # no thread still reads the previous item's shared memory
                simt.barrier(k)
            spec.emit(k, isa, args, run, item, item + 1, mine)
    else:
        with k.loop(total, start=own, step=simt.n_ctas(k) * n_threads) as item:
            spec.emit(k, isa, args, run, item, item + 1, mine)


def scratch_bytes(spec: Spec, isa: Isa) -> int:
    """Return the scratch bytes of one thread, a multiple of 64."""
    return -(-spec.scratch(isa.lanes) // 64) * 64


GPU_SOURCES = ("devices.cuda",)


@lru_cache(maxsize=1)
def gpu_source_hash() -> str:
    """Return a hash of every source that affects a GPU kernel's code: those of CPU kernels, and of
    this folder.
    """
    return sha256(f"{source_hash()}\0{hash_of_sources(*GPU_SOURCES)}".encode()).hexdigest()

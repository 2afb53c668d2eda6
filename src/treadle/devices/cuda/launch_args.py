"""How a kernel begins on a device of many threads: which thread does which items.

An entry's arguments are those of a kernel, but for the range of items: their number is that of
the step's grid, ``base * ceil(count / per)``, with ``count`` a number in memory. So the size of a
launch never changes, whatever a run brings.
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

GENERIC_THREADS = 128  # of a block of a kernel whose items are done by one thread each
MOST_THREADS = 1024  # of a block, on every card


class PerBlock(Spec):
    """A kernel whose items are done by one block each: beside the fields of the kernel that it
    stands for, how many threads a block has, and how many bytes they share.

    ``build`` is called with a range of one item: it emits what one thread does for it.
    """

    @property
    def threads(self) -> int:
        """A multiple of 32."""
        return GENERIC_THREADS

    @property
    def shared_bytes(self) -> int:
        """Bytes of the block's shared memory."""
        return 0

    def scratch(self, lanes: int) -> int:
        """None: blocks work in what they share. Launches are cut short where threads need any."""
        return 0


def threads_of(spec: Spec) -> int:
    """Threads of a block of this kernel."""
    return spec.threads if isinstance(spec, PerBlock) else GENERIC_THREADS


def shared_of(spec: Spec) -> int:
    """Bytes that its threads share."""
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
    """What one thread does of a launch: its items, or its block's.

    ``count``: where the number is, i64, or null: 1. ``scratch``: of all threads, one behind the
    other, ``spec.scratch(isa.lanes)`` bytes each, rounded up to 64.
    """
    assert isa.simt is not None, isa.name
    simt, n_threads = isa.simt, threads_of(spec)
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
            with k.if_(item > start):  # what the threads shared for the item before is read no more
                simt.barrier(k)
            spec.emit(k, isa, args, run, item, item + 1, mine)
    else:
        with k.loop(total, start=own, step=simt.n_ctas(k) * n_threads) as item:
            spec.emit(k, isa, args, run, item, item + 1, mine)


def scratch_bytes(spec: Spec, isa: Isa) -> int:
    """Bytes of scratch of one thread, a multiple of 64."""
    return -(-spec.scratch(isa.lanes) // 64) * 64


GPU_SOURCES = ("devices.cuda",)


@lru_cache(maxsize=1)
def gpu_source_hash() -> str:
    """One hash of every source that can change the code of a kernel of a GPU: ``source_hash`` and
    this folder's.
    """
    return sha256(f"{source_hash()}\0{hash_of_sources(*GPU_SOURCES)}".encode()).hexdigest()

"""What kernels of blocks have in common: who a thread is, and values joined over warp and block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from treadle.jit.language import Builder, Isa, Val
from treadle.kernels.spec import Spec

T = TypeVar("T", bound=Spec)
Op = Callable[[Val, Val], Val]


class ThreadBlock:
    """One thread of a block of ``n_threads``, while its code is built."""

    def __init__(self, k: Builder, isa: Isa, n_threads: int) -> None:
        assert isa.simt is not None, isa.name
        self.k, self.simt, self.n_threads = k, isa.simt, n_threads
        self.n_warps = n_threads // isa.simt.warp
        self.tid, self.shared = isa.simt.tid(k), isa.simt.shared(k)
        self.lane, self.warp = self.tid % isa.simt.warp, self.tid // isa.simt.warp

    def over_warp(self, v: Val, op: Op) -> Val:
        """``op`` over the warp's values, in a fixed tree: the same bits in every lane."""
        lanes = self.simt.warp // 2
        while lanes:
            v, lanes = op(v, self.simt.shuffle(self.k, v, lanes)), lanes // 2
        return v

    def over_block(self, values: Sequence[Val], op: Op, room: Val) -> list[Val]:
        """``op`` over the block's values, one after the other: the same bits in every thread.

        ``room``: ``reduce_bytes`` of shared memory, which nobody has read since a barrier.
        """
        k, n = self.k, len(values)
        for i, v in enumerate(values):
            joined = self.over_warp(v, op)
            with k.if_(self.lane.eq(0)):
                k.store(room + self.warp * (4 * n), joined, offset=4 * i, align=4)
        self.simt.barrier(k)
        made = []
        for i, v in enumerate(values):
            parts = [
                k.load(room, v.ty, offset=4 * (w * n + i), align=4) for w in range(self.n_warps)
            ]
            total = parts[0]
            for part in parts[1:]:
                total = op(total, part)
            made.append(total)
        return made

    def reduce_bytes(self, n: int = 1) -> int:
        """Shared memory that ``over_block`` needs for ``n`` values."""
        return 4 * n * self.n_warps


def plus(a: Val, b: Val) -> Val:
    """For ``over_warp`` and ``over_block``."""
    return a + b


def instead(kind: type[T], spec: Spec, **other: Any) -> T:
    """A spec of ``kind`` with the fields of ``spec``, which it stands for."""
    return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)}, **other)

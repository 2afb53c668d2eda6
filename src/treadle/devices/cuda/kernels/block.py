"""Helpers for block kernels: thread indices, and reductions over a warp or a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from treadle.jit.language import Builder, Isa, Val
from treadle.kernels.spec import Spec

T = TypeVar("T", bound=Spec)
Op = Callable[[Val, Val], Val]


class ThreadBlock:
    """A block of ``n_threads`` threads, used to build the code of one thread: its indices ``tid``,
    ``lane`` and ``warp``, and reductions over the block.
    """

    def __init__(self, k: Builder, isa: Isa, n_threads: int) -> None:
        assert isa.simt is not None, isa.name
        self.k = k
        self.simt = isa.simt
        self.n_threads = n_threads
        self.n_warps = n_threads // isa.simt.warp
        self.tid, self.shared = isa.simt.tid(k), isa.simt.shared(k)
        self.lane = self.tid % isa.simt.warp
        self.warp = self.tid // isa.simt.warp

    def reduce_warp(self, v: Val, op: Op) -> Val:
        """Emit the reduction of ``v``, a value of each lane of the warp, by ``op``, in a fixed
        tree: the same bits in every lane.
        """
        lanes = self.simt.warp // 2
        while lanes:
            v = op(v, self.simt.shuffle(self.k, v, lanes))
            lanes = lanes // 2
        return v

    def reduce_block(self, values: Sequence[Val], op: Op, room: Val) -> list[Val]:
        """Emit the reduction of each of ``values`` over the block by ``op``: the same bits in every
        thread.

        ``room``: address of ``reduce_bytes`` of shared memory that no thread has read since the
        last barrier, as it is overwritten at once.
        """
        k = self.k
        n = len(values)
        for i, v in enumerate(values):
            joined = self.reduce_warp(v, op)
            with k.if_(self.lane.eq(0)):
                k.store(room + self.warp * (4 * n), joined, offset=4 * i, align=4)
        self.simt.barrier(k)
        result = []
        for i, v in enumerate(values):
            parts = [
                k.load(room, v.ty, offset=4 * (w * n + i), align=4) for w in range(self.n_warps)
            ]
            total = parts[0]
            for part in parts[1:]:
                total = op(total, part)
            result.append(total)
        return result

    def reduce_bytes(self, n: int = 1) -> int:
        """Return the bytes of shared memory that ``reduce_block`` needs for ``n`` values."""
        return 4 * n * self.n_warps


def plus(a: Val, b: Val) -> Val:
    """Return ``a + b``, for ``reduce_warp`` and ``reduce_block``."""
    return a + b


def convert_spec(kind: type[T], spec: Spec, **other: Any) -> T:
    """Return a spec of type ``kind`` with the fields of ``spec``, and with ``other``: the fields
    that ``kind`` has in addition.
    """
    return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)}, **other)

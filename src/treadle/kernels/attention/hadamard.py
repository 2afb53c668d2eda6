"""Rotation by Hadamard matrices: spreads outliers over a head before it is stored in few bits.

The matrix of n dims (a power of two, the largest that divides the head) has entries 1 and -1 over
sqrt(n), is symmetric and its own inverse. So ``(H q) . (H k) = q . k``, and attention's sums of
rotated values are rotated back by the same matrix.
"""

from __future__ import annotations

import operator
from math import sqrt
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.spec import Args, Frame, Spec

MOST = 128  # largest matrix: its sums fit registers


def points(dims: int) -> int:
    """Return the size n of the ``[n, n]`` matrix for heads of ``dims``: the largest power of two
    that divides ``dims``, at most 128. A head is rotated n dims at a time.
    """
    return min(dims & -dims, MOST)


def rotate(k: Builder, x: Val, out: Val, dims: int) -> None:
    """Rotate the f32 head ``[dims]`` at address ``x`` into ``out`` (which may be ``x``),
    ``points(dims)`` dims at a time.
    """
    n = points(dims)
    width = min(k.isa.lanes, n)
    with k.loop(dims // n) as part:
        at = part * (4 * n)
        vectors = [k.load(x + at, f32 * width, offset=4 * i) for i in range(0, n, width)]
        h = 1
        while h < width:
            sign = k.const([-1.0 if lane & h else 1.0 for lane in range(width)], f32 * width)
            order = [lane ^ h for lane in range(width)]
            vectors = [k.fma(v, sign, k.shuffle(v, v, order)) for v in vectors]
            h *= 2
        step = 1
        while step < len(vectors):
            pairs = [(vectors[i & ~step], vectors[i | step]) for i in range(len(vectors))]
            ops = [operator.sub if i & step else operator.add for i in range(len(vectors))]
            vectors = [op(*pair) for op, pair in zip(ops, pairs, strict=True)]
            step *= 2
        for i, v in enumerate(vectors):
            k.store(out + at, v * (1 / sqrt(n)), offset=4 * i * width)


def rotate_ref(x: np.ndarray) -> np.ndarray:
    """Return ``x [.., dims]`` rotated along its last axis as by ``rotate``, float64."""
    n = points(x.shape[-1])
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    y = x.astype(np.float64).reshape(*x.shape[:-1], -1, n) @ matrix / sqrt(n)
    return np.asarray(y.reshape(x.shape))


@dataclass(frozen=True)
class Rotate(Spec):
    """Rotate each of ``heads`` heads of ``k`` dims by the Hadamard matrix, in place, f32. Items:
    tokens x heads.
    """

    op: ClassVar[str] = "rotate"
    args = Args("x:inout stride")
    k: int
    heads: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        stride = frame.stride * 4
        with k.loop(frame.end, start=frame.begin) as item:
            at = frame.x + item // self.heads * stride + item % self.heads * (4 * self.k)
            rotate(k, at, at, self.k)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"]), : self.heads * self.k]
        rows[:] = rotate_ref(rows.reshape(len(rows), self.heads, self.k)).reshape(rows.shape)

"""Attention residuals (Kimi Team, 2026): a half of a layer reads a weighted sum of the
states before earlier blocks of layers, f32 ``[N, n * k]``, and of the current state. A token's
weights are the softmax of one score for each of these states.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.spec import Args, Frame, Spec, parts


def _score(k: Builder, row: Val, w: Val, n: int, eps: float) -> Val:
    """Return the score of a state: the sum of the ``n`` values of its RMS norm with weights ``w``.
    Squares and products have four accumulators of ``isa.lanes`` lanes each.
    """
    lanes = k.isa.lanes
    ty = f32 * lanes
    squares, products = ([k.var(k.zero(ty)) for _ in range(4)] for _ in range(2))

    def run(at: Val, count: int) -> None:
        for i, have in parts(count, lanes):
            off = at * (16 * lanes) + i * 4
            v = k.load_first(row + off, ty, have)
            square, product = squares[i // lanes], products[i // lanes]
            square.v = k.fma(v, v, square.v)
            product.v = k.fma(v, k.load_first(w + off, ty, have), product.v)

    k.runs(n, 4 * lanes, run)
    square, product = (
        k.total((each[0].v + each[1].v) + (each[2].v + each[3].v)) for each in (squares, products)
    )
    return product / k.sqrt(square * (1 / n) + eps)


@dataclass(frozen=True)
class AttentionResidual(Spec):
    """Mix ``n + 1`` states of ``k`` values, the first ``n`` in ``blocks`` and the current one in
    ``x``: ``out`` is the sum of each state times its weight. Weights are the softmax of each
    state's score, ``sum(w * state) / sqrt(mean(state**2) + eps)``. Items: tokens.
    """

    op: ClassVar[str] = "attention_residual"
    args = Args("blocks:in x:in w:const out:out blocks_stride stride column out_stride")
    k: int
    n: int
    eps: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as token:
            blocks = frame.blocks + token * frame.blocks_stride * 4
            rows = [blocks + 4 * self.k * i for i in range(self.n)]
            rows.append(frame.x + (token * frame.stride + frame.column) * 4)
            if k.sharing:
                k.sharing.meet()  # other threads may have written parts of the rows
            scores = [_score(k, row, frame.w, self.k, self.eps) for row in rows]
            most = scores[0]
            for score in scores[1:]:
                most = k.max(most, score)
            ty = f32 * isa.lanes
            gains = [math.exp(k, k.splat(score - most, ty)) for score in scores]
            share = 1.0 / sum(gains[1:], gains[0])
            gains = [gain * share for gain in gains]

            def weighted(*values: Val, gains: list[Val] = gains) -> Val:
                total = values[0] * gains[0]
                for value, gain in zip(values[1:], gains[1:], strict=True):
                    total = k.fma(value, gain, total)
                return total

            map_row(k, self.k, frame.out + token * frame.out_stride * 4, weighted, *rows)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        blocks = args.blocks.reshape(-1, args.blocks_stride)[:n, : self.n * self.k]
        x = args.x.reshape(-1, args.stride)[:n, args.column : args.column + self.k]
        rows = np.concatenate([blocks.reshape(n, self.n, self.k), x[:, None]], 1).astype(np.float64)
        scale = np.sqrt((rows**2).mean(-1) + self.eps)
        scores = rows @ args.w[: self.k].astype(np.float64) / scale
        gains = np.exp(scores - scores.max(-1, keepdims=True))
        gains = gains / gains.sum(-1, keepdims=True)
        args.out.reshape(-1, args.out_stride)[:n, : self.k] = (gains[:, :, None] * rows).sum(1)

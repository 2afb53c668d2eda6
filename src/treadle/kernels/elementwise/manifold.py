"""Manifold-constrained hyper-connections (Xie and others, 2026): parallel streams are mixed by
weights of each token. The matrix of weights between streams is doubly stochastic: rows and columns
sum to 1.

Streams are f32 ``[N, n * k]``. A token's weights are ``[n (2 + n)]``: ``n`` of the mix that a half
of a layer reads; ``n`` of the half's result, one for each stream; and ``[n, n]`` between streams,
indexed [read, written].
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import f32
from treadle.kernels.activations import activated
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.elementwise.streams import store_weighted_sum
from treadle.kernels.spec import Args, Frame, Spec

SLICE = 512  # columns of a stream in an item


@dataclass(frozen=True)
class StreamWeights(Spec):
    """Compute each token's weights for ``n`` streams, ``out``, from ``x [N, n (2 + n)]``,
    ``scale [3]`` and ``base [n (2 + n)]``; the first ``n``, the next ``n``, and the matrix
    ``[n, n]`` of the rest::

        sigmoid(x scale[0] + base) + eps,  2 sigmoid(x scale[1] + base),
        sinkhorn(softmax(x scale[2] + base) + eps)

    Sinkhorn and Knopp, 1967: columns are divided by their sums plus ``eps``, then ``rounds - 1``
    times rows and columns are. With ``rounds`` 0 only the first ``n`` weights are computed. Items:
    tokens.
    """

    op: ClassVar[str] = "stream_weights"
    args = Args("x:in scale:const base:const out:out stride column out_stride")
    n: int
    rounds: int
    eps: float

    def scratch(self, lanes: int) -> int:
        return 4 * (self.n * self.n + 64)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        n = self.n
        with k.loop(frame.end, start=frame.begin) as token:
            x = frame.x + (token * frame.stride + frame.column) * 4
            out = frame.out + token * (frame.out_stride * 4)

            def mapped(first: int, count: int, which: int, to: Val, fn: Any, x: Val = x) -> None:
                scale = k.load(frame.scale, f32, offset=4 * which)

                def one(v: Val, b: Val) -> Val:
                    made: Val = fn(v * k.splat(scale, v.ty) + b)
                    return made

                map_row(k, count, to, one, x + 4 * first, frame.base + 4 * first)

            mapped(0, n, 0, out, lambda v: math.sigmoid(k, v) + self.eps)
            if self.rounds:
                mapped(n, n, 1, out + 4 * n, lambda v: math.sigmoid(k, v) * 2.0)
                tmp = frame.scratch
                mapped(2 * n, n * n, 2, tmp, lambda v: v)
                self._sinkhorn(k, tmp, out + 8 * n)

    def _sinkhorn(self, k: Builder, x: Val, out: Val) -> None:
        """Store the doubly stochastic matrix of the logits ``x [n, n]`` at ``out``; ``x`` is
        overwritten.
        """
        n = self.n
        cells: list[list[Var]] = []
        for i in range(n):
            row = x + 4 * n * i
            most = k.load(row, f32)
            for j in range(1, n):
                most = k.max(most, k.load(row, f32, offset=4 * j))
            map_row(k, n, row, lambda v, m=most: math.exp(k, v - k.splat(m, v.ty)), row)
            values = [k.load(row, f32, offset=4 * j) for j in range(n)]
            share = 1.0 / sum(values[1:], values[0])
            cells.append([k.var(v * share + self.eps) for v in values])
        columns = [list(each) for each in zip(*cells, strict=True)]

        def divide(lines: list[list[Var]]) -> None:
            for line in lines:
                total = sum((cell.v for cell in line[1:]), line[0].v)
                share = 1.0 / (total + self.eps)
                for cell in line:
                    cell.v = cell.v * share

        divide(columns)
        with k.loop(self.rounds - 1):
            divide(cells)
            divide(columns)
        for i, row_cells in enumerate(cells):
            for j, cell in enumerate(row_cells):
                k.store(out, cell.v, offset=4 * (n * i + j))

    def run_ref(self, args: Any, run: Any) -> None:
        n = self.n
        count = int(run["n_tokens"])
        x = args.x.reshape(-1, args.stride)[:count, args.column :].astype(np.float64)
        scale = args.scale.astype(np.float64)
        base = args.base.astype(np.float64)
        out = args.out.reshape(-1, args.out_stride)[:count]
        out[:, :n] = activated("sigmoid", x[:, :n] * scale[0] + base[:n]) + self.eps
        if not self.rounds:
            return
        part = slice(n, 2 * n)
        out[:, part] = 2 * activated("sigmoid", x[:, part] * scale[1] + base[part])
        part = slice(2 * n, 2 * n + n * n)
        m = (x[:, part] * scale[2] + base[part]).reshape(count, n, n)
        m = np.exp(m - m.max(-1, keepdims=True))
        m = m / m.sum(-1, keepdims=True) + self.eps
        m = m / (m.sum(-2, keepdims=True) + self.eps)
        for _ in range(self.rounds - 1):
            m = m / (m.sum(-1, keepdims=True) + self.eps)
            m = m / (m.sum(-2, keepdims=True) + self.eps)
        out[:, part] = m.reshape(count, n * n)


@dataclass(frozen=True)
class WeighStreams(Spec):
    """Sum ``n`` streams of ``k`` values, each times its weight, one of the first ``n`` columns of
    ``weight``; or with ``mean`` take their mean. Items: tokens.
    """

    op: ClassVar[str] = "streams_weigh"
    args = Args("x:in weight:in? out:out stride weight_stride:? out_stride")
    k: int
    n: int
    mean: bool = False

    @property
    def needs(self) -> set[str]:
        return self.args.required | (set() if self.mean else {"weight", "weight_stride"})

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        ty = f32 * isa.lanes
        with k.loop(frame.end, start=frame.begin) as token:
            x = frame.x + token * (frame.stride * 4)
            gains = [k.const(1.0 / self.n, ty)] * self.n
            if not self.mean:
                at = frame.weight + token * (frame.weight_stride * 4)
                gains = [k.splat(k.load(at, f32, offset=4 * i), ty) for i in range(self.n)]
            store_weighted_sum(k, frame.out + token * (frame.out_stride * 4), x, self.k, gains)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = args.x.reshape(-1, args.stride)[:n, : self.n * self.k].astype(np.float64)
        weight = np.full((n, self.n), 1.0 / self.n)
        if not self.mean:
            weight = args.weight.reshape(-1, args.weight_stride)[:n, : self.n].astype(np.float64)
        made = (x.reshape(n, self.n, self.k) * weight[:, :, None]).sum(1)
        args.out.reshape(-1, args.out_stride)[:n, : self.k] = made


@dataclass(frozen=True)
class BlendStreams(Spec):
    """Replace each of ``n`` streams of ``k`` values, in place:
    ``x[i] = weight_i y + sum over j of weight[j, i] x[j]``. ``weight``: the output of
    ``StreamWeights``, whose second ``n`` values are ``weight_i``, and whose matrix is
    ``weight[j, i]``. Items: tokens x slices of SLICE columns.
    """

    op: ClassVar[str] = "streams_blend"
    args = Args("x:inout y:in weight:in stride y_stride weight_stride")
    k: int
    n: int

    @property
    def slices(self) -> int:
        return -(-self.k // SLICE)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        n = self.n
        ty = f32 * isa.lanes
        full, rest = divmod(self.k, isa.lanes)
        per = SLICE // isa.lanes
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.slices
            part = item % self.slices
            x = frame.x + token * (frame.stride * 4)
            y = frame.y + token * (frame.y_stride * 4)
            at = frame.weight + token * (frame.weight_stride * 4) + 4 * n

            def blend(c: Val, count: int, x: Val = x, y: Val = y, at: Val = at) -> None:
                off = c * (4 * isa.lanes)
                streams = [k.load_first(x + (off + 4 * self.k * j), ty, count) for j in range(n)]
                added = k.load_first(y + off, ty, count)
                for i in range(n):
                    total = added * k.splat(k.load(at, f32, offset=4 * i), ty)
                    for j, stream in enumerate(streams):
                        gain = k.load(at, f32, offset=4 * (n + n * j + i))
                        total = k.fma(stream, k.splat(gain, ty), total)
                    k.store_first(x + (off + 4 * self.k * i), total, count)

            with k.loop(k.min((part + 1) * per, full), start=part * per) as c:
                blend(c, isa.lanes)
            if rest:
                with k.if_(part.eq(self.slices - 1)):
                    blend(k.i64(full), rest)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        rows = args.x.reshape(-1, args.stride)[:n, : self.n * self.k]
        x = rows.reshape(n, self.n, self.k).astype(np.float64)
        y = args.y.reshape(-1, args.y_stride)[:n, : self.k].astype(np.float64)
        n_weights = 2 * self.n + self.n**2
        weight = args.weight.reshape(-1, args.weight_stride)[:n, :n_weights].astype(np.float64)
        post = weight[:, self.n : 2 * self.n]
        comb = weight[:, 2 * self.n :].reshape(n, self.n, self.n)
        made = post[:, :, None] * y[:, None] + np.einsum("tji,tjk->tik", comb, x)
        rows[:] = made.reshape(rows.shape)

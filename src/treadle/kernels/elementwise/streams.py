"""Hyper-connections (Zhu and others, 2025): a token's hidden state is several parallel streams.
Each half of a layer reads a mix of them, and its result is added to all, by weights of each token.

Streams are f32 ``[N, n * k]``.
"""

from __future__ import annotations

import math as numbers
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, ptr
from treadle.kernels.activations import activated
from treadle.kernels.elementwise.elementwise import map_row, mean_square, row_mean
from treadle.kernels.spec import Args, Frame, Spec, f32_values


def store_weighted_sum(k: Builder, out: Val, x: Val, width: int, gains: list[Val]) -> None:
    """Store the sum of ``len(gains)`` streams at ``out``: stream i has ``width`` f32 values,
    follows stream i - 1 from ``x`` on, and is multiplied by ``gains[i]`` (the same value in all
    lanes).
    """

    def weighted(*rows: Val) -> Val:
        total = rows[0] * gains[0]
        for row, gain in zip(rows[1:], gains[1:], strict=True):
            total = k.fma(row, gain, total)
        return total

    map_row(k, width, out, weighted, *(x + 4 * width * i for i in range(len(gains))))


@dataclass(frozen=True)
class RepeatStreams(Spec):
    """Initialise each of ``n`` streams with ``x``. Items: tokens."""

    op: ClassVar[str] = "streams_repeat"
    args = Args("x:in out:out stride out_stride")
    k: int
    n: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            x = frame.x + item * frame.stride * 4
            out = frame.out + item * frame.out_stride * 4
            for i in range(self.n):
                map_row(k, self.k, out + 4 * self.k * i, lambda v: v, x)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = args.x.reshape(-1, args.stride)[:n, : self.k]
        args.out.reshape(-1, args.out_stride)[:n, : self.n * self.k] = np.tile(x, self.n)


@dataclass(frozen=True)
class OutputCopy(Spec):
    """Copy the rows whose outputs are requested: ``out[i] = x[output_rows[i]]``, ``k`` values.
    Items: outputs.
    """

    op: ClassVar[str] = "output_copy"
    args = Args("x:in out:out stride out_stride")
    k: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        rows = frame.run("output_rows", ptr)
        with k.loop(frame.end, start=frame.begin) as item:
            row = k.load(rows, i32, offset=item * 4).to(item.ty)
            out = frame.out + item * frame.out_stride * 4
            map_row(k, self.k, out, lambda v: v, frame.x + row * frame.stride * 4)

    def run_ref(self, args: Any, run: Any) -> None:
        x = f32_values(args.x).reshape(-1, args.stride)[:, : self.k]  # a norm's are bytes
        out = args.out.reshape(-1, args.out_stride)
        out[: len(run.output_rows), : self.k] = x[run.output_rows]


@dataclass(frozen=True)
class NormStreams(Spec):
    """RMS norm of each of ``n`` streams of ``k`` values, times the stream's own weights ``w [n,
    k]``, from column ``column`` of ``x`` to ``out``. Items: tokens x streams.
    """

    op: ClassVar[str] = "streams_norm"
    args = Args("x:in w:const out:out stride out_stride column")
    k: int
    n: int
    eps: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.n
            at = item % self.n * (self.k * 4)
            x = frame.x + (token * frame.stride + frame.column) * 4 + at
            gain = 1.0 / k.sqrt(mean_square(k, x, self.k, isa.lanes) + self.eps)
            out = frame.out + token * frame.out_stride * 4 + at
            w = frame.w + at
            map_row(k, self.k, out, lambda v, w, g=gain: v * k.splat(g, v.ty) * w, x, w)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.n * self.k
        x = args.x.reshape(-1, args.stride)[:n, args.column : args.column + width]
        x = x.astype(np.float64).reshape(n, self.n, self.k)
        y = x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps)
        y = y * args.w[:width].reshape(self.n, self.k)
        args.out.reshape(-1, args.out_stride)[:n, :width] = y.reshape(n, width)


@dataclass(frozen=True)
class MixStreams(Spec):
    """Take the mean of ``n`` streams of ``k`` values, each value first times the sigmoid of its own
    gate: ``gate`` is ``[N, n * k]``. Items: tokens.
    """

    op: ClassVar[str] = "streams_mix"
    args = Args("x:in gate:in out:out stride gate_stride out_stride")
    k: int
    n: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            x = frame.x + item * frame.stride * 4
            gate = frame.gate + item * frame.gate_stride * 4
            parts = [4 * self.k * i for i in range(self.n)]

            def mixed(*rows: Val) -> Val:
                pairs = zip(rows[: self.n], rows[self.n :], strict=True)
                first, *others = [v * math.sigmoid(k, g) for v, g in pairs]
                return sum(others, first) * (1.0 / self.n)

            rows = [*(x + at for at in parts), *(gate + at for at in parts)]
            map_row(k, self.k, frame.out + item * frame.out_stride * 4, mixed, *rows)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.n * self.k
        x = args.x.reshape(-1, args.stride)[:n, :width].astype(np.float64)
        gate = args.gate.reshape(-1, args.gate_stride)[:n, :width].astype(np.float64)
        made = (x * activated("sigmoid", gate)).reshape(n, self.n, self.k).mean(1)
        args.out.reshape(-1, args.out_stride)[:n, : self.k] = made


@dataclass(frozen=True)
class AddToStreams(Spec):
    """Add ``y`` to each of ``n`` streams ``x`` in place: ``x[i] += 2 sigmoid(scale * weight_i) y``.
    ``weight_i`` are ``n`` columns of ``weight`` from ``column`` on. Items: tokens x streams.
    """

    op: ClassVar[str] = "streams_add"
    args = Args("x:inout y:in weight:in stride y_stride weight_stride column")
    k: int
    n: int
    scale: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.n
            which = item % self.n
            x = frame.x + token * frame.stride * 4 + which * (self.k * 4)
            y = frame.y + token * frame.y_stride * 4
            at = frame.weight + (token * frame.weight_stride + frame.column + which) * 4
            ty = f32 * isa.lanes
            gain = math.sigmoid(k, k.splat(k.load(at, f32), ty) * self.scale) * 2.0
            map_row(k, self.k, x, lambda v, w, g=gain: k.fma(w, g, v), x, y)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = args.x.reshape(-1, args.stride)[:n, : self.n * self.k]
        y = args.y.reshape(-1, args.y_stride)[:n, : self.k].astype(np.float64)
        weight = args.weight.reshape(-1, args.weight_stride)[:n, args.column :][:, : self.n]
        gain = 2 * activated("sigmoid", weight.astype(np.float64) * self.scale)
        x[:] = x + (gain[:, :, None] * y[:, None]).reshape(x.shape)


LEAST_SCORE = 1e-6  # least magnitude under the root


@dataclass(frozen=True)
class ScoreStreams(Spec):
    """Scale ``value`` for each of ``n`` streams: ``out[i] = sigmoid(s_i) value``. ``s_i`` is the
    signed root of ``key_i . query_i / sqrt(k)``: ``sign(a) sqrt(|a|)``. ``key`` and ``query`` are
    ``[N, n * k]``. Items: tokens x streams.
    """

    op: ClassVar[str] = "streams_score"
    args = Args("key:in query:in value:in out:out stride value_stride column")
    k: int
    n: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.n
            at = token * frame.stride * 4 + item % self.n * (self.k * 4)
            out = frame.out + at
            query = frame.query + at
            map_row(k, self.k, out, lambda a, b: a * b, frame.key + at, query)
            mean = row_mean(k, out, self.k, isa.lanes, lambda total, v, count: total + v)
            score = mean * numbers.sqrt(self.k)
            root = k.sqrt(k.max(k.abs(score), LEAST_SCORE))
            zero = k.const(0.0, f32)
            sign = k.select(score < 0.0, k.const(-1.0, f32), k.const(1.0, f32))
            root = k.select(score.eq(zero), zero, root * sign)
            gain = math.sigmoid(k, k.splat(root, f32 * isa.lanes))
            value = frame.value + (token * frame.value_stride + frame.column) * 4
            map_row(k, self.k, out, lambda v, g=gain: v * g, value)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.n * self.k
        key, query = (
            x.reshape(-1, args.stride)[:n, :width].astype(np.float64).reshape(n, self.n, self.k)
            for x in (args.key, args.query)
        )
        score = (key * query).sum(-1) / np.sqrt(self.k)
        root = np.sqrt(np.maximum(np.abs(score), LEAST_SCORE)) * np.sign(score)
        value = args.value.reshape(-1, args.value_stride)[:n, args.column :][:, : self.k]
        made = activated("sigmoid", root)[:, :, None] * value.astype(np.float64)[:, None]
        args.out.reshape(-1, args.stride)[:n, :width] = made.reshape(n, width)

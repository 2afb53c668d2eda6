"""Steps of recurrent layers around the recurrence: decay rates per head, unit-length heads, output
gates, and splitting heads in halves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.activations import ACTIVATIONS, activated
from treadle.kernels.elementwise.elementwise import map_row, mean_square
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.run_state import round_up
from treadle.kernels.spec import Args, Frame, Spec, f32_values


@dataclass(frozen=True)
class Rates(Spec):
    """Compute each head's two rates of a recurrence: ``dt = softplus(x + bias)``, and the decay
    ``e**(a dt)``, ``a`` below 0. With ``beta`` the first is ``most * sigmoid(beta)`` instead of dt.

    ``out`` has both side by side, ``heads`` values each, padded to COLUMNS. Items: tokens.
    """

    op: ClassVar[str] = "rates"
    args = Args("x:in a:const bias:const out:out stride out_stride column beta_column:?")
    heads: int
    beta: bool = False
    most: float = 1.0

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"beta_column"} if self.beta else set())

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        pad = 4 * round_up(self.heads, COLUMNS)
        with k.loop(frame.end, start=frame.begin) as n:
            row = frame.x + n * frame.stride * 4
            x = row + frame.column * 4
            out = frame.out + n * frame.out_stride * 4

            def step(x: Val, bias: Val) -> Val:
                return math.softplus(k, x + bias)

            map_row(k, self.heads, out, step, x, frame.bias)
            map_row(k, self.heads, out + pad, lambda dt, a: math.exp(k, dt * a), out, frame.a)
            if self.beta:
                map_row(k, self.heads, out, self._first(k), row + frame.beta_column * 4)

    def _first(self, k: Builder) -> Callable[[Val], Val]:
        if self.most == 1.0:
            return lambda v: math.sigmoid(k, v)
        return lambda v: math.sigmoid(k, v) * self.most

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        h = self.heads
        rows = args.x.reshape(-1, args.stride)[:n]  # columns of others are undefined memory
        out = args.out.reshape(-1, args.out_stride)
        pad = round_up(h, COLUMNS)
        dt = np.logaddexp(
            0, rows[:, args.column : args.column + h].astype(np.float64) + args.bias[:h]
        )
        out[:n, pad : pad + h] = np.exp(dt * args.a[:h])
        if self.beta:
            dt = rows[:, args.beta_column : args.beta_column + h].astype(np.float64)
            dt = activated("sigmoid", dt) * self.most
        out[:n, :h] = dt


@dataclass(frozen=True)
class UnitHeads(Spec):
    """Scale each of ``heads`` parts of ``k`` values to Euclidean length ``scale``, in place, from
    ``column`` on: ``x * scale / sqrt(sum(x**2) + eps)``. Items: tokens x heads.
    """

    op: ClassVar[str] = "unit_heads"
    args = Args("x:inout stride column")
    k: int
    heads: int
    scale: float
    eps: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            n = item // self.heads
            head = item % self.heads
            x = frame.x + (n * frame.stride + frame.column + head * self.k) * 4
            total = mean_square(k, x, self.k, isa.lanes) * float(self.k) + self.eps
            gain = k.const(self.scale, f32) / k.sqrt(total)
            map_row(k, self.k, x, lambda v, g=gain: v * k.splat(g, v.ty), x)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        part = rows[:, args.column : args.column + self.heads * self.k]
        y = part.astype(np.float64).reshape(len(rows), self.heads, self.k)
        y = y * self.scale / np.sqrt((y**2).sum(-1, keepdims=True) + self.eps)
        part[:] = y.reshape(part.shape)


@dataclass(frozen=True)
class OutputGate(Spec):
    """Gate a layer's output ``x [N, k]``, in place: ``x * fn(gate) * gain``. With ``eps`` each of
    ``groups`` equal parts also gets an RMS norm, times ``w``. The norm is of x, before the gate,
    and all parts share ``w``; or with ``first`` it is of the gated product, and ``w`` has a value
    for each column. ``one``: each part has one gate value, and no norm. Items: tokens x groups.
    """

    op: ClassVar[str] = "gate"
    args = Args("x:inout gate:in w:const? stride gate_stride column")
    fn: str
    k: int
    groups: int = 1
    eps: float = 0.0
    first: bool = False
    one: bool = False
    gain: float = 1.0

    @property
    def needs(self) -> set[str]:
        return self.args.required | ({"w"} if self.eps else set())

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        size = self.k // self.groups
        fn = ACTIVATIONS[self.fn].emit
        with k.loop(frame.end, start=frame.begin) as item:
            n = item // self.groups
            at = item % self.groups * size
            if self.one:
                part = n * frame.gate_stride + frame.column + item % self.groups
                one = k.load(frame.gate + part * 4, f32)

                def times(v: Val, one: Val = one) -> Val:
                    return self._scaled(v * fn(k, k.splat(one, v.ty)))

                x = frame.x + (n * frame.stride + at) * 4
                map_row(k, size, x, times, x)
            else:
                self._by_value(k, isa, frame, n, at)

    def _by_value(self, k: Builder, isa: Isa, frame: Frame, n: Val, at: Val) -> None:
        size = self.k // self.groups
        x = frame.x + (n * frame.stride + at) * 4
        gate = frame.gate + (n * frame.gate_stride + frame.column + at) * 4

        def gated(v: Val, g: Val) -> Val:
            return self._scaled(v * ACTIVATIONS[self.fn].emit(k, g))

        if self.first or not self.eps:
            map_row(k, size, x, gated, x, gate)
        if self.eps:
            w = frame.w + at * 4 if self.first else frame.w
            gain = 1.0 / k.sqrt(mean_square(k, x, size, isa.lanes) + self.eps)

            def normed(v: Val, w: Val, gain: Val = gain) -> Val:
                return v * k.splat(gain, v.ty) * w

            if self.first:
                map_row(k, size, x, normed, x, w)
            else:
                map_row(k, size, x, lambda v, w, g: gated(normed(v, w), g), x, w, gate)

    def _scaled(self, v: Val) -> Val:
        return v if self.gain == 1.0 else v * self.gain

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        size = self.k // self.groups
        rows = f32_values(args.x).reshape(-1, args.stride)[:n, : self.k]  # a norm's are bytes
        wide = self.groups if self.one else self.k
        gate = args.gate.reshape(-1, args.gate_stride)[:n, args.column : args.column + wide]
        gate = gate.repeat(size, 1) if self.one else gate
        y = rows.astype(np.float64).reshape(n, self.groups, size)
        g = self.gain * activated(self.fn, gate.astype(np.float64)).reshape(y.shape)
        y = y * g if self.first or not self.eps else y
        if self.eps:
            w = args.w[: self.k].reshape(-1, size) if self.first else args.w[:size]
            y = y / np.sqrt((y**2).mean(-1, keepdims=True) + self.eps) * w
            y = y if self.first else y * g
        rows[:] = y.reshape(n, self.k)


@dataclass(frozen=True)
class SplitHalves(Spec):
    """Reorder ``heads`` parts of ``2 k`` values, in place, from ``column`` on: the first halves of
    all parts, then their second halves. Items: tokens.
    """

    op: ClassVar[str] = "halves"
    args = Args("x:inout stride column")
    k: int
    heads: int

    def scratch(self, lanes: int) -> int:
        return 8 * self.heads * self.k

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        size = 4 * self.k
        n_half = 4 * self.k * self.heads
        with k.loop(frame.end, start=frame.begin) as n:
            x = frame.x + (n * frame.stride + frame.column) * 4
            was = frame.scratch
            map_row(k, 2 * self.k * self.heads, was, lambda v: v, x)
            with k.loop(self.heads) as head:
                for half in range(2):
                    to = x + (head * size + half * n_half)
                    source = was + (head * 2 + half) * size
                    map_row(k, self.k, to, lambda v: v, source)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = args.x.reshape(-1, args.stride)[: int(run["n_tokens"])]
        part = rows[:, args.column : args.column + 2 * self.k * self.heads]
        y = part.reshape(len(rows), self.heads, 2, self.k).transpose(0, 2, 1, 3)
        part[:] = y.reshape(part.shape).copy()

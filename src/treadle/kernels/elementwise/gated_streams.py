"""Independent hyper-connections (Hunyuan 4, 2026): a half of a layer reads a weighted sum of
parallel streams, and its result is added to each, times a weight.

A weight is ``sigmoid(scale x + base)``, where ``x`` is one column of ``mix`` for each stream.
Streams are f32 ``[N, n * k]``.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.activations import activated
from treadle.kernels.elementwise.elementwise import map_row
from treadle.kernels.elementwise.streams import store_weighted_sum
from treadle.kernels.spec import Args, Frame, Spec


def _weight(k: Builder, mix: Val, scale: Val, base: Val, lanes: int) -> Val:
    """Return ``sigmoid(scale * mix + base)``, in ``lanes`` lanes, of the f32 at these three
    addresses.
    """
    x = k.fma(k.load(mix, f32), k.load(scale, f32), k.load(base, f32))
    return math.sigmoid(k, k.splat(x, f32 * lanes))


@dataclass(frozen=True)
class SumStreams(Spec):
    """Sum ``n`` streams of ``k`` values, each times its weight plus ``eps``:
    ``out = sum over i of (weight_i + eps) x[i]``, where
    ``weight_i = sigmoid(scale[0] mix_i + base[i])`` and ``mix_i`` are ``n`` columns of ``mix`` from
    ``column`` on. Items: tokens.
    """

    op: ClassVar[str] = "streams_sum"
    args = Args("x:in mix:in scale:const base:const out:out stride mix_stride out_stride column")
    k: int
    n: int
    eps: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            x = frame.x + item * frame.stride * 4
            mix = frame.mix + (item * frame.mix_stride + frame.column) * 4
            gains = [
                _weight(k, mix + 4 * i, frame.scale, frame.base + 4 * i, isa.lanes) + self.eps
                for i in range(self.n)
            ]
            store_weighted_sum(k, frame.out + item * frame.out_stride * 4, x, self.k, gains)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = args.x.reshape(-1, args.stride)[:n, : self.n * self.k].astype(np.float64)
        mix = args.mix.reshape(-1, args.mix_stride)[:n, args.column :][:, : self.n]
        gain = activated("sigmoid", mix.astype(np.float64) * args.scale[0] + args.base[: self.n])
        made = (x.reshape(n, self.n, self.k) * (gain + self.eps)[:, :, None]).sum(1)
        args.out.reshape(-1, args.out_stride)[:n, : self.k] = made


@dataclass(frozen=True)
class SpreadToStreams(Spec):
    """Add ``y`` to each of ``n`` streams ``x`` of ``k`` values in place:
    ``x[i] += (magnitude * weight_i + eps) y``, where
    ``weight_i = sigmoid(scale[1] mix_i + base[n + i])`` and ``mix_i`` are ``n`` columns of ``mix``
    from ``column`` on. Items: tokens x streams.
    """

    op: ClassVar[str] = "streams_spread"
    args = Args("x:inout y:in mix:in scale:const base:const stride y_stride mix_stride column")
    k: int
    n: int
    magnitude: float
    eps: float

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.n
            which = item % self.n
            x = frame.x + token * frame.stride * 4 + which * (self.k * 4)
            y = frame.y + token * frame.y_stride * 4
            mix = frame.mix + (token * frame.mix_stride + frame.column + which) * 4
            base = frame.base + (which + self.n) * 4
            weight = _weight(k, mix, frame.scale + 4, base, isa.lanes)
            gain = weight * self.magnitude + self.eps
            map_row(k, self.k, x, lambda v, w, g=gain: k.fma(w, g, v), x, y)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        x = args.x.reshape(-1, args.stride)[:n, : self.n * self.k]
        y = args.y.reshape(-1, args.y_stride)[:n, : self.k].astype(np.float64)
        mix = args.mix.reshape(-1, args.mix_stride)[:n, args.column :][:, : self.n]
        base = args.base[self.n : 2 * self.n]
        gain = activated("sigmoid", mix.astype(np.float64) * args.scale[1] + base)
        gain = self.magnitude * gain + self.eps
        x[:] = x + (gain[:, :, None] * y[:, None]).reshape(x.shape)

"""AltUp (Baykal and others, 2023): a token's hidden state is several parallel streams, of which the
layer computes the first.

A router predicts each stream from all of them, by weights that it computes from the first stream.
After the layer it corrects each stream by the difference of the layer's output from the first
prediction, by weights that it computes from this output.

Streams are f32 ``[N, n * k]``. With few tokens a row is cut into ``slices``, items for several
threads; each slice computes the router itself, so that results do not depend bitwise on the cut.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.elementwise.elementwise import map_row, mean_square
from treadle.kernels.spec import Args, Frame, Spec

F64Array = npt.NDArray[np.float64]
LEAST = 1e-5  # least mean square of rows that are scaled to another's size


@dataclass(frozen=True)
class SpreadStreams(Spec):
    """Initialise a token's ``n`` streams: the first is ``x``, the others the ``n - 1`` parts of
    ``y``, each scaled to the root mean square of ``x``: ``y * rms(x) / sqrt(max(mean(y**2),
    LEAST))``. Items: tokens.
    """

    op: ClassVar[str] = "altup_spread"
    args = Args("x:in y:in out:out stride y_stride out_stride column")
    k: int
    n: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            x = frame.x + item * frame.stride * 4
            out = frame.out + item * frame.out_stride * 4
            y = frame.y + (item * frame.y_stride + frame.column) * 4
            size = k.sqrt(mean_square(k, x, self.k, isa.lanes))
            map_row(k, self.k, out, lambda v: v, x)
            for i in range(self.n - 1):
                part = y + 4 * self.k * i
                gain = _sized(k, part, self.k, isa.lanes, size)
                map_row(k, self.k, out + 4 * self.k * (i + 1), _times(k, gain), part)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        w = self.k
        x = args.x.reshape(-1, args.stride)[:n, :w].astype(np.float64)
        y = args.y.reshape(-1, args.y_stride)[:n, args.column :].astype(np.float64)
        out = args.out.reshape(-1, args.out_stride)[:n]
        out[:, :w] = x
        for i in range(self.n - 1):
            part = y[:, w * i : w * (i + 1)]
            out[:, w * (i + 1) : w * (i + 2)] = part * _sized_ref(part, x)


@dataclass(frozen=True)
class CopyColumns(Spec):
    """Copy ``k`` values of each row, from column ``column`` of ``x`` on, to column ``to`` of
    ``out`` and the following ones. Items: tokens.
    """

    op: ClassVar[str] = "altup_take"
    args = Args("x:in out:out stride out_stride column to")
    k: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            x = frame.x + (item * frame.stride + frame.column) * 4
            out = frame.out + (item * frame.out_stride + frame.to) * 4
            map_row(k, self.k, out, lambda v: v, x)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        at = args.column
        x = args.x.reshape(-1, args.stride)[:n, at : at + self.k]
        args.out.reshape(-1, args.out_stride)[:n, args.to : args.to + self.k] = x


@dataclass(frozen=True)
class Join(Spec):
    """Add stream ``y`` to the mean of ``n`` streams: ``out = total + y / n``, ``y`` scaled to the
    root mean square of the first stream, ``x``, as in ``SpreadStreams``. ``total`` is the sum so
    far; with ``first`` it is ``x / n``. Items: tokens.
    """

    op: ClassVar[str] = "altup_join"
    args = Args("x:in y:in total:in? out:out stride out_stride")
    k: int
    n: int
    first: bool = False

    @property
    def needs(self) -> set[str]:
        return self.args.required | (set() if self.first else {"total"})

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            x = frame.x + item * frame.stride * 4
            at = item * frame.out_stride * 4
            y = frame.y + at
            total = x if self.first else frame.total + at
            size = k.sqrt(mean_square(k, x, self.k, isa.lanes))
            gain = _sized(k, y, self.k, isa.lanes, size) * (1 / self.n)

            def joined(total: Val, y: Val, gain: Val = gain) -> Val:
                total = total * (1 / self.n) if self.first else total
                return total + y * k.splat(gain, y.ty)

            map_row(k, self.k, frame.out + at, joined, total, y)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        w = self.k
        x = args.x.reshape(-1, args.stride)[:n, :w].astype(np.float64)
        y = args.y.reshape(-1, args.out_stride)[:n, :w].astype(np.float64)
        total = x / self.n if self.first else args.total.reshape(-1, args.out_stride)[:n, :w]
        made = total + y * _sized_ref(y, x) / self.n
        args.out.reshape(-1, args.out_stride)[:n, :w] = made


@dataclass(frozen=True)
class Predict(Spec):
    """Predict each of a token's ``n`` streams of ``k`` values:
    ``out[i] = x[i] + sum over j of c[i, j] x[j]``. ``c`` is ``coef [n * n, n]`` times the router's
    output for ``x[0]`` (see ``_router``). Items: tokens x slices.
    """

    op: ClassVar[str] = "altup_predict"
    args = Args("x:in out:out norm:const router:const coef:const stride")
    k: int
    n: int
    eps: float
    slices: int = 1

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        ty = f32 * isa.lanes
        width = self.k // self.slices
        each = range(self.n)
        with k.loop(frame.end, start=frame.begin) as item:
            row = item // self.slices * frame.stride * 4
            says = _router(k, frame, frame.x + row, self.k, self.n, self.eps)
            coefs = [_coef(k, frame.coef, i, says) for i in range(self.n**2)]
            row = row + item % self.slices * (4 * width)

            def vector(at: Val, count: int, row: Val = row) -> None:
                place = row + at * ty.n_bytes
                streams = [place + 4 * self.k * i for i in each]
                x = [k.load_first(frame.x + at, ty, count) for at in streams]
                for i in each:
                    y = x[i]
                    for j in each:
                        y = k.fma(coefs[i * self.n + j], x[j], y)
                    k.store_first(frame.out + streams[i], y, count)

            k.runs(width, isa.lanes, vector)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = int(run["n_tokens"])
        w = self.n * self.k
        x = args.x.reshape(-1, args.stride)[:rows, :w].astype(np.float64)
        x = x.reshape(rows, self.n, self.k)
        says = _router_ref(args, x[:, 0], self.n, self.eps)
        coefs = (says @ _coefs_ref(args, self.n**2, self.n).T).reshape(rows, self.n, self.n)
        args.out.reshape(-1, args.stride)[:rows, :w] = (x + coefs @ x).reshape(rows, w)


@dataclass(frozen=True)
class Correct(Spec):
    """Correct the ``n`` predicted streams in place by the layer's output ``y``:
    ``x[i] += c[i] (y - x[0])``. ``c`` is 1 plus ``coef [n, n]`` times the router's output for ``y``
    (see ``_router``). Then ``out = scale * x[0]``, of the corrected stream. Items: tokens x slices.
    """

    op: ClassVar[str] = "altup_correct"
    args = Args(
        "x:inout y:in out:out norm:const router:const coef:const scale:const stride y_stride"
    )
    k: int
    n: int
    eps: float
    slices: int = 1

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        ty = f32 * isa.lanes
        width = self.k // self.slices
        each = range(self.n)
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.slices
            first = item % self.slices * (4 * width)
            y = token * frame.y_stride * 4
            says = _router(k, frame, frame.y + y, self.k, self.n, self.eps)
            coefs = [_coef(k, frame.coef, i, says) + 1.0 for i in each]
            row = frame.x + token * frame.stride * 4 + first
            y = y + first

            def vector(at: Val, count: int, row: Val = row, y: Val = y) -> None:
                at = at * ty.n_bytes
                streams = [row + at + 4 * self.k * i for i in each]
                x = [k.load_first(place, ty, count) for place in streams]
                new = k.load_first(frame.y + y + at, ty, count) - x[0]
                x = [k.fma(coefs[i], new, x[i]) for i in each]
                for i in each:
                    k.store_first(streams[i], x[i], count)
                scale = k.load_first(frame.scale + first + at, ty, count)
                k.store_first(frame.out + y + at, x[0] * scale, count)

            k.runs(width, isa.lanes, vector)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = int(run["n_tokens"])
        w = self.n * self.k
        place = args.x.reshape(-1, args.stride)[:rows, :w]
        x = place.astype(np.float64).reshape(rows, self.n, self.k)
        y = args.y.reshape(-1, args.y_stride)[:rows, : self.k].astype(np.float64)
        says = _router_ref(args, y, self.n, self.eps)
        coefs = 1 + says @ _coefs_ref(args, self.n, self.n).T
        x = x + coefs[:, :, None] * (y - x[:, 0])[:, None]
        place[:] = x.reshape(rows, w)
        args.out.reshape(-1, args.y_stride)[:rows, : self.k] = x[:, 0] * args.scale[: self.k]


@dataclass(frozen=True)
class AddBeside(Spec):
    """Add ``norm(y)`` to each of a token's ``n`` streams except the first, in place.

    ``x``: the streams, f32 ``[N, n * k]``; ``y``: f32 ``[N, k]``; ``norm``: RMS norm with weights
    ``w`` and ``eps``. Items: tokens x slices.
    """

    op: ClassVar[str] = "altup_add"
    args = Args("x:inout y:in w:const stride y_stride")
    k: int
    n: int
    eps: float
    slices: int = 1

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        ty = f32 * isa.lanes
        width = self.k // self.slices
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.slices
            first = item % self.slices * (4 * width)
            y = frame.y + token * frame.y_stride * 4
            gain = _rms_gain(k, y, self.k, isa.lanes, self.eps)
            row = frame.x + token * frame.stride * 4 + first
            y = y + first

            def vector(at: Val, count: int, row: Val = row, y: Val = y) -> None:
                at = at * ty.n_bytes
                w = k.load_first(frame.w + first + at, ty, count)
                more = k.load_first(y + at, ty, count) * k.splat(gain, ty) * w
                for i in range(1, self.n):
                    place = row + at + 4 * self.k * i
                    k.store_first(place, k.load_first(place, ty, count) + more, count)

            k.runs(width, isa.lanes, vector)

    def run_ref(self, args: Any, run: Any) -> None:
        rows = int(run["n_tokens"])
        w = self.n * self.k
        y = args.y.reshape(-1, args.y_stride)[:rows, : self.k].astype(np.float64)
        more = _norm_ref(y, args.w[: self.k], self.eps)
        args.x.reshape(-1, args.stride)[:rows, self.k : w] += np.tile(more, self.n - 1)


@dataclass(frozen=True)
class Laurel(Spec):
    """LAuReL (Menghani and others, 2024): ``scale * (x + norm(a) + norm(x) + norm(b))``, where
    ``x`` is the hidden state, ``a`` the mixer's output, and ``b`` the low-rank product of
    ``norm(x)``. The RMS norms have weights ``w_x``, ``w_a`` and ``w_b``. Items: tokens x slices.
    """

    op: ClassVar[str] = "laurel"
    args = Args("x:in a:in b:in out:out w_x:const w_a:const w_b:const stride out_stride")
    k: int
    eps: float
    scale: float
    slices: int = 1

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        width = self.k // self.slices
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.slices
            first = item % self.slices * (4 * width)
            at = token * frame.out_stride * 4
            rows = [frame.x + token * frame.stride * 4, frame.a + at, frame.b + at]
            gains = [_rms_gain(k, row, self.k, isa.lanes, self.eps) for row in rows]

            def total(*given: Val, gains: list[Val] = gains) -> Val:
                x, a, b = (
                    v * k.splat(gain, v.ty) * w
                    for v, gain, w in zip(given[:3], gains, given[3:], strict=True)
                )
                return ((given[0] + a) + (x + b)) * self.scale

            weights = (frame.w_x, frame.w_a, frame.w_b)
            sources = [source + first for source in (*rows, *weights)]
            map_row(k, width, frame.out + at + first, total, *sources)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        w = self.k
        x = args.x.reshape(-1, args.stride)[:n, :w].astype(np.float64)
        a, b = (r.reshape(-1, args.out_stride)[:n, :w].astype(np.float64) for r in (args.a, args.b))
        norms = ((x, args.w_x), (a, args.w_a), (b, args.w_b))
        made = x + sum(_norm_ref(rows, weight[:w], self.eps) for rows, weight in norms)
        args.out.reshape(-1, args.out_stride)[:n, :w] = made * self.scale


def _router(k: Builder, frame: Frame, row: Val, width: int, n: int, eps: float) -> list[Val]:
    """Return the router's output for the ``width`` values at ``row``,
    ``tanh(router norm(row) / width)``: ``n`` numbers, each in all lanes of a vector. ``router`` is
    ``[n, width]``; ``norm`` an RMS norm with weights and ``eps``.
    """
    ty = f32 * k.isa.lanes
    sums = [k.var(k.zero(ty)) for _ in range(n + 1)]

    def vector(at: Val, count: int) -> None:
        at = at * ty.n_bytes
        v = k.load_first(row + at, ty, count)
        sums[n].v = k.fma(v, v, sums[n].v)
        v = v * k.load_first(frame.norm + at, ty, count)
        for i in range(n):
            w = k.load_first(frame.router + at + 4 * width * i, ty, count)
            sums[i].v = k.fma(v, w, sums[i].v)

    k.runs(width, ty.lanes, vector)
    square = k.total(sums[n].v) * (1 / width) + eps
    gain = k.const(1 / width, f32) / k.sqrt(square)
    return [math.exact_tanh(k, k.splat(k.total(each.v) * gain, ty)) for each in sums[:n]]


def _coef(k: Builder, coef: Val, i: int, says: list[Val]) -> Val:
    """Return the inner product of row ``i`` of ``coef`` with the router's output ``says``, in all
    lanes.
    """
    ty = says[0].ty
    n = len(says)
    total = k.zero(ty)
    for j, each in enumerate(says):
        total = k.fma(k.splat(k.load(coef, f32, offset=4 * (i * n + j)), ty), each, total)
    return total


def _rms_gain(k: Builder, row: Val, n: int, lanes: int, eps: float) -> Val:
    """Return ``1 / sqrt(mean(row**2) + eps)`` of the ``n`` values at ``row``."""
    return 1.0 / k.sqrt(mean_square(k, row, n, lanes) + eps)


def _sized(k: Builder, row: Val, n: int, lanes: int, size: Val) -> Val:
    """Return the factor that scales the ``n`` values at ``row`` to the root mean
    square ``size``.
    """
    return size / k.sqrt(k.max(mean_square(k, row, n, lanes), LEAST))


def _times(k: Builder, gain: Val) -> Any:
    return lambda v: v * k.splat(gain, v.ty)


def _norm_ref(x: F64Array, w: npt.NDArray[Any], eps: float) -> F64Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w)


def _sized_ref(y: F64Array, x: F64Array) -> F64Array:
    size, own = ((v**2).mean(-1, keepdims=True) for v in (x, y))
    return np.asarray(np.sqrt(size / np.maximum(own, LEAST)))


def _router_ref(args: Any, x: F64Array, n: int, eps: float) -> F64Array:
    width = x.shape[-1]
    h = _norm_ref(x, args.norm[:width], eps) / width
    router = args.router[: n * width].reshape(n, width).astype(np.float64)
    return np.asarray(np.tanh(h @ router.T))


def _coefs_ref(args: Any, rows: int, n: int) -> F64Array:
    return np.asarray(args.coef[: rows * n].reshape(rows, n).astype(np.float64))

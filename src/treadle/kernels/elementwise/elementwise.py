"""Steps between the products: embedding, norms, gated activations. Each writes its reader's
layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.formats import Format, by_name
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32, i32, i64, ptr
from treadle.kernels.activation_layout import BLOCK, DWORD, ActivationLayout, emit_store
from treadle.kernels.activations import ACTIVATIONS, activated, gated
from treadle.kernels.format_blocks import BlockAddress
from treadle.kernels.matmul.panel import load_values
from treadle.kernels.spec import Args, Frame, Spec, f32_values, parts

SLICE = 1024  # values of a row in an item: decoding's single row then feeds several threads
SCALES_BYTES = 64  # scratch for the scales of rows that a norm writes at once


@dataclass(frozen=True)
class Embed(Spec):
    """Embed the batch's tokens: ``x[n] = scale * W[tokens[n]]``, ``W [n_vocab, k]`` in format
    ``w``, ``x`` f32 ``[N, stride]``. With ``rows`` the matrix has only that many rows: token ids
    that are beyond them read row 0. Items: tokens.
    """

    op: ClassVar[str] = "embed"
    args = Args("w:tensor x:out stride")
    w: str
    k: int
    scale: float = 1.0
    rows: int = 0

    @property
    def fmt(self) -> Format:
        return by_name(self.w)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        fmt = self.fmt
        weights = BlockAddress(fmt, frame.each("w"))
        x = frame.x
        stride = frame.stride
        tokens = frame.run("tokens", ptr)
        with k.loop(frame.end, start=frame.begin) as n:
            token = k.load(tokens, i32, offset=n * 4).to(n.ty)
            if self.rows:
                token = k.select(token < self.rows, token, k.i64(0))
            row = weights.row(token, self.k)
            to = x + n * stride * 4
            n_values = max(BLOCK, fmt.block)

            def values(b: Val, count: int, row: BlockAddress = row, to: Val = to) -> None:
                for i, v in enumerate(load_values(k, row, b, count)):
                    here = to + b * (n_values * 4) + i * (BLOCK * 4)
                    k.store_first(here, v * self.scale, min(count, BLOCK))

            k.runs(self.k, n_values, values)

    def run_ref(self, args: Any, run: Any) -> None:
        fmt = self.fmt
        tokens = np.where(run.tokens < (self.rows or np.inf), run.tokens, 0)
        parts = [
            w.reshape(-1, n)[tokens] for w, n in zip(args.w, fmt.row_strides(self.k), strict=True)
        ]
        rows = fmt.dequantize_rows(fmt.join(parts).reshape(len(run.tokens), -1))
        x = args.x.reshape(-1, args.stride)
        x[: len(rows), : self.k] = rows.astype(np.float64) * self.scale


@dataclass(frozen=True)
class Norm(Spec):
    """RMS norm: ``out = x * w / sqrt(mean(x**2) + eps)``, written as activations of kind ``act``.

    With ``centred`` it is LayerNorm (Ba and others, 2016): of ``x - mean(x)``. With ``add`` the
    result is added to the residual stream, ``out = residual + norm(x)``, f32; with ``gain`` this
    sum is multiplied by the one value of argument ``gain``. With ``outputs`` only the rows whose
    outputs are requested are normed. Items: rows.
    """

    op: ClassVar[str] = "norm"
    args = Args("x:in w:const? out:out residual:in? stride bias:const? gain:const?")
    act: str
    k: int
    group: int  # rows in a group of the activations
    eps: float
    add: bool = False
    outputs: bool = False
    sub: int = BLOCK  # sub of the activations
    centred: bool = False
    weight: bool = True  # False: w is left out
    bias: bool = False  # added at the end
    rows: bool = False  # writes f32 rows of x's stride
    unit: int = DWORD  # unit of the activations
    gain: bool = False

    @property
    def needs(self) -> set[str]:
        asked = {"w": self.weight, "bias": self.bias, "residual": self.add, "gain": self.gain}
        return self.args.required | {name for name, on in asked.items() if on}

    def layout(self) -> ActivationLayout:
        return ActivationLayout(self.act, self.k, self.group, self.sub, self.unit)

    def scratch(self, lanes: int) -> int:
        return (1 + self.centred) * SCALES_BYTES + self.layout().store_scratch

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x = frame.x
        w = frame.w
        out = frame.out
        residual = frame.residual
        stride = frame.stride
        act = self.layout()
        lanes = isa.lanes
        n_rows = frame.run("n_outputs" if self.outputs else "n_tokens")
        bias = frame.bias if self.bias else w

        def row_of(n: Val) -> Val:
            source = k.min(n, n_rows - 1)  # the last row pads its group: see ActivationLayout.grid
            if self.outputs:
                source = k.load(frame.run("output_rows", ptr), i32, offset=source * 4).to(n.ty)
            return x + source * stride * 4

        with k.loop(frame.end, start=frame.begin) as item:
            first = item * act.together
            with k.loop(act.together) as t:
                self._store_scale(k, frame, row_of(first + t), t)

            def block(b: Val, count: int, first: Val = first) -> None:
                at = b * (BLOCK * 4)

                def values_of(n: Val) -> list[Val]:
                    row = row_of(n)
                    values = []
                    place = frame.scratch + (n - first) * 4
                    scale = k.load(place, f32)
                    for i in range(0, BLOCK, lanes):
                        have = min(max(count - i, 0), lanes)
                        v = k.load_first(row + (at + i * 4), f32 * lanes, have)
                        if self.centred:
                            v = subtract_mean(k, v, k.load(place, f32, offset=SCALES_BYTES), have)
                        if self.weight:
                            g = k.load_first(w + (at + i * 4), f32 * lanes, have)
                        v = v * k.splat(scale, v.ty)
                        v = v * g if self.weight else v
                        if self.bias:
                            v = v + k.load_first(bias + (at + i * 4), f32 * lanes, have)
                        values.append(v)
                    return values

                if not self.add and not self.rows:
                    free = frame.scratch + (1 + self.centred) * SCALES_BYTES
                    emit_store(k, act, out, first, b, values_of, free)
                    return
                for i, v in enumerate(values_of(first)):
                    have = min(max(count - i * lanes, 0), lanes)
                    if have:
                        place = first * stride * 4 + (at + i * lanes * 4)
                        if self.add:
                            v = k.load_first(residual + place, f32 * lanes, have) + v
                        if self.gain:
                            v = v * k.splat(k.load(frame.gain, f32), v.ty)
                        k.store_first(out + place, v, have)

            k.runs(self.k, BLOCK, block)

    def _store_scale(self, k: Builder, frame: Frame, row: Val, t: Val) -> None:
        """Store in scratch, for the ``t``-th row of the item, ``1 / sqrt(mean(x**2) + eps)``, and
        the mean if ``centred``.
        """
        lanes = k.isa.lanes
        mean = None
        if self.centred:
            mean = row_mean(k, row, self.k, lanes, lambda total, v, _: total + v)
            k.store(frame.scratch + t * 4, mean, offset=SCALES_BYTES)
        square = mean_square(k, row, self.k, lanes, mean)
        k.store(frame.scratch + t * 4, 1.0 / k.sqrt(square + self.eps))

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_outputs" if self.outputs else "n_tokens"])
        rows = (
            f32_values(args.x)
            .reshape(-1, args.stride)[run.output_rows if self.outputs else slice(n), : self.k]
            .astype(np.float64)
        )
        if self.centred:
            rows = rows - rows.mean(-1, keepdims=True)
        y = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + self.eps)
        y = y * args.w[: self.k] if self.weight else y
        y = y + args.bias[: self.k] if self.bias else y
        if self.rows:
            args.out.reshape(-1, args.stride)[: len(y), : self.k] = y
        elif self.add:
            given = map(f32_values, (args.out, args.residual))
            out, residual = (a.reshape(-1, args.stride)[:n] for a in given)
            gain = float(args.gain[0]) if self.gain else 1.0
            out[:, : self.k] = (residual[:, : self.k] + y) * gain
        else:
            self.layout().write_ref(args.out, y)


def map_row(k: Builder, n: int, out: Val, fn: Callable[..., Val], *rows: Val) -> None:
    """Emit ``out[i] = fn(rows[0][i], rows[1][i], ...)`` over ``n`` f32 values, in vectors. ``out``
    may be one of the rows.
    """
    ty = f32 * k.isa.lanes

    def vector(c: Val, count: int) -> None:
        at = c * ty.n_bytes
        k.store_first(out + at, fn(*(k.load_first(row + at, ty, count) for row in rows)), count)

    k.runs(n, ty.lanes, vector)


def blocks_of_slice(
    k: Builder, n: int, size: int, part: Val, block: Callable[[Val, int], None]
) -> None:
    """Emit ``block(b, count)`` for the 32-value blocks of the ``part``-th slice (``size`` values)
    of a row of ``n`` values: for full blocks, then in the last slice for the remainder.
    """
    (full, rest), per = divmod(n, BLOCK), size // BLOCK
    with k.loop(k.min((part + 1) * per, k.i64(full)), start=part * per) as b:
        block(b, BLOCK)
    if rest:
        with k.if_(part.eq(-(-n // size) - 1)):
            block(k.i64(full), rest)


def mean_square(k: Builder, row: Val, n: int, lanes: int, mean: Val | None = None) -> Val:
    """Return ``mean(x**2)`` of the ``n`` f32 values at ``row``, or, with ``mean``, their variance
    ``mean((x - mean)**2)``. ``lanes``: as in ``row_mean``.
    """

    def square(total: Val, v: Val, count: int) -> Val:
        v = v if mean is None else subtract_mean(k, v, mean, count)
        return k.fma(v, v, total)

    return row_mean(k, row, n, lanes, square)


def subtract_mean(k: Builder, v: Val, mean: Val, count: int) -> Val:
    """Return ``v - mean`` in the first ``count`` lanes, and 0 in the others."""
    v, lanes = v - k.splat(mean, v.ty), v.ty.lanes
    if count == lanes:
        return v
    inside = k.const(range(lanes), i32 * lanes) < count
    return k.select(inside, v, k.zero(v.ty))


def row_mean(k: Builder, row: Val, n: int, lanes: int, add: Callable[[Val, Val, int], Val]) -> Val:
    """Return the mean of the ``n`` f32 values at ``row``, or of a function of them.
    ``add(total, v, count)`` returns ``total`` plus the function of the first ``count`` lanes of
    ``v``, whose other lanes are 0. There are four accumulators of ``lanes`` lanes.
    """
    sums = [k.var(k.zero(f32 * lanes)) for _ in range(4)]
    step = 4 * lanes

    def run(at: Val, count: int) -> None:
        for i, have in parts(count, lanes):
            v = k.load_first(row + (at * (4 * step) + i * 4), f32 * lanes, have)
            sums[i // lanes].v = add(sums[i // lanes].v, v, have)

    if k.sharing:
        k.sharing.meet()  # other threads may have written parts of the row
    k.runs(n, step, run)
    return k.total((sums[0].v + sums[1].v) + (sums[2].v + sums[3].v)) * (1 / n)


@dataclass(frozen=True)
class Pack(Spec):
    """Pack f32 rows as activations of a product, through a function: ``out = fn(x)``, or gated,
    ``out = fn(x) * up``.

    ``fn`` is "copy" or a name of ACTIVATIONS. ``up``: the first column of up, in the same row or,
    with ``apart``, in the rows of that buffer. Items: rows times slices of SLICE values.
    """

    op: ClassVar[str] = "pack"
    args = Args("x:in out:out stride up rows:in? apart:in? apart_stride:?")
    fn: str
    act: str  # kind of the activations
    k: int
    group: int  # rows in a group of the activations
    sub: int = BLOCK  # sub of the activations
    gated: bool = True  # False: there is no up
    per: int = 1  # rows of a token, or of each entry that ``rows`` counts
    counted: bool = False  # the first i64 of ``rows`` replaces the number of tokens
    unit: int = DWORD  # unit of the activations
    apart: bool = False

    @property
    def needs(self) -> set[str]:
        asked = {"rows"} if self.counted else set()
        return self.args.required | asked | ({"apart", "apart_stride"} if self.apart else set())

    def layout(self) -> ActivationLayout:
        return ActivationLayout(self.act, self.k, self.group, self.sub, self.unit)

    def scratch(self, lanes: int) -> int:
        return self.layout().store_scratch

    @property
    def slices(self) -> int:
        return -(-self.k // SLICE)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x = frame.x
        out = frame.out
        stride = frame.stride
        up = frame.up
        act = self.layout()
        lanes = isa.lanes
        gated = self.gated and self.fn != "copy"
        n_rows = k.load(frame.rows, i64) if self.counted else frame.run("n_tokens")
        n_rows = n_rows * self.per
        with k.loop(frame.end, start=frame.begin) as item:
            # A slice of all tokens of a group, which share lines of ``out``, then the next slice.
            each = self.group // act.together
            first = item // (self.slices * each) * self.group + item % each * act.together
            part = item // each % self.slices

            def block(b: Val, count: int, first: Val = first) -> None:
                def values_of(n: Val) -> list[Val]:
                    n = k.min(n, n_rows - 1)  # see ActivationLayout.grid
                    row = x + n * stride * 4
                    values = []
                    if self.apart:
                        ups = frame.apart + n * frame.apart_stride * 4
                    for i in range(0, BLOCK, lanes):
                        at = row + (b * (BLOCK * 4) + i * 4)
                        have = min(max(count - i, 0), lanes)
                        if self.group > 1:  # next token: too short for hardware prefetch
                            k.prefetch(at + stride * 4)
                            if gated and not self.apart:
                                k.prefetch(at + (up + stride) * 4)
                        v = k.load_first(at, f32 * lanes, have)
                        if gated:
                            there = ups + (b * (BLOCK * 4) + i * 4) if self.apart else at
                            other = k.load_first(there + up * 4, f32 * lanes, have)
                            v = ACTIVATIONS[self.fn].gate(k, v, other)
                        elif self.fn != "copy":
                            v = ACTIVATIONS[self.fn].emit(k, v)
                        values.append(v)
                    return values

                emit_store(k, act, out, first, b, values_of, frame.scratch)

            blocks_of_slice(k, self.k, SLICE, part, block)

    def run_ref(self, args: Any, run: Any) -> None:
        # Padding rows of an expert are undefined memory.
        heed: Any = "ignore" if self.counted else None
        with np.errstate(invalid=heed, over=heed):
            self._run_ref(args, run)

    def _run_ref(self, args: Any, run: Any) -> None:
        n = int(args.rows[:2].view(np.int64)[0] if self.counted else run["n_tokens"]) * self.per
        rows = args.x.view(np.float32).reshape(-1, args.stride)[:n]
        y = rows[:, : self.k].astype(np.float64)
        if self.fn != "copy" and self.gated:
            if self.apart:
                rows = args.apart.reshape(-1, args.apart_stride)[:n]
            y = gated(self.fn, y, rows[:, args.up : args.up + self.k].astype(np.float64))
        elif self.fn != "copy":
            y = activated(self.fn, y)
        self.layout().write_ref(args.out, y)

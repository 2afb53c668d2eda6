"""Steps between the products: embedding rows, norms, gated activations; each ends in the layout its
reader wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from treadle.formats import by_name
from treadle.jit import math
from treadle.jit.types import f32, i32, ptr
from treadle.kernels.act import BLOCK, Act, emit_store
from treadle.kernels.blocks import At, load_weights
from treadle.kernels.panel import load_floats
from treadle.kernels.spec import Frame, Spec

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

F64Array = npt.NDArray[np.float64]

SLICE = (
    1024  # values of a row that one item handles: decoding's single row still feeds several threads
)
SCALES_BYTES = 64  # scratch for the scales of the rows that a norm writes at once


@dataclass(frozen=True)
class Embed(Spec):
    """``x[n] = scale * W[tokens[n]]``. Arguments: ``w [n_vocab, k]`` (as many as a tensor of the
    format has arrays), ``x [N, stride], stride``. Items: tokens.
    """

    op: ClassVar[str] = "embed"
    w: str
    k: int
    scale: float = 1.0

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        fmt = by_name(self.w)
        n_arrays = len(fmt.strides)
        weights = At(fmt, tuple(frame.ptr(i) for i in range(n_arrays)))
        x, stride = frame.ptr(n_arrays), frame.int(n_arrays + 1)
        tokens = frame.run("tokens", ptr)
        with k.loop(frame.end, start=frame.begin) as n:
            row = weights.row(k.load(tokens, i32, offset=n * 4).to(n.ty), self.k)
            to = x + n * stride * 4
            if fmt.codes:
                with k.loop(self.k // fmt.block) as b:
                    values = load_weights(k, isa, fmt, row.block(b))
                    for i, value in enumerate(values):
                        k.store(
                            to + b * (fmt.block * 4), value * self.scale, offset=i * (BLOCK * 4)
                        )
            else:
                full, rest = divmod(self.k, BLOCK)
                with k.loop(full) as b:
                    value = load_floats(k, isa, fmt, row, b, BLOCK, BLOCK)
                    k.store(to, value * self.scale, offset=b * (BLOCK * 4))
                if rest:
                    value = load_floats(k, isa, fmt, row, k.i64(full), BLOCK, rest)
                    k.store_first(to + full * BLOCK * 4, value * self.scale, rest)

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        fmt = by_name(self.w)
        n_arrays = len(fmt.strides)
        x, stride = arrays[n_arrays : n_arrays + 2]
        parts = [
            w.reshape(-1, self.k // fmt.block * n)[run.tokens]
            for w, n in zip(arrays, fmt.strides, strict=False)
        ]
        rows = fmt.dequantize_rows(fmt.join(parts).reshape(len(run.tokens), -1))
        x.reshape(-1, stride)[: len(rows), : self.k] = rows.astype(np.float64) * self.scale


@dataclass(frozen=True)
class Norm(Spec):
    """RMS norm: ``out = x * w / sqrt(mean(x**2) + eps)``, written as activations of kind ``act``.

    With ``add`` the result is added to the residual stream instead: ``out = residual + norm(x)``,
    f32. With ``outputs`` the rows are the run's outputs. Arguments: ``x, w, out, residual,
    x_stride``. Items: rows.
    """

    op: ClassVar[str] = "norm"
    act: str
    k: int
    group: int
    eps: float
    add: bool = False
    outputs: bool = False
    sub: int = BLOCK  # of the activations

    def layout(self) -> Act:
        return Act(self.act, self.k, self.group, self.sub)

    @property
    def scratch(self) -> int:
        return SCALES_BYTES + self.layout().store_scratch

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x, w, out, residual, stride = (*(frame.ptr(i) for i in range(4)), frame.int(4))
        act, lanes = self.layout(), isa.lanes
        n_rows = frame.run("n_outputs" if self.outputs else "n_tokens")
        full, rest = divmod(self.k, BLOCK)

        def row_of(n: Val) -> Val:
            source = k.min(n, n_rows - 1)  # a group's last row fills it up: see Act.grid
            if self.outputs:
                source = k.load(frame.run("output_rows", ptr), i32, offset=source * 4).to(n.ty)
            return x + source * stride * 4

        with k.loop(frame.end, start=frame.begin) as item:
            first = item * act.together
            with k.loop(act.together) as t:
                mean = mean_square(k, row_of(first + t), self.k, lanes)
                k.store(frame.scratch + t * 4, 1.0 / k.sqrt(mean + self.eps))

            def block(b: Val, count: int, first: Val = first) -> None:
                at = b * (BLOCK * 4)

                def values_of(n: Val) -> list[Val]:
                    row, values = row_of(n), []
                    scale = k.load(frame.scratch + (n - first) * 4, f32)
                    for i in range(0, BLOCK, lanes):
                        have = min(max(count - i, 0), lanes)
                        v = k.load_first(row + (at + i * 4), f32 * lanes, have)
                        g = k.load_first(w + (at + i * 4), f32 * lanes, have)
                        values.append(v * k.splat(scale, v.ty) * g)
                    return values

                if not self.add:
                    free = frame.scratch + SCALES_BYTES
                    emit_store(k, act, out, first, b, values_of, free)
                    return
                for i, v in enumerate(values_of(first)):
                    have = min(max(count - i * lanes, 0), lanes)
                    if have:
                        place = first * stride * 4 + (at + i * lanes * 4)
                        old = k.load_first(residual + place, f32 * lanes, have)
                        k.store_first(out + place, old + v, have)

            with k.loop(full) as b:
                block(b, BLOCK)
            if rest:
                block(k.i64(full), rest)

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        x, w, out, residual, stride = arrays[:5]
        n = int(run["n_outputs" if self.outputs else "n_tokens"])
        rows = x.reshape(-1, stride)[
            run.output_rows if self.outputs else slice(n), : self.k
        ].astype(np.float64)
        y = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + self.eps) * w[: self.k]
        if self.add:
            out.reshape(-1, stride)[:n, : self.k] = residual.reshape(-1, stride)[:n, : self.k] + y
        else:
            self.layout().write_ref(out, y)


def mean_square(k: Builder, row: Val, n: int, lanes: int) -> Val:
    """Mean of ``n`` squares, in four sums of ``lanes`` lanes each."""
    sums = [k.var(k.zero(f32 * lanes)) for _ in range(4)]
    step = 4 * lanes
    full, rest = divmod(n, step)

    def part(at: Val, i: int, count: int) -> None:
        v = k.load_first(row + (at * (4 * step) + i * lanes * 4), f32 * lanes, count)
        sums[i].v = k.fma(v, v, sums[i].v)

    with k.loop(full) as c:
        for i in range(4):
            part(c, i, lanes)
    for i in range(-(-rest // lanes)):
        part(k.i64(full), i, min(lanes, rest - i * lanes))
    total = (sums[0].v + sums[1].v) + (sums[2].v + sums[3].v)
    return k.sum(total) * (1 / n)


@dataclass(frozen=True)
class Pack(Spec):
    """f32 rows to activations, through a function: ``out = f(x)``, or gated, ``out = f(gate) *
    up``.

    ``fn`` is "copy", "silu" or "gelu". Arguments: ``x, out, x_stride, up_column``. Items: rows
    times slices of SLICE values.
    """

    op: ClassVar[str] = "pack"
    fn: str
    act: str
    k: int
    group: int
    sub: int = BLOCK

    def layout(self) -> Act:
        return Act(self.act, self.k, self.group, self.sub)

    @property
    def scratch(self) -> int:
        return self.layout().store_scratch

    @property
    def slices(self) -> int:
        return -(-self.k // SLICE)

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        x, out, stride, up = frame.ptr(0), frame.ptr(1), frame.int(2), frame.int(3)
        act, lanes = self.layout(), isa.lanes
        full, rest = divmod(self.k, BLOCK)
        n_rows = frame.run("n_tokens")
        with k.loop(frame.end, start=frame.begin) as item:
            # A slice of all of a group's tokens, which share lines of ``out``, before the next one.
            each = self.group // act.together
            first = item // (self.slices * each) * self.group + item % each * act.together
            part = item // each % self.slices

            def block(b: Val, count: int, first: Val = first) -> None:
                def values_of(n: Val) -> list[Val]:
                    row, values = x + k.min(n, n_rows - 1) * stride * 4, []  # see Act.grid
                    for i in range(0, BLOCK, lanes):
                        at = row + (b * (BLOCK * 4) + i * 4)
                        have = min(max(count - i, 0), lanes)
                        if self.group > 1:  # the next token's: too short a run for the hardware
                            k.prefetch(at + stride * 4)
                            if self.fn != "copy":
                                k.prefetch(at + (up + stride) * 4)
                        v = k.load_first(at, f32 * lanes, have)
                        if self.fn != "copy":
                            gated = getattr(math, self.fn)(k, v)
                            v = gated * k.load_first(at + up * 4, f32 * lanes, have)
                        values.append(v)
                    return values

                emit_store(k, act, out, first, b, values_of, frame.scratch)

            per = SLICE // BLOCK
            last = k.min((part + 1) * per, k.i64(full))
            with k.loop(last, start=part * per) as b:
                block(b, BLOCK)
            if rest:
                with k.if_(part.eq(self.slices - 1)):
                    block(k.i64(full), rest)

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        x, out, stride, up = arrays[:4]
        n = int(run["n_tokens"])
        rows = x.reshape(-1, stride)[:n].astype(np.float64)
        y = rows[:, : self.k]
        if self.fn != "copy":
            y = activated(self.fn, y) * rows[:, up : up + self.k]
        self.layout().write_ref(out, y)


def activated(fn: str, y: F64Array) -> F64Array:
    """An activation function, by its name in ``math``, in numpy."""
    if fn == "silu":
        made: F64Array = y * np.exp(-np.logaddexp(0, -y))
    else:
        made = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return made

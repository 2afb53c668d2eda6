"""gemv: a few tokens against rows read straight from the file's blocks.

Decoding is bound by reading the weights once, so nothing is packed: mr rows are walked together (they share each load of x)::

    q8, every 32 values:   sum[r][t] += f32(dot(code[r], x[t]) + correction[t]) * d_w[r] * d_x[t]
    floats, every vector:  sum[r][t] += w[r] * x[t]

in vectors along K, which are added up across their lanes at the end of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from treadle.jit.types import f16, f32, i8, i32
from treadle.kernels.act import BLOCK, Act, correction
from treadle.kernels.matmul import RESIDUAL, X, Y, Y_STRIDE, Matmul, Segment, pick_segment
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.values import Builder, Val, Var

STRIP = 16  # rows an item holds: at 1 KB a row or more, far above the cost of claiming it
# Bytes of each row's stream to prefetch, into the second-level cache, which can wait for more lines at once than the first:
# hardware prefetchers stop at every 4 KB page. Measured on Sapphire Rapids, Q8_0, two cores: 19 GB/s without, 26 with 8 KB into
# the first level, 33 with 16 to 32 KB into the second.
AHEAD, LEVEL = 24576, 2


@dataclass(frozen=True)
class Gemv(Matmul):
    """``nr`` tokens; items are strips of rows."""

    op: ClassVar[str] = "gemv"

    def layout(self) -> Act:
        return Act(self.act, self.k)

    def rows_per_item(self, lanes: int) -> int:
        return STRIP

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        with k.loop(frame.end, start=frame.begin) as item:
            seg = pick_segment(k, frame, self, item, STRIP)
            with k.loop(STRIP, step=self.mr) as r:
                first = seg.first + r
                with k.if_(first < seg.m):
                    dot = _dot_q8 if self.act == "q8" else _dot_floats
                    rows = [
                        seg.weights + k.min(first + i, seg.m - 1) * self.fmt.row_bytes(self.k)
                        for i in range(self.mr)
                    ]
                    self._store(k, frame, seg, first, dot(k, isa, self, rows, frame.ptr(X)))

    def _store(
        self, k: Builder, frame: Frame, seg: Segment, first: Val, sums: list[list[Val]]
    ) -> None:
        stride = frame.int(Y_STRIDE) * 4
        for i, row in enumerate(sums):
            at = (seg.column + first + i) * 4
            for t, total in enumerate(row):
                if seg.bias is not None:
                    total = total + k.load(seg.bias, f32, offset=(first + i) * 4)
                if self.residual:
                    total = total + k.load(frame.ptr(RESIDUAL) + stride * t, f32, offset=at)
                k.store(frame.ptr(Y) + stride * t, total, offset=at)


def _grid(k: Builder, spec: Gemv, lanes: int) -> list[list[Var]]:
    return [[k.var(k.zero(f32 * lanes)) for _ in range(spec.nr)] for _ in range(spec.mr)]


def _dot_q8(k: Builder, isa: Isa, spec: Gemv, rows: list[Val], x: Val) -> list[list[Val]]:
    """A block of each row at a time, in vectors of eight."""
    act, fmt, codes = spec.layout(), spec.fmt, spec.fmt.codes
    assert codes is not None
    ints, floats = i32 * 8, f32 * 8
    sums = _grid(k, spec, 8)
    mins = _grid(k, spec, 8) if codes.m else []
    with k.loop(act.kb) as b:
        xs, scales, starts, totals = [], [], [], []
        for t in range(spec.nr):
            token = x + t * act.row_bytes
            xs.append(k.load(token + b * BLOCK, i8 * BLOCK))
            d_x = k.load(token, f32, offset=b * 4 + act.d_off)
            s = k.load(token, i32, offset=b * 4 + act.s_off)
            scales.append(k.splat(d_x, floats))
            zero = k.zero(ints)
            starts.append(k.insert(zero, correction(codes, s), 0) if codes.offset else zero)
            if codes.m:
                totals.append(k.insert(k.zero(floats), s.to(f32) * (d_x * (-1 / 128)), 0))
        for r, row in enumerate(rows):
            block = row + b * fmt.dtype.itemsize
            k.prefetch(block + AHEAD, LEVEL)
            q = codes.unpack(k, block)
            d = _splat_f16(k, isa, block, fmt.field_offset(codes.d))
            for t in range(spec.nr):
                dots = isa.dot4(k, starts[t], q, xs[t], codes.top)
                sums[r][t].v = k.fma(dots.to(f32), d * scales[t], sums[r][t].v)
            if codes.m:
                m = _splat_f16(k, isa, block, fmt.field_offset(codes.m))
                for t in range(spec.nr):
                    mins[r][t].v = k.fma(m, totals[t], mins[r][t].v)
    if codes.m:
        return [
            [k.sum(s.v + m.v) for s, m in zip(a, b_, strict=True)] for a, b_ in zip(sums, mins, strict=True)
        ]
    return [[k.sum(s.v) for s in row] for row in sums]


def _splat_f16(k: Builder, isa: Isa, p: Val, offset: int) -> Val:
    halves = k.splat(k.load(p, f16, offset=offset), f16 * 8)
    wide: Val = isa.widen_f16(k, halves)
    return wide


def _dot_floats(k: Builder, isa: Isa, spec: Gemv, rows: list[Val], x: Val) -> list[list[Val]]:
    """Four vectors of each row at a time, each with a sum of its own, so that no addition waits for the last."""
    fmt, act, lanes = spec.fmt, spec.layout(), isa.lanes
    assert fmt.load is not None
    load = fmt.load
    depth = max(1, 8 // (spec.mr * spec.nr))
    size = fmt.dtype.itemsize
    sums = [_grid(k, spec, lanes) for _ in range(depth)]
    step = lanes * depth
    full, rest = divmod(spec.k, step)

    def part(base: Val, u: int, n: int) -> None:
        at = base + u * lanes
        xs = [k.load(x + t * act.row_bytes, f32 * lanes, offset=at * 4) for t in range(spec.nr)]
        for r, row in enumerate(rows):
            k.prefetch(row + (at * size + AHEAD), LEVEL)
            w = load(k, isa, row + at * size, lanes, n)
            for t in range(spec.nr):
                sums[u][r][t].v = k.fma(w, xs[t], sums[u][r][t].v)

    with k.loop(full) as c:
        for u in range(depth):
            part(c * step, u, lanes)
    for u in range(-(-rest // lanes)):
        part(k.int(full * step), u, min(lanes, rest - u * lanes))
    totals = []
    for r in range(spec.mr):
        totals.append([])
        for t in range(spec.nr):
            total = sums[0][r][t].v
            for u in range(1, depth):
                total = total + sums[u][r][t].v
            totals[-1].append(k.sum(total))
    return totals

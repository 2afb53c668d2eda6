"""gemv: a few tokens against rows read straight from the file's blocks.

Decoding is bound by reading the weights once, so nothing is packed: mr rows are walked together
(they share each load of x)::

    q8, every 32 values:   sum[r][t] += f32(dot(code[r], x[t]) + correction[t]) * d_w[r] * d_x[t]
    floats, every vector:  sum[r][t] += w[r] * x[t]

in vectors along K, which are added up across their lanes at the end of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from treadle.jit.types import f32, i8, i32
from treadle.kernels.act import BLOCK, Act, block_sums, correction
from treadle.kernels.blocks import load_scales, unpack_codes
from treadle.kernels.matmul import RESIDUAL, Y_STRIDE, Matmul, Segment, X, Y, pick_segment
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val, Var

STRIP = 16  # rows an item holds: at 1 KB a row or more, far above the cost of claiming it
# Hardware prefetchers stop at every 4 KB page, so each row's stream is asked for twice: this many
# bytes ahead into the second-level cache, which can wait for more lines at once than the first, and
# again shortly before its use into the first. Measured on Sapphire Rapids, Q8_0, two cores: 19 GB/s
# without, 26 with 8 KB into the first level, 33 with FAR alone, 35 with both.
FAR, NEAR = 24576, 512


@dataclass(frozen=True)
class Gemv(Matmul):
    """``nr`` tokens; items are strips of rows."""

    op: ClassVar[str] = "gemv"

    def layout(self) -> Act:
        return Act(self.act, self.k)

    def rows_per_item(self, lanes: int) -> int:
        return STRIP

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        # Fewer tokens than nr: the last stands in for the missing ones.
        last, stride = frame.run(self.count) - 1, self.layout().row_bytes
        tokens = [frame.ptr(X) + k.min(k.i64(t), last) * stride for t in range(self.nr)]
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
                    self._store(k, frame, seg, first, dot(k, isa, self, rows, tokens))

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


def _dot_q8(
    k: Builder, isa: Isa, spec: Gemv, rows: list[Val], tokens: list[Val]
) -> list[list[Val]]:
    """As many blocks of each row at a time as fill a register with codes."""
    act, codes = spec.layout(), spec.fmt.codes
    assert codes is not None
    width = BLOCK // codes.parts  # codes of one block in a vector
    at_once = max(1, isa.vector_bits // 8 // width)
    full, rest = divmod(act.kb, at_once)
    sums = _grid(k, spec, at_once * width // 4)
    with k.loop(full) as b:
        _blocks(k, isa, spec, rows, tokens, b * at_once, at_once, sums)
    if not rest:
        return [[k.sum(s.v) for s in row] for row in sums]
    ends = _grid(k, spec, width // 4)
    for i in range(rest):
        _blocks(k, isa, spec, rows, tokens, k.i64(full * at_once + i), 1, ends)
    return [
        [k.sum(s.v) + k.sum(e.v) for s, e in zip(row, end, strict=True)]
        for row, end in zip(sums, ends, strict=True)
    ]


def _blocks(
    k: Builder,
    isa: Isa,
    spec: Gemv,
    rows: list[Val],
    tokens: list[Val],
    b: Val,
    n: int,
    sums: list[list[Var]],
) -> None:
    """Add the products of ``n`` blocks from ``b`` on. A block's lanes stay together, for n = 2::

    dots    i32   b0 b0 b0 b0 | b1 b1 b1 b1
    scales  f32   d0 d0 d0 d0 | d1 d1 d1 d1      (repeat)
    starts  i32   s0  0  0  0 | s1  0  0  0      (first), and the sums for minimums alike
    """
    act, fmt, codes = spec.layout(), spec.fmt, spec.fmt.codes
    assert codes is not None
    width = BLOCK // codes.parts
    lanes = width // 4
    repeat = [i for i in range(n) for _ in range(lanes)]
    first = [i if lane == 0 else n for i in range(n) for lane in range(lanes)]
    orders = [
        [i * BLOCK + j * width + c for i in range(n) for c in range(width)]
        for j in range(codes.parts)
    ]
    xs, scales, starts, totals = [], [], [], []
    for token in tokens:
        values = k.load(token + b * BLOCK, i8 * (n * BLOCK))
        xs.append([k.shuffle(values, values, order) for order in orders])
        d = k.load(token, f32 * n, offset=b * 4 + act.d_off)
        s = k.load(token, i32 * n, offset=b * 4 + act.s_off)
        scales.append(k.shuffle(d, d, repeat))
        corrected = correction(codes, s) if codes.offset else k.zero(s.ty)
        starts.append(k.shuffle(corrected, k.zero(s.ty), first))
        if codes.m:
            totals.append(k.shuffle(block_sums(k, s, d), k.zero(d.ty), first))
    for r, row in enumerate(rows):
        at = row + b * fmt.dtype.itemsize
        _prefetch(k, at)
        blocks = [at + i * fmt.dtype.itemsize for i in range(n)]
        parts = unpack_codes(k, fmt, blocks)
        d_w = load_scales(k, isa, fmt, blocks, codes.d, lanes)
        m_w = load_scales(k, isa, fmt, blocks, codes.m, lanes) if codes.m else None
        for t in range(spec.nr):
            dots = starts[t]
            for part, values in zip(parts, xs[t], strict=True):
                dots = isa.dot4(k, dots, part, values, codes.top)
            sums[r][t].v = k.fma(dots.to(f32), d_w * scales[t], sums[r][t].v)
            if m_w is not None:
                sums[r][t].v = k.fma(m_w, totals[t], sums[r][t].v)


def _prefetch(k: Builder, p: Val) -> None:
    k.prefetch(p + FAR, 2)
    k.prefetch(p + NEAR, 3)


def _dot_floats(
    k: Builder, isa: Isa, spec: Gemv, rows: list[Val], tokens: list[Val]
) -> list[list[Val]]:
    """Four vectors of each row at a time, each with a sum of its own, so that no addition waits for
    the last.
    """
    fmt, lanes = spec.fmt, isa.lanes
    assert fmt.load is not None
    load = fmt.load
    depth = max(1, 8 // (spec.mr * spec.nr))
    size = fmt.dtype.itemsize
    sums = [_grid(k, spec, lanes) for _ in range(depth)]
    step = lanes * depth
    full, rest = divmod(spec.k, step)

    def part(base: Val, u: int, n: int) -> None:
        at = base + u * lanes
        xs = [k.load(token, f32 * lanes, offset=at * 4) for token in tokens]
        for r, row in enumerate(rows):
            here = row + at * size
            _prefetch(k, here)
            w = load(k, isa, here, lanes, n)
            for t in range(spec.nr):
                sums[u][r][t].v = k.fma(w, xs[t], sums[u][r][t].v)

    with k.loop(full) as c:
        for u in range(depth):
            part(c * step, u, lanes)
    for u in range(-(-rest // lanes)):
        part(k.i64(full * step), u, min(lanes, rest - u * lanes))
    totals: list[list[Val]] = []
    for r in range(spec.mr):
        totals.append([])
        for t in range(spec.nr):
            total = sums[0][r][t].v
            for u in range(1, depth):
                total = total + sums[u][r][t].v
            totals[-1].append(k.sum(total))
    return totals

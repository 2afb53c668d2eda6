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

from treadle.jit.types import f32
from treadle.kernels.act import BLOCK, Act
from treadle.kernels.ahead import Ahead
from treadle.kernels.gemv_q8 import Q8, grid, prepared_bytes
from treadle.kernels.matmul import Matmul, Segment, pick_segment
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val
    from treadle.kernels.blocks import At

STRIP = 16  # rows an item holds: at 1 KB a row or more, far above the cost of claiming it


@dataclass(frozen=True)
class Gemv(Matmul):
    """``nr`` tokens; items are strips of rows."""

    op: ClassVar[str] = "gemv"

    def layout(self) -> Act:
        return Act(self.act, self.k, sub=self.sub if self.act == "q8" else BLOCK)

    def rows_per_item(self, lanes: int) -> int:
        return STRIP

    def scratch(self, lanes: int) -> int:
        return prepared_bytes(self.k) if self.act == "q8" else 0

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        # Fewer tokens than nr: the last stands in for the missing ones.
        last, stride = frame.run(self.count) - 1, self.layout().row_bytes
        tokens = [frame.x + k.min(k.i64(t), last) * stride for t in range(self.nr)]
        dot = Q8(k, isa, self, tokens, frame.scratch).dot if self.act == "q8" else None
        with k.loop(frame.end, start=frame.begin) as item:
            seg = pick_segment(k, frame, self, item, STRIP)
            with k.loop(STRIP, step=self.mr) as r:
                first = seg.first + r
                with k.if_(first < seg.m):
                    mine = k.min((frame.end - item) * STRIP - r, seg.m - first)
                    rows = [
                        seg.weights.row(k.min(first + i, seg.m - 1), self.k) for i in range(self.mr)
                    ]
                    ahead = Ahead(k, rows[0], mine, self.k // self.fmt.block)
                    if dot:
                        sums = dot(rows, ahead)
                    else:
                        sums = _dot_floats(k, isa, self, rows, tokens, ahead)
                    self._store(k, frame, seg, first, sums)

    def _store(
        self, k: Builder, frame: Frame, seg: Segment, first: Val, sums: list[list[Val]]
    ) -> None:
        stride = frame.stride * 4
        for i, row in enumerate(sums):
            at = (seg.column + first + i) * 4
            for t, total in enumerate(row):
                if seg.bias is not None:
                    total = total + k.load(seg.bias, f32, offset=(first + i) * 4)
                if self.residual:
                    total = total + k.load(frame.residual + stride * t, f32, offset=at)
                k.store(frame.y + stride * t, total, offset=at)


def _dot_floats(
    k: Builder, isa: Isa, spec: Gemv, rows: list[At], tokens: list[Val], ahead: Ahead
) -> list[list[Val]]:
    """Four vectors of each row at a time, each with a sum of its own, so that no addition waits for
    the last.
    """
    fmt, lanes = spec.fmt, isa.lanes
    assert fmt.load is not None
    load = fmt.load
    depth = max(1, 8 // (spec.mr * spec.nr))
    sums = [grid(k, spec, lanes) for _ in range(depth)]
    step = lanes * depth
    full, rest = divmod(spec.k, step)

    def part(base: Val, u: int, n: int) -> None:
        at = base + u * lanes
        xs = [k.load(token, f32 * lanes, offset=at * 4) for token in tokens]
        for r, row in enumerate(rows):
            (here,) = row.block(at).parts
            w = load(k, isa, here, lanes, n)
            for t in range(spec.nr):
                sums[u][r][t].v = k.fma(w, xs[t], sums[u][r][t].v)

    with k.loop(full) as c:
        ahead.fetch(c, step * spec.mr)
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

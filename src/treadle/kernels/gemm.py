"""gemm: a panel of rows is unpacked once and multiplied by every token.

The one tile loop of all formats, for each group of nr tokens and mr vectors of rows::

    for each dword kd of K:   acc[m][t] += dot(panel[kd][m], x[kd][t])      acc: i32 (q8) or f32
    q8, every 32 values:      sum[m][t] += f32(acc[m][t]) * d_w[m] * d_x[t] (+ m_w[m] * sum_x[t])
                              acc = -offset * sum_x

(the panel scheme is that of Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from treadle.jit.types import f32, i8, i32, u8
from treadle.kernels.act import Act, block_sums, correction
from treadle.kernels.matmul import (
    CHUNK,
    RESIDUAL,
    Y_STRIDE,
    Matmul,
    Segment,
    X,
    Y,
    add_bias,
    pick_segment,
)
from treadle.kernels.panel import emit_pack, panel_bytes
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val, Var

PANEL_LANES_MAX = 16  # f32 lanes of the widest vectors there is a row for: scratch is sized by them


@dataclass(frozen=True)
class Gemm(Matmul):
    """Many tokens: items are panels of ``mr * lanes`` rows times chunks of tokens."""

    op: ClassVar[str] = "gemm"

    def layout(self) -> Act:
        return Act(self.act, self.k, self.nr)

    def rows_per_item(self, lanes: int) -> int:
        return self.mr * lanes

    @property
    def scratch(self) -> int:
        return panel_bytes(self.fmt, self.layout(), self.mr * PANEL_LANES_MAX) + 64

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        assert isa.lanes <= PANEL_LANES_MAX
        act, rows = self.layout(), self.mr * isa.lanes
        n_tokens, chunk = frame.run(self.count), frame.int(CHUNK)
        n_chunks = (n_tokens + (chunk - 1)) // chunk
        panel = frame.scratch
        with k.loop(frame.end, start=frame.begin) as item:
            seg = pick_segment(k, frame, self, item // n_chunks, rows)
            emit_pack(k, isa, self.fmt, act, panel, seg.weights, seg.first, seg.m, rows)
            start = item % n_chunks * chunk
            stop = k.min(start + chunk, n_tokens)
            with k.loop(stop, start=start, step=self.nr) as token:
                tile = Tile(
                    k,
                    isa,
                    self,
                    frame,
                    seg,
                    panel,
                    frame.ptr(X) + token // self.nr * act.group_bytes,
                )
                tile.store(tile.multiply(), token)


class Tile:
    """mr vectors of rows times nr tokens, over the whole of K."""

    def __init__(
        self, k: Builder, isa: Isa, spec: Gemm, frame: Frame, seg: Segment, panel: Val, x: Val
    ) -> None:
        self.k, self.isa, self.spec, self.frame, self.seg = k, isa, spec, frame, seg
        self.panel, self.x, self.act = panel, x, spec.layout()
        self.rows = spec.mr * isa.lanes

    def multiply(self) -> list[list[Var]]:
        k, spec = self.k, self.spec
        sums = [
            [k.var(k.zero(f32 * self.isa.lanes)) for _ in range(spec.nr)] for _ in range(spec.mr)
        ]
        if spec.act == "q8":
            with k.loop(self.act.kb) as b:
                self._block(b, sums)
        else:
            unroll = 4
            with k.loop(self.act.kd // unroll) as c:
                for u in range(unroll):
                    self._dwords(c * unroll + u, sums)
        return sums

    def _weights(self, kd: Val) -> list[Val]:
        """The panel's vectors of one dword of K, as i32 bits."""
        lanes = self.isa.lanes
        at = self.panel + kd * (4 * self.rows)
        return [
            self.k.load(at, i32 * lanes, offset=4 * lanes * m, align=4) for m in range(self.spec.mr)
        ]

    def _token(self, kd: Val, t: int) -> Val:
        """One token's dword, in every lane."""
        at = self.x + kd * (4 * self.spec.nr)
        return self.k.splat(self.k.load(at, i32, offset=4 * t, align=4), i32 * self.isa.lanes)

    def _dwords(self, kd: Val, sums: list[list[Var]]) -> None:
        k, isa = self.k, self.isa
        weights = self._weights(kd)
        for t in range(self.spec.nr):
            x = self._token(kd, t)
            for m, w in enumerate(weights):
                if self.spec.act == "bf16":
                    assert isa.dot_bf16 is not None
                    from treadle.jit.types import bf16

                    ty = bf16 * (2 * isa.lanes)
                    sums[m][t].v = isa.dot_bf16(k, sums[m][t].v, w.bits(ty), x.bits(ty))
                else:
                    ty = f32 * isa.lanes
                    sums[m][t].v = k.fma(w.bits(ty), x.bits(ty), sums[m][t].v)

    def _block(self, b: Val, sums: list[list[Var]]) -> None:
        """32 values of K: eight dots an accumulator, then the scales."""
        k, isa, spec, act = self.k, self.isa, self.spec, self.act
        lanes, codes = isa.lanes, spec.fmt.codes
        assert codes is not None
        ints, floats = i32 * lanes, f32 * lanes
        group = b * (4 * spec.nr)

        def token(ty: object, off: int, t: int) -> Val:
            return k.load(self.x, ty, offset=group + (off + 4 * t), align=4)  # type: ignore[arg-type]

        starts = [
            correction(codes, k.splat(token(i32, act.s_off, t), ints))
            if codes.offset
            else k.zero(ints)
            for t in range(spec.nr)
        ]
        acc = [[starts[t] for t in range(spec.nr)] for _ in range(spec.mr)]
        for step in range(8):
            kd = b * 8 + step
            weights = [w.bits(u8 * (4 * lanes)) for w in self._weights(kd)]
            for t in range(spec.nr):
                x = self._token(kd, t).bits(i8 * (4 * lanes))
                for m, w in enumerate(weights):
                    acc[m][t] = isa.dot4(k, acc[m][t], w, x, codes.top)
            k.fence()
        scales = self.panel + (4 * self.rows * act.kd)
        for m in range(spec.mr):
            at = b * (4 * self.rows) + 4 * lanes * m
            d_w = k.load(scales, floats, offset=at, align=4)
            for t in range(spec.nr):
                d_x = k.splat(token(f32, act.d_off, t), floats)
                sums[m][t].v = k.fma(acc[m][t].to(f32), d_w * d_x, sums[m][t].v)
            if codes.m:
                m_w = k.load(scales, floats, offset=at + 4 * self.rows * act.kb, align=4)
                for t in range(spec.nr):
                    total = block_sums(k, token(i32, act.s_off, t), token(f32, act.d_off, t))
                    sums[m][t].v = k.fma(m_w, k.splat(total, floats), sums[m][t].v)

    def store(self, sums: list[list[Var]], token: Val) -> None:
        """Write the tile. Rows of y are padded to whole panels and to whole groups, so no edge
        needs a mask.
        """
        k, lanes = self.k, self.isa.lanes
        stride = self.frame.int(Y_STRIDE) * 4
        for t in range(self.spec.nr):
            row = (token + t) * stride
            for m in range(self.spec.mr):
                first = self.seg.first + lanes * m
                column = row + (self.seg.column + first) * 4
                y = sums[m][t].v
                bias = add_bias(k, self.seg, first, lanes)
                if bias is not None:
                    y = y + bias
                if self.spec.residual:
                    y = y + k.load(self.frame.ptr(RESIDUAL) + column, f32 * lanes, align=4)
                k.store(self.frame.ptr(Y) + column, y, align=4)

"""The gemm tile loop as outer products: a column of weights, a byte of each row, times a byte of
each token::

    for each value kv of K:   acc[t] += panel[kv] * x[kv][t]        acc: i16 or i32, a lane a row
    for each scale:           sum[t] += f32(acc[t]) * d_w * d_x[t] (+ m_w * sum_x[t])

For machines that multiply a vector by a scalar register into lanes twice as wide, and that move
lanes slowly. The loop over K stays a loop: only the accumulators are in registers. The f32 sums are
in memory, and are updated once for every scale.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.formats.format import Codes
from treadle.jit.language import Builder, Val
from treadle.jit.types import Ty, f32, i8, i16, i32
from treadle.kernels.activation_layout import BLOCK, block_sums
from treadle.kernels.matmul.epilogue import Sums
from treadle.kernels.matmul.panel import code_type, panel_bytes, scale_bytes
from treadle.kernels.matmul.tile import KRange
from treadle.kernels.matmul.tile_shape import Tiled

OUTER = 1  # values of K in a column of the panel
X_MAX = 127  # largest magnitude of a token's byte
SOME = 8  # fewest products that make an i16 sum worthwhile
UNROLL = 4  # values of K an iteration: a dword of each token
PIECE = 4  # vectors of rows that are scaled at a time


def accumulators(codes: Codes) -> tuple[int, Ty]:
    """Return how many accumulators the values of K that share a scale need, and their type: i16 if
    that always holds the sum of at least SOME products, each accumulator then a power of two of
    them; else one of i32.
    """
    run = codes.sub
    most = max(codes.offset, codes.top - codes.offset)
    while run * most * X_MAX > 32767:
        run //= 2
    return (codes.sub // run, i16) if run >= SOME else (1, i32)


def adds_in_i16(codes: Codes) -> bool:
    """Whether accumulators are i16."""
    return accumulators(codes)[1] == i16


def outer_registers(spec: Tiled) -> float:
    """Return the number of vector registers that the loop over K needs: accumulators, a column, and
    the widened column if LLVM cannot multiply bytes directly.
    """
    assert spec.fmt.codes is not None, spec.w
    _, ty = accumulators(spec.fmt.codes)
    widened = 0 if ty == i16 else i16.n_bytes
    return spec.mr / 4 * (ty.n_bytes * spec.nr + 1 + widened)


def outer_bytes(spec: Tiled, rows: int) -> int:
    """Return the bytes of scratch after a panel: sums of x for minimums, the sums, and the
    accumulators.
    """
    assert spec.fmt.codes is not None, spec.w
    n_runs, ty = accumulators(spec.fmt.codes)
    return spec.lane_bytes + spec.nr * rows * (4 + n_runs * ty.n_bytes)


class OuterTile:
    """Tile of mr vectors of rows, side by side, times nr tokens, multiplied over ``part`` of K by
    outer products. ``panel`` and ``x``: addresses of the packed rows and of the tokens. Its sums
    are in memory.
    """

    def __init__(self, k: Builder, spec: Tiled, panel: Val, x: Val, part: KRange) -> None:
        codes = spec.fmt.codes
        assert codes is not None, spec.w
        self.k = k
        self.spec = spec
        self.codes = codes
        self.panel = panel
        self.x = x
        self.act = spec.layout()
        self.lanes = k.isa.lanes
        self.rows = spec.mr * self.lanes
        self.n_runs, self.acc_ty = accumulators(codes)
        self.run = codes.sub // self.n_runs
        self.sums_of_x = panel + panel_bytes(spec.fmt, self.act, self.rows)
        self.sums = self.sums_of_x + spec.lane_bytes
        self.accs = self.sums + 4 * self.rows * spec.nr
        self._multiply(*part)

    def _multiply(self, first: Val, last: Val, before: Callable[[int, int], Val] | None) -> None:
        k = self.k
        floats = f32 * self.lanes
        for t in range(self.spec.nr):
            for m in range(self.spec.mr):
                start = before(m, t) if before else k.zero(floats)
                k.store(self._sum(self.lanes * m, t), start, align=4)
        per = BLOCK // self.codes.sub
        with k.loop(last * per, start=first * per) as piece:
            if self.n_runs == 1:
                self._products(piece * self.codes.sub, k.i64(0))
            else:
                with k.loop(self.n_runs) as r:
                    self._products(piece * self.codes.sub + r * self.run, r)
            self._scale(piece)

    def _sum(self, row: int, t: int) -> Val:
        return self.sums + 4 * (self.rows * t + row)

    def _products(self, kv: Val, r: Val) -> None:
        """Multiply ``self.run`` values of K from ``kv`` on, and store the sums, of all rows and
        tokens, to the ``r``-th accumulators.
        """
        k = self.k
        nr = self.spec.nr
        ty = self.acc_ty * self.rows
        column_ty = code_type(self.codes, k.isa, OUTER) * self.rows
        acc = [k.var(k.zero(ty)) for _ in range(nr)]
        with k.loop(kv + self.run, start=kv, step=UNROLL) as at:
            w = self.panel + at * self.rows
            x = self.x + at * nr
            for i in range(UNROLL):
                wide = k.load(w, column_ty, offset=i * self.rows).to(i16)
                for t in range(nr):
                    by = k.splat(k.load(x, i8, offset=UNROLL * t + i).to(i16), wide.ty)
                    if self.acc_ty == i16:
                        acc[t].v = acc[t].v + wide * by
                    else:
                        acc[t].v = acc[t].v + wide.to(i32) * by.to(i32)
        for t in range(nr):
            k.store(self._acc(r, t, 0), acc[t].v, align=2)

    def _acc(self, r: Val, t: int, row: int) -> Val:
        size = self.acc_ty.n_bytes
        return self.accs + r * (size * self.rows * self.spec.nr) + size * (self.rows * t + row)

    def _scale(self, piece: Val) -> None:
        """Add the accumulators to the sums, times the ``piece``-th scales, plus the minimums'
        products.
        """
        k = self.k
        spec = self.spec
        act = self.act
        wide = min(PIECE * self.lanes, self.rows)
        n_sums = spec.n_sums
        d_off = piece // (BLOCK // self.codes.sub) * (4 * spec.nr) + act.d_off
        scales = self.panel + (4 * self.rows * act.kd + piece * (4 * self.rows))
        if self.codes.has_m:
            d = k.load(self.x, f32 * spec.nr, offset=d_off, align=4)
            for i in range(n_sums):
                at = (piece * n_sums + i) * (4 * spec.nr) + act.comp_off
                comp = k.load(self.x, i32 * spec.nr, offset=at, align=4)
                k.store(self.sums_of_x, block_sums(k, comp, d), offset=4 * spec.nr * i)
        minimums = self.panel + (4 * self.rows * act.kd + scale_bytes(self.codes, act, self.rows))
        minimums = minimums + piece * (4 * self.rows * n_sums)

        def by(p: Val) -> Val:
            return k.splat(k.load(p, f32, align=4), f32 * wide)

        for t in range(spec.nr):
            d_x = k.load(self.x + d_off, f32, offset=4 * t, align=4)
            for row in range(0, self.rows, wide):
                total = self._load_acc(0, t, row, wide)
                for r in range(1, self.n_runs):
                    total = total + self._load_acc(r, t, row, wide)
                d_w = k.load(scales, f32 * wide, offset=4 * row, align=4)
                place = self._sum(row, t)
                s = k.load(place, d_w.ty, align=4)
                s = k.fma(total.to(f32) * d_w, k.splat(d_x, d_w.ty), s)
                if self.codes.has_m:
                    for i in range(n_sums):
                        m_at = 4 * (self.rows * i + row)
                        m_w = k.load(minimums, d_w.ty, offset=m_at, align=4)
                        s = k.fma(m_w, by(self.sums_of_x + 4 * (spec.nr * i + t)), s)
                k.store(place, s, align=4)

    def _load_acc(self, r: int, t: int, row: int, lanes: int) -> Val:
        """Load ``lanes`` rows of token ``t``'s ``r``-th accumulator, from ``row`` on; as i32 if a
        scale has several accumulators, whose total may exceed an i16.
        """
        found = self.k.load(self._acc(self.k.i64(r), t, row), self.acc_ty * lanes, align=2)
        return found if self.n_runs == 1 else found.to(i32)

    def results(self) -> Sums:
        """Yield (first row, token, vector of rows) for each PIECE vectors of the tile, as
        ``Epilogue.store`` takes them.
        """
        wide = min(PIECE * self.lanes, self.rows)
        for t in range(self.spec.nr):
            for row in range(0, self.rows, wide):
                yield row, t, self.k.load(self._sum(row, t), f32 * wide, align=4)

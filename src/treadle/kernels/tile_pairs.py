"""The tile loop of gemm in products of two rows by two tokens (``Isa.pairs``), eight values of K at
a time::

    for every 8 values kq:    acc[r][t] += panel[kq][r] * x[kq][t]          acc: i32 2 x 2
    for each scale:           sum[m][t] += f32(acc) * d_w[m] * d_x[t] (+ m_w[m] * sum_x[t])

Activations lie as for dots, a dword of each token side by side: two of them and a zip make the
eight values of two tokens. Accumulators fill the registers; sums in f32 lie in memory, and are
touched once for every scale.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.formats.format import Codes
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i8, i32
from treadle.kernels.act import BLOCK, MAGIC, MAGIC_BITS, block_sums
from treadle.kernels.out import Sums
from treadle.kernels.panel import code_type, panel_bytes, scale_bytes
from treadle.kernels.tile import KRange
from treadle.kernels.tiled import Tiled

PAIRS = 8  # values of K in a column of the panel
QUAD = 4  # rows, or tokens, of a vector of 16 bytes


def pairs_registers(spec: Tiled, lanes: int) -> float:
    """Vector registers that the loop over K fills: accumulators, tokens and two of weights."""
    return spec.mr * lanes * spec.nr / QUAD + spec.nr / 2 + 2


def pairs_bytes(spec: Tiled, rows: int) -> int:
    """Scratch behind a panel: minimums' sums of x, the sums, what accumulators start as, and what
    MAGIC times each scale takes away.
    """
    return spec.lane_bytes + 2 * 4 * spec.nr * rows + 4 * rows


def _by_magic(k: Builder, codes: Codes) -> bool:
    """Whether accumulators end as the bits of floats; see ``Tile``."""
    return k.isa.fused and not codes.long_scales


def fill_pairs(k: Builder, spec: Tiled, panel: Val) -> None:
    """Store what accumulators start as. Each loads its own copy: of one register LLVM would make
    copies by instructions that the products need the units of.
    """
    assert spec.fmt.codes is not None, spec.w
    rows = spec.mr * k.isa.lanes
    starts = panel + panel_bytes(spec.fmt, spec.layout(), rows) + spec.lane_bytes
    start = k.const(MAGIC_BITS if _by_magic(k, spec.fmt.codes) else 0, i32 * QUAD)
    for i in range(rows * spec.nr // QUAD):
        k.store(starts + 4 * spec.nr * rows, start, offset=16 * i)


class PairTile:
    """mr vectors of rows times nr tokens, an even number, multiplied over a part of K."""

    def __init__(self, k: Builder, spec: Tiled, panel: Val, x: Val, part: KRange) -> None:
        assert spec.fmt.codes is not None, spec.w
        assert spec.nr % 2 == 0, spec.name
        self.k, self.spec, self.codes = k, spec, spec.fmt.codes
        self.panel, self.x, self.act = panel, x, spec.layout()
        self.rows = spec.mr * k.isa.lanes
        self.sums_of_x = panel + panel_bytes(spec.fmt, self.act, self.rows)
        self.sums = self.sums_of_x + spec.lane_bytes
        self.starts = self.sums + 4 * self.rows * spec.nr
        self.less = self.starts + 4 * self.rows * spec.nr
        self._multiply(*part)

    def _multiply(self, first: Val, last: Val, before: Callable[[int, int], Val] | None) -> None:
        k, lanes = self.k, self.k.isa.lanes
        for t in range(self.spec.nr):
            for m in range(self.spec.mr):
                start = before(m, t) if before else k.zero(f32 * lanes)
                k.store(self._sum(lanes * m, t), start, align=4)
        per = BLOCK // self.codes.sub
        with k.loop(last * per, start=first * per) as piece:
            self._scale(piece, self._products(piece))

    def _sum(self, row: int, t: int) -> Val:
        return self.sums + 4 * (self.rows * t + row)

    def _products(self, piece: Val) -> list[list[Val]]:
        """The accumulators of every two rows and two tokens, over the values that share a scale."""
        k, nr = self.k, self.spec.nr
        ty, steps = code_type(self.codes, k.isa, PAIRS) * 16, self.codes.sub // PAIRS
        k.fence()
        starts = (
            k.load(self.starts, i32 * QUAD, offset=16 * i) for i in range(self.rows * nr // QUAD)
        )
        acc = [[k.var(next(starts)) for _ in range(nr // 2)] for _ in range(self.rows // 2)]
        with k.loop((piece + 1) * steps, start=piece * steps) as kq:
            x = self._tokens(self.x + kq * (PAIRS * nr))
            for r, row in enumerate(acc):
                w = k.load(self.panel + kq * (PAIRS * self.rows), ty, offset=16 * r)
                for t, both in enumerate(x):
                    row[t].v = k.isa.pairs(k, row[t].v, w, both)
        return [[var.v for var in row] for row in acc]

    def _tokens(self, at: Val) -> list[Val]:
        """Eight values of every two tokens."""
        k, nr, out = self.k, self.spec.nr, []
        for first in range(0, nr, QUAD):
            n = min(QUAD, nr - first)
            low, high = (
                k.load(at, i32 * n, offset=4 * (nr * half + first), align=4) for half in range(2)
            )
            for t in range(0, n, 2):
                zipped = k.shuffle(low, high, [t, n + t, t + 1, n + t + 1])
                out.append(zipped.bits(i8 * 16))
        return out

    def _scale(self, piece: Val, acc: list[list[Val]]) -> None:
        """Add the accumulators to the sums; ``piece``: of which scale. See ``Tile`` for MAGIC."""
        k, spec, act, codes = self.k, self.spec, self.act, self.codes
        n_sums, floats = spec.n_sums, f32 * QUAD
        d_off = piece // (BLOCK // codes.sub) * (4 * spec.nr) + act.d_off
        scales = self.panel + (4 * self.rows * act.kd + piece * (4 * self.rows))
        if codes.has_m:
            d = k.load(self.x, f32 * spec.nr, offset=d_off, align=4)
            for i in range(n_sums):
                at = (piece * n_sums + i) * (4 * spec.nr) + act.comp_off
                comp = k.load(self.x, i32 * spec.nr, offset=at, align=4)
                k.store(self.sums_of_x, block_sums(k, comp, d), offset=4 * spec.nr * i)
        minimums = self.panel + (4 * self.rows * act.kd + scale_bytes(codes, act, self.rows))
        minimums = minimums + piece * (4 * self.rows * n_sums)

        def by(p: Val, offset: int) -> Val:
            return k.splat(k.load(p, f32, offset=offset, align=4), floats)

        for row in range(0, self.rows, QUAD):
            d_w = k.load(scales, floats, offset=4 * row, align=4)
            k.store(self.less, d_w * -MAGIC, offset=4 * row)
            m_w = [
                k.load(minimums, floats, offset=4 * (self.rows * i + row), align=4)
                for i in range(n_sums if codes.has_m else 0)
            ]
            for t in range(spec.nr):
                upper, lower = (acc[row // 2 + i][t // 2] for i in range(2))
                mine = k.shuffle(upper, lower, [t % 2 + 2 * i for i in range(QUAD)])
                if _by_magic(k, codes):
                    k.fence()  # a copy of less for each: the product is added to it in place
                    less = k.load(self.less, floats, offset=4 * row)
                    dot = k.fma(mine.bits(floats), d_w, less)
                else:
                    dot = mine.to(f32) * d_w
                place = self._sum(row, t)
                s = k.fma(dot, by(self.x + d_off, 4 * t), k.load(place, floats, align=4))
                for i, w in enumerate(m_w):
                    s = k.fma(w, by(self.sums_of_x, 4 * (spec.nr * i + t)), s)
                k.store(place, s, align=4)

    def results(self) -> Sums:
        """What ``Out`` writes."""
        lanes = self.k.isa.lanes
        for t in range(self.spec.nr):
            for row in range(0, self.rows, lanes):
                yield row, t, self.k.load(self._sum(row, t), f32 * lanes, align=4)

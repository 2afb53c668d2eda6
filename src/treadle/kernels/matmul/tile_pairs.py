"""The gemm tile loop with products of two rows by two tokens (``Isa.pairs``), eight values of K at
a time::

    for every 8 values kq:    acc[r][t] += panel[kq][r] * x[kq][t]          acc: i32 2 x 2
    for each scale:           sum[m][t] += f32(acc) * d_w[m] * d_x[t] (+ m_w[m] * sum_x[t])

Eight values of each token are adjacent (``ActivationLayout.unit``). Accumulators and sums fill the
registers; both have two rows and two tokens in a vector. So each scale is needed twice, and is
stored twice after the panel. Minimums have a loop of their own, without accumulators.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from treadle.formats.format import Codes
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32, i8, i32
from treadle.kernels.activation_layout import BLOCK, MAGIC, MAGIC_BITS, block_sums
from treadle.kernels.matmul.epilogue import Sums
from treadle.kernels.matmul.panel import code_type, panel_bytes, scale_bytes
from treadle.kernels.matmul.tile import KRange
from treadle.kernels.matmul.tile_shape import Tiled
from treadle.kernels.run_state import round_up

PAIRS = 8  # values of K in a column of the panel
SCALES = 32  # bytes for two rows: their scales, and the scales times -MAGIC
QUAD = 4  # lanes of a vector: two rows by two tokens


def pairs_registers(spec: Tiled, lanes: int) -> float:
    """Return the number of vector registers that the loop over K needs: accumulators, sums, tokens
    and two of weights.
    """
    return spec.mr * lanes * spec.nr / 2 + spec.nr / 2 + 2


def _n_scales(spec: Tiled) -> int:
    """Return the number of scales of a row in a panel."""
    assert spec.fmt.codes is not None, spec.w
    return spec.layout().kb * (BLOCK // spec.fmt.codes.sub)


class PairScratch:
    """Byte offsets, from a panel's start, of the data after it: the accumulators' initial values;
    for every two rows their scales, each twice, and the scales times -MAGIC; their minimums, each
    twice.
    """

    def __init__(self, spec: Tiled, rows: int) -> None:
        assert spec.fmt.codes is not None, spec.w
        self.starts = panel_bytes(spec.fmt, spec.layout(), rows)
        self.scales = self.starts + 4 * spec.nr * rows
        self.minimums = self.scales + SCALES * rows // 2 * _n_scales(spec)
        per = 8 * rows * spec.n_sums if spec.fmt.codes.has_m else 0
        self.end = self.minimums + per * _n_scales(spec)


def pairs_bytes(spec: Tiled, rows: int) -> int:
    """Return the bytes of what ``PairScratch`` places after a panel of ``rows`` rows (initial
    values of the accumulators, scales and minimums), rounded up to whole cache lines.
    """
    at = PairScratch(spec, rows)
    return round_up(at.end - at.starts, 64)


def _ends_as_float_bits(k: Builder, codes: Codes) -> bool:
    """Whether accumulators end as the bits of the float MAGIC + dot (see ``MatmulTile._block``)."""
    return k.isa.fused and not codes.long_scales


def _paired(k: Builder, a: Val, b: Val) -> list[Val]:
    """Interleave two vectors of rows, ``a`` and ``b``, those of two tokens or of two columns, into
    vectors of four lanes: ``a[i], b[i], a[i + 1], b[i + 1]`` for each even i.
    """
    n = a.ty.lanes
    return [k.shuffle(a, b, [i, n + i, i + 1, n + i + 1]) for i in range(0, n, 2)]


def fill_pairs(k: Builder, spec: Tiled, panel: Val) -> None:
    """Store the data after a packed panel that its tiles need (``PairScratch``).

    Each accumulator loads its own copy of its initial value. LLVM would copy a single register by
    instructions that compete with the products for execution units.
    """
    act = spec.layout()
    codes = spec.fmt.codes
    assert codes is not None, spec.w
    rows = spec.mr * k.isa.lanes
    at = PairScratch(spec, rows)
    scales = panel + 4 * rows * act.kd
    start = k.const(MAGIC_BITS if _ends_as_float_bits(k, codes) else 0, i32 * QUAD)
    for i in range(rows * spec.nr // QUAD):
        k.store(panel, start, offset=at.starts + 16 * i)
    with k.loop(_n_scales(spec)) as piece:
        for row in range(0, rows, QUAD):
            some = k.load(scales + piece * (4 * rows), f32 * QUAD, offset=4 * row, align=4)
            to = panel + piece * (SCALES * rows // 2)
            for i, d_w in enumerate(_paired(k, some, some)):
                place = at.scales + SCALES * (row // 2 + i)
                k.store(to, d_w, offset=place)
                k.store(to, d_w * -MAGIC, offset=place + 16)
    if not codes.has_m:
        return
    minimums = scales + scale_bytes(codes, act, rows)
    with k.loop(_n_scales(spec) * spec.n_sums) as piece:
        for row in range(0, rows, QUAD):
            some = k.load(minimums + piece * (4 * rows), f32 * QUAD, offset=4 * row, align=4)
            for i, m_w in enumerate(_paired(k, some, some)):
                k.store(panel + piece * (8 * rows), m_w, offset=at.minimums + 8 * row + 16 * i)


class PairTile:
    """Tile of mr vectors of rows times nr tokens, an even number, multiplied over ``part`` of K by
    products of two rows by two tokens. ``panel`` and ``x``: addresses of the packed rows and of the
    tokens.
    """

    def __init__(self, k: Builder, spec: Tiled, panel: Val, x: Val, part: KRange) -> None:
        assert spec.fmt.codes is not None, spec.w
        assert spec.nr % 2 == 0, spec.name
        self.k = k
        self.spec = spec
        self.codes = spec.fmt.codes
        self.panel = panel
        self.x = x
        self.act = spec.layout()
        self.rows = spec.mr * k.isa.lanes
        self.at = PairScratch(spec, self.rows)
        self.sums = self._multiply(*part)

    def _multiply(
        self, first: Val, last: Val, before: Callable[[int, int], Val] | None
    ) -> list[list[Var]]:
        """Return the sums over steps ``first`` to before ``last`` of K, plus ``before(m, t)`` if
        given, as ``[row pair][token pair]``: a vector of two rows by two tokens each.
        """
        k = self.k
        pairs = range(0, self.spec.nr, 2)
        sums = [[k.var(k.zero(f32 * QUAD)) for _ in pairs] for _ in range(self.rows // 2)]
        for m, t in product(range(self.spec.mr), pairs) if before else ():
            assert before is not None
            for i, both in enumerate(_paired(k, before(m, t), before(m, t + 1))):
                sums[m * k.isa.lanes // 2 + i][t // 2].v = both
        per = BLOCK // self.codes.sub
        with k.loop(last * per, start=first * per) as piece:
            self._scale(piece, self._products(piece), sums)
        if self.codes.has_m:
            with k.loop(last * per, start=first * per) as piece:
                self._minimums(piece, sums)
        return sums

    def _products(self, piece: Val) -> list[list[Val]]:
        """Return the accumulators ``[row pair][token pair]``, i32, over the values that share the
        ``piece``-th scale.
        """
        k = self.k
        nr = self.spec.nr
        ty = code_type(self.codes, k.isa, PAIRS) * 16
        steps = self.codes.sub // PAIRS
        k.fence()
        starts = (
            k.load(self.panel, i32 * QUAD, offset=self.at.starts + 16 * i)
            for i in range(self.rows * nr // QUAD)
        )
        acc = [[k.var(next(starts)) for _ in range(nr // 2)] for _ in range(self.rows // 2)]
        with k.loop((piece + 1) * steps, start=piece * steps) as kq:
            at = self.x + kq * (PAIRS * nr)
            x = [k.load(at, i8 * 16, offset=PAIRS * t) for t in range(0, nr, 2)]
            for r, row in enumerate(acc):
                w = k.load(self.panel + kq * (PAIRS * self.rows), ty, offset=16 * r)
                for t, both in enumerate(x):
                    row[t].v = k.isa.pairs(k, row[t].v, w, both)
        return [[var.v for var in row] for row in acc]

    def _by_token(self, v: Val) -> list[Val]:
        """Spread ``v``, f32 ``[nr]``, to one vector for each two tokens: t, t + 1, t, t + 1."""
        pairs = range(0, self.spec.nr, 2)
        return [self.k.shuffle(v, v, [t, t + 1, t, t + 1]) for t in pairs]

    def _scale(self, piece: Val, acc: list[list[Val]], sums: list[list[Var]]) -> None:
        """Add the accumulators ``acc`` (those of ``_products``) to the sums, times the ``piece``-th
        scales (for MAGIC see ``MatmulTile._block``).
        """
        k = self.k
        scales = self.panel + piece * (SCALES * self.rows // 2)
        d_x = self._by_token(self._d_x(piece))
        for r, row in enumerate(acc):
            place = self.at.scales + SCALES * r
            d_w = k.load(scales, f32 * QUAD, offset=place)
            for t, done in enumerate(row):
                if _ends_as_float_bits(k, self.codes):
                    k.fence()  # a copy of ``less`` for each: the product is added to it in place
                    less = k.load(scales, d_w.ty, offset=place + 16)
                    dot = k.fma(done.bits(d_w.ty), d_w, less)
                else:
                    dot = done.to(f32) * d_w
                sums[r][t].v = k.fma(dot, d_x[t], sums[r][t].v)

    def _d_x(self, piece: Val) -> Val:
        """Return the tokens' scales for the ``piece``-th scale of weights, f32 ``[nr]``."""
        nr = self.spec.nr
        act = self.act
        block = piece // (BLOCK // self.codes.sub)
        return self.k.load(self.x + block * (4 * nr), f32 * nr, offset=act.d_off, align=4)

    def _minimums(self, piece: Val, sums: list[list[Var]]) -> None:
        """Add the products of minimums, for the ``piece``-th scale, to the sums."""
        k = self.k
        n_sums = self.spec.n_sums
        ty = i32 * self.spec.nr
        minimums = self.panel + piece * (8 * self.rows * n_sums)
        for i in range(n_sums):
            at = (piece * n_sums + i) * ty.n_bytes + self.act.comp_off
            comp = k.load(self.x, ty, offset=at, align=4)
            sums_of_x = self._by_token(block_sums(k, comp, self._d_x(piece)))
            for r, row in enumerate(sums):
                place = self.at.minimums + 8 * self.rows * i + 16 * r
                m_w = k.load(minimums, f32 * QUAD, offset=place)
                for total, by in zip(row, sums_of_x, strict=True):
                    total.v = k.fma(m_w, by, total.v)

    def results(self) -> Sums:
        """Yield (first row, token, vector of rows), as ``Epilogue.store`` takes them."""
        for t, r in product(range(self.spec.nr), range(0, self.rows // 2, 2)):
            upper, lower = (self.sums[r + i][t // 2].v for i in range(2))
            yield 2 * r, t, self.k.shuffle(upper, lower, [t % 2 + 2 * i for i in range(QUAD)])

"""The gemm tile loop with dots, for nr tokens and mr vectors of rows::

for each dword kd of K:   acc[m][t] += dot(panel[kd][m], x[kd][t])      acc: i32 (q8) or f32
q8, every 32 values:      sum[m][t] += f32(acc[m][t]) * d_w[m] * d_x[t] (+ m_w[m] * sum_x[t])
                          acc = comp[t] = -offset * sum_x[t]
q16(n), every 256 values: sum[m][t] += f32(acc[m][t]) * d_w[m] * d_x[t];  acc = 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TypeAlias

from treadle.jit.language import Builder, Operand, Val, Var
from treadle.jit.types import Ty, bf16, f32, i8, i16, i32
from treadle.kernels.activation_layout import (
    BLOCK,
    MAGIC,
    MAGIC_BITS,
    OFFSET,
    PAIR,
    SPAN,
    WORDS,
    block_sums,
    scaled_comp,
)
from treadle.kernels.matmul.epilogue import Sums
from treadle.kernels.matmul.panel import (
    code_offset,
    code_top,
    code_type,
    panel_bytes,
    scale_bytes,
    short_dots,
)
from treadle.kernels.matmul.tile_shape import Tiled

Ends: TypeAlias = "tuple[Val, Val]"  # steps of K: the first, and one past the last
# The same, and the previous sums of (m, t).
KRange: TypeAlias = "tuple[Val, Val, Callable[[int, int], Val] | None]"
Dots: TypeAlias = "dict[tuple[int, int], Val]"  # by m and t
STEP = {
    "q8": 8,
    "q16": SPAN // 2,
    "q16n": SPAN // 2,
    "q16x2": PAIR // 2,
    "bf16": 4,
    "bf16x2": 8,
    "bf16x3": 12,
    "f32": 4,
}  # dwords of K an iteration
WORDS_STEP = 8  # dwords of a q16 span that are unrolled


class MatmulTile:
    """Tile of mr vectors of rows times nr tokens, multiplied over ``part`` of K. ``panel`` and
    ``x``: addresses of the packed rows and of the tokens. Its sums stay in registers.
    """

    def __init__(self, k: Builder, spec: Tiled, panel: Val, x: Val, part: KRange) -> None:
        self.k = k
        self.isa = k.isa
        self.spec = spec
        self.panel = panel
        self.x = x
        self.act = spec.layout()
        self.rows = spec.mr * self.isa.lanes
        self.lane_values = panel + panel_bytes(spec.fmt, self.act, self.rows)
        self.sums = self._multiply(*part)

    def _multiply(
        self, first: Val, last: Val, before: Callable[[int, int], Val] | None
    ) -> list[list[Var]]:
        """Return the sums ``[m][t]`` over steps ``first`` to before ``last`` of K (STEP dwords
        each), plus ``before(m, t)`` if given.
        """
        k = self.k
        spec = self.spec
        floats = f32 * self.isa.lanes
        sums = [
            [k.var(before(m, t) if before else k.zero(floats)) for t in range(spec.nr)]
            for m in range(spec.mr)
        ]
        step = STEP[spec.act]
        with k.loop(last, start=first) as c:
            if spec.act == "q8":
                assert spec.fmt.codes is not None
                for part in range(BLOCK // spec.fmt.codes.sub):
                    self._block(c, part, sums)
            elif spec.act in WORDS:
                self._span(c, sums)
            else:
                for u in range(step):
                    self._dwords(c * step + u, sums)
        return sums

    def results(self) -> Sums:
        """Yield (first row, token, vector of rows), as ``Epilogue.store`` takes them."""
        for t, m in product(range(self.spec.nr), range(self.spec.mr)):
            yield self.isa.lanes * m, t, self.sums[m][t].v

    def _weights(self, kd: Val) -> list[Val]:
        """Load the ``kd``-th dword of K of the panel's rows, as i32, in mr vectors."""
        lanes = self.isa.lanes
        at = self.panel + kd * (4 * self.rows)
        return [
            self.k.load(at, i32 * lanes, offset=4 * lanes * m, align=4) for m in range(self.spec.mr)
        ]

    def _tokens(self, kd: Val) -> Iterator[Val]:
        """Yield each token's ``kd``-th dword, in every lane: f32 for float kinds, because some
        machines multiply by one lane of a float vector; else i32.
        """
        k = self.k
        lanes = self.isa.lanes
        nr = self.spec.nr
        at = self.x + kd * (4 * nr)
        ty = i32 if self.spec.act in ("q8", *WORDS) else f32
        together = nr // lanes * lanes if self.isa.tiles.by_lane else 0
        for first in range(0, together, lanes):
            some = k.load(at, ty * lanes, offset=4 * first, align=4)
            yield from (k.shuffle(some, some, [lane] * lanes) for lane in range(lanes))
        for t in range(together, nr):
            yield k.splat(k.load(at, ty, offset=4 * t, align=4), ty * lanes)

    def _dwords(self, kd: Val, sums: list[list[Var]]) -> None:
        k = self.k
        isa = self.isa
        weights = self._weights(kd)
        for t, x in enumerate(self._tokens(kd)):
            for m, w in enumerate(weights):
                if self.spec.act == "bf16":
                    assert isa.dot_bf16 is not None
                    ty = bf16 * (2 * isa.lanes)
                    sums[m][t].v = isa.dot_bf16(k, sums[m][t].v, w.bits(ty), x.bits(ty))
                else:
                    ty = f32 * isa.lanes
                    sums[m][t].v = k.fma(w.bits(ty), x.bits(ty), sums[m][t].v)

    def _span(self, c: Val, sums: list[list[Var]]) -> None:
        """Add the products of the ``c``-th span of words to ``sums``: i16 dots, then scales."""
        k = self.k
        isa = self.isa
        spec = self.spec
        act = self.act
        dot = isa.word_dots
        lanes = isa.lanes
        words = i16 * (2 * lanes)
        acc = {at: k.var(k.zero(i32 * lanes)) for at in product(range(spec.mr), range(spec.nr))}
        n_steps = STEP[spec.act]
        stop = k.min((c + 1) * n_steps, act.kd)
        with k.loop(stop, start=c * n_steps, step=WORDS_STEP) as first:
            for u in range(WORDS_STEP):
                weights = self._weights(first + u)
                for t, x in enumerate(self._tokens(first + u)):
                    for m, w in enumerate(weights):
                        acc[m, t].v = dot(k, acc[m, t].v, w.bits(words), x.bits(words))
                if spec.fence and (u + 1) % spec.fence == 0:
                    k.fence()
        scales = self.panel + (4 * self.rows * act.kd + c * (4 * self.rows))
        d_x = self.x + (act.d_off + c * (4 * spec.nr))
        for m in range(spec.mr):
            d_w = k.load(scales, f32 * lanes, offset=4 * lanes * m, align=4)
            for t in range(spec.nr):
                scale = k.splat(k.load(d_x, f32, offset=4 * t, align=4), d_w.ty)
                total = sums[m][t]
                total.v = k.fma(acc[m, t].v.to(f32) * scale, d_w, total.v)

    def _dots(self, piece: Val, start: Callable[[int, int], Val]) -> Dots:
        """Return the dots of the codes that share the ``piece``-th scale, added to ``start(m, t)``.
        As many as fit an i16 are added up there first, on machines with such dots (``Isa.shorts``).
        """
        k = self.k
        isa = self.isa
        spec = self.spec
        codes = self.spec.fmt.codes
        assert codes is not None
        n_steps = codes.sub // 4
        ty = code_type(codes, isa)
        room = short_dots(codes, isa)
        acc: Dots = {}
        if not room:  # otherwise they start when the first i16 are full
            acc = {(m, t): start(m, t) for t, m in product(range(spec.nr), range(spec.mr))}
        short: Dots = {}
        for step in range(n_steps):
            kd = piece * n_steps + step
            weights = [w.bits(ty * (4 * isa.lanes)) for w in self._weights(kd)]
            for t, dword in enumerate(self._tokens(kd)):
                x = dword.bits(i8 * (4 * isa.lanes))
                for m, w in enumerate(weights):
                    if not (isa.shorts and room):
                        acc[m, t] = isa.dot4(k, acc[m, t], w, x, code_top(codes, isa))
                        continue
                    s = isa.shorts.dot(k, short.pop((m, t), None), w, x)
                    if (step + 1) % room and step + 1 < n_steps:
                        short[m, t] = s
                    else:
                        before = acc[m, t] if (m, t) in acc else start(m, t)
                        acc[m, t] = isa.shorts.widen(k, before, s)
            if spec.fence and (step + 1) % spec.fence == 0:
                k.fence()
        return acc

    def _block(self, b: Val, part: int, sums: list[list[Var]]) -> None:
        """Add the products of the values that share a scale (``part`` of the ``b``-th block, 32
        values or 16) to ``sums``: dots, then scales.

        An accumulator ends as the bits of the float MAGIC + dot (see
        ``kernels/activation_layout.py``). ``fma(that, d_w, -MAGIC * d_w)`` is dot * d_w, rounded
        once, without a conversion: two operations besides eight dots, where converting takes three.
        The product of MAGIC and a scale with all of f32's bits is not exact; then the dot is
        converted.
        """
        k = self.k
        isa = self.isa
        spec = self.spec
        act = self.act
        lanes = isa.lanes
        codes = spec.fmt.codes
        assert codes is not None
        floats = f32 * lanes
        group = b * (4 * spec.nr)
        piece = b * (BLOCK // codes.sub) + part  # index of the scale
        n_sums = spec.n_sums

        def in_lanes(p: Val, ty: Ty, t: int, offset: Operand = 0) -> Val:
            return k.splat(k.load(p + 4 * t, ty, offset=offset, align=4), ty * lanes)

        offset = code_offset(codes, isa)
        comp_at = piece * (4 * spec.nr * n_sums) + act.comp_off
        if codes.has_m or offset not in (0, OFFSET):
            # Values that each token needs in every lane are computed for all tokens at once and
            # read back one by one: a broadcast from memory costs no arithmetic.
            comp = k.load(self.x, i32 * spec.nr, offset=comp_at, align=4)
            if codes.has_m:
                d = k.load(self.x, f32 * spec.nr, offset=group + act.d_off, align=4)
                k.store(self.lane_values, block_sums(k, comp, d))
                for i in range(1, n_sums):
                    comp = k.load(self.x + 4 * spec.nr * i, comp.ty, offset=comp_at, align=4)
                    k.store(self.lane_values, block_sums(k, comp, d), offset=4 * spec.nr * i)
            else:
                k.store(self.lane_values, scaled_comp(offset, comp) + MAGIC_BITS)
            k.fence()
        base, at = (self.x, comp_at) if offset == OFFSET else (self.lane_values, 0)

        def start(m: int, t: int) -> Val:
            """Return the initial value of the accumulator of (m, t)."""
            if offset:
                return in_lanes(base, i32, t, at)
            if isa.shorts:
                return k.const(MAGIC_BITS, i32 * lanes)
            # Each accumulator has its own copy in memory: from one constant LLVM would make 16
            # copies in registers, and spill.
            return in_lanes(self.lane_values, i32, (n_sums + m) * spec.nr + t)

        acc = self._dots(piece, start)
        scales = self.panel + (4 * self.rows * act.kd)
        for m in range(spec.mr):
            at = piece * (4 * self.rows) + 4 * lanes * m
            d_w = k.load(scales, floats, offset=at, align=4)
            less = d_w * -MAGIC
            m_w: list[Val] = []
            if codes.has_m:
                at = piece * (4 * self.rows * n_sums) + 4 * lanes * m
                at = at + scale_bytes(codes, act, self.rows)
                m_w = [
                    k.load(scales, floats, offset=at + 4 * self.rows * i, align=4)
                    for i in range(n_sums)
                ]
            for t in range(spec.nr):
                d_x = in_lanes(self.x, f32, t, group + act.d_off)
                if isa.fused and not codes.long_scales:
                    dot = k.fma(acc[m, t].bits(floats), d_w, less)
                else:
                    dot = (acc[m, t] - MAGIC_BITS).to(f32) * d_w
                total = k.fma(dot, d_x, sums[m][t].v)
                for i, w in enumerate(m_w):
                    total = k.fma(w, in_lanes(self.lane_values, f32, i * spec.nr + t), total)
                sums[m][t].v = total

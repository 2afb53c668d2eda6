"""Few tokens on matrix registers: codes as bytes, each block's sums scaled for themselves.

Codes of 16 rows and activations, both int8, are met by one register of sums for each scale of a
row: 32 values of K, or 16. That leaves most of a product's speed unused, and beside many tokens
scaling would be all there is to do (``matrix.py``); but nothing is rounded to bf16, and packing
only unpacks codes, whose order stays::

    sums[r, t] += f32(codes[r] . x[t]) * d_w[r] * d_x[t]     a row's sums in one vector

While a *strip* of 16 rows meets the tokens, the next one is unpacked: memory, vectors and registers
have work at the same time. A strip has a few rows of each of an item's runs, which are streams of
memory (``matrix.RUNS``). Its row holds codes, in order, then scales and minimums in f32.
"""

from __future__ import annotations

from treadle.formats.format import Codes
from treadle.jit.language import Builder, Isa, Operand, Val, Var
from treadle.jit.types import f32, i8, i32
from treadle.kernels.act import BLOCK, DWORD, block_sums
from treadle.kernels.blocks import At, WeightRows, ordered_codes, scales_of
from treadle.kernels.gemm import Gemm
from treadle.kernels.matmul import Segment, Share, n_strips, pick_segment, shares
from treadle.kernels.matrix import AHEAD, REGISTER, RUNS, SIDE
from treadle.kernels.out import Out, Sums
from treadle.kernels.spec import LINE, Frame, round_up
from treadle.kernels.transpose import transpose
from treadle.record import dataclass

# Registers of sums that are made before the first is scaled: a turn, in which each of as many runs
# of the next strip's rows has its part.
AT_ONCE = RUNS
SMALL = 8  # small blocks that are unpacked together
EACH = SIDE // RUNS  # rows of a run in a strip


@dataclass(frozen=True)
class BytesGemm(Gemm):
    """``act`` "q8", ``nr`` 16; ``mr * lanes`` a multiple of 16."""

    @property
    def name(self) -> str:
        return f"{super().name}_bytes"

    @property
    def codes(self) -> Codes:
        assert self.fmt.codes is not None, self.fmt.name
        return self.fmt.codes

    @property
    def per_scale(self) -> int:
        """Values of K that share one: those of a product of registers."""
        return self.codes.sub

    @property
    def n_products(self) -> int:
        """Products of registers over all of K."""
        return self.k // self.per_scale

    @property
    def turns(self) -> int:
        """Rounds of AT_ONCE of them."""
        return -(-self.n_products // AT_ONCE)

    @property
    def n_blocks(self) -> int:
        """Blocks of a row that are unpacked together."""
        n = 1
        while self.fmt.block < 256 and n < SMALL and self.k // self.fmt.block % (2 * n) == 0:
            n *= 2
        return n

    @property
    def scale_offs(self) -> list[int]:
        """Where in a strip's row scales begin, and minimums if there are any."""
        return [
            round_up(self.k, LINE) + 4 * self.n_products * i for i in range(1 + self.codes.has_m)
        ]

    @property
    def row_pitch(self) -> int:
        """Bytes of a strip's row: an odd number of lines, or rows would share a few sets of L1."""
        end = self.scale_offs[-1] + 4 * self.n_products
        return (round_up(end, LINE) // LINE | 1) * LINE

    def scratch(self, lanes: int) -> int:
        """Two strips, AT_ONCE registers, the sums of all rows, and those of the tokens' values."""
        n_lines = self.rows_per_item(lanes) + self.n_products * self.codes.has_m
        return 2 * SIDE * self.row_pitch + AT_ONCE * REGISTER + n_lines * LINE

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        rows, matrix = self.rows_per_item(isa.lanes), isa.matrix
        assert matrix is not None, isa.name
        assert matrix.begin_bytes is not None, isa.name
        share_of = shares(k, frame, self, lambda: n_strips(k, frame, self, rows))
        strips, made = frame.scratch, frame.scratch + 2 * SIDE * self.row_pitch
        sums = made + AT_ONCE * REGISTER
        totals = sums + rows * LINE

        def begin(item: Val) -> tuple[Share, Segment, _Strip]:
            share = share_of(item)
            seg = pick_segment(k, frame, self, share.strip, rows, share.expert)
            left = seg.rows.m - seg.rows.first
            n = k.min((left + (SIDE - 1)) // SIDE, rows // SIDE)
            return share, seg, _Strip(seg.rows, n, k.i64(0))

        matrix.begin_bytes(k, made, self.per_scale)
        _, _, first = begin(frame.begin)
        with k.loop(self.turns) as turn:
            for i in range(AT_ONCE):
                self._unpack(k, strips, first, turn, i)
        full = k.var(k.i64(0))  # which of the two strips is unpacked
        with k.loop(frame.end, start=frame.begin) as item:
            share, seg, first = begin(item)
            _, _, last = begin(k.min(item + 1, frame.end - 1))
            n = first.n
            with k.loop(share.stop, start=share.start, step=self.nr) as token:
                x = frame.x + token // self.nr * self.layout().group_bytes
                tokens = _Tokens(k, self, x, totals)
                then = last.unless(k, token + self.nr < share.stop, first)
                with k.loop(n) as s:
                    strip = strips + full.v * (SIDE * self.row_pitch)
                    full.v = k.i64(1) - full.v
                    to = strips + full.v * (SIDE * self.row_pitch)
                    here = _Strip(seg.rows, n, s)
                    soon = then.unless(k, s + 1 < n, _Strip(seg.rows, n, s + 1))
                    for r, total in enumerate(self._sums(k, strip, tokens, made, to, soon)):
                        at = sums + here.row(r // EACH, r % EACH) * LINE
                        k.store(at, total.v, align=LINE)
                out = Out(k, self, frame, seg, token)
                with k.loop(n) as s:
                    held = _columns(k, sums + s * (SIDE * LINE))
                    out.store(held, s * SIDE, False, add=False)
        matrix.end(k)

    def _unpack(self, k: Builder, to: Val, strip: _Strip, turn: Val, run: int) -> None:
        """A turn's share of a strip's rows of a run: as many blocks as all turns do them in."""
        per_row = self.k // (self.n_blocks * self.fmt.block)
        n = -(-EACH * per_row // self.turns)
        for i in range(n):
            at = k.min(turn * n + i, EACH * per_row - 1)
            row, c = at // per_row, at % per_row
            blocks = strip.weights(k, run, row).block(c, self.n_blocks)
            blocks.prefetch(k, AHEAD // sum(self.fmt.strides), self.n_blocks, 3)
            self._some(k, blocks, to + (row + EACH * run) * self.row_pitch, c * self.n_blocks)

    def _some(self, k: Builder, first: At, to: Val, b: Val) -> None:
        """Blocks that are unpacked together, from a row's ``b``-th on."""
        codes, size, n = self.codes, self.fmt.block, self.n_blocks
        blocks = [first.block(i) for i in range(n)]
        together = max(1, 2 * k.isa.vector_bits // 8 // size)
        for i in range(0, n, together):
            offset = i * size
            for held in ordered_codes(k, *blocks[i : i + together]):
                signed = (held - codes.offset).bits(i8.like(held.ty))
                k.store(to + b * size, signed, offset=offset)
                offset += held.ty.lanes
        scales = [v for v in scales_of(k, blocks) if v is not None]
        for v, off in zip(scales, self.scale_offs, strict=True):
            k.store(to + b * (size // self.per_scale * 4), v, offset=off)

    def _sums(
        self, k: Builder, strip: Val, tokens: _Tokens, made: Val, to: Val, soon: _Strip
    ) -> list[Var]:
        """Of 16 rows with a group of tokens. Some products are scaled while later ones are made,
        and what comes ``soon`` is unpacked into the other strip, ``to``.
        """
        sums = [k.var(k.zero(f32 * SIDE)) for _ in range(SIDE)]
        begun = min(self.n_products, AT_ONCE)
        turns, rest = divmod(self.n_products - begun, AT_ONCE)
        for i in range(AT_ONCE):
            if i < begun:
                self._multiply(k, strip, tokens, k.i64(i), i, made)
            self._unpack(k, to, soon, k.i64(0), i)
        with k.loop(turns) as c:
            for i in range(AT_ONCE):
                at = c * AT_ONCE + i
                self._scale(k, strip, tokens, at, made + i * REGISTER, sums)
                self._multiply(k, strip, tokens, at + AT_ONCE, i, made)
                self._unpack(k, to, soon, c + 1, i)
        for i in range(begun + rest):
            at = k.i64(turns * AT_ONCE + i)
            self._scale(k, strip, tokens, at, made + i % AT_ONCE * REGISTER, sums)
            if i < rest:
                self._multiply(k, strip, tokens, at + AT_ONCE, i, made)
        for i in range(AT_ONCE if rest else 0):
            self._unpack(k, to, soon, k.i64(turns + 1), i)
        return sums

    def _multiply(
        self, k: Builder, strip: Val, tokens: _Tokens, at: Val, i: int, made: Val
    ) -> None:
        """The ``at``-th product, into the ``i``-th register of sums, and that to scratch."""
        matrix, n = k.isa.matrix, self.per_scale
        assert matrix is not None, k.isa.name
        assert matrix.dot_bytes is not None, k.isa.name
        matrix.zero(k, i)
        matrix.load(k, 4 + i % 2, strip + at * n, self.row_pitch)
        matrix.load(k, 6 + i % 2, tokens.x + at * (n // DWORD * LINE), LINE)
        matrix.dot_bytes(k, i, 4 + i % 2, 6 + i % 2)
        matrix.store(k, i, made + i * REGISTER, LINE)

    def _scale(
        self, k: Builder, strip: Val, tokens: _Tokens, at: Val, made: Val, sums: list[Var]
    ) -> None:
        """Add a register's sums, scaled, and minimums times the sums of what they are for."""
        d, ty = tokens.scales(at), f32 * SIDE
        values = tokens.sums(at) if self.codes.has_m else None

        def of_row(r: int, off: int) -> Val:
            place = strip + at * 4 + (r * self.row_pitch + off)
            return k.splat(k.load(place, f32, align=4), ty)

        for r, total in enumerate(sums):
            dot = k.load(made, i32 * SIDE, offset=r * LINE, align=LINE)
            total.v = k.fma(dot.to(f32), d * of_row(r, self.scale_offs[0]), total.v)
            if values is not None:
                total.v = k.fma(of_row(r, self.scale_offs[1]), values, total.v)
        k.fence()


def _columns(k: Builder, sums: Val) -> Sums:
    """What ``Out`` writes, of 16 rows."""
    held = [k.load(sums, i32 * SIDE, offset=r * LINE, align=LINE) for r in range(SIDE)]
    for i, column in enumerate(transpose(k, held, k.isa.lanes)):
        for j, v in enumerate(column):
            yield v.ty.lanes * j, i, v.bits(f32 * v.ty.lanes)


@dataclass
class _Strip:
    """The ``s``-th of an item's ``n`` strips: EACH rows of each of RUNS runs."""

    rows: WeightRows
    n: Val
    s: Val

    def row(self, run: int, r: Operand) -> Val:
        """Which of the item's rows the ``r``-th of a run's is."""
        return self.n * (EACH * run) + self.s * EACH + r

    def weights(self, k: Builder, run: int, r: Val) -> At:
        """Where that row is."""
        return self.rows.row(k, self.row(run, r))

    def unless(self, k: Builder, holds: Val, other: _Strip) -> _Strip:
        """This strip, or another one if something holds."""
        mine, its = ([*each.rows.values, each.n, each.s] for each in (self, other))
        *rows, n, s = (k.select(holds, b, a) for a, b in zip(mine, its, strict=True))
        return _Strip(self.rows.of(rows), n, s)


class _Tokens:
    """A group of 16: ``x``'s dwords are what registers load. ``room``: for the sums of the values
    that share a minimum.
    """

    def __init__(self, k: Builder, spec: BytesGemm, x: Val, room: Val) -> None:
        self.k, self.spec, self.x, self.act, self.totals = k, spec, x, spec.layout(), room
        if spec.codes.has_m:
            with k.loop(spec.n_products) as at:
                comp = k.load(x + at * LINE, i32 * SIDE, offset=self.act.comp_off)
                k.store(room + at * LINE, block_sums(k, comp, self.scales(at)), align=LINE)

    def scales(self, at: Val) -> Val:
        """Of the ``at``-th product's values of K."""
        block = at // (BLOCK // self.spec.per_scale)
        return self.k.load(self.x + block * LINE, f32 * SIDE, offset=self.act.d_off)

    def sums(self, at: Val) -> Val:
        """Of those values."""
        return self.k.load(self.totals + at * LINE, f32 * SIDE, align=LINE)

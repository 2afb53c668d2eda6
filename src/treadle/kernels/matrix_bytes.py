"""Few tokens on matrix registers: codes as bytes, each block's sums scaled for themselves.

Codes of 16 rows and activations, both int8, are met by one register of sums for each scale of a
row: 32 values of K, or 16. That leaves most of a product's speed unused, and beside many tokens
scaling would be all there is to do (``matrix.py``); but nothing is rounded to bf16, and packing
only unpacks codes, whose order stays::

    sums[r, t] += f32(codes[r] . x[t]) * d_w[r] * d_x[t]     a row's sums in one vector

The vector is of 16 tokens, or of 8 and two scales' values of K side by side: a register takes both
at once, where the activations of each are zeros for the other's codes (``_Pairs``).

A panel's row holds its codes, in order, then its scales and minimums in f32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import f32, f64, i8, i32
from treadle.kernels.act import BLOCK, DWORD, block_sums
from treadle.kernels.blocks import At, WeightRows, codes_in_order, scales_of
from treadle.kernels.gemm import Gemm
from treadle.kernels.matrix import AHEAD, REGISTER, SIDE, in_runs
from treadle.kernels.out import Out, Sums
from treadle.kernels.spec import LINE, round_up
from treadle.kernels.tile import Ends, KRange
from treadle.kernels.transpose import transpose
from treadle.record import dataclass

AT_ONCE = 4  # registers of sums that are made before the first is scaled
SMALL = 8  # small blocks that are unpacked together


@dataclass(frozen=True)
class BytesGemm(Gemm):
    """``act`` "q8", ``nr`` 16, or 8 where a row has an even number of scales; ``mr * lanes`` a
    multiple of 16.
    """

    @property
    def name(self) -> str:
        return f"{super().name}_bytes"

    @property
    def per_scale(self) -> int:
        """Values of K that share one."""
        assert self.fmt.codes is not None, self.fmt.name
        return self.fmt.codes.sub

    @property
    def n_scales(self) -> int:
        """Of a row."""
        return self.k // self.per_scale

    @property
    def beside(self) -> int:
        """How many scales' values of K a product of registers takes: side by side in its sums."""
        return SIDE // self.nr

    @property
    def step(self) -> int:
        """Values of K of a product of registers."""
        return self.per_scale * self.beside

    @property
    def scales_off(self) -> int:
        """Where in a panel's row scales begin; minimums are behind them."""
        return round_up(self.k, LINE)

    @property
    def minimums_off(self) -> int:
        return self.scales_off + 4 * self.n_scales

    @property
    def row_pitch(self) -> int:
        """Bytes of a panel's row: an odd number of lines, or rows would share a few sets of L1."""
        codes = self.fmt.codes
        assert codes is not None, self.fmt.name
        minimums = 4 * (self.k // self.sub) if codes.has_m else 0
        return (round_up(self.minimums_off + minimums, LINE) // LINE | 1) * LINE

    def panel_pitch(self, lanes: int) -> int:
        return self.mr * lanes * self.row_pitch

    def sums_bytes(self, lanes: int, n_panels: int = 1) -> int:
        pairs = self.k // self.step * (self.step // DWORD + 1) * LINE if self.beside > 1 else 0
        return AT_ONCE * REGISTER + pairs

    def stage_bytes(self, lanes: int) -> int:
        return 0

    def fill(
        self, k: Builder, panel: Val, stage: Val, rows: WeightRows, part: Ends | None = None
    ) -> None:
        def pack(k: Builder, panel: Val, *source: Val) -> None:
            self._unpack(k, panel, rows.of(source))

        k.outlined("pack", (panel, *rows.values), pack)

    def _unpack(self, k: Builder, panel: Val, source: WeightRows) -> None:
        """Codes, scales and minimums of all rows."""
        fmt, n = self.fmt, 1
        while fmt.block < 256 and n < SMALL and self.k // fmt.block % (2 * n) == 0:
            n *= 2
        rows = in_runs(k, source, self.mr * k.isa.lanes)
        with rows as (at, run), k.loop(self.k // (n * fmt.block)) as c:
            for row in run:
                row.block(c, n).prefetch(k, AHEAD // sum(fmt.strides), n, 3)
            for r, row in zip(at, run, strict=True):
                self._some(k, row.block(c, n), panel + r * self.row_pitch, c * n, n)

    def _some(self, k: Builder, first: At, to: Val, b: Val, n: int) -> None:
        """``n`` blocks, from a row's ``b``-th on."""
        blocks, codes, size = [first.block(i) for i in range(n)], self.fmt.codes, self.fmt.block
        assert codes is not None, self.fmt.name
        together = max(1, 2 * k.isa.vector_bits // 8 // size)
        for i in range(0, n, together):
            held = codes_in_order(k, *blocks[i : i + together])
            k.store(to + b * size, (held - codes.offset).bits(i8.like(held.ty)), offset=i * size)
        places = (self.scales_off, self.per_scale), (self.minimums_off, self.sub)
        for v, (off, per) in zip(scales_of(k, blocks), places, strict=True):
            if v is not None:
                k.store(to + b * (size // per * 4), v, offset=off)

    @contextmanager
    def registers(self, k: Builder, free: Val) -> Iterator[None]:
        matrix = k.isa.matrix
        assert matrix is not None, k.isa.name
        assert matrix.begin_bytes is not None, k.isa.name
        matrix.begin_bytes(k, free, self.step)
        yield
        matrix.end(k)

    @contextmanager
    def tiles(
        self,
        k: Builder,
        panel: Val,
        x: Val,
        free: Val,
        part: KRange | None = None,
        out: Out | None = None,
        n_panels: int = 1,
    ) -> Iterator[tuple[Val, Sums]]:
        n = n_panels * self.mr * k.isa.lanes // SIDE
        n_strips = k.i64(n)
        if out is not None:
            rows = out.seg.rows
            n_strips = k.min((rows.m - rows.first + (SIDE - 1)) // SIDE, n)
        tokens = (_Pairs if self.beside > 1 else _Tokens)(k, self, x, free + AT_ONCE * REGISTER)
        with k.loop(n_strips) as s:
            strip = panel + s * (SIDE * self.row_pitch)
            yield s * SIDE, self._sums(k, strip, tokens, free)

    def _sums(self, k: Builder, strip: Val, tokens: _Tokens, free: Val) -> Sums:
        """Of 16 rows with a group of tokens; some are scaled while later steps' are made."""
        n = self.k // self.step
        sums = [k.var(k.zero(f32 * SIDE)) for _ in range(SIDE)]
        first = min(n, AT_ONCE)
        for i in range(first):
            self._multiply(k, strip, tokens, k.i64(i), i, free)
        full, rest = divmod(n - first, AT_ONCE)
        with k.loop(full) as c:
            for i in range(AT_ONCE):
                at = c * AT_ONCE + i
                self._scale(k, strip, tokens, at, free + i * REGISTER, sums)
                self._multiply(k, strip, tokens, at + AT_ONCE, i, free)
        for i in range(first + rest):
            at = k.i64(full * AT_ONCE + i)
            self._scale(k, strip, tokens, at, free + i % AT_ONCE * REGISTER, sums)
            if i < rest:
                self._multiply(k, strip, tokens, at + AT_ONCE, i, free)
        held = [tokens.joined(made.v) for made in sums]
        codes = self.fmt.codes
        if codes is not None and codes.has_m:
            held = self._with_minimums(k, strip, tokens.x, held)
        dwords = [v.bits(i32 * self.nr) for v in held]
        for i, column in enumerate(transpose(k, dwords, k.isa.lanes)):
            for j, v in enumerate(column):
                yield v.ty.lanes * j, i, v.bits(f32 * v.ty.lanes)

    def _multiply(
        self, k: Builder, strip: Val, tokens: _Tokens, at: Val, i: int, free: Val
    ) -> None:
        """The ``at``-th step of K, into the ``i``-th register of sums, and that to scratch."""
        matrix = k.isa.matrix
        assert matrix is not None, k.isa.name
        assert matrix.dot_bytes is not None, k.isa.name
        matrix.zero(k, i)
        matrix.load(k, 4 + i % 2, strip + at * self.step, self.row_pitch)
        matrix.load(k, 6 + i % 2, tokens.values + at * (self.step // DWORD * LINE), LINE)
        matrix.dot_bytes(k, i, 4 + i % 2, 6 + i % 2)
        matrix.store(k, i, free + i * REGISTER, LINE)

    def _scale(
        self, k: Builder, strip: Val, tokens: _Tokens, at: Val, made: Val, sums: list[Var]
    ) -> None:
        """Add a register's sums, scaled."""
        d, ty = tokens.scales(at), f32 * SIDE
        for r, total in enumerate(sums):
            dot = k.load(made, i32 * SIDE, offset=r * LINE, align=LINE)
            place = strip + at * (4 * self.beside) + (r * self.row_pitch + self.scales_off)
            kind = f64 if self.beside == 2 else f32
            scale = k.splat(k.load(place, kind, align=4), kind * (SIDE // self.beside)).bits(ty)
            total.v = k.fma(dot.to(f32), d * scale, total.v)
        k.fence()

    def _with_minimums(self, k: Builder, strip: Val, x: Val, held: list[Val]) -> list[Val]:
        """Rows' sums, and each minimum times the sum of the values that it is for."""
        act, n = self.layout(), self.nr
        sums = [k.var(v) for v in held]
        with k.loop(self.k // self.sub) as b:
            block = b // (BLOCK // self.sub)
            d = k.load(x + block * (4 * n), f32 * n, offset=act.d_off)
            comp = k.load(x + b * (4 * n), i32 * n, offset=act.comp_off)
            total = block_sums(k, comp, d)
            for r, made in enumerate(sums):
                at = strip + b * 4 + (r * self.row_pitch + self.minimums_off)
                made.v = k.fma(k.splat(k.load(at, f32), f32 * n), total, made.v)
        return [made.v for made in sums]


class _Tokens:
    """A group of 16: its dwords are what registers load."""

    def __init__(self, k: Builder, spec: BytesGemm, x: Val, room: Val) -> None:
        self.k, self.spec, self.x, self.act = k, spec, x, spec.layout()
        self.values = x

    def scales(self, at: Val) -> Val:
        """Of a step of K."""
        block = at // (BLOCK // self.spec.per_scale)
        return self.k.load(self.x + block * (4 * SIDE), f32 * SIDE, offset=self.act.d_off)

    def joined(self, sums: Val) -> Val:
        """A row's sums, one for each token."""
        return sums


class _Pairs(_Tokens):
    """A group of 8, put in order in scratch: of a step the first scale's values stand in even
    columns, the second one's in odd ones, with zeros where the other's codes are met; and what they
    are scaled by.
    """

    def __init__(self, k: Builder, spec: BytesGemm, x: Val, room: Val) -> None:
        super().__init__(k, spec, x, room)
        n, per = spec.nr, spec.per_scale
        rows, steps = per // DWORD, spec.k // spec.step
        self.values, self.d = room, room + steps * (spec.step // DWORD * LINE)
        with k.loop(steps) as at:
            to = room + at * (2 * rows * LINE)
            for half, row in product(range(2), range(rows)):
                line = half * rows + row
                v = k.load(x + at * (2 * rows * 4 * n), i32 * n, offset=line * 4 * n)
                places = [j // 2 if j % 2 == half else n for j in range(SIDE)]
                k.store(to, k.shuffle(v, k.zero(v.ty), places), offset=line * LINE, align=LINE)
            blocks = [(at * 2 + half) // (BLOCK // per) for half in range(2)]
            even, odd = (k.load(x + b * (4 * n), f32 * n, offset=self.act.d_off) for b in blocks)
            zipped = k.shuffle(even, odd, [j // 2 + n * (j % 2) for j in range(SIDE)])
            k.store(self.d + at * LINE, zipped, align=LINE)

    def scales(self, at: Val) -> Val:
        return self.k.load(self.d + at * LINE, f32 * SIDE, align=LINE)

    def joined(self, sums: Val) -> Val:
        even, odd = (self.k.shuffle(sums, sums, range(i, SIDE, 2)) for i in range(2))
        return even + odd

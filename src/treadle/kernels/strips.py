"""Few tokens: products of bytes, of rows in strips that are unpacked without changing their order.

A panel of many rows (``gemm.py``) is put in an order of its own, which takes as long as
multiplying it by a few tokens. Here 16 rows, a *strip*, have their codes as bytes in the order of
the file, then scales and minimums in f32, and tokens, which `Act` has side by side, stand in the
columns::

    sums[r, t] += f32(codes[r] . x[t]) * d_w[r] * d_x[t] (+ m_w[r] * sum_x[t])

a row's sums in one vector, for all values of K that share a scale. Subclasses say how these are
made, on matrix registers (``matrix_bytes.py``) or in vectors (``vector_bytes.py``). A strip has a
few rows of each of an item's runs, which are streams of memory (``matrix.RUNS``).
"""

from __future__ import annotations

from collections.abc import Iterator

from treadle.formats.format import Codes
from treadle.jit.language import Builder, Isa, Operand, Val, Var
from treadle.jit.types import Ty, f32, i32
from treadle.kernels.act import BLOCK, DWORD, block_sums
from treadle.kernels.blocks import At, WeightRows, ordered_codes, scales_of
from treadle.kernels.gemm import Gemm
from treadle.kernels.matmul import Segment, Share, n_strips, pick_segment, shares
from treadle.kernels.matrix import AHEAD, RUNS, SIDE
from treadle.kernels.out import Out, Sums
from treadle.kernels.spec import LINE, Frame, round_up
from treadle.kernels.transpose import transpose
from treadle.record import dataclass

# Products to a turn, in which each of as many runs of the next strip's rows has its part.
AT_ONCE = RUNS
SMALL = 8  # small blocks that are unpacked together
EACH = SIDE // RUNS  # rows of a run in a strip


@dataclass(frozen=True)
class StripGemm(Gemm):
    """``act`` "q8"; ``mr * lanes`` a multiple of 16. ``groups`` of nr tokens meet a strip while it
    is unpacked.
    """

    groups: int = 1

    @property
    def codes(self) -> Codes:
        assert self.fmt.codes is not None, self.fmt.name
        return self.fmt.codes

    @property
    def per_scale(self) -> int:
        """Values of K that share one: those of a product."""
        return self.codes.sub

    @property
    def n_products(self) -> int:
        """Products over all of K."""
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

    @property
    def line(self) -> int:
        """Bytes of a dword of each token."""
        return DWORD * self.nr

    @property
    def made_bytes(self) -> int:
        """Scratch for products that are not scaled yet."""
        return 0

    @property
    def n_held(self) -> int:
        """Strips that there are at once: with two the next is unpacked while one is multiplied."""
        return 1

    def scratch(self, lanes: int) -> int:
        """Strips, products, the sums of all rows, and those of the tokens' values."""
        n_lines = self.groups * (self.rows_per_item(lanes) + self.n_products * self.codes.has_m)
        return self.n_held * SIDE * self.row_pitch + self.made_bytes + n_lines * self.line

    def begin(self, k: Builder, made: Val) -> None:
        """Before all products of a call; ``made``: that scratch."""

    def end(self, k: Builder) -> None:
        """After them."""

    def stored(self, k: Builder, codes: Val) -> Val:
        """Codes as a strip holds them."""
        raise NotImplementedError

    def sums(
        self, k: Builder, strip: Val, tokens: Tokens, made: Val, to: Val, soon: Strip
    ) -> Iterator[tuple[Val | int, Var]]:
        """Each row of ``strip``, by number, and its sums with ``tokens``, f32 ``[nr]``, or with the
        first half where there are no more. Where two strips are held, unpacks what comes ``soon``
        to ``to``.
        """
        raise NotImplementedError

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        rows = self.rows_per_item(isa.lanes)
        share_of = shares(k, frame, self, lambda: n_strips(k, frame, self, rows))
        size = SIDE * self.row_pitch
        strips, made = frame.scratch, frame.scratch + self.n_held * size
        sums = made + self.made_bytes
        sums_bytes = rows * self.line  # of a group
        totals = sums + self.groups * sums_bytes

        def begin(item: Val) -> tuple[Share, Segment, Strip]:
            share = share_of(item)
            seg = pick_segment(k, frame, self, share.strip, rows, share.expert)
            left = seg.rows.m - seg.rows.first
            n = k.min((left + (SIDE - 1)) // SIDE, rows // SIDE)
            return share, seg, Strip(seg.rows, n, k.i64(0))

        self.begin(k, made)
        if self.n_held > 1:
            _, _, first = begin(frame.begin)
            self.unpack(k, strips, first)
        full = k.var(k.i64(0))  # which strip is unpacked
        with k.loop(frame.end, start=frame.begin) as item:
            share, seg, first = begin(item)
            _, _, last = begin(k.min(item + 1, frame.end - 1))
            n = first.n
            step = self.groups * self.nr
            with k.loop(share.stop, start=share.start, step=step) as token:
                met = Tokens(k, self, frame.x, token, share.stop, totals)
                met.prepare()
                then = last.unless(k, token + step < share.stop, first)
                with k.loop(n) as s:
                    here, strip = Strip(seg.rows, n, s), strips + full.v * size
                    if self.n_held > 1:
                        full.v = k.i64(1) - full.v
                    else:
                        self.unpack(k, strip, here)
                    to = strips + full.v * size
                    soon = then.unless(k, s + 1 < n, Strip(seg.rows, n, s + 1))
                    for g, tokens in met.each():
                        for r, total in self.sums(k, strip, tokens, made, to, soon):
                            row = here.row(r // EACH, r % EACH)
                            _keep(k, sums + (g * sums_bytes + row * self.line), total.v, self.nr)
                for g, tokens in met.each():
                    out = Out(k, self, frame, seg, tokens.first)
                    with k.loop(n) as s:
                        place = sums + (g * sums_bytes + s * (SIDE * self.line))
                        out.store(_columns(k, place, self.nr), s * SIDE, False, add=False)
        self.end(k)

    def unpack(self, k: Builder, to: Val, strip: Strip) -> None:
        """A strip's rows."""
        with k.loop(self.turns) as turn, k.loop(AT_ONCE) as run:
            self.unpack_part(k, to, strip, turn, run)

    def unpack_part(self, k: Builder, to: Val, strip: Strip, turn: Val, run: Val | int) -> None:
        """A turn's share of a strip's rows of a run: as many blocks as all turns do them in."""
        per_row = self.k // (self.n_blocks * self.fmt.block)
        n = -(-EACH * per_row // self.turns)
        for i in range(n):
            at = k.min(turn * n + i, EACH * per_row - 1)
            row, c = at // per_row, at % per_row
            blocks = strip.weights(k, run, row).block(c, self.n_blocks)
            blocks.prefetch(k, AHEAD // sum(self.fmt.strides), self.n_blocks, 3)
            self._some(k, blocks, to + (row + run * EACH) * self.row_pitch, c * self.n_blocks)

    def _some(self, k: Builder, first: At, to: Val, b: Val) -> None:
        """Blocks that are unpacked together, from a row's ``b``-th on."""
        size, n = self.fmt.block, self.n_blocks
        blocks = [first.block(i) for i in range(n)]
        together = max(1, 2 * k.isa.vector_bits // 8 // size)
        for i in range(0, n, together):
            offset = i * size
            for held in ordered_codes(k, *blocks[i : i + together]):
                k.store(to + b * size, self.stored(k, held), offset=offset)
                offset += held.ty.lanes
        scales = [v for v in scales_of(k, blocks) if v is not None]
        for v, off in zip(scales, self.scale_offs, strict=True):
            k.store(to + b * (size // self.per_scale * 4), v, offset=off)


def _keep(k: Builder, at: Val, sums: Val, n: int) -> None:
    """A row's sums, of ``n`` tokens; of those that are not there zeros."""
    for i in range(0, n, sums.ty.lanes):
        k.store(at, k.zero(sums.ty) if i else sums, offset=4 * i, align=sums.ty.n_bytes)


def _columns(k: Builder, sums: Val, n: int) -> Sums:
    """What ``Out`` writes, of 16 rows with ``n`` tokens."""
    held = [k.load(sums, i32 * n, offset=r * 4 * n, align=4 * n) for r in range(SIDE)]
    for i, column in enumerate(transpose(k, held, k.isa.lanes)):
        for j, v in enumerate(column):
            yield v.ty.lanes * j, i, v.bits(f32 * v.ty.lanes)


@dataclass
class Strip:
    """The ``s``-th of an item's ``n`` strips: EACH rows of each of RUNS runs."""

    rows: WeightRows
    n: Val
    s: Val

    def row(self, run: Val | int, r: Operand) -> Val:
        """Which of the item's rows the ``r``-th of a run's is."""
        return self.n * (run * EACH) + self.s * EACH + r

    def weights(self, k: Builder, run: Val | int, r: Val) -> At:
        """Where that row is."""
        return self.rows.row(k, self.row(run, r))

    def unless(self, k: Builder, holds: Val, other: Strip) -> Strip:
        """This strip, or another one if something holds."""
        mine, its = ([*each.rows.values, each.n, each.s] for each in (self, other))
        *rows, n, s = (k.select(holds, b, a) for a, b in zip(mine, its, strict=True))
        return Strip(self.rows.of(rows), n, s)


class Tokens:
    """Those of an item that meet a strip, from ``first`` on and before ``stop``, in groups of nr;
    ``room``: for the sums of the values that share a minimum.
    """

    def __init__(
        self, k: Builder, spec: StripGemm, x: Val, first: Val, stop: Val, room: Val
    ) -> None:
        self.k, self.spec, self.x_all, self.first, self.stop = k, spec, x, first, stop
        self.act, self.room, self.line = spec.layout(), room, spec.line
        self.x = x + first // spec.nr * self.act.group_bytes

    def each(self) -> Iterator[tuple[Val, Tokens]]:
        """The groups, by number: what follows is done for each."""
        k, nr, n = self.k, self.spec.nr, self.spec.groups
        if n == 1:
            yield k.i64(0), self
            return
        left = k.min(self.stop - self.first, k.i64(n * nr))
        with k.loop((left + (nr - 1)) // nr) as g:
            room = self.room + g * (self.spec.n_products * self.line)
            yield g, Tokens(k, self.spec, self.x_all, self.first + g * nr, self.stop, room)

    def prepare(self) -> None:
        """Make those sums."""
        if self.spec.codes.has_m:
            for _, group in self.each():
                with self.k.loop(self.spec.n_products) as at:
                    sums = block_sums(self.k, group.comp(at), group.scales(at))
                    self.k.store(group.room + at * self.line, sums, align=self.line)

    def _load(self, at: Val, ty: Ty, off: int, n: int) -> Val:
        """Of the first ``n`` tokens, or of all."""
        n = n or self.spec.nr
        return self.k.load(at, ty * n, offset=off, align=4 * n)

    def dwords(self, at: Val, n: int = 0) -> Val:
        """The ``at``-th of K."""
        return self._load(self.x + at * self.line, i32, 0, n)

    def comp(self, at: Val, n: int = 0) -> Val:
        """What stands for the sum of the ``at``-th product's values of K."""
        return self._load(self.x + at * self.line, i32, self.act.comp_off, n)

    def scales(self, at: Val, n: int = 0) -> Val:
        """Of the ``at``-th product's values of K."""
        place = self.x + at // (BLOCK // self.spec.per_scale) * self.line
        return self._load(place, f32, self.act.d_off, n)

    def sums(self, at: Val, n: int = 0) -> Val:
        """Of those values."""
        return self._load(self.room + at * self.line, f32, 0, n)

"""Few tokens: products of bytes, by strips whose codes are unpacked without reordering.

A strip is 16 rows of codes as bytes in file order, then scales and minimums in f32::

    sums[r, t] += f32(codes[r] . x[t]) * d_w[r] * d_x[t] (+ m_w[r] * sum_x[t])

A *product* is one row's dot over the values of K that share a scale. A row's sums with all tokens
are one vector. Subclasses compute them on matrix registers (``matrix_bytes.py``) or in vectors
(``vector_bytes.py``).
"""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.formats.format import Codes
from treadle.jit.language import Builder, Val
from treadle.kernels.format_blocks import BlockAddress, ordered_codes, scales_of
from treadle.kernels.matmul.matrix import AHEAD, RUNS, SIDE
from treadle.kernels.matmul.strips import EACH, Strip, StripGemm
from treadle.kernels.run_state import LINE, round_up

# Products in a turn. In a turn, each of as many runs of the next strip's rows is unpacked in part.
AT_ONCE = RUNS
SMALL = 8  # small blocks that are unpacked together


@dataclass(frozen=True)
class ByteStrips(StripGemm):
    """Base of the strip products of bytes; ``act`` is "q8"."""

    @property
    def codes(self) -> Codes:
        assert self.fmt.codes is not None, self.fmt.name
        return self.fmt.codes

    @property
    def per_scale(self) -> int:
        return self.codes.sub

    @property
    def n_products(self) -> int:
        return self.k // self.per_scale

    @property
    def has_m(self) -> bool:
        return self.codes.has_m

    @property
    def turns(self) -> int:
        """Number of turns, of AT_ONCE products each (the last may have fewer), over all of K."""
        return -(-self.n_products // AT_ONCE)

    @property
    def n_blocks(self) -> int:
        """Blocks of a row that one step unpacks together."""
        n = 1
        while self.fmt.block < 256 and n < SMALL and self.k // self.fmt.block % (2 * n) == 0:
            n *= 2
        return n

    @property
    def scale_offs(self) -> list[int]:
        """Byte offsets, in a strip's row, of its scales and (if the format has them) of its
        minimums.
        """
        return [
            round_up(self.k, LINE) + 4 * self.n_products * i for i in range(1 + self.codes.has_m)
        ]

    @property
    def row_pitch(self) -> int:
        """Bytes from one row of a strip to the next: an odd number of cache lines, because an even
        one would map the rows to few sets of L1.
        """
        end = self.scale_offs[-1] + 4 * self.n_products
        return (round_up(end, LINE) // LINE | 1) * LINE

    @property
    def strip_bytes(self) -> int:
        return SIDE * self.row_pitch

    def stored(self, k: Builder, codes: Val) -> Val:
        """Return ``codes`` (u8) as the bytes that a strip holds: less the subclass's zero point."""
        raise NotImplementedError

    def unpack(self, k: Builder, strip: Strip) -> None:
        with k.loop(self.turns) as turn, k.loop(AT_ONCE) as run:
            self.unpack_part(k, strip, turn, run)

    def unpack_part(self, k: Builder, strip: Strip, turn: Val, run: Val | int) -> None:
        """Unpack, in turn number ``turn``, its share of the strip's EACH rows in run number ``run``
        (see ``Strip``). All ``turns`` for all RUNS runs together unpack the whole strip.
        """
        per_row = self.k // (self.n_blocks * self.fmt.block)
        n = -(-EACH * per_row // self.turns)
        for i in range(n):
            at = k.min(turn * n + i, EACH * per_row - 1)
            row = at // per_row
            c = at % per_row
            blocks = strip.weights(k, run, row).block(c, self.n_blocks)
            blocks.prefetch(k, AHEAD // sum(self.fmt.strides), self.n_blocks, 3)
            to = strip.held + (row + run * EACH) * self.row_pitch
            self._unpack_blocks(k, blocks, to, c * self.n_blocks)

    def _unpack_blocks(self, k: Builder, first: BlockAddress, to: Val, b: Val) -> None:
        """Unpack ``n_blocks`` blocks of a row, from block number ``b`` at ``first`` on, to the
        strip's row that begins at ``to``.
        """
        size = self.fmt.block
        n = self.n_blocks
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

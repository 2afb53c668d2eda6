"""gemm: unpack a panel of rows once, and multiply it by every token.

The tile loop, for each group of nr tokens and mr vectors of rows, does not depend on the format.
``Tiles.unit`` of the instruction set selects one of three: ``tile.py``, ``tile_outer.py``,
``tile_pairs.py``. The panel scheme is that of Goto and van de Geijn, "Anatomy of high-performance
matrix multiplication", 2008.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import i32
from treadle.kernels.activation_layout import BLOCK, DWORD, DWORDS, MAGIC_BITS
from treadle.kernels.format_blocks import WeightRows
from treadle.kernels.matmul.epilogue import Epilogue, Sums
from treadle.kernels.matmul.matmul import n_strips, pick_segment, shares
from treadle.kernels.matmul.panel import emit_pack, panel_bytes, stage_bytes
from treadle.kernels.matmul.tile import STEP, Ends, KRange, MatmulTile
from treadle.kernels.matmul.tile_outer import OUTER, OuterTile, outer_bytes
from treadle.kernels.matmul.tile_pairs import PAIRS, PairTile, fill_pairs, pairs_bytes
from treadle.kernels.matmul.tile_shape import Tiled
from treadle.kernels.spec import Frame

TILES: dict[int, type[MatmulTile | OuterTile | PairTile]] = {
    DWORD: MatmulTile,
    OUTER: OuterTile,
    PAIRS: PairTile,
}


@dataclass(frozen=True)
class Gemm(Tiled):
    """Product for many tokens. Items are panels of ``mr * lanes`` rows times chunks of tokens."""

    op: ClassVar[str] = "gemm"
    tile: ClassVar[type[MatmulTile] | None] = None  # None: from TILES
    resumes: ClassVar[bool] = True  # a tile starts from the sums of earlier K, else from zero

    def scratch(self, lanes: int) -> int:
        return self.panel_pitch(lanes) + self.stage_bytes(lanes) + self.sums_bytes(lanes)

    def panel_pitch(self, lanes: int) -> int:
        """Return the bytes of scratch for a panel and for the data after it that its tiles need."""
        rows = self.mr * lanes
        behind = {OUTER: outer_bytes, PAIRS: pairs_bytes}.get(self.unit)
        more = behind(self, rows) if behind else self.lane_bytes
        return panel_bytes(self.fmt, self.layout(), rows) + more

    def sums_bytes(self, lanes: int, n_panels: int = 1) -> int:
        """Return the bytes of scratch that ``registers`` and ``tiles`` need for ``n_panels``
        panels.
        """
        return 0

    def stage_bytes(self, lanes: int) -> int:
        """Return the bytes of scratch that packing needs."""
        return stage_bytes(self.fmt, self.layout(), lanes)

    def fill(
        self, k: Builder, panel: Val, stage: Val, rows: WeightRows, part: Ends | None = None
    ) -> None:
        """Pack ``rows`` into ``panel``, with ``stage`` as scratch, and store the data after it that
        its tiles need. ``part``: the first step of K to pack and one past the last, for tiles that
        do not resume (``resumes``); None: all of K.
        """
        act = self.layout()
        n = self.mr * k.isa.lanes
        if self.act == "q8" and self.unit == DWORD:
            magic = k.const(MAGIC_BITS, i32 * (self.mr * self.nr))
            lane_values = panel + panel_bytes(self.fmt, act, n)
            k.store(lane_values, magic, offset=4 * self.nr * self.n_sums)

        def pack(k: Builder, panel: Val, stage: Val, *source: Val) -> None:
            emit_pack(k, act, panel, stage, rows.with_values(source), n, self.unit)

        k.outlined("pack", (panel, stage, *rows.values), pack)
        if self.unit == PAIRS:
            fill_pairs(k, self, panel)

    @property
    def steps(self) -> int:
        """Iterations of the tile loop over all of K."""
        return -(-self.layout().kd // STEP[self.act])

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        act, rows = self.layout(), self.rows_per_item(isa.lanes)
        share_of = shares(k, frame, self, lambda: n_strips(k, frame, self, rows))
        panel, free = frame.scratch, frame.scratch + self.panel_pitch(isa.lanes)
        kc = self.kc // BLOCK * DWORDS[self.act] // STEP[self.act] or self.steps
        kc = self.steps if self.factor and self.resumes else kc  # y's sums have the factor already
        in_parts = not self.resumes and kc < self.steps
        with self.registers(k, free), k.loop(frame.end, start=frame.begin) as item:
            share = share_of(item)
            seg = pick_segment(k, frame, self, share.strip, rows, share.expert)
            if not in_parts:
                self.fill(k, panel, free, seg.rows)
            start = share.start
            stop = share.stop
            first_x = frame.x
            if self.heads and share.expert is not None:
                first_x = first_x + share.expert * frame.x_pitch

            def tokens(first: Val, last: Val, again: bool) -> None:
                if in_parts:
                    self.fill(k, panel, free, seg.rows, (first, last))
                with k.loop(stop, start=start, step=self.nr) as token:
                    x = first_x + token // self.nr * act.group_bytes
                    out = Epilogue(k, self, frame, seg, token)
                    part = first, last, out.load if again else None
                    with self.tiles(k, panel, x, free, part, out) as (row, sums):
                        out.store(sums, row, again, add=again and in_parts)

            tokens(k.i64(0), k.i64(min(kc, self.steps)), False)
            if kc < self.steps:
                with k.loop(self.steps, start=kc, step=kc) as at:
                    tokens(at, k.min(at + kc, self.steps), True)

    @contextmanager
    def registers(self, k: Builder, free: Val) -> Iterator[None]:
        """Context in which ``tiles`` may be used: it acquires matrix registers. ``free``: scratch
        of ``sums_bytes``.
        """
        yield

    @contextmanager
    def tiles(
        self,
        k: Builder,
        panel: Val,
        x: Val,
        free: Val,
        part: KRange | None = None,
        out: Epilogue | None = None,
        n_panels: int = 1,
    ) -> Iterator[tuple[Val, Sums]]:
        """Multiply a panel, or ``n_panels`` consecutive ones, by the group of tokens at ``x``.
        Yield, for each tile, the panels' row at which it begins, and its sums.

        ``free``: scratch of ``sums_bytes``; ``part``: arguments of ``MatmulTile._multiply``, None
        for all of K; ``out``: destination of the sums, if known, to prefetch it.
        """
        kind = self.tile or TILES[self.unit]
        ends = part or (k.i64(0), k.i64(self.steps), None)
        if n_panels == 1:
            yield k.i64(0), kind(k, self, panel, x, ends).results()
            return
        with k.loop(n_panels) as p:
            here = panel + p * self.panel_pitch(k.isa.lanes)
            yield p * self.rows_per_item(k.isa.lanes), kind(k, self, here, x, ends).results()

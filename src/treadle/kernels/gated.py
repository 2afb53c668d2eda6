"""gated: the two products of a gated activation and the activation itself, ``out = fn(x G^T) * (x
U^T)``, in the layout of the product after it.

As two kernels the two products are written whole, in f32, and read again: 8 bytes for every byte
that is kept. Here an item is a block of out's columns: the panels of the block's rows of G and of U
are both packed, and a tile of tokens meets one after the other. What they make stays in the
first-level cache until it is through ``fn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from treadle.jit import math
from treadle.jit.types import f32
from treadle.kernels.act import BLOCK, Act, emit_store
from treadle.kernels.blocks import At
from treadle.kernels.elementwise import activated
from treadle.kernels.gemm import Gemm
from treadle.kernels.matmul import CHUNK, W, X, Y
from treadle.kernels.spec import Frame

if TYPE_CHECKING:
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val

LANES = (4, 8, 16)  # f32 lanes of the rows there are: scratch is sized by them


@dataclass(frozen=True)
class Gated(Gemm):
    """Many tokens, ``fn`` "silu" or "gelu"; both matrices have ``m`` rows, whole blocks.

    Arguments as every product's, ``y`` in the layout of ``result()``; without biases. Items are
    blocks of rows times chunks of tokens.
    """

    op: ClassVar[str] = "gated"
    fn: str = ""
    m: int = 0
    to: str = ""  # the result's kind, group and sub
    to_group: int = 1
    to_sub: int = BLOCK

    def result(self) -> Act:
        """The layout that is written."""
        return Act(self.to, self.m, self.to_group, self.to_sub)

    def item_rows(self, lanes: int) -> int:
        """Rows of an item in each matrix: whole panels, and whole blocks of the result."""
        return max(BLOCK, self.rows_per_item(lanes))

    def strips(self, heights: Sequence[int], lanes: int) -> int:
        return -(-self.m // self.item_rows(lanes))

    @property
    def scratch(self) -> int:
        return max(self._places(lanes)[-1] for lanes in LANES)

    def _places(self, lanes: int) -> tuple[int, int, int]:
        """Where in scratch the stage is (behind the panels), a tile's values, and its end. What
        ``emit_store`` needs lies behind the values.
        """
        stage = 2 * (self.item_rows(lanes) // self.rows_per_item(lanes)) * self.panel_pitch(lanes)
        values = stage + self.stage_bytes + self.sums_bytes
        end = values + 2 * 4 * self.item_rows(lanes) * self.nr
        return stage, values, end + self.result().store_scratch

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        act, rows, item_rows = (
            self.layout(),
            self.rows_per_item(isa.lanes),
            self.item_rows(isa.lanes),
        )
        n_tokens, chunk = frame.run(self.count), frame.int(CHUNK)
        n_chunks = (n_tokens + (chunk - 1)) // chunk
        panels, pitch = 2 * (item_rows // rows), self.panel_pitch(isa.lanes)
        stage, values = (frame.scratch + at for at in self._places(isa.lanes)[:2])
        with self.registers(k, isa, stage), k.loop(frame.end, start=frame.begin) as item:
            first = item // n_chunks * item_rows
            with k.loop(panels) as p:
                weights = self._matrix(k, frame, p * rows >= item_rows)
                row = first + p * rows % item_rows
                self.fill(k, frame.scratch + p * pitch, stage, weights, row, k.i64(self.m))
            start = item % n_chunks * chunk
            stop = k.min(start + chunk, n_tokens)
            with k.loop(stop, start=start, step=self.nr) as token:
                x = frame.ptr(X) + token // self.nr * act.group_bytes
                with k.loop(panels) as p:
                    panel, to = frame.scratch + p * pitch, values + p * (4 * rows)
                    with self.tiles(k, isa, panel, x, stage) as (above, tile):
                        for column, t, y in tile.results():
                            at = 4 * (2 * item_rows * t + column)
                            k.store(to + above * 4, y, offset=at)
                # What fills up the last group is the last token once more: see Act.grid.
                whole = (n_tokens + (self.to_group - 1)) // self.to_group * self.to_group
                upto = k.select(token + self.nr >= n_tokens, whole, token + self.nr)
                with k.loop(upto, start=token, step=self.result().together) as n:
                    self._activate(k, frame, n, first, token, values)

    def _matrix(self, k: Builder, frame: Frame, up: Val) -> At:
        """The gate's weights, or the other matrix's where ``up``."""
        parts = range(len(self.fmt.strides))
        gate, other = ([frame.ptr(self.slot(s, W) + i) for i in parts] for s in range(2))
        return At(self.fmt, tuple(k.select(up, b, a) for a, b in zip(gate, other, strict=True)))

    def _activate(
        self, k: Builder, frame: Frame, n: Val, first: Val, token: Val, values: Val
    ) -> None:
        """Columns from ``first`` on of the tokens that are written together with ``n``, of what
        both products gave for those from ``token`` on.
        """
        out, lanes = self.result(), k.isa.lanes
        rows, last = self.item_rows(lanes), frame.run(self.count) - 1
        free = values + 2 * 4 * rows * self.nr

        def block(b: int) -> None:
            def values_of(n: Val) -> list[Val]:
                at, results = values + (k.min(n, last) - token) * (8 * rows), []
                for i in range(b * BLOCK, (b + 1) * BLOCK, lanes):
                    gate = k.load(at, f32 * lanes, offset=4 * i, align=4)
                    up = k.load(at, f32 * lanes, offset=4 * (rows + i), align=4)
                    results.append(getattr(math, self.fn)(k, gate) * up)
                return results

            emit_store(k, out, frame.ptr(Y), n, first // BLOCK + b, values_of, free)

        for b in range(rows // BLOCK):
            if b:  # a panel may reach past the last row
                with k.if_(first + b * BLOCK < self.m):
                    block(b)
            else:
                block(b)

    def run_ref(self, arrays: Sequence[Any], run: Any) -> None:
        n = int(run[self.count])
        x = self.layout().read_ref(arrays[X], n)
        gate, up = (x @ self.weights_ref(arrays, s).T for s in range(2))
        self.result().write_ref(arrays[Y], activated(self.fn, gate) * up)

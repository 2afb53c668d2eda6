"""gated: the two products of a gated activation and the activation itself, ``out = fn(x G^T) * (x
U^T)``, in the layout of the product after it.

As two kernels the two products are written whole, in f32, and read again: 8 bytes for every byte
that is kept. Here an item is a block of out's columns: the panels of the block's rows of G and of U
are both packed, and a tile of tokens meets one after the other. What they make stays in the
first-level cache until it is through ``fn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.act import BLOCK, Act, emit_store
from treadle.kernels.activation import ACTIVATIONS, activated
from treadle.kernels.blocks import At, WeightRows
from treadle.kernels.gemm import Gemm
from treadle.kernels.matmul import Matmul
from treadle.kernels.matrix import MatrixGemm
from treadle.kernels.panel import DWORD
from treadle.kernels.spec import Frame
from treadle.record import dataclass


@dataclass(frozen=True)
class Gated(Matmul):
    """Many tokens, ``fn`` of ACTIVATIONS; both matrices have ``m`` rows, whole blocks.

    Without biases; ``y`` is in the layout of ``result()``. Items are blocks of rows times chunks of
    tokens.
    """

    op: ClassVar[str] = "gated"
    fence: int = 1  # these four: which gemm
    folded: bool = False
    unit: int = DWORD
    matrix: bool = False
    fn: str = ""
    m: int = 0
    to: str = ""  # the result's kind, group and sub
    to_group: int = 1
    to_sub: int = BLOCK

    @property
    def product(self) -> Gemm:
        kind = MatrixGemm if self.matrix else Gemm
        shape = self.w, self.act, self.k, self.mr, self.nr
        return kind(*shape, fence=self.fence, folded=self.folded, unit=self.unit)

    def layout(self) -> Act:
        return self.product.layout()

    def rows_per_item(self, lanes: int) -> int:
        return self.product.rows_per_item(lanes)

    def result(self) -> Act:
        """The layout that is written."""
        return Act(self.to, self.m, self.to_group, self.to_sub)

    def item_rows(self, lanes: int) -> int:
        """Rows of an item in each matrix: whole panels, and whole blocks of the result."""
        return max(BLOCK, self.rows_per_item(lanes))

    def strips(self, heights: Sequence[int], lanes: int) -> int:
        return -(-self.m // self.item_rows(lanes))

    def scratch(self, lanes: int) -> int:
        return self._places(lanes)[-1]

    def _places(self, lanes: int) -> tuple[int, int, int]:
        """Where in scratch the stage is (behind the panels), a tile's values, and its end. What
        ``emit_store`` needs lies behind the values.
        """
        product, n_panels = self.product, 2 * (self.item_rows(lanes) // self.rows_per_item(lanes))
        stage = n_panels * product.panel_pitch(lanes)
        values = stage + product.stage_bytes(lanes) + product.sums_bytes
        end = values + 2 * 4 * self.item_rows(lanes) * self.nr
        return stage, values, end + self.result().store_scratch

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        act, product = self.layout(), self.product
        rows, item_rows = self.rows_per_item(isa.lanes), self.item_rows(isa.lanes)
        n_tokens, chunk = frame.run(self.count), frame.tokens
        n_chunks = (n_tokens + (chunk - 1)) // chunk
        panels, pitch = 2 * (item_rows // rows), product.panel_pitch(isa.lanes)
        stage, values = (frame.scratch + at for at in self._places(isa.lanes)[:2])
        with product.registers(k, stage), k.loop(frame.end, start=frame.begin) as item:
            first = item // n_chunks * item_rows
            with k.loop(panels) as p:
                weights = self._matrix(k, frame, p * rows >= item_rows)
                source = WeightRows(weights, first + p * rows % item_rows, k.i64(self.m), self.k)
                product.fill(k, frame.scratch + p * pitch, stage, source)
            start = item % n_chunks * chunk
            stop = k.min(start + chunk, n_tokens)
            with k.loop(stop, start=start, step=self.nr) as token:
                x = frame.x + token // self.nr * act.group_bytes
                with k.loop(panels) as p:
                    panel, to = frame.scratch + p * pitch, values + p * (4 * rows)
                    with product.tiles(k, panel, x, stage) as (above, sums):
                        for column, t, y in sums:
                            at = 4 * (2 * item_rows * t + column)
                            k.store(to + above * 4, y, offset=at)
                # What fills up the last group is the last token once more: see Act.grid.
                whole = (n_tokens + (self.to_group - 1)) // self.to_group * self.to_group
                upto = k.select(token + self.nr >= n_tokens, whole, token + self.nr)
                with k.loop(upto, start=token, step=self.result().together) as n:
                    self._activate(k, frame, n, first, token, values)

    def _matrix(self, k: Builder, frame: Frame, up: Val) -> At:
        """The gate's weights, or the other matrix's where ``up``."""
        gate, other = frame.each("w", 0), frame.each("w", 1)
        return At(
            self.product.fmt, tuple(k.select(up, b, a) for a, b in zip(gate, other, strict=True))
        )

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
                    results.append(ACTIVATIONS[self.fn].emit(k, gate) * up)
                return results

            emit_store(k, out, frame.y, n, first // BLOCK + b, values_of, free)

        for b in range(rows // BLOCK):
            if b:  # a panel may reach past the last row
                with k.if_(first + b * BLOCK < self.m):
                    block(b)
            else:
                block(b)

    def run_ref(self, args: Any, run: Any) -> None:
        gate, up = self.product.products_ref(args, run)
        self.result().write_ref(args.y, activated(self.fn, gate) * up)

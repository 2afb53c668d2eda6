"""gated: both products of a gated activation and the activation itself, ``out = fn(x G^T) * (x
U^T)``, in the layout of the next product.

As two kernels, both products would be written in f32 and read again: 8 bytes for each value of the
result. Here an item is a block of out's columns: the panels of the block's rows of G and of U are
both packed, and a tile of tokens is multiplied by one after the other. The results stay in the
first-level cache until ``fn`` is applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.activation_layout import (
    BLOCK,
    DWORD,
    NARROW,
    ActivationLayout,
    emit_store,
    in_bf16,
)
from treadle.kernels.activations import ACTIVATIONS, gated
from treadle.kernels.format_blocks import BlockAddress, WeightRows
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.matmul import Matmul, StripShare, shares
from treadle.kernels.matmul.matrix import (
    EDGE,
    PART_BYTES,
    SUMS_BYTES,
    MatrixGemm,
    MatrixOutput,
    RegisterTile,
)
from treadle.kernels.matmul.tile_ordered import OrderedGemm
from treadle.kernels.run_state import LINE
from treadle.kernels.spec import Frame


@dataclass(frozen=True)
class Gated(Matmul):
    """Gated product for many tokens, with ``fn`` of ACTIVATIONS. Gate and up have ``m`` rows each,
    a multiple of 32.

    ``y`` is in the layout of ``result()``. Items are blocks of rows times chunks of tokens.

    fence, folded, unit, matrix, ordered: select the gemm of the two products: MatrixGemm with
        ``matrix``, OrderedGemm with ``ordered``, else a Gemm with the other three fields.
    to, to_group, to_sub, to_unit: fields ``kind``, ``group``, ``sub`` and ``unit`` of the result's
        ActivationLayout.
    """

    op: ClassVar[str] = "gated"
    fence: int = 1
    folded: bool = False
    unit: int = DWORD
    matrix: bool = False
    ordered: bool = False
    fn: str = ""
    m: int = 0
    to: str = ""
    to_group: int = 1
    to_sub: int = BLOCK
    to_unit: int = DWORD

    @property
    def compile_ms(self) -> float:
        return self.product.compile_ms + 50.0

    @property
    def product(self) -> Gemm:
        kind = MatrixGemm if self.matrix else OrderedGemm if self.ordered else Gemm
        shape = self.w, self.act, self.k, self.mr, self.nr
        return kind(*shape, fence=self.fence, folded=self.folded, unit=self.unit)

    def layout(self) -> ActivationLayout:
        return self.product.layout()

    def rows_per_item(self, lanes: int) -> int:
        return self.product.rows_per_item(lanes)

    def result(self) -> ActivationLayout:
        """Return the activation layout of the result, for the next product."""
        return ActivationLayout(self.to, self.m, self.to_group, self.to_sub, self.to_unit)

    def item_rows(self, lanes: int) -> int:
        """Return the rows of an item in each matrix: whole panels, and whole blocks (32) of the
        result.
        """
        return max(BLOCK, self.rows_per_item(lanes))

    def strips(self, heights: Sequence[int], lanes: int) -> int:
        return -(-self.m // self.item_rows(lanes))

    def scratch(self, lanes: int) -> int:
        return self._places(lanes)[-1]

    def _places(self, lanes: int) -> tuple[int, int, int]:
        """Return three scratch offsets: of the stage and the sums (after the panels), of a tile's
        f32 values, and of the end. ``emit_store``'s scratch follows the values. A ``turned`` result
        has no values.
        """
        product = self.product
        n_panels = 2 * (self.item_rows(lanes) // self.rows_per_item(lanes))
        stage = n_panels * product.panel_pitch(lanes)
        values = stage + product.stage_bytes(lanes) + product.sums_bytes(lanes, n_panels)
        if self.turned:
            return stage, values, values
        end = values + self._row_bytes(lanes) * self.nr
        return stage, values, end + self.result().store_scratch

    @property
    def turned(self) -> bool:
        """Whether the result has the layout of the sums on matrix registers: dwords of 32 tokens
        side by side.
        """
        out = self.result()
        return self.matrix and out.kind in NARROW and out.group == self.nr

    def _row_bytes(self, lanes: int) -> int:
        """Return the bytes from one token's values in scratch to the next: an odd number of cache
        lines, because an even one would map many tokens to few sets of the first-level cache.
        """
        return (2 * 4 * self.item_rows(lanes) // LINE | 1) * LINE

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        act = self.layout()
        product = self.product
        rows = self.rows_per_item(isa.lanes)
        item_rows = self.item_rows(isa.lanes)
        share_of = shares(k, frame, self, lambda: k.i64(self.strips([], isa.lanes)))
        panels = 2 * (item_rows // rows)
        pitch = product.panel_pitch(isa.lanes)
        stage, values = (frame.scratch + at for at in self._places(isa.lanes)[:2])
        with product.registers(k, stage), k.loop(frame.end, start=frame.begin) as item:
            share = share_of(item)
            first = share.strip * item_rows
            with k.loop(panels) as p:
                weights = self._matrix(k, frame, p * rows >= item_rows, share.expert)
                source = WeightRows(weights, first + p * rows % item_rows, k.i64(self.m), self.k)
                product.fill(k, frame.scratch + p * pitch, stage, source)
            with k.loop(share.stop, start=share.start, step=self.nr) as token:
                x = frame.x + token // self.nr * act.group_bytes
                if isinstance(product, MatrixGemm) and self.turned:
                    to = self._block(frame, token, first)
                    half = self.block_bytes // 2  # a block is prefetched by a strip of each matrix
                    lines = MatrixOutput(half // LINE, 1, k.i64(LINE), to, half)
                    product.multiply(k, frame.scratch, x, stage, written=lines, n_panels=panels)
                    self._activate_turned(k, frame, share, first, token, stage)
                else:
                    with product.tiles(k, frame.scratch, x, stage, n_panels=panels) as (
                        above,
                        sums,
                    ):
                        for column, t, y in sums:
                            at = self._row_bytes(isa.lanes) * t + 4 * column
                            k.store(values + above * 4, y, offset=at)
                    # The last token pads the last group: see ``ActivationLayout.grid``.
                    whole = (share.end + (self.to_group - 1)) // self.to_group * self.to_group
                    upto = k.select(token + self.nr >= share.end, whole, token + self.nr)
                    with k.loop(upto, start=token, step=self.result().together) as n:
                        self._activate(k, frame, share, n, first, token, values)

    def _matrix(self, k: Builder, frame: Frame, up: Val, expert: Val | None) -> BlockAddress:
        """Return the address of up's weights if ``up`` is true at run time, else of the gate's;
        those of ``expert`` if there are experts.
        """
        gate = frame.each("w", 0)
        other = frame.each("w", 1)
        weights = BlockAddress(
            self.product.fmt, tuple(k.select(up, b, a) for a, b in zip(gate, other, strict=True))
        )
        if expert is None:
            return weights
        pitch = k.select(up, frame.each("pitch", 1), frame.each("pitch", 0))
        return weights.row(expert * pitch, self.k)

    def _activate(
        self,
        k: Builder,
        frame: Frame,
        share: StripShare,
        n: Val,
        first: Val,
        token: Val,
        values: Val,
    ) -> None:
        """Apply the activation ``fn`` to the gate and up products of a tile, f32 at ``values``, a
        row for each token from ``token`` on. Store the results of the tokens from ``n`` on, as many
        as the layout of ``result`` writes at once, in its columns from ``first`` on.
        """
        out = self.result()
        lanes = k.isa.lanes
        rows = self.item_rows(lanes)
        last = share.end - 1
        biases = self._biases(k, frame, share, first)
        free = values + self._row_bytes(lanes) * self.nr

        def block(b: int) -> None:
            def values_of(n: Val) -> list[Val]:
                at = values + (k.min(n, last) - token) * self._row_bytes(lanes)
                results = []
                for i in range(b * BLOCK, (b + 1) * BLOCK, lanes):
                    gate = k.load(at, f32 * lanes, offset=4 * i, align=4)
                    up = k.load(at, f32 * lanes, offset=4 * (rows + i), align=4)
                    if biases:
                        gate = gate + k.load(biases[0], gate.ty, offset=4 * i)
                        up = up + k.load(biases[1], up.ty, offset=4 * i)
                    results.append(ACTIVATIONS[self.fn].gate(k, gate, up))
                return results

            emit_store(k, out, frame.y, n, first // BLOCK + b, values_of, free)

        for b in range(rows // BLOCK):
            if b:  # a panel may reach past the last row
                with k.if_(first + b * BLOCK < self.m):
                    block(b)
            else:
                block(b)

    def _activate_turned(
        self, k: Builder, frame: Frame, share: StripShare, first: Val, token: Val, sums: Val
    ) -> None:
        """Apply ``fn`` and store the result for the group of tokens from ``token`` on, in its
        columns from ``first`` on. The gate and up products are read straight from the matrix
        registers' ``sums``, which have tokens side by side as the result has. For tokens that pad
        the group, the result is computed from the padding of x.
        """
        n_strips = self.item_rows(k.isa.lanes) // EDGE
        to = self._block(frame, token, first)
        n_parts = NARROW[self.to]
        order = [i + EDGE // 2 * j for i in range(EDGE // 2) for j in range(2)]
        with k.loop(k.min((self.m - first) // EDGE, n_strips)) as s, k.loop(EDGE // 2) as pair:
            row = first + s * EDGE + pair * 2
            biases = self._biases(k, frame, share, row)
            tiles = [RegisterTile(k, sums + at * SUMS_BYTES) for at in (s, s + n_strips)]
            for t in range(0, EDGE, EDGE // 2):
                gates, ups = (tile.pair(pair, t) for tile in tiles)
                results = []
                for i, (gate, up) in enumerate(zip(gates, ups, strict=True)):
                    if biases:
                        gate = gate + k.splat(k.load(biases[0], f32, offset=4 * i), gate.ty)
                        up = up + k.splat(k.load(biases[1], f32, offset=4 * i), up.ty)
                    results.append(ACTIVATIONS[self.fn].gate(k, gate, up))
                both = k.concat(*results)
                at = to + (s * self.block_bytes + (pair * EDGE + t) * 4)
                for p, part in enumerate(in_bf16(k, both, n_parts)):
                    k.store(at, k.shuffle(part, part, order), offset=p * PART_BYTES, align=LINE)

    def _block(self, frame: Frame, token: Val, row: Val) -> Val:
        """Return the address of the result for the group of ``token`` and the block (32 columns) of
        ``row``.
        """
        group = frame.y + token // self.to_group * self.result().group_bytes
        return group + row // BLOCK * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block of a ``turned`` result: 32 columns of one group of tokens,
        as bf16 parts.
        """
        return NARROW[self.to] * PART_BYTES

    def _biases(self, k: Builder, frame: Frame, share: StripShare, row: Val) -> list[Val]:
        """Return the addresses of the gate's and of up's biases from ``row`` on; an empty list
        without biases.
        """
        if not self.bias:
            return []
        rows = [
            row + share.expert * frame.each("pitch", s) if share.expert is not None else row
            for s in range(2)
        ]
        return [frame.each("bias", s) + at * 4 for s, at in enumerate(rows)]

    def run_ref(self, args: Any, run: Any) -> None:
        act = self.result()
        product = replace(self.product, bias=self.bias, experts=self.experts)
        for to, (gate, up) in product.products_ref(args, run):
            at = int(to[0]) // act.group * act.group_bytes if len(to) else 0
            act.write_ref(args.y[at:], gated(self.fn, gate, up))

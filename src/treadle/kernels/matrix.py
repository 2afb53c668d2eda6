"""Packed products on matrix registers: weights as bf16, whatever they were in the file.

A panel's rows lie as they follow each other: a register loads a line, 32 weights, of each of 16 of
them, and no weight changes places. Tokens lie in groups of 32, ``[KD, 32]`` dwords (see
``act.py``): a register loads 16 dwords of 16 of them. Two registers of each are met by four of
sums, rows by tokens, over all of K or of a panel; they are transposed once, at the end. 32 rows are
a *strip*.

Scales are multiplied into the weights before these are rounded: beside a product of registers, 8192
multiplications in 16 cycles, scaling the sums of a block would take longer than the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import ClassVar

from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i32
from treadle.kernels.act import BLOCK, PER_DWORD
from treadle.kernels.blocks import At, WeightRows
from treadle.kernels.gemm import Gemm
from treadle.kernels.out import Sums
from treadle.kernels.panel import load_values
from treadle.kernels.spec import LINE, round_up
from treadle.kernels.tile import STEP, Ends, KRange
from treadle.kernels.transpose import transpose
from treadle.record import dataclass

SIDE = 16  # rows of a register, and dwords
EDGE = 2 * SIDE  # rows and tokens that four registers of sums are for
REGISTER = LINE * SIDE  # bytes
SUMS_BYTES = 4 * REGISTER
AHEAD = 4096  # bytes of the file that packing asks for before it reads them


@dataclass(frozen=True)
class MatrixGemm(Gemm):
    """On matrix registers: ``act`` "bf16", ``nr`` 32, ``mr * lanes`` a multiple of 32. With ``kc``
    no more of a panel is packed at once, and what lies in the second-level cache is that.
    """

    resumes: ClassVar[bool] = False
    sums_bytes: ClassVar[int] = SUMS_BYTES

    @property
    def name(self) -> str:
        return f"{super().name}_matrix"

    def panel_pitch(self, lanes: int) -> int:
        return self.mr * lanes * self.row_pitch

    @property
    def row_pitch(self) -> int:
        """Bytes from one row of a panel to the next."""
        n_values = min(self.kc or self.k, self.k)
        return row_pitch(round_up(n_values, BLOCK) // PER_DWORD[self.act])

    def fill(
        self, k: Builder, panel: Val, stage: Val, rows: WeightRows, part: Ends | None = None
    ) -> None:
        def pack(k: Builder, panel: Val, *source: Val) -> None:
            *given, begin, end = source
            n = self.mr * k.isa.lanes
            emit_pack_rows(k, panel, self.row_pitch, rows.of(given), n, begin, end)

        values = STEP[self.act] * PER_DWORD[self.act]
        ends = (end * values for end in part or (k.i64(0), k.i64(self.steps)))
        begin, end = ends
        k.outlined("pack", (panel, *rows.values, begin, end), pack)
        self._turn(k, panel, begin, end)

    def _turn(self, k: Builder, panel: Val, begin: Val, end: Val) -> None:
        """Let the columns of each register lie as its rows, for machines that want them so."""
        matrix = k.isa.matrix
        assert matrix is not None, k.isa.name
        turn, n = matrix.turn, self.mr * k.isa.lanes
        if turn is None:
            return

        def turn_all(k: Builder, panel: Val, n_lines: Val) -> None:
            with k.loop(n // SIDE) as m, k.loop(n_lines) as b:
                turn(k, panel + (m * (SIDE * self.row_pitch) + b * LINE), self.row_pitch)

        matrix.scope(k, "turn", (panel, (end - begin) // BLOCK), turn_all)

    @contextmanager
    def registers(self, k: Builder, free: Val) -> Iterator[None]:
        assert k.isa.matrix is not None, k.isa.name
        k.isa.matrix.begin(k, free)
        yield
        k.isa.matrix.end(k)

    @contextmanager
    def tiles(
        self, k: Builder, panel: Val, x: Val, free: Val, part: KRange | None = None
    ) -> Iterator[tuple[Val, Sums]]:
        first, last, _ = part or (k.i64(0), k.i64(self.steps), None)
        n = (last - first) * STEP[self.act] // SIDE
        x = x + first * (STEP[self.act] * 4 * EDGE)
        with k.loop(self.rows_per_item(k.isa.lanes) // EDGE) as s:
            strip, row = panel + s * (EDGE * self.row_pitch), s * EDGE
            yield row, RegisterTile(k, strip, self.row_pitch, x, n, free).results()


def row_pitch(n_dwords: int) -> int:
    """Bytes from one row of a panel to the next: an odd number of lines, or the rows of a register
    would fall on a few sets of the first-level cache.
    """
    return (4 * n_dwords // LINE | 1) * LINE


def emit_pack_rows(
    k: Builder, panel: Val, pitch: int, source: WeightRows, rows: int, begin: Val, end: Val
) -> None:
    """Pack ``rows`` rows of ``source``, their values from ``begin`` to before ``end``, into
    ``panel``. Both are whole blocks, but for K itself, where zeros fill the last line up.
    """
    fmt = source.weights.fmt
    n_values = max(BLOCK, fmt.block)  # at once
    n_blocks, (full, rest) = n_values // fmt.block, divmod(source.k, n_values)

    def some(row: At, to: Val, c: Val, n: int) -> None:
        values = load_values(k, row, c, n)
        for i, v in enumerate(values):
            at = (c * len(values) + i) * LINE
            k.store(to + at, k.isa.narrow_bf16(k, v), align=LINE)

    with k.loop(rows) as r:
        row, to = source.row(k, r), panel + (r * pitch - begin * 2)
        with k.loop(k.min(end // n_values, full), start=begin // n_values) as c:
            row.block(c, n_blocks).prefetch(k, AHEAD // sum(fmt.strides), n_blocks, 3)
            some(row, to, c, n_values)
        if rest:
            with k.if_(end > full * n_values):
                some(row, to, k.i64(full), rest)


class RegisterTile:
    """32 rows times 32 tokens, multiplied over ``n`` lines of each row."""

    def __init__(self, k: Builder, strip: Val, pitch: int, x: Val, n: Val, sums: Val) -> None:
        self.k, self.sums = k, sums
        self._multiply(strip, pitch, x, n)

    def _multiply(self, strip: Val, pitch: int, x: Val, n: Val) -> None:
        """Leave the sums in scratch, a register after the other."""
        matrix = self.k.isa.matrix
        assert matrix is not None, self.k.isa.name

        def multiply(k: Builder, strip: Val, x: Val, n: Val, sums: Val) -> None:
            for c in range(4):
                matrix.zero(k, c)
            with k.loop(n) as b:
                for m in range(2):
                    matrix.load(k, 4 + m, strip + (b * LINE + m * SIDE * pitch), pitch)
                    matrix.load(k, 6 + m, x + (b * (LINE * EDGE) + m * LINE), 2 * LINE)
                matrix.dots_bf16(k)
            for c in range(4):
                matrix.store(k, c, sums + c * REGISTER, LINE)

        matrix.scope(self.k, "multiply", (strip, x, n, self.sums), multiply)

    def results(self) -> Sums:
        """What ``Out`` writes."""
        k, lanes = self.k, self.k.isa.lanes
        for m, t in product(range(2), range(2)):
            at = self.sums + (2 * m + t) * REGISTER
            held = [k.load(at, i32 * SIDE, offset=LINE * i, align=LINE) for i in range(SIDE)]
            for i, column in enumerate(transpose(k, held, lanes)):
                for j, v in enumerate(column):
                    yield SIDE * m + v.ty.lanes * j, SIDE * t + i, v.bits(f32 * v.ty.lanes)

"""Packed products on matrix registers: weights of any format as bf16.

32 rows of a panel are a *strip*. For each 32 values of K, a *step*, a strip holds the lines of its
rows one after the other: the data of two registers is contiguous, and weights stay in order. Tokens
are in groups of 32, ``[KD, 32]`` dwords (see ``kernels/activation_layout.py``): a register loads 16
dwords of 16 tokens. Two registers of rows and two of tokens are multiplied into four registers of
sums, rows by tokens, which are transposed once, at the end.

Registers are fed from the caches. ``MatrixUnit.near`` values of a group's tokens stay in the first
level while all strips of a panel pass by. The panel is in the second level, and its lines are
loaded as not needed again soon. Sums stay in scratch until the next ``near`` values of K, whose
tokens are prefetched meanwhile.

F16 weights have more bits than a bf16. They and their activations are two bf16 each (``act``
"bf16x2"), high and low, and one product becomes three. F32 weights are three ("bf16x3"), as many
bits as an f32 has, and six products.

Scales are multiplied into the weights before these are rounded. A product of registers is 8192
multiplications in 16 cycles; scaling a block's sums would take longer than the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import ClassVar

from treadle.base.fast_classes import dataclass
from treadle.isa.isa import MatrixUnit
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i32
from treadle.kernels.activation_layout import BLOCK, DWORDS, NARROW, in_bf16
from treadle.kernels.format_blocks import BlockAddress, WeightRows, load_narrow
from treadle.kernels.matmul.epilogue import Epilogue, Sums
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.panel import load_values
from treadle.kernels.matmul.tile import STEP, Ends, KRange
from treadle.kernels.run_state import LINE
from treadle.kernels.transpose import transpose

SIDE = 16  # rows, and dwords a row, of a register
EDGE = 2 * SIDE  # rows and tokens of four registers of sums
REGISTER = LINE * SIDE  # bytes
SUMS_BYTES = 4 * REGISTER  # sums of a strip, in bytes
PART_BYTES = LINE * EDGE  # bytes of a part of a step: of a strip, or of a group's tokens
# Pairs of (part of a strip's values, part of the tokens'), 0 the highest, that are multiplied. The
# rest is below 2**-18 of the whole for two parts, and below 2**-25 for three. Consecutive pairs
# have a part in common.
PRODUCTS = {
    1: ((0, 0),),
    2: ((0, 1), (0, 0), (1, 0)),
    3: ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)),
}
# Rows are packed in RUNS parallel runs, each a memory stream that is prefetched AHEAD bytes early.
# One stream is slower, by up to a fifth; so are eight.
RUNS = 4
AHEAD = 1024
NEXT_LEVEL = 2  # prefetch locality: the second-level cache


@dataclass(frozen=True)
class MatrixGemm(Gemm):
    """gemm on matrix registers: ``act`` one of NARROW, ``nr`` 32, ``mr * lanes`` a multiple of 32.
    With ``kc``, only ``kc`` values of K of a panel are packed at a time, to fit the second-level
    cache.
    """

    resumes: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{super().name}_matrix"

    def panel_pitch(self, lanes: int) -> int:
        return self.mr * lanes // EDGE * self.strip_pitch

    def sums_bytes(self, lanes: int, n_panels: int = 1) -> int:
        return n_panels * self.mr * lanes // EDGE * SUMS_BYTES

    @property
    def strip_pitch(self) -> int:
        """Bytes from one strip of a panel to the next."""
        n_values = min(self.kc or self.k, self.k)
        return -(-n_values // BLOCK) * step_pitch(self.n_parts)

    @property
    def n_parts(self) -> int:
        """Number of bf16 that make up one value."""
        return NARROW[self.act]

    def fill(
        self, k: Builder, panel: Val, stage: Val, rows: WeightRows, part: Ends | None = None
    ) -> None:
        def pack(k: Builder, panel: Val, *source: Val) -> None:
            *given, begin, end = source
            weights = rows.with_values(given)
            n = self._n_strips(k, weights) * EDGE
            emit_pack_rows(k, panel, self.strip_pitch, self.n_parts, weights, n, begin, end)

        values = STEP[self.act] * BLOCK // DWORDS[self.act]
        ends = (end * values for end in part or (k.i64(0), k.i64(self.steps)))
        begin, end = ends
        k.outlined("pack", (panel, *rows.values, begin, end), pack)
        self._transpose_registers(k, panel, begin, end)

    def _n_strips(self, k: Builder, rows: WeightRows) -> Val:
        """Return the number of the panel's strips that have rows of the tensor."""
        return k.min((rows.m - rows.first + (EDGE - 1)) // EDGE, self.mr * k.isa.lanes // EDGE)

    def _transpose_registers(self, k: Builder, panel: Val, begin: Val, end: Val) -> None:
        """Transpose the data of each register in the panel, which holds values ``begin`` to before
        ``end`` of K, on machines that load operand a of a product by columns (``MatrixUnit.turn``).
        """
        matrix = matrix_of(k)
        turn = matrix.turn
        n = self.mr * k.isa.lanes
        if turn is None:
            return

        def turn_all(k: Builder, panel: Val, n_steps: Val) -> None:
            with k.loop(n // EDGE) as s, k.loop(n_steps) as b:
                for m in range(2 * self.n_parts):
                    at = s * self.strip_pitch + (b * step_pitch(self.n_parts) + m * REGISTER)
                    turn(k, panel + at, LINE)

        matrix.scope(k, "turn", (panel, (end - begin) // BLOCK), turn_all)

    @contextmanager
    def registers(self, k: Builder, free: Val) -> Iterator[None]:
        matrix = matrix_of(k)
        matrix.begin(k, free)
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
        out: Epilogue | None = None,
        n_panels: int = 1,
    ) -> Iterator[tuple[Val, Sums]]:
        written = (
            MatrixOutput(EDGE, 2, out.stride, out.output_address(0, 0), 4 * EDGE) if out else None
        )
        most = self._n_strips(k, out.seg.rows) if out else None
        n_strips = self.multiply(k, panel, x, free, part, written, most, n_panels)
        with k.loop(n_strips) as s:
            yield s * EDGE, RegisterTile(k, free + s * SUMS_BYTES).results()

    def multiply(
        self,
        k: Builder,
        panel: Val,
        x: Val,
        sums: Val,
        part: KRange | None = None,
        written: MatrixOutput | None = None,
        n_strips: Val | None = None,
        n_panels: int = 1,
    ) -> Val:
        """Multiply a panel by the tokens ``x`` as ``tiles`` does, but leave the sums at ``sums``,
        SUMS_BYTES a strip; return the number of strips. ``n_strips``: the strips to multiply, None
        for all of the panels; ``written``: the sums' final destination, to prefetch it.
        """
        first, last, _ = part or (k.i64(0), k.i64(self.steps), None)
        n_steps = (last - first) * STEP[self.act] // DWORDS[self.act]
        x = x + first * (STEP[self.act] * 4 * EDGE)
        most = n_panels * self.mr * k.isa.lanes // EDGE
        n_strips = k.i64(most) if n_strips is None else n_strips
        group = TokenGroup(k, panel, self.strip_pitch, self.n_parts, n_strips, most, sums, written)
        group.multiply(x, n_steps, x + self.layout().group_bytes)
        return n_strips


def matrix_of(k: Builder) -> MatrixUnit:
    """Return the matrix registers of ``k``'s instruction set, which must have some (asserted)."""
    assert k.isa.matrix is not None, k.isa.name
    return k.isa.matrix


def step_pitch(n_parts: int) -> int:
    """Return the bytes from one step of a strip to the next: an odd number of lines, because an
    even one would map the lines of a row to few sets of the cache.
    """
    return n_parts * PART_BYTES + LINE


def emit_pack_rows(
    k: Builder,
    panel: Val,
    pitch: int,
    n_parts: int,
    source: WeightRows,
    rows: Val,
    begin: Val,
    end: Val,
) -> None:
    """Pack values ``begin`` to before ``end`` of ``rows`` rows of ``source`` into ``panel``, with
    strips ``pitch`` bytes apart, as ``n_parts`` bf16 a value. Both ends are whole blocks, except K
    itself, where zeros fill the last line.
    """
    fmt = source.weights.fmt
    n_values = max(BLOCK, fmt.block)  # at once
    n_blocks = n_values // fmt.block
    (full, rest) = divmod(source.k, n_values)

    looks_up = fmt.codes is not None and fmt.codes.words and k.isa.lookup_words

    def some(row: BlockAddress, to: Val, c: Val, n: int) -> None:
        if looks_up and n_parts == 1:
            values = [[v] for v in load_narrow(k, row.block(c))]
        else:
            values = [in_bf16(k, v, n_parts) for v in load_values(k, row, c, n)]
        for i, parts in enumerate(values):
            at = (c * len(values) + i) * step_pitch(n_parts)
            for p, part in enumerate(parts):
                k.store(to + at, part, offset=p * PART_BYTES, align=LINE)

    with in_runs(k, source, rows) as (at, run):
        skipped = begin // BLOCK * step_pitch(n_parts)
        tos = [panel + r // EDGE * pitch + (r % EDGE * LINE - skipped) for r in at]
        with k.loop(k.min(end // n_values, full), start=begin // n_values) as c:
            for row in run:
                row.block(c, n_blocks).prefetch(k, AHEAD // sum(fmt.strides), n_blocks, 3)
            for row, to in zip(run, tos, strict=True):
                some(row, to, c, n_values)
        if rest:
            with k.if_(end > full * n_values):
                for row, to in zip(run, tos, strict=True):
                    some(row, to, k.i64(full), rest)


@contextmanager
def in_runs(
    k: Builder, source: WeightRows, rows: Val | int
) -> Iterator[tuple[list[Val], list[BlockAddress]]]:
    """Emit a loop over ``rows`` rows, a multiple of RUNS, in RUNS runs of consecutive rows, one row
    of each run at a time. Yield the numbers of these RUNS rows, and their addresses.
    """
    each = rows // RUNS
    with k.loop(each) as j:
        at = [each * i + j for i in range(RUNS)]
        yield at, [source.row(k, r) for r in at]


@dataclass
class MatrixOutput:
    """Final destination of a group's sums, to prefetch it. A strip's sums go to ``n`` pieces of
    ``width`` lines, ``stride`` bytes apart; the first strip's begin at ``first``, each next one's
    ``apart`` bytes later. Another thread read these lines last, so they are prefetched long before
    they are written.
    """

    n: int
    width: int
    stride: Val
    first: Val
    apart: int

    def prefetch(self, k: Builder, n_steps: int, step: Val, first: Val, stride: Val) -> None:
        """Prefetch, in step ``step`` of ``n_steps``, its part of a strip's lines from
        ``first`` on.
        """
        n = -(-self.n // n_steps)
        for run, line in product(range(n), range(self.width)):
            k.prefetch(first + ((step * n + run) * stride + line * LINE), write=True)


class TokenGroup:
    """Product of a group of 32 tokens with ``n_strips`` strips of a panel, at most ``most``, which
    are ``pitch`` bytes apart. Each strip's sums are left in scratch at ``sums``, register by
    register. ``written``: their final destination, to prefetch it, or None.
    """

    def __init__(
        self,
        k: Builder,
        panel: Val,
        pitch: int,
        n_parts: int,
        n_strips: Val,
        most: int,
        sums: Val,
        written: MatrixOutput | None,
    ) -> None:
        self.k = k
        self.matrix = matrix_of(k)
        self.panel = panel
        self.pitch = pitch
        self.n_strips = n_strips
        self.sums = sums
        self.written = written
        self.n_parts = n_parts
        self.x_step = n_parts * PART_BYTES
        # Steps of K whose tokens stay in the first-level cache.
        self.near = self.matrix.near // (BLOCK * n_parts)
        # Lines of the next part's tokens that each step prefetches: all strips together prefetch
        # all.
        self.n_asked = -(-EDGE * n_parts // most)

    def multiply(self, x: Val, n_steps: Val, next_group: Val) -> None:
        """Multiply the tokens at ``x`` over ``n_steps`` steps of K, and prefetch the tokens at
        ``next_group``, which are multiplied next.
        """
        k = self.k
        near = self.near
        self._part(x, k.i64(0), k.min(n_steps, near), n_steps, next_group, again=False)
        with k.loop(n_steps, start=near, step=near) as first:
            self._part(x, first, k.min(first + near, n_steps), n_steps, next_group, again=True)

    def _part(
        self, x: Val, first: Val, last: Val, n_steps: Val, next_group: Val, *, again: bool
    ) -> None:
        """Multiply all strips by the tokens at ``x`` in steps ``first`` to before ``last`` of
        ``n_steps``. With ``again`` add to ``sums``, else replace them. Prefetch the tokens of the
        following steps, or after the last step those at ``next_group``.
        """
        k = self.k
        soon = k.select(last < n_steps, x + last * self.x_step, next_group)

        def multiply(
            k: Builder, strip: Val, x: Val, n: Val, sums: Val, soon: Val, *places: Val
        ) -> None:
            for c in range(4):
                if again:
                    self.matrix.load(k, c, sums + c * REGISTER, LINE)
                else:
                    self.matrix.zero(k, c)
            with k.loop(n) as b:
                for line in range(self.n_asked):
                    k.prefetch(soon + (b * self.x_step + line * LINE), NEXT_LEVEL)
                if self.written and places:
                    self.written.prefetch(k, self.near, b, *places)
                self._dots(k, strip + b * step_pitch(self.n_parts), x + b * self.x_step)
            for c in range(4):
                self.matrix.store(k, c, sums + c * REGISTER, LINE)

        with k.loop(self.n_strips) as s:
            strip = self.panel + (s * self.pitch + first * step_pitch(self.n_parts))
            args = [
                strip,
                x + first * self.x_step,
                last - first,
                self.sums + s * SUMS_BYTES,
                soon + s * (self.n_asked * LINE),
            ]
            if self.written and not again:
                args += [self.written.first + s * self.written.apart, self.written.stride]
            self.matrix.scope(k, "multiply_on" if again else "multiply", args, multiply)

    def _dots(self, k: Builder, strip: Val, x: Val) -> None:
        """Emit the products of one step: of each pair of parts in PRODUCTS, from the strip's values
        at ``strip`` and the tokens' at ``x``. Registers keep the part that the next product shares.
        """
        loaded: list[int | None] = [None, None]
        for parts in PRODUCTS[self.n_parts]:
            for m in range(2):
                if loaded[0] != parts[0]:
                    at = strip + (parts[0] * PART_BYTES + m * REGISTER)
                    self.matrix.load_passing(k, 4 + m, at, LINE)
                if loaded[1] != parts[1]:
                    at = x + (parts[1] * PART_BYTES + m * LINE)
                    self.matrix.load(k, 6 + m, at, 2 * LINE)
            loaded = [*parts]
            self.matrix.dots_bf16(k)


class RegisterTile:
    """Sums of 32 rows by 32 tokens, as four registers stored them in scratch at ``sums``."""

    def __init__(self, k: Builder, sums: Val) -> None:
        self.k = k
        self.sums = sums

    def pair(self, r: Val, t: int) -> tuple[Val, Val]:
        """Return the sums of rows ``2 r`` and ``2 r + 1``, f32, for the 16 tokens from ``t`` on."""
        half = SIDE // 2
        at = self.sums + (r // half * (2 * REGISTER) + r % half * (2 * LINE))
        even, odd = (t // SIDE * REGISTER + i * LINE for i in range(2))
        k = self.k
        ty = f32 * SIDE
        return k.load(at, ty, offset=even, align=LINE), k.load(at, ty, offset=odd, align=LINE)

    def results(self) -> Sums:
        """Yield (first row, token, vector of rows), transposed, as ``Epilogue.store``
        takes them.
        """
        k = self.k
        lanes = self.k.isa.lanes
        for m, t in product(range(2), range(2)):
            at = self.sums + (2 * m + t) * REGISTER
            held = [k.load(at, i32 * SIDE, offset=LINE * i, align=LINE) for i in range(SIDE)]
            for i, column in enumerate(transpose(k, held, lanes)):
                for j, v in enumerate(column):
                    yield SIDE * m + v.ty.lanes * j, SIDE * t + i, v.bits(f32 * v.ty.lanes)

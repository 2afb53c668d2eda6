"""Packed products on matrix registers: float weights as words, of two bytes each.

A register holds twice as many bytes as bf16, and its products take the same time. Weights and
activations are words of 16 bits with a scale for every 256 values (``act`` "q16x2"), and a word is
256 times its high byte plus its low one::

    a b = 65536 high_a high_b + 256 (high_a low_b + low_a high_b) + low_a low_b

The last product is left out, so three products of bytes take half the time of the three products of
bf16 that F16 weights need (``matrix.py``). Sums are kept over 256; that factor is in the scales of
a panel's rows. Two registers hold sums of the first product, two of the second and third, of 16
rows by 32 tokens. After every 256 values of K vectors add them up, scale them, and add them to the
sums in scratch, while the registers are busy with the next 16 rows.

Panels and groups of tokens are as in ``matrix.py``, but a *step* is 64 values of K: of a strip the
lines of high parts of its rows, then those of low parts. Scales of rows, f32, come after a strip's
steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i32
from treadle.kernels.activation_layout import (
    BLOCK,
    BYTES_TOP,
    PAIR,
    SPAN,
    in_bytes,
    largest_magnitude_bits,
    word_scale,
)
from treadle.kernels.format_blocks import BlockAddress, WeightRows
from treadle.kernels.matmul.matrix import (
    AHEAD,
    EDGE,
    NEXT_LEVEL,
    REGISTER,
    RUNS,
    SIDE,
    SUMS_BYTES,
    MatrixGemm,
    MatrixOutput,
    matrix_of,
)
from treadle.kernels.matmul.panel import load_floats
from treadle.kernels.matmul.tile import Ends, KRange
from treadle.kernels.run_state import LINE

SPAN_STEPS = SPAN // PAIR
PART_BYTES = LINE * EDGE  # of a step's high or low parts: of a strip, or of a group's tokens
# From one step of a strip to the next: an odd number of lines, as in ``matrix.step_pitch``.
STEP_PITCH = 2 * PART_BYTES + LINE
TOKENS_BYTES = 2 * PART_BYTES  # of a step, of a group
SCALES_BYTES = 4 * EDGE  # of a strip's rows, or a group's tokens, for a span


@dataclass(frozen=True)
class WordsMatrixGemm(MatrixGemm):
    """gemm on matrix registers with ``act`` "q16x2". ``kc`` is a multiple of SPAN."""

    @property
    def name(self) -> str:
        return f"{super().name}_words"

    @property
    def n_spans(self) -> int:
        """Spans of 256 values in a row of a panel."""
        return -(-min(self.kc or self.k, self.k) // SPAN)

    @property
    def strip_pitch(self) -> int:
        return self.scales_off + self.n_spans * SCALES_BYTES

    @property
    def scales_off(self) -> int:
        """Byte offset of the scales in a strip."""
        return self.n_spans * SPAN_STEPS * STEP_PITCH

    @contextmanager
    def registers(self, k: Builder, free: Val) -> Iterator[None]:
        matrix = matrix_of(k)
        assert matrix.begin_bytes is not None, k.isa.name
        matrix.begin_bytes(k, free, LINE)
        yield
        matrix.end(k)

    def sums_bytes(self, lanes: int, n_panels: int = 1) -> int:
        return super().sums_bytes(lanes, n_panels) + 2 * SUMS_BYTES  # and those of a span, twice

    def fill(
        self, k: Builder, panel: Val, stage: Val, rows: WeightRows, part: Ends | None = None
    ) -> None:
        def pack(k: Builder, panel: Val, *source: Val) -> None:
            *given, begin, end = source
            self._pack(k, panel, rows.with_values(given), begin, end)

        begin, end = part or (k.i64(0), k.i64(self.steps))
        k.outlined("pack", (panel, *rows.values, begin, end), pack)

    def _pack(self, k: Builder, panel: Val, source: WeightRows, begin: Val, end: Val) -> None:
        """Pack steps ``begin`` to before ``end`` of K of all rows that exist in ``source`` into
        ``panel``. Both ends are whole spans, except the end of K.
        """
        each = self._n_strips(k, source) * EDGE // RUNS
        first = begin // SPAN_STEPS
        full, rest = divmod(self.k, SPAN)

        def span(r: Val, c: Val, n: int) -> None:
            strip = panel + r // EDGE * self.strip_pitch
            to = strip + ((c - first) * (SPAN_STEPS * STEP_PITCH) + r % EDGE * LINE)
            d = self._pack_span(k, source.row(k, r), c, n, to)
            at = strip + (self.scales_off + (c - first) * SCALES_BYTES + r % EDGE * 4)
            k.store(at, d * 256.0)

        with k.loop(each) as j:
            with k.loop(k.min(end // SPAN_STEPS, full), start=first) as c, k.loop(RUNS) as run:
                span(each * run + j, c, SPAN)
            if rest:
                with k.if_(end > full * SPAN_STEPS), k.loop(RUNS) as run:
                    span(each * run + j, k.i64(full), rest)

    def _pack_span(self, k: Builder, row: BlockAddress, c: Val, n: int, to: Val) -> Val:
        """Write the ``n`` weights of a row's ``c``-th span to ``to`` as high and low bytes, zeros
        up to a whole step; return the span's scale.
        """
        per = SPAN // BLOCK
        row.block(c, SPAN).prefetch(k, AHEAD // sum(self.fmt.strides), SPAN, 3)
        blocks = [
            load_floats(k, row, c * per + b, BLOCK, min(max(n - b * BLOCK, 0), BLOCK))
            for b in range(-(-n // PAIR) * 2)
        ]
        inverse, d = word_scale(k, largest_magnitude_bits(k, blocks), most=BYTES_TOP)
        for step in range(len(blocks) // 2):
            both = k.concat(*blocks[2 * step : 2 * step + 2])
            for p, part in enumerate(in_bytes(k, both, inverse)):
                k.store(to, part, offset=step * STEP_PITCH + p * PART_BYTES, align=LINE)
        return d

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
        first, last, _ = part or (k.i64(0), k.i64(self.steps), None)
        act = self.layout()
        most = n_panels * self.mr * k.isa.lanes // EDGE
        n_strips = k.i64(most) if n_strips is None else n_strips
        at = x + first * TOKENS_BYTES
        group = SpanGroup(
            k,
            panel,
            self.strip_pitch,
            self.scales_off,
            n_strips,
            most,
            at,
            x + (act.d_off + first // SPAN_STEPS * SCALES_BYTES),
            sums,
            written,
            last - first,
            at + act.group_bytes,
        )
        full, rest = divmod(self.k, SPAN)
        n_full = k.min(last // SPAN_STEPS, full) - first // SPAN_STEPS
        if full:
            with k.if_(n_full > 0):
                group.multiply(k.i64(0), SPAN_STEPS, again=False)
            with k.loop(n_full, start=1) as c:
                group.multiply(c, SPAN_STEPS, again=True)
        if rest:
            alone = not full or (self.kc > 0 and full * SPAN % self.kc == 0)
            with k.if_(last > full * SPAN_STEPS):
                group.multiply(n_full, -(-rest // PAIR), again=not alone)
        return n_strips


@dataclass
class SpanGroup:
    """Product of a group of 32 tokens with ``n_strips`` strips of a panel, at most ``most``, a span
    at a time. Sums are left at ``sums``, as in ``matrix.TokenGroup``. After them is scratch for the
    i32 sums of one span, twice for 16 rows: one is filled while the other is scaled.
    """

    k: Builder
    panel: Val
    pitch: int  # bytes from one strip to the next
    scales_off: int  # byte offset of the rows' scales in a strip
    n_strips: Val
    most: int
    x: Val  # the tokens' values, from the panel's first step on
    scales: Val  # the tokens' scales, from the panel's first span on
    sums: Val
    written: MatrixOutput | None  # the sums' final destination, to prefetch it
    n_panel_steps: Val  # steps of K in the panel
    next_group: Val  # its tokens, which are prefetched with the last span

    def multiply(self, c: Val, n_steps: int, *, again: bool) -> None:
        """Multiply all strips by the panel's ``c``-th span, ``n_steps`` steps. With ``again`` add
        to the sums, else replace them.
        """
        k = self.k
        n_rows = self.n_strips * (EDGE // SIDE)
        done = c * SPAN_STEPS
        x = self.x + done * TOKENS_BYTES
        more = done + n_steps < self.n_panel_steps
        soon = k.select(more, x + n_steps * TOKENS_BYTES, self.next_group)
        d_x = self.scales + c * SCALES_BYTES
        scales = [k.load(d_x, f32 * SIDE, offset=t * LINE, align=LINE) for t in range(2)]
        # Lines of the next span's tokens that each step prefetches: all rows together prefetch all.
        n_asked = -(-SPAN_STEPS * TOKENS_BYTES // LINE // (n_steps * self.most * 2))

        def add(i: Val, rows: range) -> None:
            strip = self.panel + i // 2 * self.pitch
            d_w = strip + (self.scales_off + c * SCALES_BYTES + i % 2 * (4 * SIDE))
            to = self.sums + i * (2 * REGISTER)
            add_rows(k, self._span_sums(i), d_w, scales, to, rows, again=again)

        def multiply(i: Val, before: Val | None) -> None:
            strip = self.panel + (i // 2 * self.pitch + i % 2 * REGISTER + done * STEP_PITCH)
            for r in range(4):
                matrix_of(k).zero(k, r)
            for step in range(n_steps):
                at = i * n_steps + step
                for line in range(n_asked):
                    k.prefetch(soon + (at * n_asked + line) * LINE, NEXT_LEVEL)
                if self.written and not again:
                    out = self.written
                    first = out.first + i // 2 * out.apart
                    out.prefetch(k, 2 * n_steps, i % 2 * n_steps + step, first, out.stride)
                multiply_step(k, strip + step * STEP_PITCH, x + step * TOKENS_BYTES)
                if before is not None:
                    add(before, range(SIDE * step // n_steps, SIDE * (step + 1) // n_steps))
            for r in range(4):
                matrix_of(k).store(k, r, self._span_sums(i) + r * REGISTER, LINE)

        multiply(k.i64(0), None)
        with k.loop(n_rows, start=1) as i:
            multiply(i, i - 1)
        add(n_rows - 1, range(SIDE))

    def _span_sums(self, i: Val) -> Val:
        """Return the address of the i32 sums of one span for the ``i``-th 16 rows."""
        return self.sums + (self.most * SUMS_BYTES + i % 2 * SUMS_BYTES)


def multiply_step(k: Builder, rows: Val, x: Val) -> None:
    """Multiply the 16 rows at ``rows`` by the 32 tokens at ``x`` over 64 values of K. Registers 0
    and 1 accumulate products of two high parts, 2 and 3 those of a high and a low part.
    """
    matrix = matrix_of(k)
    dot = matrix.dot_bytes
    assert dot is not None, k.isa.name
    matrix.load_passing(k, 4, rows, LINE)
    for t in range(2):
        matrix.load(k, 6 + t, x + t * LINE, 2 * LINE)
        dot(k, t, 4, 6 + t)
    matrix.load_passing(k, 5, rows + PART_BYTES, LINE)
    for t in range(2):
        dot(k, 2 + t, 5, 6 + t)
    for t in range(2):
        matrix.load(k, 6 + t, x + (PART_BYTES + t * LINE), 2 * LINE)
        dot(k, 2 + t, 4, 6 + t)


def add_rows(
    k: Builder, made: Val, d_w: Val, scales: list[Val], sums: Val, rows: range, *, again: bool
) -> None:
    """Scale the i32 sums of one span at ``made``, for ``rows`` of 16, by the rows' scales at
    ``d_w`` and the tokens' ``scales``. With ``again`` add them to ``sums``, else store them there.
    """
    for r in rows:
        d = k.splat(k.load(d_w, f32, offset=4 * r, align=4), f32 * SIDE)
        for t in range(2):
            at = t * REGISTER + r * LINE
            high, middle = (
                k.load(made, i32 * SIDE, offset=2 * part * REGISTER + at, align=LINE)
                for part in range(2)
            )
            # At most 256 * (256 * 127**2 + 2 * 127 * 128), which is below 2**31.
            y = ((high << 8) + middle).to(f32) * d
            if again:
                y = k.fma(y, scales[t], k.load(sums, y.ty, offset=at, align=LINE))
            else:
                y = y * scales[t]
            k.store(sums, y, offset=at, align=LINE)

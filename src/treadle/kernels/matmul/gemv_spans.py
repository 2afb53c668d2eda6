"""gemv in bytes, a *span* of 256 values of K at a time, for 256-bit vectors whose dots take two
instructions.

Codes narrower than a byte keep the two halves of a span side by side: a vector has 16 codes of each
half, a pair of vectors 32 consecutive codes of each, with one scale of x. Their dots are added up
in i16 as far as they share a scale::

    short   i16   dots of codes and x
    whole   i32   sums of pairs, each times its step if sub-blocks have steps; of two parts of x
                  (``q8x2``), 128 times that of the high parts plus that of the low ones
    sum     f32   + whole * scale

A row's scales are unpacked before its codes are read, for many blocks together: they take many
instructions, and this way no product waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treadle.formats import Format
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import f32, i8, i16, i32, u8
from treadle.kernels.activation_layout import BLOCK, BYTES, LOW_BITS, block_sums, scaled_comp
from treadle.kernels.format_blocks import BlockAddress, fields_of, scales_of, unpack_codes
from treadle.kernels.matmul.gemv_q8 import accumulators, prepared_bytes
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.prefetch import Neighbours, PrefetchRuns
from treadle.kernels.reduce import reduce_all

SPAN = 256  # values of K that are multiplied together
VECTORS = 8  # vectors of a span's codes
PAIRS = 4  # pairs of vectors of a span's codes
HALF = SPAN // 2
RUN = 16
SCALES = SPAN // BLOCK  # scales of x for a span
# Spans of a row whose scales are unpacked before their codes are read. With more, scales would wait
# for lines that are not prefetched yet.
CHUNK = 8
# Limit in bytes of the tokens' values and magnitudes together, for signed codes: while both fit the
# first-level cache, loading ``|x|`` is faster than computing ``|code|``.
VALUES_AND_SIZES = 1 << 15
# Bytes of a span in scratch. For a token: a part of its values, its scales for each pair of
# vectors, and eight sums in f32 or sixteen in i16. For a row: sixteen steps, and the d of its block
# or its scales times a token's.
VALUES = SPAN
SPREAD = 32 * PAIRS
SUMS = 32
STEPS = 32
D = 4
SCALED = 4 * SCALES


def kind_of(fmt: Format, isa: Isa, k: int) -> type[GemvSpans] | None:
    """Return the class that multiplies rows of ``k`` weights of format ``fmt`` by spans on ``isa``;
    None if there is none.
    """
    codes = fmt.codes
    if codes is None or isa.shorts is None or isa.vector_bits != 256 or k % SPAN:
        return None
    if fmt.block == SPAN:
        return SubBlockSpans if codes.steps else None
    if fmt.block != BLOCK or codes.sub != BLOCK:
        return None
    return HalfBlockSpans if (codes.run,) * len(codes.order) == (RUN, RUN) else None


class GemvSpans:
    """Base of the gemvs that process K in spans of 256 values. The operands of tokens, which all
    rows share, are prepared once, in scratch; the scales of ``mr`` rows are unpacked for some spans
    at a time.
    """

    def __init__(self, k: Builder, spec: Matmul, tokens: list[Val], scratch: Val) -> None:
        assert spec.fmt.codes is not None, spec.name
        assert k.isa.shorts is not None, spec.name
        self.k = k
        self.spec = spec
        self.tokens = tokens
        self.codes = spec.fmt.codes
        self.act = spec.layout()
        self.shorts = k.isa.shorts
        self.lanes = k.isa.lanes
        # Codes too large for a dot are made signed; the dot moves their sign to x, so they need no
        # offset.
        self.less = self.codes.offset if self.codes.top > k.isa.dot4_top else 0
        self.offset = self.codes.offset - self.less
        self.n_spans = spec.k // SPAN
        self.free = scratch
        self.used = 0
        self.n_parts = BYTES[spec.act]
        self.values = [self._places(len(tokens), VALUES) for _ in range(self.n_parts)]
        fit = 2 * self.n_parts * VALUES * self.n_spans * len(tokens) <= VALUES_AND_SIZES
        sized = self.less > 0 and fit
        self.sizes = [self._places(len(tokens), VALUES) for _ in self.values] if sized else None
        # Sums of one byte's values fit i16; two for one scale of x.
        self.in_shorts = self.codes.sub < BLOCK and self.n_parts == 1
        self.sum_bytes = SUMS if self.in_shorts else SUMS * BLOCK // self.codes.sub
        self.sums = self._places(len(tokens), self.sum_bytes)
        self.make_room()
        assert self.used <= spec.nr * prepared_bytes(spec.k, self.n_parts), spec.name
        with k.loop(self.n_spans) as b:
            for t, token in enumerate(tokens):
                for part, places in enumerate(self.values):
                    x = token + (self.act.low_off * part + b * SPAN)
                    for v in range(VECTORS):
                        both = [k.load(x, i8 * RUN, offset=RUN * v + half) for half in (0, HALF)]
                        whole = k.concat(*both)
                        k.store(places[t] + b * VALUES, whole, offset=32 * v)
                        if self.sizes:
                            size = k.abs(whole)
                            k.store(self.sizes[part][t] + b * VALUES, size, offset=32 * v)
                self.prepare(t, b)

    def _places(self, n: int, size: int, spans: int = 0) -> list[Val]:
        """Allocate scratch of ``size`` bytes for each span (of all, or of ``spans``), ``n`` times;
        return the addresses.
        """
        first = self.free
        each = (spans or self.n_spans) * size
        self.free = first + n * each
        self.used = self.used + n * each
        return [first + i * each for i in range(n)]

    def alloc_per_span(self, n: int, size: int) -> list[Val]:
        """Allocate scratch of ``size`` bytes for each span of a chunk, ``n`` times; return the
        addresses.
        """
        return self._places(n, size, min(CHUNK, self.n_spans))

    def make_room(self) -> None:
        """Allocate the scratch that the subclass needs."""
        raise NotImplementedError

    def prepare(self, t: int, b: Val) -> None:
        """Store the ``t``-th token's operands for span ``b``, which all rows share."""
        raise NotImplementedError

    def unpack(self, row: BlockAddress, r: int, first: Val, n: Val, sums: list[Var]) -> None:
        """Unpack the scales of the ``r``-th row for ``n`` spans from ``first`` on. Adds the
        products of minimums or of an offset to ``sums``, one for each token.
        """
        raise NotImplementedError

    def multiply(self, row: BlockAddress, r: int, b: Val, i: Val) -> list[Val]:
        """Return the sums of span ``b`` of the ``r``-th row, the ``i``-th span of its chunk, with
        each token. The caller adds them to the row's sums, so that fewer additions wait for the
        previous one.
        """
        raise NotImplementedError

    def scaled(self, r: int, i: Val, part: Val, total: Val) -> Val:
        """Return ``total`` plus ``part``, one of the sums that ``multiply`` returns for row ``r``
        and the ``i``-th span of its chunk. A subclass whose ``multiply`` leaves out the block's
        scale multiplies ``part`` by it.
        """
        return total + part

    def dot(self, rows: list[BlockAddress], ahead: Neighbours | PrefetchRuns) -> list[list[Val]]:
        """Return the products f32 ``[row][token]`` of ``rows`` with all tokens; ``ahead``
        prefetches their blocks.
        """
        k = self.k
        sums = accumulators(k, self.spec, self.lanes)
        with k.loop(-(-self.n_spans // CHUNK)) as chunk:
            start = chunk * CHUNK
            n_spans = k.min(self.n_spans - start, CHUNK)
            for r, row in enumerate(rows):
                self.unpack(row, r, start, n_spans, sums[r])
            with k.loop(n_spans) as i:
                ahead.fetch(start + i, SPAN // self.spec.fmt.block)
                for r, row in enumerate(rows):
                    parts = self.multiply(row, r, start + i, i)
                    for part, total in zip(parts, sums[r], strict=True):
                        total.v = self.scaled(r, i, part, total.v)
        flat = [var.v for mine in sums for var in mine]
        n = len(self.tokens)
        made: list[Val] = []
        for first in range(0, len(flat), self.lanes):  # as many as fit one reduction
            some = flat[first : first + self.lanes]
            reduced = reduce_all(k, some, lambda a, b: a + b)
            made += [k.extract(reduced, i) for i in range(len(some))]
        return [made[i : i + n] for i in range(0, len(made), n)]

    def token_scales(self, t: int, b: Val) -> Val:
        """Return the scales of the ``t``-th token's values in span ``b``: f32 ``[8]``, one for each
        32 values of K.
        """
        at = self.tokens[t] + b * (4 * SCALES)
        return self.k.load(at, f32 * SCALES, offset=self.act.d_off)

    def comps(self, t: int, b: Val, n: int) -> Val:
        """Return the ``t``-th token's ``n`` compensations for span ``b``, i32 ``[n]`` (see
        ``ActivationLayout``).
        """
        return self.k.load(self.tokens[t] + b * (4 * n), i32 * n, offset=self.act.comp_off)

    def add_short_dots(self, acc: Val | None, code: Val, part: int, t: int, b: Val, v: int) -> Val:
        """Return ``acc`` plus the i16 dots of ``code``, the ``v``-th vector of span ``b``, with
        part ``part`` of the ``t``-th token's values.
        """
        k = self.k
        x = k.load(self.values[part][t] + b * VALUES, i8 * 32, offset=32 * v)
        size = None
        if self.sizes:
            size = k.load(self.sizes[part][t] + b * VALUES, u8 * 32, offset=32 * v)
        return self.shorts.dot(k, acc, code, x, size)

    def signed(self, codes: list[Val]) -> list[Val]:
        """Return the codes as the dots take them: if ``less`` is not 0, reduced by it, as signed
        bytes.
        """
        return [(v - self.less).bits(i8.like(v.ty)) for v in codes] if self.less else codes

    def dots(
        self,
        t: int,
        b: Val,
        i: int,
        codes: list[Val],
        widen: Callable[[Val, Val, int, bool], Val],
    ) -> Val:
        """Return the i32 dots of the ``i``-th pair of vectors of span ``b`` with token ``t``.
        ``widen(whole, short, v, high)`` returns ``whole`` plus the i16 dots of the ``v``-th vector
        (or of both of a pair, if they may be added up), times 128 if ``high``.
        """
        first, second = codes
        whole = self.k.zero(i32 * self.lanes)
        together = self.codes.sub == BLOCK and self.shorts.room(self.codes.top - self.less) >= 2
        for part in range(self.n_parts):
            high = part < self.n_parts - 1
            short = self.add_short_dots(None, first, part, t, b, 2 * i)
            if together:
                short = self.add_short_dots(short, second, part, t, b, 2 * i + 1)
                whole = widen(whole, short, 2 * i, high)
                continue
            whole = widen(whole, short, 2 * i, high)
            short = self.add_short_dots(None, second, part, t, b, 2 * i + 1)
            whole = widen(whole, short, 2 * i + 1, high)
        return whole

    def pair(self, v: Val, i: int) -> Val:
        """Return the scales of the ``i``-th pair of vectors, spread over the lanes, from ``v``, the
        eight scales of a span: that of the span's ``i``-th 32 values in the first four lanes, that
        of the ``i``-th 32 of its second half in the others.
        """
        return self.k.shuffle(v, v, [i] * PAIRS + [PAIRS + i] * PAIRS)


class SubBlockSpans(GemvSpans):
    """Spans of formats whose blocks of 256 have sub-blocks with integer scales (*steps*). The
    instruction that adds up pairs of i16 dots also multiplies by the steps.
    """

    def make_room(self) -> None:
        self.spread = self._places(len(self.tokens), SPREAD)
        self.steps = self.alloc_per_span(self.spec.mr, STEPS)
        self.d = self.alloc_per_span(self.spec.mr, D)
        self.n_subs = SPAN // self.codes.sub

    def prepare(self, t: int, b: Val) -> None:
        k = self.k
        d = self.token_scales(t, b)
        comp = self.comps(t, b, self.n_subs)
        for i in range(PAIRS):
            k.store(self.spread[t] + b * SPREAD, self.pair(d, i), offset=32 * i)
        place = self.sums[t] + b * self.sum_bytes
        if self.in_shorts:
            k.store(place, scaled_comp(1, comp).to(i16))
        elif self.codes.has_m or self.offset:
            each = k.shuffle(d, d, [i * SCALES // self.n_subs for i in range(self.n_subs)])
            k.store(place, block_sums(k, comp, -each))

    def unpack(self, row: BlockAddress, r: int, first: Val, n: Val, sums: list[Var]) -> None:
        k = self.k
        with k.loop(n >> 1) as pair:  # a register holds the scales of two blocks
            self._unpack(row, r, first + pair * 2, pair * 2, 2, sums)
        if self.n_spans % 2:
            with k.if_((n & 1) > 0):
                self._unpack(row, r, first + (n - 1), n - 1, 1, sums)

    def _unpack(
        self, row: BlockAddress, r: int, b: Val, i: Val, count: int, sums: list[Var]
    ) -> None:
        """Unpack the scales of ``count`` blocks of the ``r``-th row from block ``b`` on, which is
        the ``i``-th block of its chunk. Add the products of minimums or of an offset to ``sums``,
        one for each token.
        """
        k = self.k
        codes = self.codes
        n = self.n_subs
        assert codes.steps is not None
        blocks = [row.block(b + j) for j in range(count)]
        given, d, m, dmin = codes.steps(k, k.isa, fields_of(k, blocks))
        steps = given.to(i16 * given.ty.lanes)
        k.store(self.steps[r] + i * (2 * n), steps)
        k.store(self.d[r] + i * D, d)
        if m is None and not self.offset:
            return
        if m is None:
            m = steps
            dmin = d * self.offset
        for j, mine in enumerate(k.split(m.to(steps.ty), n)):
            less = k.splat(k.extract(dmin, j), f32 * self.lanes)
            each = [] if self.in_shorts else k.split(mine.to(i32).to(f32), self.lanes)
            each = [v * less for v in each]
            for t in range(len(self.tokens)):
                place = self.sums[t] + (b + j) * self.sum_bytes
                for v, factor in enumerate(each):
                    made = k.load(place, factor.ty, offset=v * factor.ty.n_bytes)
                    sums[t].v = k.fma(made, factor, sums[t].v)
                if self.in_shorts:  # sums of neighbours that share a scale of x
                    whole = k.zero(i32 * (n // 2))
                    whole = self.shorts.scale(k, whole, mine, k.load(place, mine.ty))
                    made = whole.to(f32) * self.token_scales(t, b + j)
                    sums[t].v = k.fma(made, less, sums[t].v)

    def multiply(self, row: BlockAddress, r: int, b: Val, i: Val) -> list[Val]:
        k = self.k
        assert self.codes.in_halves is not None
        codes = self.signed(self.codes.in_halves(k, fields_of(k, [row.block(b)])))
        steps = self._steps(r, i)
        parts = SpanSums(k)

        def widen(whole: Val, short: Val, v: int, high: bool) -> Val:
            step = steps(v // 2 if self.n_subs == SCALES else v)
            if v % 2 == 0 and not high and self.n_parts > 1:  # the first of the low parts
                whole = whole << LOW_BITS
            return self.shorts.scale(k, whole, short, step)

        for p in range(PAIRS):
            for t in range(len(self.tokens)):
                whole = self.dots(t, b, p, codes[2 * p :][:2], widen)
                scale = k.load(self.spread[t] + b * SPREAD, f32 * self.lanes, offset=32 * p)
                parts.add(t, whole, scale)
        return parts.sums

    def scaled(self, r: int, i: Val, part: Val, total: Val) -> Val:
        d = self.k.load(self.d[r] + i * D, f32)
        return self.k.fma(part, self.k.splat(d, part.ty), total)

    def _steps(self, r: int, i: Val) -> Callable[[int], Val]:
        """Return a function of a sub-block's number v: the steps of sub-block v and of the one half
        a span later, each spread over half of the i16 lanes. ``r``: the row; ``i``: the span of its
        chunk.
        """
        k = self.k
        n = self.n_subs
        held = k.load(self.steps[r] + i * (2 * n), i16 * n)
        second = n // 2
        if n == VECTORS:  # all of them in both halves of the register
            held = k.pin(k.concat(held, held), "v")
            second = n + n // 2
        return lambda at: k.shuffle(held, held, [at] * VECTORS + [second + at] * VECTORS)


class HalfBlockSpans(GemvSpans):
    """Spans of formats with blocks of 32: eight blocks are a span, the first four side by side with
    the last four.
    """

    def make_room(self) -> None:
        self.scales = self.alloc_per_span(self.spec.mr * len(self.tokens), SCALED)

    def prepare(self, t: int, b: Val) -> None:
        k = self.k
        codes = self.codes
        comp = self.comps(t, b, SCALES)
        if codes.has_m:
            k.store(self.sums[t] + b * SUMS, block_sums(k, comp, self.token_scales(t, b)))
        elif self.offset:
            k.store(self.sums[t] + b * SUMS, scaled_comp(self.offset, comp).to(f32))

    def unpack(self, row: BlockAddress, r: int, first: Val, n: Val, sums: list[Var]) -> None:
        k = self.k
        codes = self.codes
        with k.loop(n) as i:
            b = first + i
            d, m = scales_of(k, self._blocks(row, b, range(SCALES)))
            for t, total in enumerate(sums):
                scale = d * self.token_scales(t, b)
                k.store(self.scales[r * len(sums) + t] + i * SCALED, scale)
                if codes.has_m or self.offset:
                    given = k.load(self.sums[t] + b * SUMS, f32 * SCALES)
                    total.v = k.fma(scale if m is None else m, given, total.v)

    def multiply(self, row: BlockAddress, r: int, b: Val, i: Val) -> list[Val]:
        k = self.k
        n = len(self.tokens)
        places = [self.scales[r * n + t] + i * SCALED for t in range(n)]
        scales = [k.load(place, f32 * SCALES) for place in places]
        parts = SpanSums(k)

        def widen(whole: Val, short: Val, v: int, high: bool) -> Val:
            if high:
                return self.shorts.scale(k, whole, short, k.const(1 << LOW_BITS, short.ty))
            return self.shorts.widen(k, whole, short)

        for p in range(PAIRS):
            codes = self.signed(unpack_codes(k, self._blocks(row, b, (p, PAIRS + p))))
            for t in range(n):
                parts.add(t, self.dots(t, b, p, codes, widen), self.pair(scales[t], p))
        return parts.sums

    def _blocks(self, row: BlockAddress, b: Val, which: Iterable[int]) -> list[BlockAddress]:
        return [row.block(b * SCALES + i) for i in which]


class SpanSums:
    """Sums of a span's products, one for each token."""

    def __init__(self, k: Builder) -> None:
        self.k = k
        self.sums: list[Val] = []

    def add(self, t: int, whole: Val, scale: Val) -> None:
        """Add ``whole * scale`` to the ``t``-th token's sum. The first calls must be in the order
        of tokens.
        """
        if len(self.sums) == t:
            self.sums.append(whole.to(f32) * scale)
        else:
            self.sums[t] = self.k.fma(whole.to(f32), scale, self.sums[t])

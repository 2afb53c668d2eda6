"""Attention in vectors, for few rows of queries: the sums of a page's scores, and of its P V, stay
in registers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import gcd

from treadle.jit import math
from treadle.jit.language import Builder, Isa, Val, Var
from treadle.jit.types import boolean, f32, i32
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.page_layout import HALF
from treadle.kernels.attention.work_item import LOWEST, SPAN, AttentionItem, Queries
from treadle.kernels.reduce import reduce_all
from treadle.kernels.run_state import PAGE
from treadle.kernels.spec import Frame, widest


class VectorTile(AttentionItem):
    """Attention tile of few rows of queries (decoding), whose sums stay in vector registers."""

    def __init__(
        self, k: Builder, isa: Isa, spec: Queries, frame: Frame, item: Val, group: Val
    ) -> None:
        super().__init__(k, isa, spec, frame, item, group)
        rows = spec.rows
        dims = spec.head_dim
        self.q = frame.scratch
        self.o = self.q + 4 * rows * dims
        self.p = self.o + 4 * rows * spec.dims_v
        self.stat = f32 * spec.row_lanes  # m and l, a lane a row
        self.slopes = [self.slope(g, f32 * isa.lanes) for g in range(spec.heads) if spec.alibi]

    def run(self) -> None:
        k = self.k
        self._load_queries()
        m = k.var(k.const(LOWEST, self.stat))
        total = k.var(k.zero(self.stat))
        if self.spec.sinks:
            for r, _, g in self._rows():
                score, one = self.sink(g)
                m.v, total.v = k.insert(m.v, score, r), k.insert(total.v, one, r)
        begin = self.item["key_begin"]
        end = self.item["key_end"]
        start = begin // PAGE
        last = (end + (PAGE - 1)) // PAGE
        # Spans start at multiples of SPAN pages, so that the order of a row's sums does not depend
        # on where the window of its tile's first row begins. Earlier pages may have been freed.
        with k.loop(last, start=start // SPAN * SPAN, step=SPAN) as span:
            first = k.max(span, start)
            n_pages = k.min(last, span + SPAN) - first
            if self.spec.chosen:
                with k.if_(self._any_chosen(first, n_pages)):
                    self._span(first, n_pages, m, total)
            else:
                self._span(first, n_pages, m, total)
        self._store(m.v, total.v)

    def _span(self, first: Val, n_pages: Val, m: Var, total: Var) -> None:
        """Process the span of ``n_pages`` pages from ``first`` on: scores, softmax, values. Updates
        ``m`` and ``total`` (l in ``paged.py``), a lane a row.
        """
        k = self.k
        tops = self._vectors(LOWEST)
        with k.loop(n_pages) as i:
            self._scores(self.page(first + i), (first + i) * PAGE, i * (PAGE * 4), tops)
        correction = self._softmax(m, total, n_pages, tops)
        self._values(first, n_pages, correction)

    def _any_chosen(self, first: Val, n_pages: Val) -> Val:
        """Return whether any token of the tile attends to a key of the span of ``n_pages`` pages
        from ``first`` on. A span without one is skipped: it would change no bit of the result.
        """
        k = self.k
        found = k.var(k.const(0, i32))
        with k.loop(n_pages) as i:
            for t in range(self.spec.tokens):
                found.v = found.v | self.choice(t, first + i)
        return (found.v < 0) | (found.v > 0)

    def _vectors(self, value: float) -> list[Var]:
        """Return a variable for each row of the tile: a vector with ``value`` in all lanes."""
        ty = f32 * self.isa.lanes
        return [self.k.var(self.k.const(value, ty)) for _ in range(self.spec.rows)]

    def _rows(self) -> list[tuple[int, int, int]]:
        return [
            (t * self.spec.heads + g, t, g)
            for t in range(self.spec.tokens)
            for g in range(self.spec.heads)
        ]

    def _load_queries(self) -> None:
        """Copy the tile's queries to scratch, contiguous, and zero its output."""
        k = self.k
        dims = self.spec.head_dim
        dims_v = self.spec.dims_v
        width = widest(self.isa.lanes, gcd(dims, dims_v))
        factor = 1.0 if self.spec.softcap else math.LOG2_E  # capped scores are scaled later
        for r, t, g in self._rows():
            row = self.query(t, g)

            def query(d: Val, r: int = r, row: Val = row) -> None:
                q = k.load(row, f32 * width, offset=d * 4) * factor
                k.store(self.q, q, offset=d * 4 + r * dims * 4)

            def result(d: Val, r: int = r) -> None:
                k.store(self.o, k.zero(f32 * width), offset=d * 4 + r * dims_v * 4)

            self.each_dim(1, width, query, result)

    def _scores(self, home: Val, key: Val, at: Val, tops: list[Var]) -> None:
        """Compute masked S = Q K^T of the page at ``home``, whose first key has position ``key``.
        Store it ``at`` bytes into the span's scores, and update ``tops``, the maxima of each row.
        """
        k = self.k
        isa = self.isa
        spec = self.spec
        side = spec.page.keys
        fmt = side.fmt
        lanes = isa.lanes
        dims = spec.head_dim
        vectors = PAGE // lanes
        at_once = max(1, min(vectors, (isa.regs - 6) // spec.rows))
        while vectors % at_once:
            at_once -= 1
        for first in range(0, vectors, at_once):
            columns = range(first, first + at_once)
            sums = [[k.var(k.zero(f32 * lanes)) for _ in columns] for _ in range(spec.rows)]

            def dots(
                start: Val,
                count: int,
                into: list[list[Var]],
                before: Val,
                totals: list[Var],
                columns: range = columns,
            ) -> None:
                """Multiply rows of keys from ``start`` on. ``before``: how many dims the key rows
                lag behind the query's. ``totals``, if any: sums of each row's query.
                """
                with k.loop(start + count, start=start) as d:
                    for half in fmt.halves:
                        keys = [side.load_keys(k, home, d, c * lanes, lanes, half) for c in columns]
                        at = (d + before) * 4 + half * HALF
                        for r, row in enumerate(into):
                            q = k.load(self.q, f32, offset=at + r * dims * 4)
                            if totals:
                                totals[r].v = totals[r].v + q
                            for c, key_ in enumerate(keys):
                                row[c].v = k.fma(k.splat(q, f32 * lanes), key_, row[c].v)

            if fmt.scaled:
                with k.loop(dims // BLOCK) as b:
                    part = [[k.var(k.zero(f32 * lanes)) for _ in columns] for _ in range(spec.rows)]
                    n_totals = spec.rows if fmt.minimum else 0
                    totals = [k.var(k.const(0.0, f32)) for _ in range(n_totals)]
                    dots(b * fmt.run, fmt.run, part, b * (BLOCK - fmt.run), totals)
                    for i, c in enumerate(columns):
                        place = home + (b * PAGE + c * lanes) * 4
                        d_k = k.load(place, f32 * lanes, offset=side.scales_at)
                        for r in range(spec.rows):
                            sums[r][i].v = k.fma(part[r][i].v, d_k, sums[r][i].v)
                        if fmt.minimum:
                            m_k = k.load(place, f32 * lanes, offset=side.minimums_at)
                            for r, total in enumerate(totals):
                                q = k.splat(total.v, m_k.ty)
                                sums[r][i].v = k.fma(q, m_k, sums[r][i].v)
            else:
                dots(k.i64(0), dims, sums, k.i64(0), [])
            for i, c in enumerate(columns):
                self._mask_and_store(key, at, c * lanes, [row[i].v for row in sums], tops)

    def _mask_and_store(
        self, key: Val, at: Val, column: int, rows: list[Val], tops: list[Var]
    ) -> None:
        k = self.k
        lanes = self.isa.lanes
        iota = k.const(range(column, column + lanes), i32 * lanes)
        position = k.splat(key.to(i32), iota.ty) + iota
        begin = k.splat(self.item["key_begin"].to(i32), iota.ty)
        end = k.splat(self.item["key_end"].to(i32), iota.ty)
        inside = (position >= begin) & (position < end)
        lowest = k.const(float("-inf"), f32 * lanes)
        for r, t, g in self._rows():
            own = self.item["position"] + self.token(t)
            here = k.splat(own.to(i32), iota.ty)
            seen = inside
            window = self.spec.window
            if self.spec.causal:
                last = k.splat(self.last_seen(own).to(i32), iota.ty) if self.spec.spans else here
                seen = seen & (position <= last)
            elif window:
                seen = seen & (position < here + window)
            if window:
                seen = seen & (position > here - window)
            if self.spec.chosen:
                word = k.splat(self.choice(t, key // PAGE), iota.ty)
                seen = seen & (((word >> iota) & 1) > 0)
            assert seen.ty.scalar == boolean
            score = rows[r]
            if self.spec.softcap:
                cap = self.spec.softcap
                score = math.tanh(k, score * (1 / cap)) * (cap * math.LOG2_E)
            if self.spec.alibi:
                score = score - self.slopes[g] * k.abs((position - here).to(score.ty))
            if self.spec.reach:
                first = key + column - (self.item["position"] + self.token(t))
                number = self.relative_biases(g, first, lanes)
                score = k.fma(number, k.const(math.LOG2_E, number.ty), score)
            if self.spec.rel_extent:
                number = self.rel_logits(t, g, key + column - own, lanes)
                score = k.fma(number, k.const(math.LOG2_E, number.ty), score)
            score = k.select(seen, score, lowest)
            tops[r].v = k.max(tops[r].v, score)
            k.store(self.p + at, score, offset=4 * (r * SPAN * PAGE + column))

    def _softmax(self, m: Var, total: Var, n_pages: Val, tops: list[Var]) -> Val:
        """Replace the scores S by P = ``2**(S - m')``, m' the new maximum; ``tops``: the maxima of
        each row's scores. Update ``m`` and ``total``; return ``2**(m - m')``, by which earlier sums
        are multiplied.
        """
        k = self.k
        lanes = self.isa.lanes
        old = m.v
        new = k.max(old, self._reduce_rows([top.v for top in tops], k.max))
        m.v = new
        correction = math.exp2(k, old - new)
        shifts = [k.splat(k.extract(new, r), f32 * lanes) for r in range(self.spec.rows)]
        lines = self._vectors(0.0)
        with k.loop(n_pages * PAGE, step=PAGE) as i:
            for r, shift in enumerate(shifts):
                for c in range(0, PAGE, lanes):
                    place = self.p + i * 4
                    offset = 4 * (r * SPAN * PAGE + c)
                    part = math.exp2(k, k.load(place, shift.ty, offset=offset) - shift)
                    k.store(place, part, offset=offset)
                    lines[r].v = lines[r].v + part
        sums = self._reduce_rows([line.v for line in lines], operator.add)
        total.v = k.fma(total.v, correction, sums)
        return correction

    def _reduce_rows(self, vectors: list[Val], op: Callable[[Val, Val], Val]) -> Val:
        """Reduce the vector of each row of the tile to one value by ``op``; return them in one
        vector, in the lane of the row.
        """
        k = self.k
        lanes = self.isa.lanes
        vectors = vectors + vectors[:1] * (self.stat.lanes - len(vectors))
        at_once = min(lanes, self.stat.lanes)
        reduced = [
            k.split(reduce_all(k, vectors[at : at + at_once], op), at_once)[0]
            for at in range(0, self.stat.lanes, at_once)
        ]
        return k.concat(*reduced)

    def _values(self, first: Val, n_pages: Val, correction: Val) -> None:
        """Update O = O c + P V, with the ``n_pages`` pages from ``first`` on; c is ``correction``.
        Keys past the last one are not read: their memory is undefined.
        """
        k = self.k
        isa = self.isa
        spec = self.spec
        fmt = spec.page.values.fmt
        width = widest(isa.lanes, fmt.run if fmt.scaled else spec.dims_v)
        vectors = spec.dims_v // width
        at_once = max(1, min(vectors, (isa.regs - 6) // spec.rows))
        while vectors % at_once:
            at_once -= 1
        with k.loop(vectors, step=at_once) as column:
            places = [
                [(column + i) * (4 * width) + r * spec.dims_v * 4 for i in range(at_once)]
                for r in range(spec.rows)
            ]
            sums = [
                [
                    k.var(
                        k.load(self.o, f32 * width, offset=place)
                        * k.splat(k.extract(correction, r), f32 * width)
                    )
                    for place in row
                ]
                for r, row in enumerate(places)
            ]
            with k.loop(n_pages) as i:
                page = self.page(first + i) + spec.page.v_off
                n_keys = k.min(self.item["key_end"] - (first + i) * PAGE, PAGE)
                self._add_page(page, n_keys, self.p + i * (PAGE * 4), column, sums)
            for row, line in zip(places, sums, strict=True):
                for place, total in zip(row, line, strict=True):
                    k.store(self.o, total.v, offset=place)

    def _add_page(self, home: Val, n_keys: Val, p: Val, column: Val, sums: list[list[Var]]) -> None:
        """Add P V of the page at ``home``, which has ``n_keys`` keys, to ``sums [row][vector]``,
        for the vectors of V from the ``column``-th on. ``p``: address of the page's weights P.
        """
        k = self.k
        spec = self.spec
        side = spec.page.values
        width = sums[0][0].ty.lanes
        with k.loop(n_keys) as j:
            values = [
                side.load_values(k, home, j, (column + i) * width, width)
                for i in range(len(sums[0]))
            ]
            for r, row in enumerate(sums):
                weight = k.load(p, f32, offset=j * 4 + r * SPAN * PAGE * 4)
                for total, v in zip(row, values, strict=True):
                    total.v = k.fma(k.splat(weight, v.ty), v, total.v)

    def _store(self, m: Val, total: Val) -> None:
        k = self.k
        spec = self.spec
        dims = self.spec.dims_v
        width = widest(self.isa.lanes, dims)
        with k.if_else(self.item["partial"] < 0) as (whole, part):
            with whole:
                inverse = 1.0 / total
                for r, t, g in self._rows():
                    row = self.result(t, g)
                    factor = k.splat(k.extract(inverse, r), f32 * width)
                    with k.loop(dims, step=width) as d:
                        o = k.load(self.o, factor.ty, offset=d * 4 + r * dims * 4)
                        k.store(row, o * factor, offset=d * 4)
            with part:
                for r in range(spec.rows):
                    row = self.partial(r)
                    with k.loop(dims, step=width) as d:
                        k.store(
                            row,
                            k.load(self.o, f32 * width, offset=d * 4 + r * dims * 4),
                            offset=d * 4,
                        )
                    k.store(row, k.extract(m, r), offset=dims * 4)
                    k.store(row, k.extract(total, r), offset=dims * 4 + 4)

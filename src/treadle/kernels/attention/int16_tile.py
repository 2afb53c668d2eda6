"""Attention in vectors with products of 16-bit integers, two to a lane of 32 bits: twice as many at
a time as with floats.

A row of queries q, and a key k, become integers times a scale. The scale is their Euclidean length
over LIMIT::

    q = q_i |q| / LIMIT,  k = k_i |k| / LIMIT:    q k = (q_i k_i) |q| |k| / LIMIT**2

The integer sum of a score is then at most LIMIT**2 (Cauchy and Schwarz), below 2**31. A value
becomes integers times its largest magnitude over LIMIT. This scale d is multiplied into the key's
weight p, and a span's weights become integers whose sum is LIMIT::

    w_j = p_j d_j,  w = w_i (sum over j of w_j) / LIMIT:    |sum over j of w_i v_i| <= LIMIT**2

Scratch, for R rows and D dims: queries i16 ``[R, D]``, O f32 ``[R, D]``; the span's keys ``[SPAN,
PAGE/W, D/2, W]`` and values ``[D/W, KEYS/2, W]``, pairs of i16, for the W columns of a product. For
ROWS rows at a time: scores f32 ``[ROWS, KEYS]``, and weights i16.
"""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

from treadle.jit import math
from treadle.jit.language import Builder, Val
from treadle.jit.types import Ty, f32, i16, i32
from treadle.kernels.activation_layout import BLOCK
from treadle.kernels.attention.wide import DIMS, KEYS, ROWS, WideTile, tree
from treadle.kernels.attention.work_item import WORD_DIMS, Queries
from treadle.kernels.run_state import LINE, PAGE, round_up

LIMIT = 32000.0  # with rounding, a number stays below 2**15, a sum below 2**31
LEAST = 2.0**-40  # least length or largest value, so that scales are finite
FAINT = 2.0**-100  # the same for the sum of weights
VECTORS = 2  # vectors of columns in a product


class Int16Scratch(NamedTuple):
    """Byte offsets of a tile's arrays in scratch (O, m and l of ``paged.py``; ``total`` is l).
    ``d_x`` has the f32 scales of the integers in ``x``.
    """

    q: int
    d_q: int
    keys: int
    d_keys: int
    values: int
    d_values: int
    scores: int
    weights: int
    d_weights: int
    less: int  # factors of earlier results
    o: int
    m: int
    total: int
    end: int

    @classmethod
    def for_spec(cls, spec: Queries) -> Int16Scratch:
        """Return the offsets of the arrays in scratch for the tiles of kernel ``spec``."""
        rows = round_up(spec.rows, ROWS)
        dims = round_up(spec.head_dim, DIMS)
        dims_v = round_up(spec.dims_v, DIMS)
        sizes = [
            *(2 * rows * dims, 4 * rows, 2 * KEYS * dims, 4 * KEYS, 2 * KEYS * dims_v, 4 * KEYS),
            *(4 * ROWS * KEYS, 2 * ROWS * KEYS, 4 * ROWS, 4 * ROWS),
            *(4 * rows * dims_v, 4 * rows, 4 * rows),
        ]
        return cls(*accumulate((round_up(size, LINE) for size in sizes), initial=0))


def words_scratch(spec: Queries) -> int:
    """Return the bytes of scratch that a thread needs for ``WordTile``."""
    return Int16Scratch.for_spec(spec).end


class WordTile(WideTile):
    """Wide attention tile with 16-bit products: ``group_rows`` rows by VECTORS vectors of columns
    at a time.
    """

    places: ClassVar[Any] = Int16Scratch
    divisor: ClassVar[int] = WORD_DIMS
    at: Int16Scratch

    @property
    def pitch(self) -> int:
        """f32 values from one row of ``o`` to the next: ``dims_v`` rounded up to whole vectors."""
        return round_up(self.spec.dims_v, self.isa.lanes)

    @property
    def width(self) -> int:
        """Columns of one product: keys of a score, or dims of a value."""
        return VECTORS * self.isa.lanes

    @property
    def line(self) -> int:
        """Bytes of one line of an operand: a pair of i16 for each column of a product."""
        return 4 * self.width

    # -- to whole numbers -----------------------------------------------------------------------

    def _load_queries(self) -> None:
        k = self.k
        at = self.at
        lanes = self.isa.lanes
        dims = self.spec.head_dim
        factor = 1.0 if self.spec.softcap else math.LOG2_E  # capped scores are scaled later
        k.store(self.scratch + at.d_values, k.zero(f32 * KEYS))  # for pages that do not exist
        with k.loop(_up_to(self.n_rows, self.group_rows)) as r:
            query = self.query(*self.row(r))
            some = f32 * min(lanes, self.step)
            squares = k.var(k.zero(some))
            with k.loop(dims, step=some.lanes) as d:
                x = k.load(query, some, offset=d * 4)
                squares.v = k.fma(x, x, squares.v)
            length = k.sqrt(k.max(k.const(LEAST**2, f32), k.sum(squares.v)))
            by = k.splat(LIMIT / length, f32 * self.step)
            with k.loop(dims, step=self.step) as d:
                x = k.load(query, by.ty, offset=d * 4)
                whole = _narrow(k, _rounded(k, x, by))
                k.store(self.scratch + at.q, whole, offset=(r * dims + d) * 2)
            k.store(self.scratch + at.d_q, length * (factor / LIMIT**2), offset=r * 4)
            zero = k.zero(f32 * (DIMS if self.pitch % DIMS == 0 else lanes))
            with k.loop(self.pitch, step=zero.ty.lanes) as d:
                k.store(self.o, zero, offset=(r * self.pitch + d) * 4)
            for place, value in zip((self.m, self.total), self.sink(self.row(r)[1]), strict=True):
                k.store(place, value, offset=r * 4)

    def _load_page(self, p: Val, i: Val) -> None:
        home = self.page(p)
        self._load_keys(home, i)
        n_keys = self.k.min(self.item["key_end"] - p * PAGE, PAGE)
        self._load_values(home + self.spec.page.v_off, i, n_keys)

    def _load_keys(self, home: Val, i: Val) -> None:
        """Scale the keys of the page at ``home`` to int16 by their Euclidean lengths. Store them as
        the span's ``i``-th page, in pairs of dims, and their lengths in ``d_keys``.
        """
        k = self.k
        at = self.at
        lanes = self.isa.lanes
        dims = self.spec.head_dim
        side = self.spec.page.keys
        fmt = side.fmt
        ty = f32 * lanes
        scales = home + side.codes_bytes

        def row(d: Val, c: int) -> Val:
            """Return dim ``d`` of a vector of keys."""
            v = fmt.load(k, self.isa, home + (d * PAGE + c) * fmt.n_bytes, lanes)
            if not fmt.scaled:
                return v
            return v * k.load(scales, ty, offset=(d // BLOCK * PAGE + c) * 4)

        columns = range(0, PAGE, lanes)
        squares = [k.var(k.zero(ty)) for _ in columns]
        with k.loop(dims) as d:
            for c, total in zip(columns, squares, strict=True):
                x = row(d, c)
                total.v = k.fma(x, x, total.v)
        lengths = [k.sqrt(k.max(k.const(LEAST**2, ty), total.v)) for total in squares]
        by = [k.const(LIMIT, ty) / length for length in lengths]
        for c, length in zip(columns, lengths, strict=True):
            k.store(self.scratch + at.d_keys, length, offset=(i * PAGE + c) * 4)
        with k.loop(dims // 2) as pair:
            to = self.scratch + at.keys + (i * (PAGE // self.width * dims // 2) + pair) * self.line
            for c, b in zip(columns, by, strict=True):
                both = (_rounded(k, row(pair * 2 + j, c), b) for j in range(2))
                column, within = divmod(c, self.width)
                k.store(to, _paired(*both), offset=column * (dims // 2 * self.line) + within * 4)

    def _load_values(self, home: Val, i: Val, n_keys: Val) -> None:
        """Scale the page's values at ``home`` to int16 by their largest magnitudes. Store them as
        the span's ``i``-th page, in pairs of keys. Values from key ``n_keys`` on are not read and
        count as zeros.
        """
        k = self.k
        at = self.at
        dims = self.spec.dims_v
        side = self.spec.page.values
        fmt = side.fmt
        lanes = self.isa.lanes
        scales = home + side.codes_bytes
        ty = f32 * lanes
        starts = range(0, dims, lanes)

        def row(key: Val, start: int) -> Val:
            """Return dims of a key's value from ``start`` on, zeros behind the last."""
            place = home + (key * dims + start) * fmt.n_bytes
            if start + lanes > dims:
                some = fmt.load(k, self.isa, place, WORD_DIMS)
                assert not fmt.scaled, fmt.name
                return k.concat(some, *[k.zero(some.ty)] * (lanes // WORD_DIMS - 1))
            v = fmt.load(k, self.isa, place, lanes)
            if not fmt.scaled:
                return v
            place = (key * (dims // BLOCK) + start // BLOCK) * 4
            return v * k.splat(k.load(scales, f32, offset=place), ty)

        with k.loop(PAGE // 2) as pair:
            by = []
            keys = [k.min(pair * 2 + j, n_keys - 1) for j in range(2)]
            for j, key in enumerate(keys):
                inside = pair * 2 + j < n_keys
                top = k.reduce(tree([k.abs(row(key, d)) for d in starts], k.max), k.max)
                top = k.max(k.const(LEAST, f32), top)
                by.append(k.splat(k.select(inside, LIMIT / top, k.const(0.0, f32)), ty))
                d_value = top * (1 / LIMIT)
                place = (i * PAGE + pair * 2 + j) * 4
                k.store(self.scratch + at.d_values, d_value, offset=place)
            to = self.scratch + at.values + (i * (PAGE // 2) + pair) * self.line
            for d in starts:
                both = (_rounded(k, row(key, d), b) for key, b in zip(keys, by, strict=True))
                column, within = divmod(d, self.width)
                offset = column * (KEYS // 2 * self.line) + within * 4
                k.store(to, _paired(*both), offset=offset)

    # -- products -------------------------------------------------------------------------------

    def _multiply(
        self, a: Val, pitch: int, b: Val, n: Val | int, n_vectors: int = VECTORS
    ) -> list[list[Val]]:
        """Return i32 sums ``[group_rows][n_vectors]``: rows of i16 pairs at ``a``, ``pitch`` bytes
        apart, times ``n`` lines of ``width`` pairs at ``b``, of which the first ``n_vectors``
        vectors are used.
        """
        k = self.k
        isa = self.isa
        lanes = self.isa.lanes
        assert isa.dot_words is not None
        ty = i32 * lanes
        sums = [[k.var(k.zero(ty)) for _ in range(n_vectors)] for _ in range(self.group_rows)]
        with k.loop(n) as pair:
            columns = [
                k.load(b + pair * self.line, ty, offset=4 * lanes * c) for c in range(n_vectors)
            ]
            for r, row in enumerate(sums):
                x = k.splat(k.load(a, i32, offset=pair * 4 + r * pitch), ty)
                for c, total in enumerate(row):
                    total.v = isa.dot_words(
                        k, total.v, x.bits(i16 * (2 * lanes)), columns[c].bits(i16 * (2 * lanes))
                    )
        return [[total.v for total in row] for row in sums]

    def _scores(self, block: Val, i: Val) -> None:
        k = self.k
        at = self.at
        dims = self.spec.head_dim
        lanes = self.isa.lanes
        with k.loop(PAGE // self.width) as column:
            place = i * PAGE + column * self.width
            d = [
                k.load(self.scratch + at.d_keys, f32 * lanes, offset=(place + c * lanes) * 4)
                for c in range(VECTORS)
            ]
            with k.loop(self._groups(block)) as g:
                rows = self.scratch + at.q + (block * ROWS + g * self.group_rows) * (2 * dims)
                keys = i * (PAGE // self.width) + column
                keys = self.scratch + at.keys + keys * (dims // 2 * self.line)
                sums = self._multiply(rows, 2 * dims, keys, dims // 2)
                to = self.scratch + at.scores + g * (self.group_rows * KEYS * 4) + place * 4
                for r, row in enumerate(sums):
                    for c, total in enumerate(row):
                        k.store(to, total.to(f32) * d[c], offset=(r * KEYS + c * lanes) * 4)

    def _values(self, block: Val, n_pages: Val) -> None:
        whole, left = divmod(self.pitch, self.width)
        if whole:
            with self.k.loop(whole) as column:
                self._value_columns(block, n_pages, column, VECTORS)
        if left:
            self._value_columns(block, n_pages, self.k.i64(whole), left // self.isa.lanes)

    def _value_columns(self, block: Val, n_pages: Val, column: Val, n_vectors: int) -> None:
        """Update O = O c + P V for the rows of the ``block``-th block, with the span's first
        ``n_pages`` pages, in ``n_vectors`` vectors of O, from the ``column``-th ``width`` dims on.
        """
        k = self.k
        at = self.at
        lanes = self.isa.lanes
        ty = f32 * lanes
        with k.loop(self._groups(block)) as g:
            weights = self.scratch + at.weights + g * (self.group_rows * KEYS * 2)
            values = self.scratch + at.values + column * (KEYS // 2 * self.line)
            n = n_pages * (PAGE // 2)
            sums = self._multiply(weights, 2 * KEYS, values, n, n_vectors)
            first = block * ROWS + g * self.group_rows
            o = self.o + (first * self.pitch + column * self.width) * 4
            for r, row in enumerate(sums):
                less, d = (
                    k.splat(self._number(place, g * self.group_rows + r), ty)
                    for place in (at.less, at.d_weights)
                )
                for c, total in enumerate(row):
                    offset = (r * self.pitch + c * lanes) * 4
                    before = k.load(o, ty, offset=offset) * less
                    k.store(o, k.fma(total.to(f32), d, before), offset=offset)

    # -- between them ---------------------------------------------------------------------------

    def _weigh(self, row: Val, at_m: Val, r: Val) -> None:
        k = self.k
        at = self.at
        lanes = self.isa.lanes
        ty = f32 * lanes
        starts = range(0, KEYS, lanes)
        shift, by = (k.splat(v, ty) for v in (-self._number(at.m, at_m), self._scale(at_m, f32)))
        powers = [
            math.exp2(k, k.fma(k.load(row, ty, offset=4 * c), by, shift), math.EXP2_SHORT)
            for c in starts
        ]
        sum_ = k.sum(tree(powers, operator.add))
        total = k.fma(self._number(at.total, at_m), self._number(at.less, r), sum_)
        k.store(self.total, total, offset=at_m * 4)
        weights = [
            p * k.load(self.scratch + at.d_values, ty, offset=4 * c)
            for p, c in zip(powers, starts, strict=True)
        ]
        whole = k.max(k.const(FAINT, f32), k.sum(tree(weights, operator.add)))
        by = k.splat(LIMIT / whole, ty)
        to = self.scratch + at.weights + r * (KEYS * 2)
        for c in range(0, len(weights), 2):
            pair = k.concat(*(_rounded(k, w, by) for w in weights[c : c + 2]))
            k.store(to, _narrow(k, pair), offset=2 * lanes * c)
        k.store(self.scratch + at.d_weights, whole * (1 / LIMIT), offset=r * 4)

    def _unit(self, r: Val, ty: Ty) -> Val:
        return self.k.load(self.scratch + self.at.d_q, ty, offset=r * 4)


def _up_to(n: Val, step: int) -> Val:
    """Round ``n`` up to a multiple of ``step``."""
    return (n + (step - 1)) // step * step


def _rounded(k: Builder, x: Val, by: Val) -> Val:
    """Return ``x * by`` as the nearest whole number, in the low 16 bits of each lane."""
    return k.fma(x, by, k.const(math.WHOLE, x.ty)).bits(i32.like(x.ty))


def _paired(even: Val, odd: Val) -> Val:
    """Combine the low 16 bits of each lane of ``even`` and ``odd``, those of ``even`` in the lower
    half, into one lane of 32 bits.
    """
    return (even & 0xFFFF) | (odd << 16)


def _narrow(k: Builder, whole: Val) -> Val:
    """Return the low 16 bits of each lane of ``whole`` as a vector of i16."""
    return whole.to(i16.like(whole.ty))

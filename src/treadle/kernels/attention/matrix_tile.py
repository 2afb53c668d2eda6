"""Attention on matrix registers: many rows of queries times a page of keys, then of values.

bf16 has 8 bits, too few for a score. So every number x is two bf16, ``high = bf16(x)`` and ``low =
bf16(x - high)``, 16 bits together (an f16 has 11), and one product becomes three::

    x y = high high + low high + high low      the fourth, low low, is below 2**-18 of the whole

Scratch, for R rows (whole registers) and D dims: queries high and low ``[R/16, D/32, 16]`` lines of
64 bytes; O ``[R, D]``, m and l f32; the span's keys ``[SPAN, D/32, 2, 16]`` and values ``[SPAN,
D/16, 16]`` lines, high and low, in pairs of rows as the product needs them. For 32 rows at a time:
scores ``[32, SPAN * PAGE]`` f32, their powers, high and low, ``[32, SPAN]`` lines.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

from treadle.base.fast_classes import dataclass
from treadle.jit import math
from treadle.jit.language import Builder, Val
from treadle.jit.types import f32, i32, u32
from treadle.kernels.activation_layout import BLOCK, in_bf16
from treadle.kernels.attention.wide import KEYS, WideTile, tree
from treadle.kernels.attention.work_item import SPAN, Queries
from treadle.kernels.matmul.matrix import EDGE, REGISTER, SIDE
from treadle.kernels.matmul.matrix_registers import paired, turn
from treadle.kernels.run_state import LINE, PAGE, round_up

BOTH = range(2)


@dataclass(frozen=True)
class MatrixScratch:
    """Byte offsets in scratch (Q, S, P, O, m and l of ``paged.py``; ``total`` is l). For data with
    high and low parts: the high part's offset, and in ``..._low`` the distance from it to the low
    part.
    """

    q: int
    q_low: int
    scores: int
    p: int
    p_low: int
    o: int
    m: int
    total: int
    less: int  # factors of earlier results
    keys: int
    keys_low: int
    values: int
    values_low: int
    end: int

    @classmethod
    def for_spec(cls, spec: Queries) -> MatrixScratch:
        """Return the offsets of the arrays in scratch for the tiles of kernel ``spec``."""
        rows = round_up(spec.rows, EDGE)
        dims = spec.head_dim
        dims_v = spec.dims_v
        q = 2 * rows * dims
        p = LINE * EDGE * SPAN
        keys = 2 * KEYS * dims
        values = 2 * KEYS * dims_v
        stats = [4 * rows, 4 * rows, 4 * EDGE]
        sizes = [2 * q, 4 * EDGE * KEYS, 2 * p, 4 * rows * dims_v, *stats]
        at = [LINE]  # after the registers' configuration
        for size in (*sizes, 2 * keys, 2 * values):
            at.append(round_up(at[-1] + size, LINE))
        o, m, total, less = at[3:7]
        return cls(at[0], q, at[1], at[2], p, o, m, total, less, at[7], keys, at[8], values, at[9])


def matrix_scratch(spec: Queries) -> int:
    """Return the bytes of scratch that a thread needs for ``MatrixTile``."""
    return MatrixScratch.for_spec(spec).end


class MatrixTile(WideTile):
    """Wide attention tile on matrix registers: scores of two registers of rows (32) at a time."""

    places: ClassVar[Any] = MatrixScratch
    at: MatrixScratch

    @property
    def lanes(self) -> int:
        return SIDE

    @property
    def low(self) -> bool:
        """Whether keys and values have a low part; bf16 ones have none."""
        page = self.spec.page
        return not page.keys.fmt.name == page.values.fmt.name == "bf16"

    # -- to bf16 --------------------------------------------------------------------------------

    def _paired(self, even: Val, odd: Val) -> tuple[Val, Val]:
        """Return two vectors of bf16 bits, ``i16 * 2n``: the high parts of ``even`` and ``odd``
        (``f32 * n``) interleaved, and their low parts interleaved.
        """
        k = self.k
        n = even.ty.lanes
        high = paired(k, even, odd)
        pairs = high.bits(u32 * n)
        less = (pairs << 16).bits(even.ty), (pairs & 0xFFFF0000).bits(odd.ty)
        return high, paired(k, even - less[0], odd - less[1])

    def _load_queries(self) -> None:
        k = self.k
        dims = self.spec.head_dim
        dims_v = self.spec.dims_v
        at = self.at
        factor = 1.0 if self.spec.softcap else math.LOG2_E  # capped scores are scaled later
        with k.loop(self.spec.rows) as r:
            query = self.query(*self.row(r))
            to = self.scratch + (at.q + r // SIDE * (2 * dims * SIDE) + r % SIDE * LINE)

            def load(b: Val, query: Val = query, to: Val = to) -> None:
                x = k.load(query, f32 * BLOCK, offset=b * (4 * BLOCK)) * factor
                for part, offset in zip(in_bf16(self.k, x, 2), (0, at.q_low), strict=True):
                    k.store(to + b * REGISTER, part, offset=offset)

            def clear(b: Val, r: Val = r) -> None:
                k.store(self.o + (r * dims_v + b * BLOCK) * 4, k.zero(f32 * BLOCK))

            self.each_dim(BLOCK, 1, load, clear)
            for place, value in zip((self.m, self.total), self.sink(self.row(r)[1]), strict=True):
                k.store(place, value, offset=r * 4)
        n_queries = round_up(self.spec.rows, EDGE) * dims // (SIDE * BLOCK)  # number of registers
        self._transpose_registers("queries", self.scratch + at.q, 2 * n_queries, 1)

    def _load_page(self, p: Val, i: Val) -> None:
        k = self.k
        spec = self.spec
        at = self.at
        fmt = spec.page.keys.fmt
        dims = spec.head_dim
        dims_v = spec.dims_v
        home = self.page(p)
        lanes = f32 * SIDE

        def store(to: Val, rows: list[Val], low: int) -> None:
            for part, offset in zip(self._paired(*rows), (0, low), strict=True):
                if self.low or not offset:
                    k.store(to, part, offset=offset)

        scales = home + spec.page.keys.codes_bytes
        with k.loop(dims // 2) as pair:
            to = self.scratch + (at.keys + i * (2 * PAGE * dims))
            to = to + (pair // SIDE * (2 * REGISTER) + pair % SIDE * LINE)
            for half in BOTH:
                start = pair * (2 * PAGE) + half * SIDE
                rows = [
                    fmt.load(k, self.isa, home + (start + j * PAGE) * fmt.n_bytes, SIDE)
                    for j in BOTH
                ]
                if fmt.scaled:
                    block = pair // (BLOCK // 2) * PAGE + half * SIDE
                    d = k.load(scales, lanes, offset=block * 4)
                    rows = [row * d for row in rows]
                store(to + half * REGISTER, rows, at.keys_low)
        home = home + spec.page.v_off
        fmt = spec.page.values.fmt
        scales = home + spec.page.values.codes_bytes
        n_keys = self.item["key_end"] - p * PAGE
        values = self.scratch + (at.values + i * (2 * PAGE * dims_v))
        with k.loop(PAGE // 2) as pair:
            keys = [pair * 2 + j for j in BOTH]
            masks = [
                k.splat(k.select(key < n_keys, k.const(-1, i32), k.const(0, i32)), i32 * SIDE)
                for key in keys
            ]
            with k.loop(dims_v // SIDE, step=BLOCK // SIDE) as first:
                for c in (first + i for i in range(BLOCK // SIDE)):
                    rows = []
                    for key, mask in zip(keys, masks, strict=True):
                        at_row = home + (key * dims_v + c * SIDE) * fmt.n_bytes
                        row = fmt.load(k, self.isa, at_row, SIDE)
                        if fmt.scaled:
                            place = (key * (dims_v // BLOCK) + c // (BLOCK // SIDE)) * 4
                            row = row * k.splat(k.load(scales, f32, offset=place), lanes)
                        rows.append((row.bits(mask.ty) & mask).bits(lanes))
                    store(values + (c * REGISTER + pair * LINE), rows, at.values_low)

    # -- products -------------------------------------------------------------------------------

    def _transpose_registers(self, name: str, at: Val, n: int, n_side: int) -> None:
        """Transpose ``n`` groups of ``n_side`` registers side by side in memory at ``at``, if the
        machine has ``MatrixUnit.turn``. ``name``: of the emitted function.
        """
        turn(self.k, name, at, n, n_side)

    def _multiply(
        self,
        k: Builder,
        a: Callable[[int, int], tuple[Val, int]],
        b: Callable[[int, int], tuple[Val, int]],
    ) -> None:
        """Add the products of two registers of rows and two of columns to the four registers of
        sums. ``a(part, m)`` and ``b(part, n)`` return address and stride of a register's high (0)
        or low (1) part.
        """
        matrix = self.isa.matrix
        assert matrix is not None

        def load(first: int, side: Callable[[int, int], tuple[Val, int]], part: int) -> None:
            for i in BOTH:
                matrix.load(k, first + i, *side(part, i))

        load(6, b, 0)
        load(4, a, 1)
        matrix.dots_bf16(k)
        load(4, a, 0)
        matrix.dots_bf16(k)
        if self.low:
            load(6, b, 1)
            matrix.dots_bf16(k)

    def _scores(self, block: Val, i: Val) -> None:
        at = self.at
        dims = self.spec.head_dim
        matrix = self.isa.matrix
        assert matrix is not None

        def multiply(k: Builder, scratch: Val, block: Val, i: Val) -> None:
            for c in range(4):
                matrix.zero(k, c)
            with k.loop(dims // BLOCK) as b:
                q = scratch + (at.q + block * (4 * dims * SIDE) + b * REGISTER)
                keys = scratch + (at.keys + i * (2 * PAGE * dims) + b * (2 * REGISTER))
                self._multiply(
                    k,
                    lambda part, m: (q + (part * at.q_low + m * (2 * dims * SIDE)), LINE),
                    lambda part, n: (keys + (part * at.keys_low + n * REGISTER), LINE),
                )
            to = scratch + (at.scores + i * (4 * PAGE))
            for m, n in product(BOTH, BOTH):
                place = to + (m * (4 * SIDE * KEYS) + n * LINE)
                matrix.store(k, 2 * m + n, place, 4 * KEYS)

        matrix.scope(self.k, "scores", (self.scratch, block, i), multiply)

    def _values(self, block: Val, n_pages: Val) -> None:
        with self.k.loop(self.spec.dims_v // EDGE) as column:
            self._add_page_values(block, column, n_pages)

    def _add_page_values(self, block: Val, column: Val, n_pages: Val) -> None:
        """Add P V of the span's first ``n_pages`` pages to the ``column``-th 32 dims of O, for the
        rows of the ``block``-th block.
        """
        at = self.at
        dims = self.spec.dims_v
        matrix = self.isa.matrix
        assert matrix is not None

        def multiply(k: Builder, scratch: Val, block: Val, column: Val, n_pages: Val) -> None:
            home = scratch + (at.o + block * (4 * EDGE * dims) + column * (4 * EDGE))
            o = [
                (home + (m * (4 * SIDE * dims) + n * LINE), 4 * dims)
                for m, n in product(BOTH, BOTH)
            ]
            for c, place in enumerate(o):
                matrix.load(k, c, *place)
            with k.loop(n_pages) as i:
                p = scratch + (at.p + i * LINE)
                values = scratch + (at.values + i * (2 * PAGE * dims) + column * (2 * REGISTER))
                self._multiply(
                    k,
                    lambda part, m: (p + (part * at.p_low + m * (LINE * SIDE * SPAN)), LINE * SPAN),
                    lambda part, n: (values + (part * at.values_low + n * REGISTER), LINE),
                )
            for c, place in enumerate(o):
                matrix.store(k, c, *place)

        matrix.scope(self.k, "values", (self.scratch, block, column, n_pages), multiply)

    # -- between them ---------------------------------------------------------------------------

    def _softmax(self, block: Val, first_key: Val) -> None:
        super()._softmax(block, first_key)
        self._transpose_registers("powers", self.scratch + self.at.p, 2 * 2, SPAN)

    def _weigh(self, row: Val, at_m: Val, r: Val) -> None:
        """Compute P of one row of scores, in high and low parts, update its l, and multiply the row
        of O by the correction ``less``. Arguments as in ``WideTile._weigh``.
        """
        k = self.k
        at = self.at
        spec = self.spec
        ty = f32 * SIDE
        shift = k.splat(self._number(at.m, at_m), ty)
        powers = [
            math.exp2(k, k.load(row, ty, offset=4 * c) - shift, math.EXP2_SHORT)
            for c in range(0, KEYS, SIDE)
        ]
        less = self._number(at.less, r)
        total = k.fma(self._number(at.total, at_m), less, k.sum(tree(powers, operator.add)))
        k.store(self.total, total, offset=at_m * 4)
        to = self.scratch + at.p + r * (LINE * SPAN)
        for j in range(SPAN):
            both = k.concat(powers[2 * j], powers[2 * j + 1])
            for part, offset in zip(in_bf16(k, both, 2), (0, at.p_low), strict=True):
                k.store(to, part, offset=offset + LINE * j)
        with k.if_(less < 1.0), k.loop(spec.dims_v, step=SIDE) as d:
            o = self.o + (at_m * spec.dims_v + d) * 4
            k.store(o, k.load(o, ty) * k.splat(less, ty))

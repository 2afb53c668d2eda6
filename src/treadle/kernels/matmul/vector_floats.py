"""Float weights times few to medium numbers of tokens, in vectors: lanes are tokens, and a weight
is in every lane.

A broadcast load takes no arithmetic, so rows are multiplied as they are in the file: nothing is
packed. In f32, or in pairs of bf16 on machines with such dots (``dot_bf16``)::

    sums[r] += w[r, k] in every lane * x[k]

Weights of other types are widened first, a vector of each row at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import gcd

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Builder, Val, Var
from treadle.jit.types import bf16, f32, i32
from treadle.kernels.activation_layout import DWORD
from treadle.kernels.matmul.matrix import SIDE
from treadle.kernels.matmul.strips import EACH, Strip, StripGemm, Tokens

# Dwords of each row at a time, and weights widened at a time. More are no faster, and take longer
# to compile.
AT_ONCE = 4
WIDENED = 16


@dataclass(frozen=True)
class FloatLanes(StripGemm):
    """Strip product of float weights in vectors: a lane a token. ``act`` "f32", or "bf16" with an
    even K. ``nr``: the lanes of two vectors, or of half a vector.
    """

    @property
    def name(self) -> str:
        return f"{super().name}_lanes"

    @property
    def dwords(self) -> int:
        """Number of dwords in a row of activations."""
        return self.k // 2 if self.act == "bf16" else self.k

    @property
    def widens(self) -> bool:
        """Whether weights must be widened to f32 before they are multiplied."""
        return self.act == "f32" and self.fmt.dtype != np.dtype(np.float32)

    def sums(
        self, k: Builder, strip: Strip, tokens: Tokens, made: Val, soon: Strip
    ) -> Iterator[tuple[Val | int, Var]]:
        return self.in_lanes(k, tokens, partial(self._sums, k, strip, tokens))

    def _sums(
        self, k: Builder, strip: Strip, tokens: Tokens, n: int
    ) -> Iterator[tuple[Val | int, Var]]:
        """Yield (number, sums) of each of the 16 rows of ``strip``; the sums, f32 ``[n]``, are the
        products of the row with ``n`` tokens, a lane a token. A few rows at a time are multiplied
        over all of K.
        """
        size = WIDENED if self.widens else AT_ONCE
        full, rest = divmod(self.dwords, size)
        n_rows = (
            k.isa.regs // 4
        )  # at once: with two vectors of tokens, sums fill half the registers
        with k.loop(SIDE, step=n_rows) as first:
            places = [(first // EACH + i // EACH, k.i64(i % EACH)) for i in range(n_rows)]
            rows = [strip.weights(k, run, r).parts[0] for run, r in places]
            sums = [k.var(k.zero(f32 * n)) for _ in rows]
            with k.loop(full) as c:
                self._add_products(k, rows, tokens, c * size, size, sums)
            if rest:
                self._add_products(k, rows, tokens, k.i64(full * size), rest, sums)
            yield from ((first + r, total) for r, total in enumerate(sums))

    def _add_products(
        self, k: Builder, rows: list[Val], tokens: Tokens, at: Val, count: int, sums: list[Var]
    ) -> None:
        """Add the products of ``count`` dwords of each row, from the ``at``-th on, to ``sums``."""
        isa = k.isa
        n = sums[0].v.ty.lanes
        size = self.fmt.strides[0]
        width = min(n, isa.lanes)
        here = [row + at * (size * self.k // self.dwords) for row in rows]
        for p in here:  # rows of the same run in the next strip
            k.prefetch(p + EACH * size * self.k, 2)
        if self.widens:
            here = self._widened(k, here, count)
        align = DWORD if self.widens else gcd(size, isa.aligned)
        for i in range(count):
            x = k.split(tokens.dwords(at + i, n), width)
            for p, total in zip(here, sums, strict=True):
                w = k.splat(k.load(p, i32, offset=i * DWORD, align=align), x[0].ty)
                acc = k.split(total.v, width)
                total.v = k.concat(*(self._dot(k, a, w, b) for a, b in zip(acc, x, strict=True)))
            k.fence()

    def _dot(self, k: Builder, acc: Val, w: Val, x: Val) -> Val:
        """Return ``acc`` plus the product of the dwords in each lane of ``w`` and ``x``: one f32,
        or two bf16.
        """
        if self.act == "f32":
            return k.fma(w.bits(acc.ty), x.bits(acc.ty), acc)
        assert k.isa.dot_bf16 is not None
        pairs = bf16 * (2 * x.ty.lanes)
        return k.isa.dot_bf16(k, acc, w.bits(pairs), x.bits(pairs))

    def _widened(self, k: Builder, rows: list[Val], count: int) -> list[Val]:
        """Widen ``count`` weights of each row to f32 in stack memory; return the rows' addresses
        there.
        """
        load = self.fmt.load
        lanes = k.isa.lanes
        assert load is not None
        room = k.room(len(rows) * WIDENED * DWORD, "widened")
        for i, row in enumerate(rows):
            for first in range(0, count, lanes):
                at = row + first * self.fmt.strides[0]
                w = load(k, k.isa, at, lanes, min(lanes, count - first))
                k.store(room, w, offset=(i * WIDENED + first) * DWORD)
        k.fence(room)
        return [room + i * WIDENED * DWORD for i in range(len(rows))]

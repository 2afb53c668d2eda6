"""Transposition of rows to columns, in registers."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.jit.language import Builder, Val

SQUARE = 8  # rows and columns of the transposition by register halves


def transpose(k: Builder, rows: list[Val], lanes: int) -> list[list[Val]]:
    """Transpose ``rows`` (n vectors of C dwords) to columns: C lists, each the n dwords of a column
    in vectors of ``lanes``.

    Zipping row i with row i + n/2, log2(n) times over, is the perfect shuffle that transposes.
    """
    n = len(rows)
    columns = rows[0].ty.lanes
    if k.isa.halves and n == lanes == SQUARE and not columns % SQUARE:
        pieces = zip(*(k.split(row, SQUARE) for row in rows), strict=True)
        return [[column] for piece in pieces for column in _by_halves(k, piece)]
    vectors = [[row] for row in rows]
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [
            [v for x, y in zip(a, b, strict=True) for v in _zip(k, x, y, lanes)]
            for a, b in zip(vectors[:half], vectors[half:], strict=True)
        ]
    flat = [part for v in vectors[0] for part in k.split(v, min(lanes, v.ty.lanes))]
    if flat[0].ty.lanes <= n:
        per = n // flat[0].ty.lanes
        return [flat[c * per : (c + 1) * per] for c in range(columns)]
    return [[part] for v in flat for part in k.split(v, n)]


def _by_halves(k: Builder, rows: Sequence[Val]) -> list[Val]:
    """Transpose eight rows of eight dwords (vectors): join rows that are four apart, then keep
    every lane within its half of a register. 24 shuffles, as many as by zips, but each shuffle of a
    zip takes two instructions.
    """
    columns = []
    for first in (0, 4):
        half = [first + i for i in range(4)]
        joined = [
            k.shuffle(a, b, half + [SQUARE + i for i in half])
            for a, b in zip(rows[:4], rows[4:], strict=True)
        ]
        for order in ([0, 8, 1, 9], [2, 10, 3, 11]):  # first two dwords of a row, then the rest
            low, high = (
                k.shuffle(a, b, order + [i + 4 for i in order]) for a, b in (joined[:2], joined[2:])
            )
            for pair in ([0, 1, 8, 9], [2, 3, 10, 11]):
                columns.append(k.shuffle(low, high, pair + [i + 4 for i in pair]))
    return columns


def _zip(k: Builder, a: Val, b: Val, lanes: int) -> list[Val]:
    """Interleave vectors ``a`` and ``b``, a0 b0 a1 b1 ..., into vectors of at most ``lanes``."""
    n = a.ty.lanes
    order = [i + n * j for i in range(n) for j in range(2)]
    if 2 * n <= lanes:
        return [k.shuffle(a, b, order)]
    return [k.shuffle(a, b, order[:n]), k.shuffle(a, b, order[n:])]

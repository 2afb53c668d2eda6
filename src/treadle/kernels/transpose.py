"""Rows to columns, in registers."""

from __future__ import annotations

from treadle.jit.language import Builder, Val


def transpose(k: Builder, rows: list[Val], lanes: int) -> list[list[Val]]:
    """``rows`` (n vectors of C dwords) to columns: C lists, each the n dwords of a column in
    vectors of ``lanes``.

    Zipping row i with row i + n/2, log2(n) times over, is the perfect shuffle that transposes.
    """
    n, columns = len(rows), rows[0].ty.lanes
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


def _zip(k: Builder, a: Val, b: Val, lanes: int) -> list[Val]:
    """a0 b0 a1 b1 ..., in vectors of at most ``lanes``."""
    n = a.ty.lanes
    order = [i + n * j for i in range(n) for j in range(2)]
    if 2 * n <= lanes:
        return [k.shuffle(a, b, order)]
    return [k.shuffle(a, b, order[:n]), k.shuffle(a, b, order[n:])]

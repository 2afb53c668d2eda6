"""Packing: a strip of weight rows, unpacked into cache in the order that the tile loop reads.

A panel is ``[KD, P]`` dwords (see ``act.py``) of P rows, then for int8 formats the scales ``[KB,
P]`` in f32 and, where the format has them, the minimums ``[KB, P]``. Rows past the last one repeat
it, so nothing outside the tensor is ever read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.jit.types import f32, i32
from treadle.kernels.act import BLOCK, CHUNK, PER_DWORD, Act, bf16_bits
from treadle.kernels.blocks import load_scales, unpack_codes
from treadle.kernels.spec import round_up

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.values import Val


def panel_bytes(fmt: Format, act: Act, rows: int) -> int:
    """Scratch for one panel."""
    n_scales = act.kb * (2 if fmt.codes and fmt.codes.m else 1)
    return round_up(4 * rows * (act.kd + n_scales), 64)


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


def row_pointers(k: Builder, weights: Val, first: Val, m: Val, n: int, row_bytes: int) -> list[Val]:
    """Addresses of rows ``first .. first + n``, the last row standing in for those past it."""
    return [weights + k.min(first + r, m - 1) * row_bytes for r in range(n)]


def emit_pack(
    k: Builder,
    isa: Isa,
    fmt: Format,
    act: Act,
    panel: Val,
    weights: Val,
    first: Val,
    m: Val,
    rows: int,
) -> None:
    """Pack rows ``first .. first + rows`` of ``weights [m, K]`` into ``panel``."""
    lanes = isa.lanes
    for strip in range(0, rows, lanes):
        pointers = row_pointers(k, weights, first + strip, m, lanes, fmt.row_bytes(act.k))
        out = panel + strip * 4
        if act.kind == "q8":
            _pack_codes(k, isa, fmt, act, out, pointers, rows)
        else:
            _pack_floats(k, isa, fmt, act, out, pointers, rows)


def _pack_codes(
    k: Builder, isa: Isa, fmt: Format, act: Act, out: Val, pointers: list[Val], rows: int
) -> None:
    codes = fmt.codes
    assert codes is not None
    lanes, size = isa.lanes, fmt.dtype.itemsize
    scales = out + 4 * rows * act.kd
    with k.loop(act.kb) as b:
        blocks = [p + b * size for p in pointers]
        for p in blocks:
            k.prefetch(p + lanes * fmt.row_bytes(act.k), 2)  # the strip after this one
        quants = [k.concat(*unpack_codes(k, fmt, [p])).bits(i32 * 8) for p in blocks]
        to = out + b * (8 * rows * 4)
        for c, column in enumerate(transpose(k, quants, lanes)):
            for i, v in enumerate(column):
                k.store(to, v, offset=4 * (c * rows + i * v.ty.lanes))
        for at, field in enumerate(f for f in (codes.d, codes.m) if f):
            k.store(
                scales + 4 * rows * act.kb * at,
                load_scales(k, isa, fmt, blocks, field),
                offset=b * (4 * rows),
            )


def _pack_floats(
    k: Builder, isa: Isa, fmt: Format, act: Act, out: Val, pointers: list[Val], rows: int
) -> None:
    """Weights of any format as bf16 or f32 dwords, CHUNK dwords (or a whole block) of each row at a
    time.
    """
    per = PER_DWORD[act.kind]
    n_values = max(CHUNK * per, fmt.block)
    n_dwords = n_values // per
    full = act.k // n_values

    def chunk(c: Val, n: int) -> None:
        vectors = []
        for p in pointers:
            x = load_floats(k, isa, fmt, p, c, n_values, n)
            vectors.append((bf16_bits(k, x) if act.kind == "bf16" else x).bits(i32 * n_dwords))
        to = out + c * (n_dwords * rows * 4)
        for col, column in enumerate(transpose(k, vectors, isa.lanes)):
            for i, v in enumerate(column):
                k.store(to, v, offset=4 * (col * rows + i * v.ty.lanes))

    with k.loop(full) as c:
        chunk(c, n_values)
    for last in range(full, act.kd // n_dwords):  # the ragged end, and zeros up to a whole block
        chunk(k.i64(last), max(0, act.k - last * n_values))


def load_floats(k: Builder, isa: Isa, fmt: Format, row: Val, c: Val, n_values: int, n: int) -> Val:
    """``n`` weights from value ``c * n_values`` of a row on, as f32, zeros up to ``n_values``."""
    codes = fmt.codes
    if codes is None:
        assert fmt.load is not None
        if not n:
            return k.zero(f32 * n_values)
        at = row + c * (n_values * fmt.dtype.itemsize)
        return fmt.load(k, isa, at, n_values, n)  # type: ignore[no-any-return]
    blocks = []
    for j in range(n_values // BLOCK):
        p = row + (c * (n_values // BLOCK) + j) * fmt.dtype.itemsize
        x = (k.concat(*unpack_codes(k, fmt, [p])).to(i32) - codes.offset).to(f32)
        x = x * load_scales(k, isa, fmt, [p], codes.d, BLOCK)
        if codes.m:
            x = x + load_scales(k, isa, fmt, [p], codes.m, BLOCK)
        blocks.append(x)
    return k.concat(*blocks)

"""Packing: a strip of weight rows, unpacked into cache in the order that the tile loop reads.

A panel is ``[KD, P]`` dwords (see ``act.py``) of P rows, then for int8 formats the scales ``[KS,
P]`` in f32 (fewer of them, where only minimums come so often) and, where the format has them, the
minimums ``[KS, P]``. Rows past the last one repeat it, so nothing outside the tensor is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.jit.types import f32, i8, i32, u8
from treadle.kernels.act import BLOCK, CHUNK, OFFSET, PER_DWORD, Act
from treadle.kernels.blocks import (
    At,
    codes_in_order,
    load_scales,
    load_weights,
    scales_of,
    unpack_codes,
)
from treadle.kernels.spec import round_up
from treadle.kernels.transpose import transpose

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.formats.format import Codes
    from treadle.isa.isa import Isa
    from treadle.jit.builder import Builder
    from treadle.jit.types import Ty
    from treadle.jit.values import Operand, Val


STAGE = 256  # codes of a row that are unpacked at once


def panel_bytes(fmt: Format, act: Act, rows: int) -> int:
    """Scratch for one panel."""
    n_bytes = 4 * rows * act.kd
    if fmt.codes:
        n_bytes += scale_bytes(fmt.codes, act, rows)
        n_bytes += 4 * rows * act.ks if fmt.codes.has_m else 0
    return round_up(n_bytes, 64)


def scale_bytes(codes: Codes, act: Act, rows: int) -> int:
    """Of a panel's scales; minimums come after them."""
    return 4 * rows * act.kb * (BLOCK // codes.sub)


def stage_blocks(fmt: Format, k: int) -> int:
    """Blocks of a row that are unpacked before they are put in order: about STAGE codes."""
    n = 1
    while 2 * n * fmt.block <= STAGE and k // fmt.block % (2 * n) == 0:
        n *= 2
    return n


def stage_bytes(fmt: Format, k: int, lanes: int) -> int:
    """Scratch for the codes, scales and minimums of ``lanes`` rows of that many blocks."""
    if fmt.codes is None or not is_staged(fmt):
        return 0
    n = stage_blocks(fmt, k) * fmt.block
    return lanes * (n + 4 * sum(shared_by(fmt.codes, n)))


def shared_by(codes: Codes, n: int) -> list[int]:
    """How many scales ``n`` codes have, and how many minimums, if any."""
    return [n // codes.sub] + [n // codes.sum_sub] * codes.has_m


def is_staged(fmt: Format) -> bool:
    """Blocks with more than one scale are unpacked row by row first."""
    return fmt.codes is not None and fmt.codes.scales is not None


def code_offset(codes: Codes, isa: Isa) -> int:
    """What to subtract from a panel's code: nothing, or OFFSET, which the activations are prepared
    for, unless a dot of such codes would be slower.
    """
    for offset in (0, OFFSET):
        more = offset - codes.offset
        if isa.dot4_least <= more and codes.top + more <= isa.dot4_top:
            return offset
    return codes.offset


def code_type(codes: Codes, isa: Isa) -> Ty:
    """Of a panel's codes: signed where all that is to be subtracted has been."""
    return i8 if code_offset(codes, isa) < codes.offset else u8


def code_top(codes: Codes, isa: Isa) -> int:
    """The largest code in a panel."""
    return codes.top + code_offset(codes, isa) - codes.offset


def emit_pack(
    k: Builder,
    isa: Isa,
    fmt: Format,
    act: Act,
    panel: Val,
    stage: Val,
    weights: At,
    first: Val,
    m: Val,
    rows: int,
) -> None:
    """Pack rows ``first .. first + rows`` of ``weights [m, K]`` into ``panel``, by way of
    ``stage``.
    """
    lanes = isa.lanes
    if is_staged(fmt):
        with k.loop(rows, step=lanes) as at:
            source = Rows(weights, first + at, m, act.k)
            _pack_staged(k, isa, fmt, act, panel + at * 4, stage, source, rows)
        return
    for strip in range(0, rows, lanes):
        source = Rows(weights, first + strip, m, act.k)
        pointers = [source.row(k, r) for r in range(lanes)]
        out = panel + strip * 4
        if act.kind == "q8":
            _pack_codes(k, isa, fmt, act, out, pointers, rows)
        else:
            _pack_floats(k, isa, fmt, act, out, pointers, rows)


def _pack_codes(
    k: Builder, isa: Isa, fmt: Format, act: Act, out: Val, pointers: list[At], rows: int
) -> None:
    codes = fmt.codes
    assert codes is not None
    lanes = isa.lanes
    more = code_offset(codes, isa) - codes.offset
    scales = out + 4 * rows * act.kd
    with k.loop(act.kb) as b:
        blocks = [p.block(b) for p in pointers]
        for p in blocks:
            p.prefetch(k, lanes * (act.k // fmt.block), 1, 2)  # the strip after this one
        quants = [(k.concat(*unpack_codes(k, fmt, [p])) + more).bits(i32 * 8) for p in blocks]
        _store_columns(k, isa, out + b * (8 * rows * 4), quants, rows)
        for at, field in enumerate(f for f in (codes.d, codes.m) if f):
            k.store(
                scales + 4 * rows * act.kb * at,
                load_scales(k, isa, fmt, blocks, field),
                offset=b * (4 * rows),
            )


@dataclass(frozen=True)
class Rows:
    """Rows from ``first`` on of ``weights [m, k]``; the last stands in for those past it."""

    weights: At
    first: Val
    m: Val
    k: int

    def row(self, k: Builder, r: Operand) -> At:
        return self.weights.row(k.min(self.first + r, self.m - 1), self.k)


def _pack_staged(
    k: Builder, isa: Isa, fmt: Format, act: Act, out: Val, stage: Val, source: Rows, rows: int
) -> None:
    """Large blocks: each row's are unpacked into ``stage``, then all rows' put in order together,
    the 32 codes of a block of activations at a time.
    """
    codes, lanes = fmt.codes, isa.lanes
    assert codes is not None
    more, n_blocks = code_offset(codes, isa) - codes.offset, stage_blocks(fmt, act.k)
    n = n_blocks * fmt.block
    counts, each = shared_by(codes, n), shared_by(codes, fmt.block)
    pitch, scales = n + 4 * sum(counts), out + 4 * rows * act.kd
    staged = [n, n + 4 * counts[0]][: len(counts)]
    packed = [scales, scales + scale_bytes(codes, act, rows)][: len(counts)]
    with k.loop(act.k // n) as c:
        with k.loop(lanes) as r:
            row = source.row(k, r).block(c, n_blocks)
            row.prefetch(k, 2 * n_blocks, n_blocks, 2)
            with k.loop(n_blocks) as i:
                block = row.block(i)
                to = stage + (r * pitch + i * fmt.block)
                k.store(to, codes_in_order(k, fmt, block) + more)
                both = [v for v in scales_of(k, isa, fmt, [block]) if v is not None]
                for v, at, per in zip(both, staged, each, strict=True):
                    k.store(stage + (r * pitch + at + i * (4 * per)), v)
        with k.loop(n // BLOCK) as j:
            held = [k.load(stage + j * BLOCK, i32 * 8, offset=r * pitch) for r in range(lanes)]
            to = out + (c * (n // BLOCK) + j) * (8 * rows * 4)
            _store_columns(k, isa, to, held, rows)
        for count, at, to in zip(counts, staged, packed, strict=True):
            width = min(count, 8)
            with k.loop(count, step=width) as j:
                here = stage + j * 4
                held = [k.load(here, i32 * width, offset=r * pitch + at) for r in range(lanes)]
                _store_columns(k, isa, to + (c * count + j) * (4 * rows), held, rows)


def _store_columns(k: Builder, isa: Isa, to: Val, held: list[Val], rows: int) -> None:
    """The dwords of some rows, column after column of a panel of ``rows``."""
    for c, column in enumerate(transpose(k, held, isa.lanes)):
        for i, v in enumerate(column):
            k.store(to, v, offset=4 * (c * rows + i * v.ty.lanes))


def _pack_floats(
    k: Builder, isa: Isa, fmt: Format, act: Act, out: Val, pointers: list[At], rows: int
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
            vectors.append(
                (isa.narrow_bf16(k, x) if act.kind == "bf16" else x).bits(i32 * n_dwords)
            )
        _store_columns(k, isa, out + c * (n_dwords * rows * 4), vectors, rows)

    with k.loop(full) as c:
        chunk(c, n_values)
    for last in range(full, act.kd // n_dwords):  # the ragged end, and zeros up to a whole block
        chunk(k.i64(last), max(0, act.k - last * n_values))


def load_floats(k: Builder, isa: Isa, fmt: Format, row: At, c: Val, n_values: int, n: int) -> Val:
    """``n`` weights from value ``c * n_values`` of a row on, as f32, zeros up to ``n_values``."""
    codes = fmt.codes
    if codes is None:
        assert fmt.load is not None
        if not n:
            return k.zero(f32 * n_values)
        (at,) = row.block(c, n_values).parts
        return fmt.load(k, isa, at, n_values, n)  # type: ignore[no-any-return]
    first = row.block(c, n_values // fmt.block)
    return k.concat(
        *(
            part
            for j in range(n_values // fmt.block)
            for part in load_weights(k, isa, fmt, first.block(j))
        )
    )

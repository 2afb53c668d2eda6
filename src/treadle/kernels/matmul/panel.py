"""Packing: unpacks weight rows into cache, in the order that the tile loop reads.

A panel is ``[KD, P]`` dwords (see ``kernels/activation_layout.py``) of P rows. For int8 formats the
scales ``[KS, P]`` in f32 follow (fewer if only minimums are that frequent) and, if the format has
them, the minimums ``[KS, P]``; for words the scales of spans, ``[KB, P]``. Rows past the end
repeat the last one, so nothing outside the tensor is read.
"""

from __future__ import annotations

from treadle.formats import Format
from treadle.formats.format import Codes
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import Ty, f32, i8, i16, i32, u8
from treadle.kernels.activation_layout import (
    BLOCK,
    DWORD,
    DWORDS,
    MAGIC,
    OFFSET,
    SPAN,
    STEP_BITS,
    WORDS,
    ActivationLayout,
    in_words,
    word_scale,
)
from treadle.kernels.format_blocks import (
    BlockAddress,
    WeightRows,
    codes_in_order,
    load_scales,
    load_weights,
    ordered_codes,
    scales_of,
    unpack_codes,
)
from treadle.kernels.spec import round_up
from treadle.kernels.transpose import transpose

STAGE = 256  # codes of a row that are unpacked at once
PACK_DWORDS = 16  # dwords of a row that are reordered at once


def panel_bytes(fmt: Format, act: ActivationLayout, rows: int) -> int:
    """Return the bytes of scratch for a panel of ``rows`` rows."""
    n_bytes = 4 * rows * act.kd
    if act.kind in WORDS:
        n_bytes += 4 * rows * act.kb
    elif fmt.codes:
        n_bytes += scale_bytes(fmt.codes, act, rows)
        n_bytes += 4 * rows * act.ks if fmt.codes.has_m else 0
    return round_up(n_bytes, 64)


def scale_bytes(codes: Codes, act: ActivationLayout, rows: int) -> int:
    """Return the bytes of a panel's scales; the minimums come after them."""
    return 4 * rows * act.kb * (BLOCK // codes.sub)


def stage_blocks(fmt: Format, k: int) -> int:
    """Return the number of a row's blocks that are unpacked before they are reordered: about STAGE
    codes.
    """
    n = 1
    while 2 * n * fmt.block <= STAGE and k // fmt.block % (2 * n) == 0:
        n *= 2
    return n


def stage_bytes(fmt: Format, act: ActivationLayout, lanes: int) -> int:
    """Return the bytes of scratch for ``lanes`` rows while they are packed: codes, scales and
    minimums of ``stage_blocks`` blocks, or the words of a span; 0 for formats that are packed
    directly.
    """
    if act.kind in WORDS:
        return SPAN * (4 + 2 * lanes)
    if act.kind != "q8" or fmt.codes is None or not is_staged(fmt):
        return 0
    n = stage_blocks(fmt, act.k) * fmt.block
    return lanes * (n + 4 * sum(scale_counts(fmt.codes, n)))


def scale_counts(codes: Codes, n: int) -> list[int]:
    """Return the number of scales of ``n`` codes, and (if the format has them) of minimums."""
    return [n // codes.sub] + [n // codes.sum_sub] * codes.has_m


def is_staged(fmt: Format) -> bool:
    """Whether rows are unpacked one by one before they are reordered: if blocks have more than one
    scale.
    """
    return fmt.codes is not None and fmt.codes.scales is not None


def code_offset(codes: Codes, isa: Isa, unit: int = DWORD) -> int:
    """Return the zero point of a panel's codes: a code minus it is the integer weight.

    It is 0 or OFFSET, the zero point for which the activations' ``comp`` is made, if the codes are
    then within the operands that ``isa.dot4`` multiplies at full speed; else the format's own. The
    format's own is also taken where dots are added in i16 (``Isa.shorts``), because more of them
    fit if codes are small. ``unit``: as in ``emit_pack``; with any but DWORD the result is 0, since
    those products take signed bytes as well as unsigned ones.
    """
    if unit != DWORD:
        return 0
    if isa.shorts and codes.top <= isa.dot4_top:  # the smaller the codes, the more dots fit an i16
        return codes.offset
    for offset in (0, OFFSET):
        more = offset - codes.offset
        if isa.dot4_least <= more and codes.top + more <= isa.dot4_top:
            return offset
    return codes.offset


def code_type(codes: Codes, isa: Isa, unit: int = DWORD) -> Ty:
    """Return the type of a panel's codes: signed if the offset is already subtracted."""
    return i8 if code_offset(codes, isa, unit) < codes.offset else u8


def code_top(codes: Codes, isa: Isa) -> int:
    """Return the largest code in a panel, whose zero point may differ from the format's."""
    return codes.top + code_offset(codes, isa) - codes.offset


def code_size(codes: Codes, isa: Isa) -> int:
    """Return the largest magnitude of a code in a panel."""
    return max(code_top(codes, isa), codes.offset - code_offset(codes, isa))


def short_dots(codes: Codes, isa: Isa) -> int:
    """Return how many dots of a panel's codes fit an i16 sum (``Isa.shorts``); 0: dots are not
    added in i16.
    """
    return isa.shorts.room(code_size(codes, isa)) if isa.shorts else 0


def emit_pack(
    k: Builder,
    act: ActivationLayout,
    panel: Val,
    stage: Val,
    source: WeightRows,
    rows: int,
    unit: int = DWORD,
) -> None:
    """Pack ``rows`` rows of ``source`` into ``panel``, with ``stage`` as scratch. ``unit``:
    consecutive values of K in a column of the panel.
    """
    lanes = k.isa.lanes
    if act.kind in WORDS:
        with k.loop(rows, step=lanes) as at:
            _pack_words(k, act, panel, stage, source.offset_by(at), rows, at)
        return
    if act.kind == "q8" and is_staged(source.weights.fmt):
        with k.loop(rows, step=lanes) as at:
            to = panel + at * 4
            codes_to = to if unit == DWORD else panel + at * unit
            _pack_staged(k, act, to, codes_to, stage, source.offset_by(at), rows, unit)
        return
    for first in range(0, rows, lanes):
        behind = source.offset_by(first)
        to = panel + first * 4
        strip = [behind.row(k, r) for r in range(lanes)]
        if act.kind == "q8":
            codes_to = to if unit == DWORD else panel + first * unit
            _pack_codes(k, act, to, codes_to, strip, rows, unit)
        else:
            _pack_floats(k, act, to, strip, rows)


def _pack_codes(
    k: Builder,
    act: ActivationLayout,
    out: Val,
    codes_to: Val,
    strip: list[BlockAddress],
    rows: int,
    unit: int,
) -> None:
    """Pack blocks of one scale, of as many rows as fill a vector: ``strip``, in a panel of ``rows``
    rows. ``out``: address of the strip's first dword, for scales; ``codes_to``: of its codes, which
    differ if ``unit`` is not a dword.
    """
    lanes = k.isa.lanes
    fmt = strip[0].fmt
    codes = strip[0].codes
    more = code_offset(codes, k.isa, unit) - codes.offset
    scales = out + 4 * rows * act.kd
    with k.loop(act.kb) as b:
        blocks = [row.block(b) for row in strip]
        for block in blocks:
            block.prefetch(k, lanes * (act.k // fmt.block), 1, 2)  # the next strip
        quants = [(k.concat(*unpack_codes(k, [p])) + more).bits(i32 * 8) for p in blocks]
        _store_codes(k, codes_to + b * (8 * rows * 4), quants, rows, unit)
        for at, field in enumerate(f for f in (codes.d, codes.m) if f):
            to = scales + 4 * rows * act.kb * at
            k.store(to, load_scales(k, blocks, field), offset=b * (4 * rows))


def _pack_staged(
    k: Builder,
    act: ActivationLayout,
    out: Val,
    codes_to: Val,
    stage: Val,
    source: WeightRows,
    rows: int,
    unit: int,
) -> None:
    """Pack blocks with several scales: unpack those of each row into ``stage``, then reorder all
    rows together, 32 codes at a time. ``out`` and ``codes_to`` as in ``_pack_codes``.
    """
    fmt = source.weights.fmt
    codes = source.weights.codes
    lanes = k.isa.lanes
    more = code_offset(codes, k.isa, unit) - codes.offset
    n_blocks = stage_blocks(fmt, act.k)
    n = n_blocks * fmt.block
    counts = scale_counts(codes, n)
    each = scale_counts(codes, fmt.block)
    pitch = n + 4 * sum(counts)
    scales = out + 4 * rows * act.kd
    staged = [n, n + 4 * counts[0]][: len(counts)]
    packed = [scales, scales + scale_bytes(codes, act, rows)][: len(counts)]
    with k.loop(act.k // n) as c:
        with k.loop(lanes) as r:
            row = source.row(k, r).block(c, n_blocks)
            row.prefetch(k, 2 * n_blocks, n_blocks, 2)
            with k.loop(n_blocks) as i:
                block = row.block(i)
                to = stage + (r * pitch + i * fmt.block)
                offset = 0
                # Q6_K is slower in file order (0.95 of the speed, Zen 4).
                in_order = codes.sub == BLOCK
                for v in ordered_codes(k, block) if in_order else [codes_in_order(k, block)]:
                    k.store(to, v + more, offset=offset)
                    offset += v.ty.lanes
                both = [v for v in scales_of(k, [block]) if v is not None]
                for v, at, per in zip(both, staged, each, strict=True):
                    k.store(stage + (r * pitch + at + i * (4 * per)), v)
        with k.loop(n // BLOCK) as j:
            held = [k.load(stage + j * BLOCK, i32 * 8, offset=r * pitch) for r in range(lanes)]
            to = codes_to + (c * (n // BLOCK) + j) * (8 * rows * 4)
            _store_codes(k, to, held, rows, unit)
        for count, at, to in zip(counts, staged, packed, strict=True):
            width = min(count, 8)
            with k.loop(count, step=width) as j:
                here = stage + j * 4
                held = [k.load(here, i32 * width, offset=r * pitch + at) for r in range(lanes)]
                _store_columns(k, to + (c * count + j) * (4 * rows), held, rows)


def _store_codes(k: Builder, to: Val, held: list[Val], rows: int, unit: int) -> None:
    """Store the dwords ``held`` of some rows, four codes each, as columns of ``unit`` values of K,
    in a panel of ``rows`` rows.
    """
    if unit == DWORD:
        _store_columns(k, to, held, rows)
        return
    columns = transpose(k, held, k.isa.lanes)
    if unit > DWORD:
        for c, both in enumerate(zip(columns[::2], columns[1::2], strict=True)):
            for i, (low, high) in enumerate(zip(*both, strict=True)):
                n = low.ty.lanes
                zipped = k.shuffle(low, high, [j + n * half for j in range(n) for half in (0, 1)])
                k.store(to, zipped, offset=unit * (c * rows + i * n))
        return
    for c, column in enumerate(columns):
        for i, v in enumerate(column):
            for j in range(DWORD):
                at = (c * DWORD + j) * rows + i * v.ty.lanes
                k.store(to, (v >> 8 * j).to(i8), offset=at)


def _store_columns(k: Builder, to: Val, held: list[Val], rows: int) -> None:
    """Store the dwords ``held`` of some rows column after column, in a panel of ``rows`` rows."""
    for c, column in enumerate(transpose(k, held, k.isa.lanes)):
        for i, v in enumerate(column):
            k.store(to, v, offset=4 * (c * rows + i * v.ty.lanes))


def _pack_floats(
    k: Builder, act: ActivationLayout, out: Val, strip: list[BlockAddress], rows: int
) -> None:
    """Pack dequantised weights as bf16 or f32 dwords, for formats of any kind: of the rows
    ``strip``, PACK_DWORDS dwords (or a whole block) of each row at a time. ``out``: address of the
    strip's first dword in a panel of ``rows`` rows.
    """
    per = BLOCK // DWORDS[act.kind]
    n_values = max(PACK_DWORDS * per, strip[0].fmt.block)
    n_dwords = n_values // per
    full = act.k // n_values

    def some(c: Val, n: int) -> None:
        values = (load_floats(k, row, c, n_values, n) for row in strip)
        if act.kind == "bf16":
            values = (k.isa.narrow_bf16(k, x) for x in values)
        vectors = [x.bits(i32 * n_dwords) for x in values]
        _store_columns(k, out + c * (n_dwords * rows * 4), vectors, rows)

    with k.loop(full) as c:
        some(c, n_values)
    for last in range(full, act.kd // n_dwords):  # the remainder, and zeros up to a whole block
        some(k.i64(last), max(0, act.k - last * n_values))


def _pack_words(
    k: Builder,
    act: ActivationLayout,
    out: Val,
    stage: Val,
    source: WeightRows,
    rows: int,
    first: Val,
) -> None:
    """Pack weights as i16 with a scale for each span: as many rows as fill a vector, from row
    ``first`` of a panel of ``rows`` rows at ``out`` on. Rows go one by one into ``stage``, then all
    are reordered together.
    """
    lanes = k.isa.lanes
    words = stage + 4 * SPAN
    columns_to = out + first * 4
    scales = out + (4 * rows * act.kd + first * 4)
    is_float = source.weights.fmt.codes is None

    def some(c: Val, have: int) -> None:
        with k.loop(lanes) as r:
            given = source.row(k, r), c, have, stage, words + r * (2 * SPAN)
            d = _store_floats(k, act, *given) if is_float else _store_scaled_codes(k, *given)
            k.store(scales + (c * rows + r) * 4, d)
        with k.loop(-(-have // BLOCK) * 2) as j:
            held = [k.load(words + j * 32, i32 * 8, offset=2 * SPAN * r) for r in range(lanes)]
            to = columns_to + (c * (SPAN // 16) + j) * (8 * rows * 4)
            _store_columns(k, to, held, rows)

    k.runs(act.k, SPAN, some)


def _store_floats(
    k: Builder, act: ActivationLayout, row: BlockAddress, c: Val, have: int, stage: Val, to: Val
) -> Val:
    """Write ``have`` float weights of a row's ``c``-th span to ``to`` as words, zeros up to a whole
    block; return the span's scale. ``stage``: scratch for SPAN f32.
    """
    ty = f32 * k.isa.lanes
    per_span = SPAN // BLOCK
    top = k.var(k.zero(i32 * ty.lanes))
    squares = k.var(k.zero(ty)) if act.kind == "q16n" else None

    def largest_of(b: Val, n: int) -> None:
        values = load_floats(k, row, c * per_span + b, BLOCK, n)
        for i, v in enumerate(k.split(values, ty.lanes)):
            k.store(stage + b * (4 * BLOCK), v, offset=i * ty.n_bytes)
            top.v = k.max(top.v, k.abs(v).bits(top.v.ty))
            if squares is not None:
                squares.v = k.fma(v, v, squares.v)

    row.block(c, SPAN).prefetch(k, 2 * SPAN, SPAN, 2)
    k.runs(have, BLOCK, largest_of)
    total = k.sum(squares.v) if squares is not None else None
    inverse, d = word_scale(k, k.reduce(top.v, k.max), squares=total)
    with k.loop(-(-have // BLOCK)) as b:
        at = stage + b * (4 * BLOCK)
        values = [k.load(at, ty, offset=4 * i) for i in range(0, BLOCK, ty.lanes)]
        k.store(to + b * (2 * BLOCK), in_words(k, values, inverse))
    return d


def _store_scaled_codes(
    k: Builder, row: BlockAddress, c: Val, have: int, stage: Val, to: Val
) -> Val:
    """Write ``have`` weights of a row's ``c``-th span to ``to`` as words, for formats of codes with
    a scale for every 32; return the span's scale. It follows from the largest code times the
    largest scale, which no weight exceeds. ``stage``: scratch for the scales.
    """
    fmt = row.fmt
    codes = row.codes
    shorts = k.isa.shorts
    assert codes.sub == BLOCK, fmt.name
    assert not codes.has_m, fmt.name
    assert shorts is not None, k.isa.name
    per = SPAN // fmt.block
    step = 15 - STEP_BITS
    n = k.isa.vector_bits // 16
    row.block(c, per).prefetch(k, 2 * per, per, 2)
    blocks = [row.block(c, per).block(i) for i in range(have // fmt.block)]
    scales, _ = scales_of(k, blocks + blocks[-1:] * (per - len(blocks)))
    inverse, d = word_scale(k, (k.abs(scales) * codes.most).bits(i32.like(scales.ty)))
    steps = scales * k.splat(inverse, scales.ty) * float(1 << STEP_BITS)
    steps = (steps + MAGIC).bits(i32.like(scales.ty))  # integers, in the low bits
    k.store(stage, (steps & 0xFFFF) | (steps << 16))
    k.fence()  # a broadcast from memory needs no shuffle
    parts = [part for b in blocks for v in ordered_codes(k, b) for part in k.split(v, BLOCK)]
    for i, code in enumerate(parts):
        v = (code - codes.offset).bits(i8 * BLOCK).to(i16) << step
        factor = k.splat(k.load(stage + 4 * i, i32), i32 * (BLOCK // 2)).bits(v.ty)
        both = zip(k.split(v, n), k.split(factor, n), strict=True)
        k.store(to, k.concat(*(shorts.high(k, a, b) for a, b in both)), offset=2 * BLOCK * i)
    return d


def load_values(k: Builder, row: BlockAddress, c: Val, n: int) -> list[Val]:
    """Return dequantised weights of a row: the ``c``-th block, or of a float format the ``c``-th 32
    values, as vectors of ``f32 * 32``. Only ``n`` values exist; zeros follow them.
    """
    if row.fmt.codes:
        return load_weights(k, row.block(c))
    return [load_floats(k, row, c, BLOCK, n)]


def load_floats(k: Builder, row: BlockAddress, c: Val, n_values: int, n: int) -> Val:
    """Return ``n`` dequantised weights of a row from value ``c * n_values`` on, ``f32 * n_values``,
    zeros after them.
    """
    fmt = row.fmt
    if fmt.codes is None:
        assert fmt.load is not None
        if not n:
            return k.zero(f32 * n_values)
        (at,) = row.block(c, n_values).parts
        return fmt.load(k, k.isa, at, n_values, n)  # type: ignore[no-any-return]
    n_blocks = n_values // fmt.block
    first = row.block(c, n_blocks)
    return k.concat(*(v for j in range(n_blocks) for v in load_weights(k, first.block(j))))

"""Every row's operations against their one meaning, in numpy: the same tests for all rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import pytest

from tests.jit.emit import compiled
from tests.kernels import rows
from tests.kernels.harness import U32, assert_close
from treadle.formats.kernel_bits import bit_extract, bit_spread, count_ones, multishift
from treadle.isa.isa import Isa, MatrixUnit
from treadle.jit.builder import Builder
from treadle.jit.types import Ty, bf16, f16, f32, i8, i16, i32, u8, u16
from treadle.jit.values import Val
from treadle.kernels.activation_layout import from_bf16_bits, to_bf16_bits

# -- pairs
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ty", [i8, u8], ids=str)
@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_pairs(isa: Isa, ty: Ty, rng: np.random.Generator) -> None:
    """Two rows of 8 by two tokens of 8, at the ends of their ranges too."""

    def build(k: Builder, acc: Val, w: Val, x: Val) -> None:
        made = isa.pairs(k, k.load(acc, i32 * 4), k.load(w, ty * 16), k.load(x, i8 * 16))
        k.store(acc, made)

    kernel = compiled(isa, 3, build)
    kind = np.int8 if ty.is_signed else np.uint8
    ends = np.iinfo(kind)
    for low, high in ((ends.min, ends.max), (ends.max, ends.max), (ends.min, ends.min)):
        w = rng.integers(low, high, (2, 8), kind, endpoint=True)
        x = rng.integers(-127, 127, (2, 8), np.int8, endpoint=True)
        acc = rng.integers(-(1 << 20), 1 << 20, (2, 2), np.int32)
        want = acc + w.astype(np.int32) @ x.astype(np.int32).T
        kernel(acc, w, x)
        assert (acc == want).all()


# -- dot4
# -------------------------------------------------------------------------------------------

TOPS = (15, 129, 130, 255)  # 129: the largest weight for which maddubs cannot saturate


@lru_cache
def dot4(isa: Isa, lanes: int, w_max: int) -> Callable[..., None]:
    def build(k: Builder, acc: Val, w: Val, x: Val) -> None:
        sums = k.load(acc, i32 * (lanes // 4))
        k.store(acc, isa.dot4(k, sums, k.load(w, u8 * lanes), k.load(x, i8 * lanes), w_max))

    return compiled(isa, 3, build)


def check_dot4(isa: Isa, w_max: int, w: np.ndarray, x: np.ndarray, acc: np.ndarray) -> None:
    got = acc.copy()
    dot4(isa, len(w), w_max)(got, w, x)
    dots = (w.astype(np.int64) * x).reshape(-1, 4).sum(-1)
    assert (got == (acc + dots).astype(np.int32)).all(), (w, x, acc, got)


def widths(isa: Isa) -> list[int]:
    """A register of bytes; a block and half a block, which gemv's ends are made of."""
    return sorted({16, 32, isa.vector_bits // 8})


@pytest.mark.slow
@pytest.mark.parametrize("w_max", TOPS)
@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_dot4(isa: Isa, w_max: int, rng: np.random.Generator) -> None:
    """Of codes and activations at the ends of their ranges and around zero."""
    for lanes in widths(isa):
        for _ in range(40):
            w = rng.choice(np.array([0, 1, w_max // 2, w_max - 1, w_max], np.uint8), lanes)
            x = rng.choice(np.array([-127, -126, -1, 0, 1, 127], np.int8), lanes)
            acc = rng.integers(-(2**31), 2**31, lanes // 4, np.int32)
            check_dot4(isa, w_max, w, x, acc)
        same = np.full(lanes, w_max, np.uint8)
        for x_value in (-127, 127):
            acc = np.full(lanes // 4, 5, np.int32)
            check_dot4(isa, w_max, same, np.full(lanes, x_value, np.int8), acc)


@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_dot4_random(isa: Isa, rng: np.random.Generator) -> None:
    for lanes in widths(isa):
        for w_max in TOPS:
            w = rng.integers(0, w_max + 1, (64, lanes)).astype(np.uint8)
            x = rng.integers(-127, 128, (64, lanes)).astype(np.int8)
            for i in range(64):
                check_dot4(isa, w_max, w[i], x[i], np.zeros(lanes // 4, np.int32))


@pytest.mark.parametrize("isa", [r for r in rows.ALL if r.dot4_least < 0] or [None], ids=rows.name)
def test_dot4_of_signed_codes(isa: Isa | None, rng: np.random.Generator) -> None:
    if isa is None:
        pytest.skip("no row here takes signed codes")

    def build(k: Builder, acc: Val, w: Val, x: Val) -> None:
        n = isa.vector_bits // 8
        sums = k.load(acc, i32 * (n // 4))
        k.store(acc, isa.dot4(k, sums, k.load(w, i8 * n), k.load(x, i8 * n), 127))

    kernel = compiled(isa, 3, build)
    for w, x in signed_operands(rng, isa.vector_bits // 8):
        acc = rng.integers(-(1 << 20), 1 << 20, len(w) // 4, np.int32)
        want = acc + (w.astype(np.int32) * x).reshape(-1, 4).sum(-1)
        kernel(acc, w, x)
        assert (acc == want).all()


def signed_operands(
    rng: np.random.Generator, n: int, size: int = 128
) -> list[tuple[np.ndarray, np.ndarray]]:
    """``n`` weights of at most ``size``, at the ends and any, and as many activations."""
    low = -size
    high = min(size, 127)
    made = [
        (np.full(n, w, np.int8), np.full(n, x, np.int8))
        for w in (low, high, 0)
        for x in (-127, 127)
    ]
    for _ in range(20):
        w = rng.integers(low, high, n, np.int8, endpoint=True)
        made.append((w, rng.integers(-127, 127, n, np.int8, endpoint=True)))
    return made


@pytest.mark.parametrize("size", [1, 3, 15, 31, 63, 128, 129])
@pytest.mark.parametrize("isa", [r for r in rows.ALL if r.shorts] or [None], ids=rows.name)
def test_dots_that_an_i16_holds(isa: Isa | None, size: int, rng: np.random.Generator) -> None:
    """As many as ``room`` says, of codes of either sign and of none."""
    if isa is None:
        pytest.skip("no row here adds up dots in i16")
    shorts = isa.shorts
    assert shorts is not None
    room = shorts.room(size)
    n = isa.vector_bits // 8
    assert room >= 1
    for ty in (i8, u8) if size < 128 else (i8,) if size == 128 else (u8,):

        def build(k: Builder, acc: Val, w: Val, x: Val, ty: Ty = ty) -> None:
            s = None
            for i in range(room):
                pair = k.load(w, ty * n, offset=i * n), k.load(x, i8 * n, offset=i * n)
                s = shorts.dot(k, s, *pair)
            k.store(acc, shorts.widen(k, k.load(acc, i32 * (n // 4)), s))

        kernel = compiled(isa, 3, build)
        for w, x in signed_operands(rng, room * n, min(size, 128)):
            if ty is u8:
                w = np.minimum(np.abs(w.astype(np.int16)) + (size == 129), size).astype(np.uint8)
            acc = rng.integers(-(1 << 20), 1 << 20, n // 4, np.int32)
            products = w.astype(np.int32) * x.astype(np.int32)
            want = acc + products.reshape(room, n // 4, 4).sum((0, 2))
            kernel(acc, w, x)
            assert (acc == want).all()


@pytest.mark.parametrize("isa", rows.WORDS, ids=rows.name)
def test_dot_words(isa: Isa, rng: np.random.Generator) -> None:
    n = isa.lanes
    op = isa.dot_words
    assert op is not None

    def build(k: Builder, acc: Val, a: Val, b: Val) -> None:
        words = [k.load(p, i16 * (2 * n)) for p in (a, b)]
        k.store(acc, op(k, k.load(acc, i32 * n), *words))

    kernel = compiled(isa, 3, build)
    ends = np.resize(np.array([-32768, 32767, 32767, -32768, -32767], np.int16), 2 * n)
    random = rng.integers(-32768, 32768, (2, 2 * n)).astype(np.int16)
    for a, b in ((ends, np.full(2 * n, 32767, np.int16)), random):
        start = rng.integers(-(2**16), 0, n).astype(np.int32)
        acc = start.copy()
        kernel(acc, a, b)
        assert np.array_equal(acc, start + (a.astype(np.int64) * b).reshape(-1, 2).sum(-1))


# -- dot_bf16
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", [r for r in rows.ALL if r.dot_bf16] or [None], ids=rows.name)
def test_dot_bf16(isa: Isa | None, rng: np.random.Generator) -> None:
    if isa is None:
        pytest.skip("no row of this machine multiplies bf16")
    n = isa.lanes
    op = isa.dot_bf16
    assert op is not None

    def build(k: Builder, acc: Val, a: Val, b: Val) -> None:
        pairs = [k.load(p, u16 * (2 * n)).bits(bf16 * (2 * n)) for p in (a, b)]
        k.store(acc, op(k, k.load(acc, f32 * n), *pairs))

    kernel = compiled(isa, 3, build)
    whole = [rng.integers(-128, 129, 2 * n).astype(np.float32) for _ in range(2)]
    random = [rng.standard_normal(2 * n).astype(np.float32) for _ in range(2)]
    for pair in (whole, random):
        bits = [to_bf16_bits(v) for v in pair]
        a, b = ((v.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for v in bits)
        start = rng.integers(-99, 100, n).astype(np.float32)
        acc = start.copy()
        kernel(acc, *bits)
        products = (a * b).reshape(-1, 2)
        # Products are exact (8 bits by 8); two additions round. Whole numbers this small leave
        # nothing to round.
        size = 2 * U32 * (np.abs(start) + np.abs(products).sum(-1)) if pair is random else 0
        assert_close(acc, start + products.sum(-1), size, isa.name)


# -- matrix registers
# -------------------------------------------------------------------------------

SIDE = 16  # rows, and dwords of a row
MATRIX_ROWS = pytest.mark.parametrize("isa", rows.MATRICES, ids=rows.name)


def on_registers(isa: Isa, n_args: int, body: Callable[..., None]) -> Callable[..., None]:
    """``body(k, matrix, *pointers)``, where matrix registers may be used."""

    def build(k: Builder, *pointers: Val) -> None:
        matrix = isa.matrix
        assert matrix is not None
        matrix.begin(k, k.room(64))
        matrix.scope(k, "body", pointers, lambda k, *given: body(k, matrix, *given))
        matrix.end(k)

    return compiled(isa, n_args, build)


@MATRIX_ROWS
def test_registers_hold_what_was_loaded(isa: Isa, rng: np.random.Generator) -> None:
    """All sums at once, from rows that lie apart to rows that lie otherwise apart; and nothing
    between those is touched.
    """
    # dwords from row to row
    wide = 3 * SIDE
    wider = 5 * SIDE

    def body(k: Builder, matrix: MatrixUnit, given: Val, out: Val, empty: Val) -> None:
        for r in range(4):
            matrix.load(k, r, given + r * SIDE * wide * 4, wide * 4)
        for r in range(4):
            matrix.store(k, r, out + r * SIDE * wider * 4, wider * 4)
        matrix.zero(k, 2)
        matrix.store(k, 2, empty, 64)
        matrix.store(k, 1, empty + 1024, 64)

    given = rng.integers(0, 2**32, (4, SIDE, wide), dtype=np.uint32)
    out = np.full((4, SIDE, wider), 7, np.uint32)
    empty = np.ones((2, SIDE, SIDE), np.uint32)
    on_registers(isa, 3, body)(given, out, empty)
    assert (out[..., :SIDE] == given[..., :SIDE]).all()
    assert (out[..., SIDE:] == 7).all()
    assert not empty[0].any()
    assert (empty[1] == given[1, :, :SIDE]).all()


@MATRIX_ROWS
def test_turned_rows_are_columns(isa: Isa, rng: np.random.Generator) -> None:
    """Twice is not at all."""
    assert isa.matrix is not None
    turn = isa.matrix.turn
    wide = 3 * SIDE
    if turn is None:
        pytest.skip("the machine takes rows")

    def body(k: Builder, matrix: MatrixUnit, given: Val, again: Val) -> None:
        for p, times in ((given, 1), (again, 2)):
            for _ in range(times):
                turn(k, p, wide * 4)

    given = rng.integers(0, 2**32, (SIDE, wide), dtype=np.uint32)
    turned = given.copy()
    again = given.copy()
    on_registers(isa, 2, body)(turned, again)
    assert (turned[:, :SIDE] == given[:, :SIDE].T).all()
    assert (turned[:, SIDE:] == given[:, SIDE:]).all()
    assert (again == given).all()


@lru_cache
def matrix_dots(isa: Isa) -> Callable[..., None]:
    """Two products one after the other, of the same operands."""

    def body(k: Builder, matrix: MatrixUnit, c: Val, a: Val, b: Val) -> None:
        for i in range(2):
            if matrix.turn:
                matrix.turn(k, a + i * 1024, 64)
        for r in range(4):
            matrix.load(k, r, c + r * 1024, 64)
        for i in range(2):
            matrix.load(k, 4 + i, a + i * 1024, 64)
            matrix.load(k, 6 + i, b + i * 1024, 64)
        matrix.dots_bf16(k)
        matrix.dots_bf16(k)
        for r in range(4):
            matrix.store(k, r, c + r * 1024, 64)

    return on_registers(isa, 3, body)


def check_matrix_dots(
    isa: Isa, c: np.ndarray, a: np.ndarray, b: np.ndarray, n_rounded: int
) -> None:
    """``c`` f32 ``[2, 2, 16, 16]``, ``a``, ``b`` f32 ``[2, 16, 16, 2]``, the pairs of a row;
    ``n_rounded`` additions round.
    """
    bits = [to_bf16_bits(v) for v in (a, b)]
    a, b = (from_bf16_bits(v) for v in bits)
    got = c.copy()
    matrix_dots(isa)(got, *bits)
    want, size = (
        f(c) + 2 * np.einsum("milp,nljp->mnij", f(a), f(b)) for f in (lambda v: v * 1.0, np.abs)
    )
    assert_close(got, want, n_rounded * U32 * size, isa.name)


SUMS = (2, 2, SIDE, SIDE)
OPERAND = (2, SIDE, SIDE, 2)


@MATRIX_ROWS
def test_matrix_dots(isa: Isa, rng: np.random.Generator) -> None:
    """Products are exact (8 bits by 8), and 64 additions round, in whatever order."""
    for _ in range(20):
        c, a, b = (rng.standard_normal(s).astype(np.float32) for s in (SUMS, OPERAND, OPERAND))
        check_matrix_dots(isa, c, a, b, 65)


@MATRIX_ROWS
def test_matrix_dots_of_whole_numbers(isa: Isa, rng: np.random.Generator) -> None:
    """Sums stay below 2**24: nothing is left to round."""
    for top in (1, 128):
        c, a, b = (
            rng.integers(-top, top, shape, endpoint=True).astype(np.float32)
            for shape in (SUMS, OPERAND, OPERAND)
        )
        check_matrix_dots(isa, c, a, b, 0)


@MATRIX_ROWS
@pytest.mark.parametrize("n", [16, 32, 64])
def test_matrix_dot_of_bytes(n: int, isa: Isa, rng: np.random.Generator) -> None:
    """Twice on top of sums, of rows with ``n`` bytes."""
    matrix = isa.matrix
    assert matrix is not None
    if matrix.begin_bytes is None:
        pytest.skip("the machine has none of bytes")

    def build(k: Builder, c: Val, a: Val, b: Val) -> None:
        assert matrix.begin_bytes is not None
        assert matrix.dot_bytes is not None
        matrix.begin_bytes(k, k.room(64), n)
        matrix.load(k, 1, c, 64)
        matrix.load(k, 5, a, 80)
        matrix.load(k, 6, b, 64)
        for _ in range(2):
            matrix.dot_bytes(k, 1, 5, 6)
        matrix.store(k, 1, c, 64)
        matrix.end(k)

    c = rng.integers(-(1 << 20), 1 << 20, (16, 16), np.int32)
    a = rng.integers(-128, 128, (16, 80), np.int8)
    b = rng.integers(-128, 128, (n // 4, 16, 4), np.int8)
    got = c.copy()
    compiled(isa, 3, build)(got, a, b)
    want = c + 2 * np.einsum("il,lj->ij", a[:, :n].astype(int), b.transpose(0, 2, 1).reshape(n, 16))
    assert (got == want).all()


# -- lookup
# -----------------------------------------------------------------------------------------

TABLES = {
    "falling": list(range(255, 239, -1)),
    "steep": [(i * i * 37 + 11) % 256 for i in range(16)],
    "ends": [0] + [255] * 14 + [1],
}


@lru_cache
def lookup(isa: Isa, table: str, lanes: int) -> Callable[..., None]:
    def build(k: Builder, index: Val, out: Val) -> None:
        k.store(out, k.lookup(TABLES[table], k.load(index, u8 * lanes)))

    return compiled(isa, 2, build)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_lookup(isa: Isa, table: str, rng: np.random.Generator) -> None:
    """From half a block up to a block of 256 nibbles, wider than any register: every byte in every
    lane.
    """
    for lanes in (16, 32, 64, 128):
        for index in rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (lanes, 1)), axis=1).T:
            index = np.ascontiguousarray(index)
            got = np.zeros(lanes, np.uint8)
            lookup(isa, table, lanes)(index, got)
            assert (got == np.array(TABLES[table], np.uint8)[index % 16]).all(), (index, got)


@pytest.mark.parametrize("isa", [row for row in rows.ALL if row.lookup_words], ids=rows.name)
def test_lookup_words(isa: Isa, rng: np.random.Generator) -> None:
    """What an index has above its fifth bit counts nothing."""
    look_up = isa.lookup_words
    assert look_up is not None

    def build(k: Builder, table: Val, index: Val, out: Val) -> None:
        k.store(out, look_up(k, k.load(table, i16 * 32), k.load(index, u16 * 32)))

    table = rng.integers(-(1 << 15), 1 << 15, 32).astype(np.int16)
    index, got = rng.integers(0, 1 << 16, 32).astype(np.uint16), np.zeros(32, np.int16)
    compiled(isa, 3, build)(table, index, got)
    assert (got == table[index % 32]).all()


# -- bits of bytes
# -----------------------------------------------------------------------------------------

LANES = (8, 16, 32, 64, 128)  # from less than a register to more than any
CUTS = [  # shift, width, to
    ([0], 4, 0),
    ([4], 4, 0),
    ([0], 2, 4),
    ([3], 1, 3),
    ([2], 3, 1),
    ([0, 2, 4, 6], 2, 0),
    ([0, 0, 2, 2, 4, 4, 6, 6], 1, 4),
    ([7, 1], 1, 2),
]
PLACES = [
    [8 * i for i in range(8)],
    [0, 7, 14, 21, 32, 39, 46, 53],
    list(range(12, 28)),
    [63, 1, 0, 62, 57, 5, 3, 56],
]


def bytes_to_bytes(isa: Isa, lanes: int, op: Callable[[Builder, Val], Val]) -> np.ndarray:
    """Bytes of all kinds, and what becomes of them: [2, n]."""

    def build(k: Builder, given: Val, out: Val) -> None:
        k.store(out, op(k, k.load(given, u8 * lanes)))

    kernel = compiled(isa, 2, build)
    rng = np.random.default_rng(lanes)
    given = rng.integers(0, 256, (40, lanes)).astype(np.uint8)
    given[:2] = [[0], [255]]
    made = np.zeros_like(given)
    for row, out in zip(given, made, strict=True):
        kernel(row, out)
    return np.stack([given, made])


def ring(v: np.ndarray, at: list[int]) -> np.ndarray:
    """For each byte the 64 bits of its eight, from its bit of ``at`` on round to it again."""
    words = np.repeat(v.view("<u8"), 8, axis=-1)
    shift = np.resize(np.array(at, np.uint64), v.shape[-1])
    turned: np.ndarray = words >> shift | words << (-shift & np.uint64(63))
    return turned


@pytest.mark.parametrize(("shift", "width", "to"), CUTS, ids=str)
@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_bit_extract(isa: Isa, shift: list[int], width: int, to: int) -> None:
    for lanes in LANES:
        given, made = bytes_to_bytes(isa, lanes, lambda k, v: bit_extract(k, v, shift, width, to))
        down = np.repeat(np.resize(np.array(shift, np.uint8), lanes // 8), 8)
        assert (made == (given >> down & ((1 << width) - 1)) << to).all(), lanes


@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_multishift_and_bit_spread(isa: Isa, at: list[int]) -> None:
    for lanes in LANES:
        given, made = bytes_to_bytes(isa, lanes, lambda k, v: multishift(k, v, at))
        assert (made == ring(given, at) & np.uint64(255)).all(), lanes
        for to in (0, 4, 7):
            op = partial(bit_spread, at=at, to=to)
            given, made = bytes_to_bytes(isa, lanes, op)
            assert (made == (ring(given, at) & np.uint64(1)) << np.uint64(to)).all(), (lanes, to)


@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_count_ones(isa: Isa) -> None:
    for lanes in LANES:
        given, made = bytes_to_bytes(isa, lanes, count_ones)
        assert (made == np.bitwise_count(given)).all(), lanes


# -- f16
# --------------------------------------------------------------------------------------------

HALVES = np.arange(65536, dtype=np.uint16)


def convert(isa: Isa, x: np.ndarray, out: np.ndarray, *, narrow: bool) -> np.ndarray:
    """``x`` through the row's conversion, a register of f32 at a time."""
    n = isa.lanes
    assert len(x) % n == 0

    def build(k: Builder, source: Val, to: Val) -> None:
        with k.loop(len(x), step=n) as i:
            if narrow:
                k.store(to + i * 2, isa.narrow_f16(k, k.load(source + i * 4, f32 * n)))
            else:
                k.store(to + i * 4, isa.widen_f16(k, k.load(source + i * 2, f16 * n)))

    compiled(isa, 2, build)(x, out)
    return out


@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_widen_f16_of_every_half(isa: Isa) -> None:
    got = convert(isa, HALVES, np.zeros(65536, np.float32), narrow=False)
    want = HALVES.view(np.float16).astype(np.float32)
    assert (np.isnan(got) == np.isnan(want)).all()
    kept = ~np.isnan(want)
    assert (got.view(np.uint32) == want.view(np.uint32))[kept].all()  # zeros keep their sign


def boundaries() -> np.ndarray:
    """Every half, every midpoint between neighbours, and the floats just beside those; f32."""
    halves = HALVES.view(np.float16).astype(np.float32)
    finite = np.sort(np.abs(halves[np.isfinite(halves)]))
    finite = np.unique(finite)
    steps = np.append(finite, np.float32(65536))  # as if the exponents went on: 65520 rounds up
    middles = ((steps[1:].astype(np.float64) + steps[:-1]) / 2).astype(np.float32)
    exact = np.concatenate([halves, middles, -middles])
    beside = [np.nextafter(exact, np.float32(s) * np.float32(np.inf)) for s in (-1, 1)]
    return np.concatenate([exact, *beside])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_narrow_f16_rounds_to_even(isa: Isa, rng: np.random.Generator) -> None:
    any_bits = rng.integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    tiny = np.array(
        [1e-45, 1e-40, 2.0**-126, 2.0**-26, 2.0**-25, 2.0**-24, 3e38, np.inf], np.float32
    )
    with np.errstate(all="ignore"):
        x = np.concatenate([boundaries(), any_bits, tiny, -tiny])
        x = np.resize(x, -(-len(x) // 16) * 16)
        want = x.astype(np.float16)
    got = convert(isa, x, np.zeros(len(x), np.uint16), narrow=True).view(np.float16)
    assert (np.isnan(got) == np.isnan(x)).all()
    wrong = (got.view(np.uint16) != want.view(np.uint16)) & ~np.isnan(x)
    assert not wrong.any(), (x[wrong][:4], got[wrong][:4], want[wrong][:4])


# -- bf16
# -------------------------------------------------------------------------------------------

# The lower half of an f32 is what is lost: nothing, below a tie, a tie, above it.
LOST = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
LEAST_NORMAL = np.float32(2.0**-126)


@lru_cache
def narrow_bf16(isa: Isa, lanes: int) -> Callable[..., None]:
    def build(k: Builder, x: Val, out: Val) -> None:
        k.store(out, isa.narrow_bf16(k, k.load(x, f32 * lanes)))

    return compiled(isa, 2, build)


@pytest.mark.slow
@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
def test_narrow_bf16(isa: Isa, rng: np.random.Generator) -> None:
    """All upper halves with all that is lost in the widest vectors, some of them in the others."""
    check_narrow_bf16(isa, rng, 1 << 30)


def check_narrow_bf16(isa: Isa, rng: np.random.Generator, most: int) -> None:
    """Of half a register to four at once, at ``most`` so many vectors of the widest; infinities as
    well, and what rounds up to them. Of NaN those that arithmetic makes stay NaN.
    """
    kept = np.arange(1 << 16, dtype=np.uint32) << 16
    every = rng.permutation((kept[:, None] | np.array(LOST, np.uint32)).reshape(-1))
    for lanes in (isa.lanes // 2, isa.lanes, 2 * isa.lanes, 4 * isa.lanes):
        n = min(most, len(every) // lanes if lanes == 4 * isa.lanes else 500)
        for bits in every[: n * lanes].reshape(n, lanes):
            x = bits.view(np.float32)
            x = np.where(np.isnan(x), np.copysign(np.float32(np.nan), x), x)
            got = np.zeros(lanes, np.uint16)
            narrow_bf16(isa, lanes)(x, got)
            flushed = (np.abs(x) < LEAST_NORMAL) & (got & 0x7FFF == 0)
            same = (got == to_bf16_bits(x)) | np.isnan(x) | flushed
            assert same.all(), (x[~same], got[~same])
            assert (np.isnan(from_bf16_bits(got)) == np.isnan(x)).all(), (x, got)


def test_the_ties_of_bf16() -> None:
    """What the test above compares with: the even one of two neighbours."""
    x = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 3.4e38], np.float32)
    want = [1, 1 + 2.0**-6, -1, np.inf]
    assert from_bf16_bits(to_bf16_bits(x)).tolist() == want

"""Each row's operations, of machines that are not here too, against their one meaning in numpy.

``test_ops.py`` compiles the rows of this machine; here no machine is needed (see
``numpy_language.py``). That LLVM then selects the instructions is shown by ``test_emission.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.isa.numpy_language import NumpyBuilder, NumpyVal
from tests.jit.emit import compiled, ir_text
from treadle.isa import ROWS, amx, nvptx, portable, sme
from treadle.isa.isa import Isa, MatrixUnit
from treadle.isa.portable import PORTABLE
from treadle.jit.builder import Builder
from treadle.jit.compile import emit_assembly
from treadle.jit.types import f16, f32, i8, i16, i32, u8, u16, u32
from treadle.jit.values import Val
from treadle.kernels.activation_layout import from_bf16_bits, to_bf16_bits

ALL: list[Isa] = [*ROWS.values(), *nvptx.ROWS.values()]


def each(name: str, *more: str) -> Iterator[tuple[Isa, Any]]:
    """A row for each implementation of an operation and vector width, which is all it can see."""
    seen = {}
    for isa in ALL:
        op = getattr(isa, name)
        if op is not None:
            seen[(op, isa.vector_bits, *(getattr(isa, field) for field in more))] = isa
    assert seen
    for isa in seen.values():
        yield isa, getattr(isa, name)


def vector(ty: Any, rows: np.ndarray) -> NumpyVal:
    return NumpyVal(ty * len(rows), rows)


def whole(rng: np.random.Generator, ty: Any, n: int, low: int, high: int) -> NumpyVal:
    """Numbers from ``low`` to ``high``, and both ends."""
    rows = rng.integers(low, high, n, endpoint=True)
    rows[:2] = low, high
    rows[-2:] = low, high
    return vector(ty, rows)


def check(isa: Isa, found: NumpyVal, expected: Any) -> None:
    same = np.array_equal(found.rows, expected, equal_nan=found.ty.is_float)
    assert same, f"{isa.name}: {found.rows}\nexpected: {expected}"


# -- products --------------------------------------------------------------------------------------


def test_dots_of_four_bytes() -> None:
    """Unsigned codes of each size; signed ones where a row takes them."""
    rng = np.random.default_rng(1)
    for isa, dot4 in each("dot4", "dot4_least"):
        for n in (16, 32) if isa.vector_bits == 128 else (isa.vector_bits // 8,):
            for top in (15, 127, 129, 255):
                kinds = [(u8, 0, top)]
                if isa.dot4_least < 0:
                    kinds.append((i8, isa.dot4_least, min(top, 127)))
                for ty, low, high in kinds:
                    w = whole(rng, ty, n, low, high)
                    x = whole(rng, i8, n, -127, 127)
                    x.rows[:8] = 127  # the largest sums of neighbours
                    w.rows[:8] = high
                    acc = whole(rng, i32, n // 4, -(1 << 20), 1 << 20)
                    products = w.rows.astype(int) * x.rows
                    expected = acc.rows + products.reshape(-1, 4).sum(1)
                    check(isa, dot4(NumpyBuilder(isa), acc, w, x, high), expected)


def test_the_instructions_of_dots() -> None:
    """A register of products each; Arm's rows multiply narrower vectors by portable operations."""
    names = {
        "avx512_vnni": ["vpdpbusd.512"],
        "neon": ["smull", "smull", "addp", "saddlp"],
        "neon_dotprod": ["sdot"],
        "neon_i8mm": ["usdot"],
        "rvv256_vqdot": ["partial.reduce.add"],
        "sm_80": ["idp4a.u.s"] * 4,
    }
    rows = {isa.name: isa for isa in ALL}
    for name, instructions in names.items():
        isa = rows[name]
        n = isa.vector_bits // 8
        k = NumpyBuilder(isa)
        args = k.zero(i32 * (n // 4)), k.zero(u8 * n), k.zero(i8 * n)
        isa.dot4(k, *args, 100)
        assert len(k.called) == len(instructions), name
        for found, expected in zip(k.called, instructions, strict=True):
            assert expected in found
    for name in ("neon", "neon_dotprod", "neon_i8mm"):
        k = NumpyBuilder(rows[name])
        w = vector(u8, np.arange(8))
        x = vector(i8, np.arange(-4, 4))
        narrow: Any = rows[name].dot4(k, k.zero(i32 * 2), w, x, 255)
        check(rows[name], narrow, [-4 * 0 - 3 - 4 - 3, 0 + 5 + 12 + 21])
        assert not k.called


def test_two_rows_by_two_tokens() -> None:
    rng = np.random.default_rng(2)
    for isa, pairs in each("pairs"):
        for ty, low, high in ((u8, 0, 255), (i8, -128, 127)):
            w = whole(rng, ty, 16, low, high)
            x = whole(rng, i8, 16, -127, 127)
            acc = whole(rng, i32, 4, -1000, 1000)
            product = w.rows.astype(int).reshape(2, 8) @ x.rows.astype(int).reshape(2, 8).T
            check(isa, pairs(NumpyBuilder(isa), acc, w, x), acc.rows + product.reshape(-1))


def test_dots_of_words() -> None:
    rng = np.random.default_rng(3)
    for isa, dot in each("dot_words"):
        n = isa.vector_bits // 16
        a, b = (whole(rng, i16, n, -9000, 9000) for _ in range(2))
        acc = whole(rng, i32, n // 2, -1000, 1000)
        expected = acc.rows + (a.rows.astype(int) * b.rows).reshape(-1, 2).sum(1)
        check(isa, dot(NumpyBuilder(isa), acc, a, b), expected)


def test_dots_of_bf16() -> None:
    """Of whole numbers, whose sums are exact in any order."""
    rng = np.random.default_rng(4)
    for isa, dot in each("dot_bf16"):
        n = isa.vector_bits // 16
        a, b = (rng.integers(-128, 128, n).astype(np.float32) for _ in range(2))
        acc = vector(f32, rng.integers(-99, 99, n // 2).astype(np.float32))
        given = (vector(i16, to_bf16_bits(v).view(np.int16)) for v in (a, b))
        expected = acc.rows + (a * b).reshape(-1, 2).sum(1)
        check(isa, dot(NumpyBuilder(isa), acc, *given), expected)


def test_dots_in_i16() -> None:
    """Weights of both kinds, with and without the absolute values of x."""
    rng = np.random.default_rng(5)
    for isa, shorts in each("shorts"):
        n = isa.vector_bits // 8
        x = whole(rng, i8, n, -127, 127)
        size = vector(u8, np.abs(x.rows.astype(int)))
        for ty, low, high in ((u8, 0, 31), (i8, -32, 31)):
            w = whole(rng, ty, n, low, high)
            sums = (w.rows.astype(int) * x.rows).reshape(-1, 2).sum(1)
            k = NumpyBuilder(isa)
            first = shorts.dot(k, None, w, x)
            check(isa, first, sums)
            check(isa, shorts.dot(k, first, w, x, size if ty == i8 else None), 2 * sums)
            acc = whole(rng, i32, n // 4, -1000, 1000)
            wide = first.rows.astype(int).reshape(-1, 2)
            check(isa, shorts.widen(k, acc, first), acc.rows + wide.sum(1))
            f = whole(rng, i16, n // 2, -64, 63)
            scaled = acc.rows + (wide * f.rows.reshape(-1, 2)).sum(1)
            check(isa, shorts.scale(k, acc, first, f), scaled)
            a, b = (whole(rng, i16, n // 2, -20000, 20000) for _ in range(2))
            high_halves = (a.rows.astype(int) * b.rows + (1 << 14)) >> 15
            check(isa, shorts.high(k, a, b), high_halves)
        assert shorts.room(31) == 4
        assert shorts.room(15) == 8


# -- conversions -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_halves() -> None:
    """Every sixteenth of all halves, those at the ends, and floats between two of them."""
    bits = np.concatenate([np.arange(0, 65536, 61), [0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x8001]])
    halves = np.resize(bits, 1024).astype(np.uint16).view(np.float16)
    rng = np.random.default_rng(6)
    floats = (rng.standard_normal(1024) * 10.0 ** rng.integers(-9, 6, 1024)).astype(np.float32)
    floats[:4] = np.inf, -np.inf, 65520, 1 + 2.0**-11  # the last two are ties
    for isa, widen in each("widen_f16"):
        check(isa, widen(NumpyBuilder(isa), vector(f16, halves)), halves.astype(np.float32))
    for isa, narrow in each("narrow_f16"):
        with np.errstate(over="ignore"):
            found = narrow(NumpyBuilder(isa), vector(f32, floats))
            check(isa, found, floats.astype(np.float16))


def test_bf16() -> None:
    rng = np.random.default_rng(7)
    x = (rng.standard_normal(64) * 10.0 ** rng.integers(-20, 20, 64)).astype(np.float32)
    x[:4] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf, 3.4e38
    for isa, narrow in each("narrow_bf16"):
        for n in (8, 16, 64):
            found = narrow(NumpyBuilder(isa), vector(f32, x[:n]))
            check(isa, found, to_bf16_bits(x[:n]).view(np.int16))
    assert from_bf16_bits(to_bf16_bits(x[:2])).tolist() == [1, 1 + 2.0**-6]


def test_reciprocals() -> None:
    x = np.concatenate([2.0 ** np.arange(-126, 126), [3, -7, 1e30]]).astype(np.float32)
    x = np.resize(x, 256)
    for isa, reciprocal in each("reciprocal"):
        for n in (2, 16, 256):
            found = reciprocal(NumpyBuilder(isa), vector(f32, x[:n])).rows
            apart = np.abs(found * x[:n].astype(np.float64) - 1)
            assert apart.max() <= 2 * 2.0**-23, isa.name
    one = nvptx.reciprocal(NumpyBuilder(nvptx.SM_80), NumpyVal(f32, 8.0))  # type: ignore[arg-type]
    assert float(one.rows[0]) == 0.125  # type: ignore[attr-defined]


# -- bytes and bits --------------------------------------------------------------------------------

TABLE = [(i * i * 37 + 200) % 256 for i in range(16)]


def test_lookups() -> None:
    rng = np.random.default_rng(8)
    for isa, lookup in each("lookup"):
        for n in (16, 32, 128):
            index = rng.integers(0, 256, n)
            found = lookup(NumpyBuilder(isa), TABLE, vector(u8, index))
            check(isa, found, np.array(TABLE)[index % 16])
    for isa, lookup in each("lookup_words"):
        table = rng.integers(-(1 << 15), 1 << 15, 32)
        index = rng.integers(0, 1 << 16, 32)
        found = lookup(NumpyBuilder(isa), vector(i16, table), vector(u16, index))
        check(isa, found, table[index % 32])


CUTS: list[tuple[list[int], int, int]] = [
    ([0], 4, 0),
    ([4], 4, 0),
    ([0], 2, 4),
    ([2], 3, 2),
    ([0, 2, 4, 6], 2, 0),
    ([0, 0, 2, 2, 4, 4, 6, 6], 1, 4),
]
PLACES = [[8 * i for i in range(8)], [0, 7, 14, 21, 32, 39, 46, 53], [63, 1, 0, 62, 57, 5, 3, 56]]


def test_bits_of_bytes() -> None:
    rng = np.random.default_rng(9)
    for isa, extract in each("bit_extract"):
        for n in (8, 16, 64, 128):
            v = whole(rng, u8, n, 0, 255)
            for shift, width, to in CUTS:
                down = np.repeat(np.resize(shift, n // 8), 8)
                expected = (v.rows >> down & ((1 << width) - 1)) << to
                check(isa, extract(NumpyBuilder(isa), v, shift, width, to), expected)
    v = vector(u8, np.array([0xF0, 0x5A, 0x0F, 0xA5]))  # fewer bytes than a shift is for
    found = nvptx.bit_extract(NumpyBuilder(nvptx.SM_80), v, [4], 4, 0)  # type: ignore[arg-type]
    check(nvptx.SM_80, found, [15, 5, 0, 10])  # type: ignore[arg-type]


def test_bits_of_words() -> None:
    rng = np.random.default_rng(10)
    for name in ("multishift", "bit_spread"):
        for isa, op in each(name):
            for n in (8, 16, 64, 128):
                v = whole(rng, u8, n, 0, 255)
                words = np.repeat(v.rows.view(np.uint64), 8)
                for at in PLACES:
                    by = np.resize(np.array(at, np.uint64), n)
                    ring = words >> by | words << (-by & np.uint64(63))
                    if name == "multishift":
                        check(isa, op(NumpyBuilder(isa), v, at), ring & np.uint64(255))
                        continue
                    for to in (0, 5):
                        expected = (ring & np.uint64(1)) << np.uint64(to)
                        check(isa, op(NumpyBuilder(isa), v, at, to), expected)


@pytest.mark.parametrize("gather", [PORTABLE.gather, nvptx.gather, ROWS["rvv256"].gather])
def test_gathers(gather: Callable[..., Any]) -> None:
    """Compiled for this machine: they are plain loads."""

    def build(k: Builder, table: Val, index: Val, out: Val) -> None:
        k.store(out, gather(k, table, k.load(index, i32 * 4), f32 * 4))

    table = np.arange(100, dtype=np.float32)
    found = np.zeros(4, np.float32)
    compiled(PORTABLE, 3, build)(table, np.array([99, 0, 7, 7], np.int32), found)
    assert found.tolist() == [99, 0, 7, 7]


# -- matrix registers ------------------------------------------------------------------------------


def matrix_assembly(isa: Isa, matrix: MatrixUnit) -> str:
    """A product of each kind that a row has, of sums that are loaded and stored."""

    def build(k: Builder, c: Val, a: Val, b: Val) -> None:
        def product(k: Builder, c: Val, a: Val, b: Val) -> None:
            matrix.zero(k, 0)
            matrix.load(k, 1, c, 64)
            matrix.load_passing(k, 4, a, 64)
            matrix.load(k, 5, a, 64)
            for r in (6, 7):
                matrix.load(k, r, b, 64)
            matrix.dots_bf16(k)
            for r in (0, 1):
                matrix.store(k, r, c, 64)

        if (turn := matrix.turn) is not None:
            matrix.scope(k, "turn", [a], lambda k, a: turn(k, a, 64))
        matrix.begin(k, k.room(64))
        matrix.scope(k, "product", [c, a, b], product)
        matrix.end(k)

    return emit_assembly(ir_text(isa, 3, build), isa)


def count(pattern: str, code: str) -> int:
    return len(re.findall(pattern, code, re.MULTILINE))


def test_amx_instructions() -> None:
    isa = ROWS["amx_bf16"]
    code = matrix_assembly(isa, amx.MATRIX)
    expected = {
        "ldtilecfg": 1,
        "tilezero": 1,
        "tileloadd": 4,
        "tileloaddt1": 1,
        "tdpbf16ps": 4,
        "tilestored": 2,
        "tilerelease": 1,
    }
    assert {name: count(rf"^\t{name}\b", code) for name in expected} == expected

    def build(k: Builder, a: Val) -> None:
        amx.begin_bytes(k, a, 32)
        amx.dot_bytes(k, 2, 5, 7)
        amx.end(k)

    text = emit_assembly(ir_text(isa, 1, build), isa)
    assert re.search(r"^\ttdpbssd\t%tmm7, %tmm5, %tmm2", text, re.MULTILINE)


@pytest.mark.parametrize("n", [16, 32, 64])
def test_amx_is_configured_by_intels_table(n: int) -> None:
    """Palette 1, bytes a row from byte 16 on, rows from byte 48 on; at most 16 rows of 64 bytes."""
    config = np.array(amx._config(n), np.uint8)
    assert len(config) == 64
    assert config[:16].tolist() == [1] + [0] * 15
    columns = config[16:32].view("<u2")
    rows = config[48:56]
    assert columns.tolist() == [64, 64, 64, 64, n, n, 64, 64]
    assert rows.tolist() == [16] * 6 + [n // 4] * 2
    assert not config[32:48].any()
    assert not config[56:].any()


def test_sme_instructions() -> None:
    """Two functions of their own in streaming mode. Operands are read by the products: two columns
    and two rows for each pair of values.
    """
    code = matrix_assembly(ROWS["sme"], sme.MATRIX)
    assert count(r"\tsmstart\tsm", code) == count(r"\tsmstop\tsm", code) == 2
    assert count(r"\tbfmopa\tza[0-3]\.s", code) == 4 * sme.SIDE
    assert count(r"\tzero\t\{za0\.s\}", code) == 1
    assert count(r"\tst1w\t\{za0v\.s", code) == 1  # the transposed rows, in a loop
    assert count(r"\tld1w\t\{za0h\.s", code) == 1
    assert count(r"\tld1w\t\{za1h\.s", code) == 1
    assert count(r"\tst1w\t\{za[01]h\.s", code) == 2


def test_memory_as_matrix_registers() -> None:
    """Of products of bytes, whose rows of a are shorter than a register's."""
    matrix = portable.MATRIX
    n = 32

    def build(k: Builder, c: Val, a: Val, b: Val) -> None:
        assert matrix.begin_bytes is not None
        assert matrix.dot_bytes is not None
        matrix.begin_bytes(k, k.room(64), n)
        matrix.zero(k, 1)
        matrix.load(k, 4, a, n)
        matrix.load(k, 6, b, 64)
        matrix.dot_bytes(k, 1, 4, 6)
        matrix.store(k, 1, c, 64)
        matrix.end(k)

    rng = np.random.default_rng(11)
    a = rng.integers(-128, 128, (16, n), np.int8)
    b = rng.integers(-128, 128, (n // 4, 16, 4), np.int8)
    found = np.full((16, 16), -1, np.int32)
    compiled(PORTABLE, 3, build)(found, a, b)
    expected = a.astype(int) @ b.transpose(0, 2, 1).reshape(n, 16).astype(int)
    assert (found == expected).all()


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "name"),
    [((7, 5), None), ((8, 0), "sm_80"), ((8, 9), "sm_80"), ((12, 0), "sm_90")],
)
def test_the_row_of_a_card(version: Sequence[int], name: str | None) -> None:
    row = nvptx.row(*version)
    assert (row.name if row else None) == name


def test_a_gpus_operations_become_its_instructions() -> None:
    """Those of a block of threads, in PTX."""
    isa = nvptx.SM_80
    simt = isa.simt
    assert simt is not None

    def build(k: Builder, p: Val) -> None:
        memory = simt.shared(k)
        at = simt.tid(k) + simt.cta(k) * simt.n_ctas(k)
        for n in (4, 8, 16):
            simt.copy_async(k, memory, p + at * 16, n)
        simt.commit(k)
        simt.wait(k, 1)
        simt.barrier(k)
        simt.warp_barrier(k)
        loaded = simt.load_matrix(k, memory), simt.load_matrix_t(k, memory)
        a = loaded[0]
        b = loaded[1][:2]
        c = [k.zero(f32)] * 4
        c = simt.mma_bf16(k, simt.mma_f16(k, c, a, b), a, b)
        k.store(p, simt.shuffle(k, c[0], 4), align=4)
        k.store(p, simt.shuffle(k, k.load(p, u32, align=4), 8), align=4)

    code = emit_assembly(ir_text(isa, 1, build), isa)
    expected = {
        r"cp\.async\.ca\.shared\.global": 2,
        r"cp\.async\.cg\.shared\.global": 1,
        r"cp\.async\.commit_group": 1,
        r"cp\.async\.wait_group\s+1;": 1,
        r"(barrier\.sync|bar\.sync)\b": 1,
        r"bar\.warp\.sync": 1,
        r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared": 1,
        r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans": 1,
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16": 1,
        r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16": 1,
        r"shfl\.sync\.bfly\.b32": 2,
    }
    assert {pattern: count(pattern, code) for pattern in expected} == expected

"""The kernel language: what it refuses while building, and what its code does."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import pytest

from tests.jit.emit import compiled, ir_text, scratch_builder
from tests.kernels import rows
from tests.kernels.harness import Memory
from treadle.isa.isa import Isa
from treadle.isa.portable import PORTABLE
from treadle.jit.builder import Builder
from treadle.jit.compile import emit_object
from treadle.jit.types import Ty, bf16, f16, f32, f64, i8, i16, i32, i64, ptr, u8, u16, u32, u64
from treadle.jit.values import Val

BEST = rows.ALL[-1]
NUMPY = {f16: "f2", f32: "f4", f64: "f8"}
NUMPY |= {i8: "i1", i16: "i2", i32: "i4", i64: "i8", u8: "u1", u16: "u2", u32: "u4", u64: "u8"}


@pytest.fixture
def k() -> Builder:
    return scratch_builder(PORTABLE)


# -- types
# ------------------------------------------------------------------------------------------


def test_types_print_as_they_are_written() -> None:
    assert str(f32 * 16) == "f32 * 16"
    assert (str(i8), str(u8), str(bf16), str(ptr)) == ("i8", "u8", "bf16", "ptr")
    assert ((f32 * 8).n_bytes, f16.n_bytes, ptr.n_bytes) == (32, 2, 8)
    assert ((f32 * 16).mangled, (u8 * 4).mangled, f64.mangled) == ("v16f32", "v4i8", "f64")
    assert i8 != u8
    assert i8.ir == u8.ir
    with pytest.raises(TypeError, match=r"f32 \* 4 is already a vector"):
        f32 * 4 * 2


# -- what is refused
# --------------------------------------------------------------------------------


def test_a_run_time_value_has_no_truth(k: Builder) -> None:
    x = k.const(1, i32)
    with pytest.raises(TypeError, match=r"run-time value \(i32\) cannot be the condition"):
        bool(x)
    with pytest.raises(TypeError, match="run-time value"):
        _ = 0 < x < 5
    with pytest.raises(TypeError, match="run-time value"):
        _ = x if x > 0 else -x


@pytest.mark.parametrize(
    ("a", "b"), [(f32, f64), (i32, u32), (f32, i32), (i8, i16), (f32 * 4, f32 * 8), (f32 * 4, f32)]
)
@pytest.mark.parametrize(
    "op",
    [operator.add, operator.sub, operator.mul, operator.lt, operator.ge, Val.eq],
    ids=lambda f: f.__name__,
)
def test_mixed_types_raise_naming_both(a: Ty, b: Ty, op: Callable[..., object], k: Builder) -> None:
    with pytest.raises(TypeError) as caught:
        op(k.zero(a), k.zero(b))
    assert f"{a} and {b}" in str(caught.value)


def test_mixed_types_raise_everywhere_else(k: Builder) -> None:
    x, y = k.zero(f32 * 4), k.zero(f64 * 4)
    builds: list[Callable[[], object]] = [
        lambda: k.fma(x, x, y),
        lambda: k.fma(y, x, x),
        lambda: k.select(x > 0.0, x, y),
        lambda: k.select(k.zero(i32) > 0, k.zero(i32), k.zero(u32)),
        lambda: k.max(x, y),
        lambda: k.min(x, y),
    ]
    for build in builds:
        with pytest.raises(TypeError, match="mixed types"):
            build()
    with pytest.raises(TypeError, match=r"cannot assign a f64 value to a f32 variable"):
        k.var(k.zero(f32)).v = k.zero(f64)
    with pytest.raises(TypeError, match=r"cannot splat i32 into f32 \* 4"):
        k.splat(k.zero(i32), f32 * 4)


def test_operations_that_a_type_lacks(k: Builder) -> None:
    x = k.zero(f32)
    n = k.zero(i32)
    with pytest.raises(TypeError, match=r"/ is not defined for integers \(i32\); use //"):
        n / 2
    for op in (
        operator.floordiv,
        operator.mod,
        operator.and_,
        operator.or_,
        operator.xor,
        operator.lshift,
        operator.rshift,
    ):
        with pytest.raises(TypeError, match=r"not defined for floats \(f32\)"):
            op(x, 2)
    with pytest.raises(TypeError, match=r"0\.5 cannot be represented as i32"):
        n * 0.5  # would silently be n * 0
    with pytest.raises(TypeError, match="different numbers of lanes"):
        k.zero(f32 * 4).to(i32 * 8)
    with pytest.raises(TypeError, match="differ in size"):
        k.zero(f32).bits(i64)


# -- arithmetic
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ty", [i8, u8, i16, i32, u32, i64, u64], ids=str)
def test_integers_wrap_divide_shift_and_compare_by_their_sign(
    ty: Ty, rng: np.random.Generator
) -> None:
    dtype = np.dtype(NUMPY[ty])
    a, b = (rng.integers(0, 256, 8 * dtype.itemsize, np.uint8).view(dtype) for _ in range(2))
    b[b == 0] = 3
    b[b == -1 if ty.is_signed else False] = 5  # the lowest divided by -1 is undefined
    shift = 3
    out = np.zeros((10, 8), dtype)

    def build(k: Builder, pa: Val, pb: Val, to: Val) -> None:
        x = k.load(pa, ty * 8)
        y = k.load(pb, ty * 8)
        made = [x + y, x - y, x * y, x // y, x % y, x >> shift, x << shift, -x, 7 - x]
        made.append(k.select(x < y, k.const(1, ty * 8), k.zero(ty * 8)))
        for i, v in enumerate(made):
            k.store(to, v, offset=i * 8 * dtype.itemsize)

    compiled(BEST, 3, build)(a, b, out)
    with np.errstate(over="ignore"):
        quotient = (
            np.sign(a) * np.sign(b) * (abs(a.astype(object)) // abs(b.astype(object)))
        ).astype(dtype)
        expected = [
            a + b,
            a - b,
            a * b,
            quotient,
            (a - quotient * b).astype(dtype),
            a >> shift,
            a << shift,
        ]
        expected += [(0 - a).astype(dtype), (7 - a).astype(dtype), (a < b).astype(dtype)]
    for name, got, want in zip(
        ["+", "-", "*", "//", "%", ">>", "<<", "neg", "rsub", "<"], out, expected, strict=True
    ):
        assert (got == want).all(), (name, a, b, got, want)


def test_float_arithmetic() -> None:
    a = np.array([1.5, -2.25, 1e30, -0.0], np.float32)
    out = np.zeros((7, 4), np.float32)

    def build(k: Builder, pa: Val, to: Val) -> None:
        x = k.load(pa, f32 * 4)
        made = [x + 1.0, 1.0 - x, 2.0 * x, 1.0 / x, -x, k.abs(x), k.sqrt(k.abs(x))]
        for i, v in enumerate(made):
            k.store(to, v, offset=16 * i)

    compiled(BEST, 2, build)(a, out)
    one = np.float32(1)
    with np.errstate(divide="ignore"):
        want = [a + one, one - a, a * 2, one / a, -a, abs(a), np.sqrt(abs(a))]
    assert (out.view(np.uint32) == np.array(want, np.float32).view(np.uint32)).all()


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (i8, i32),
        (u8, i32),
        (i8, i16),
        (u8, i16),
        (i16, i8),
        (i32, i8),
        (u16, u32),
        (i64, i32),
        (u32, i64),
        (i8, f32),
        (u8, f32),
        (i32, f32),
        (u32, f32),
        (i32, f64),
        (f32, i32),
        (f32, f64),
        (f64, f32),
    ],
    ids=str,
)
def test_conversions_follow_the_sign(src: Ty, dst: Ty, isa: Isa, rng: np.random.Generator) -> None:
    a = rng.integers(0, 256, 16 * src.n_bytes, np.uint8).view(NUMPY[src])
    if src.is_float:
        a = (rng.standard_normal(16) * 1e6).astype(NUMPY[src])
    out = np.zeros(16, NUMPY[dst])

    def build(k: Builder, pa: Val, to: Val) -> None:
        k.store(to, k.load(pa, src * 16).to(dst))

    compiled(isa, 2, build)(a, out)
    assert (out == a.astype(NUMPY[dst])).all()


def test_round_is_to_even(rng: np.random.Generator) -> None:
    edges = np.arange(-8, 8.5, 0.5)
    large = rng.uniform(-(2**22), 2**22, 999)
    x = np.concatenate([edges, np.nextafter(edges, 9, dtype="f4"), large]).astype(np.float32)
    x = np.resize(x, len(x) // 4 * 4)
    for isa in rows.DISTINCT:
        out = np.zeros_like(x)

        def build(k: Builder, pa: Val, to: Val) -> None:
            with k.loop(4 * len(x), step=16) as at:
                k.store(to + at, k.round(k.load(pa + at, f32 * 4)))

        compiled(isa, 2, build)(x, out)
        assert (out == np.rint(x)).all(), isa.name


# -- memory
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
@pytest.mark.parametrize("ty", [u8, f16, f32], ids=str)
def test_first_lanes_touch_nothing_behind_them(ty: Ty, isa: Isa, memory: Memory) -> None:
    lanes = isa.vector_bits // ty.bits

    def build(k: Builder, *p: Val) -> None:
        for n in range(lanes + 1):
            v = k.load_first(p[0] + (lanes - n) * ty.n_bytes, ty * lanes, n)
            k.store(p[1], v, offset=n * lanes * ty.n_bytes)
            if n:
                k.store_first(p[2] + (lanes - n) * ty.n_bytes, v, n)
                k.store_first(p[3], v, n)

    values = np.arange(1, lanes + 1).astype(NUMPY[ty])
    src = memory.copy(values, name="src")  # a page that cannot be read begins right behind it
    loaded = memory.array((lanes + 1, lanes), NUMPY[ty], name="loaded")
    last = memory.array(lanes, NUMPY[ty], name="last")
    first = memory.array(lanes, NUMPY[ty], name="first", front=True)
    compiled(isa, 4, build)(src, loaded, last, first)
    memory.check()
    for n in range(lanes + 1):
        assert (loaded[n, :n] == values[lanes - n :]).all()
        assert not loaded[n, n:].any()
    assert (last == values).all()
    assert (first == values).all()


def test_store_first_leaves_the_rest(memory: Memory) -> None:
    for n in range(1, 8):
        out = memory.array(8, np.float32)

        def build(k: Builder, to: Val, n: int = n) -> None:
            k.store_first(to, k.const(range(8), f32 * 8), n)

        compiled(BEST, 1, build)(out)
        assert (out[:n] == np.arange(n)).all()
        assert np.isnan(out[n:]).all()


@pytest.mark.parametrize("isa", rows.ALL, ids=rows.name)
@pytest.mark.parametrize("ty", [u32, u64, f32], ids=str)
def test_gather_reads_a_table(ty: Ty, isa: Isa, rng: np.random.Generator) -> None:
    dtype = np.dtype(NUMPY[ty])
    values = rng.integers(0, 256, (2048, dtype.itemsize), np.uint8).view(dtype)[:, 0]
    for lanes in (1, 4, 64 // dtype.itemsize, 128 // dtype.itemsize):
        index = rng.integers(0, 2048, lanes).astype(np.int32)
        index[[0, -1]] = 0, 2047
        out = np.zeros(lanes, dtype)

        def build(k: Builder, at: Val, to: Val, lanes: int = lanes) -> None:
            k.store(to, k.gather(k.table(values), k.load(at, i32 * lanes), ty * lanes))

        compiled(isa, 2, build)(index, out)
        assert out.tobytes() == values[index].tobytes(), lanes


def test_a_table_is_kept_once_and_read_only() -> None:
    """The object holds each table's bytes a single time, in a section that nobody may write."""
    a, b = np.arange(1000, 1064, dtype=np.uint32), np.arange(2000, 2064, dtype=np.uint32)

    def build(k: Builder, to: Val) -> None:
        for i, table in enumerate((a, b, a.copy(), a.view(np.int32))):
            k.store(to, k.load(k.table(table), u32, offset=4 * i), offset=4 * i)
        k.store(to, k.gather(k.table(a), k.load(to, i32 * 4) & 63, u32 * 4), offset=16)
        k.store(to, k.gather(k.table(b), k.load(to, i32 * 4) & 63, u32 * 4), offset=32)

    text = ir_text(BEST, 1, build)
    assert text.count("private constant") == 2, text
    code = emit_object(text, BEST)
    assert code.count(a.tobytes()) == 1
    assert code.count(b.tobytes()) == 1
    out = np.zeros(12, np.uint32)
    compiled(BEST, 1, build)(out)
    assert out[:4].tolist() == [1000, 2001, 1002, 1003]
    assert out[4:].tolist() == [*a[out[:4] & 63], *b[out[:4] & 63]]


# -- vectors
# ----------------------------------------------------------------------------------------


def test_vector_shuffles() -> None:
    out = np.zeros((5, 8), np.int32)

    def build(k: Builder, to: Val) -> None:
        a = k.const(range(8), i32 * 8)
        b = k.const(range(10, 18), i32 * 8)
        rows_ = [
            k.shuffle(a, b, [0, 8, 1, 9, 2, 10, 3, 11]),
            k.concat(*k.split(a, 2)),
            k.concat(k.split(a, 4)[1], k.split(b, 4)[0]),
            k.insert(a, k.const(99, i32), 3),
            k.splat(k.extract(b, 5), i32 * 8),
        ]
        for i, v in enumerate(rows_):
            k.store(to, v, offset=32 * i)

    compiled(BEST, 1, build)(out)
    a, b = list(range(8)), list(range(10, 18))
    assert out[0].tolist() == [0, 10, 1, 11, 2, 12, 3, 13]
    assert out[1].tolist() == a
    assert out[2].tolist() == a[4:] + b[:4]
    assert out[3].tolist() == [0, 1, 2, 99, 4, 5, 6, 7]
    assert out[4].tolist() == [15] * 8


@pytest.mark.parametrize("isa", rows.DISTINCT, ids=rows.name)
def test_fold_has_one_order(isa: Isa, rng: np.random.Generator) -> None:
    """Halves are added until one lane is left: the same bits on every machine."""
    x = (rng.standard_normal(32) * 10.0 ** rng.integers(-6, 7, 32)).astype(np.float32)
    out = np.zeros(2, np.float32)

    def build(k: Builder, pa: Val, to: Val) -> None:
        k.store(to, k.sum(k.load(pa, f32 * 32)))
        k.store(to, k.reduce(k.load(pa, f32 * 32), k.max), offset=4)

    compiled(isa, 2, build)(x, out)
    v = x
    while len(v) > 1:
        v = v[: len(v) // 2] + v[len(v) // 2 :]
    assert out[0] == v[0]
    assert out[1] == x.max()


def test_max_and_min_take_the_second_where_there_is_a_nan() -> None:
    x = np.array([np.nan, 1, 2, np.nan], np.float32)
    y = np.array([5, np.nan, 3, np.nan], np.float32)
    out = np.zeros((2, 4), np.float32)

    def build(k: Builder, pa: Val, pb: Val, to: Val) -> None:
        a = k.load(pa, f32 * 4)
        b = k.load(pb, f32 * 4)
        k.store(to, k.max(a, b))
        k.store(to, k.min(a, b), offset=16)

    for isa in rows.DISTINCT:
        compiled(isa, 3, build)(x, y, out)
        np.testing.assert_array_equal(out, [[5, np.nan, 3, np.nan], [5, np.nan, 2, np.nan]])


# -- control
# ----------------------------------------------------------------------------------------


def test_loops_run_as_ranges_do(rng: np.random.Generator) -> None:
    cases = [(0, 0, 1), (0, 5, 1), (3, 20, 4), (5, 3, 1), (-4, 4, 3)]
    out = np.zeros((len(cases), 2), np.int64)
    bounds = np.array(cases, np.int64)

    def build(k: Builder, p: Val, to: Val) -> None:
        for i in range(len(cases)):
            start, stop, step = (k.load(p, i64, offset=24 * i + 8 * j) for j in range(3))
            count = k.var(k.i64(0))
            total = k.var(k.i64(0))
            with k.loop(stop, start=start, step=step) as at:
                count.v = count.v + 1
                total += at
            k.store(to, count.v, offset=16 * i)
            k.store(to, total.v, offset=16 * i + 8)

    compiled(BEST, 2, build)(bounds, out)
    assert out.tolist() == [[len(range(*c)), sum(range(*c))] for c in cases]


def test_nested_loops_branches_and_variables() -> None:
    """A variable made inside a loop starts anew each time round, and takes no more stack for it."""
    out = np.zeros(3, np.int64)

    def build(k: Builder, to: Val) -> None:
        even, odd, ends = (k.var(k.i64(0)) for _ in range(3))
        with k.loop(2000) as i:
            inner = k.var(k.i64(0))
            with k.loop(1000) as j:
                inner.v = inner.v + j
                with k.if_else((i % 2).eq(0)) as (then, other):
                    with then:
                        even.v = even.v + 1
                    with other:
                        odd.v = odd.v + 2
            with k.if_(i >= 1999):
                ends.v = inner.v
        for n, v in enumerate((even, odd, ends)):
            k.store(to, v.v, offset=8 * n)

    compiled(PORTABLE, 1, build)(out)
    assert out.tolist() == [10**6, 2 * 10**6, sum(range(1000))]

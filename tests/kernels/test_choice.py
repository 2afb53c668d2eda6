"""Which product is chosen, by what is shipped and by a machine's own table."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from treadle.formats import FORMATS, by_name
from treadle.formats.mlx import BITS, mlx
from treadle.isa import ROWS
from treadle.isa.isa import Isa, Tiles
from treadle.jit import cache
from treadle.jit.kernel import isa_key
from treadle.kernels.activation_layout import ActivationLayout
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import ITEM_ROWS, Gemv
from treadle.kernels.matmul.matrix import MatrixGemm
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.matmul.select import SHIPPED, TUNING_CANDIDATES, TunedTable, fits, matmul
from treadle.kernels.matmul.select_activation import has_matrix_act
from treadle.kernels.matmul.sizes import COLUMNS, batch_sizes
from treadle.kernels.matmul.strips import StripGemm
from treadle.kernels.matmul.tile_outer import OUTER
from treadle.kernels.matmul.tile_pairs import PAIRS
from treadle.kernels.matmul.vector_bytes import LanesGemm
from treadle.kernels.matmul.vector_floats import FloatLanes
from treadle.kernels.run_state import GEMV_TOKENS

ISAS = pytest.mark.parametrize("isa", ROWS.values(), ids=lambda row: row.name)
READ = [fmt for fmt in FORMATS.values() if fmt.codes or fmt.load]
MANY = GEMV_TOKENS[-1] + 1
Q8_0, Q4_0 = by_name("Q8_0"), by_name("Q4_0")
VNNI = ROWS["avx512_vnni"]
AMX = ROWS["amx_bf16"]
SME = ROWS["sme"]
assert AMX.matrix is not None
VECTOR_TOKENS = AMX.matrix.vector_tokens
PANEL_BYTES = AMX.matrix.panel_bytes
PROMPT = 512
NO_BYTES = replace(AMX, matrix=replace(AMX.matrix, dot_bytes=None))


@ISAS
def test_what_is_shipped_fits(isa: Isa) -> None:
    for fmt, tokens in product(READ, (*GEMV_TOKENS, MANY, VECTOR_TOKENS, PROMPT)):
        spec = matmul(fmt, isa, 2048, tokens)
        what = f"{spec.name} for {tokens} tokens"
        assert fits(spec, isa), what
        assert isinstance(spec, Gemv) == (tokens < MANY), what
        short = not fmt.codes and fmt.name != "F32"
        few = isa.matrix is not None and short and tokens > isa.matrix.float_tokens
        on_registers = (tokens == PROMPT or few) and has_matrix_act(fmt, isa)
        assert (select.family(spec) == "matrix") == on_registers, what
        bytes_ = isa is AMX and MANY <= tokens <= VECTOR_TOKENS and fmt.codes is not None
        assert isinstance(spec, BytesGemm) == bytes_, what


def test_codes_are_met_as_bytes_by_few_tokens() -> None:
    """Whose registers are of 16 tokens, of experts too; but not of heads."""
    assert matmul(Q8_0, AMX, 2080, 8) == BytesGemm("Q8_0", "q8", 2080, 8, 16)
    assert matmul(Q8_0, AMX, 2048, 9, bias=True) == BytesGemm("Q8_0", "q8", 2048, 8, 16, bias=True)
    row = ROWS["avx512_vbmi"]
    assert matmul(Q8_0, AMX, 64, 8, experts=4) == BytesGemm("Q8_0", "q8", 64, 8, 16, experts=4)
    assert matmul(Q8_0, AMX, 2048, 8, heads=2) == matmul(Q8_0, row, 2048, 8, heads=2)
    assert select.gated(Q8_0, AMX, 2048, 4096, "silu", ActivationLayout("q8", 4096, 8), 8) is None


def test_five_to_eight_tokens_of_floats_use_a_gemv() -> None:
    """On the rows on which it was measured; not BF16, AVX2 or other numbers of tokens."""
    for name in ("avx512", "avx512_vnni", "amx_bf16"):
        for w in ("F16", "F32"):
            spec = matmul(by_name(w), ROWS[name], 512, 8, outputs=True)
            assert isinstance(spec, Gemv), name
            assert (spec.mr, spec.nr, spec.ahead) == (2, 8, 2048)
            assert not isinstance(select.exact(by_name(w), ROWS[name], 512, 8), Gemv)
    for w, name, tokens in (("BF16", "amx_bf16", 8), ("F16", "avx2", 8), ("F16", "amx_bf16", 7)):
        assert not isinstance(matmul(by_name(w), ROWS[name], 512, tokens), Gemv), (w, name)


def test_a_table_is_honoured_where_it_says_something() -> None:
    table = TunedTable({"Q8_0": {"mr": 1, "nr": 6}}, {("Q8_0", 2): {"mr": 16}})
    assert matmul(Q8_0, VNNI, 2048, MANY, table) == Gemm("Q8_0", "q8", 2048, 1, 6)
    assert matmul(Q8_0, VNNI, 2048, 2, table) == Gemv("Q8_0", "q8", 2048, 16, 2, ahead=2048)
    for tokens in (1, 4):
        assert matmul(Q8_0, VNNI, 2048, tokens, table) == matmul(Q8_0, VNNI, 2048, tokens)
    for tokens in (*GEMV_TOKENS, MANY):
        assert matmul(Q4_0, VNNI, 2048, tokens, table) == matmul(Q4_0, VNNI, 2048, tokens)
    spec = matmul(Q8_0, VNNI, 2048, MANY, table, bias=True, segments=3)
    assert (spec.nr, spec.bias, spec.segments) == (6, True, 3)


def test_more_tokens_leave_registers_for_fewer_rows() -> None:
    """Of codes that are unpacked; gathering takes the time it takes."""
    rows = {"Q4_K": (4, 2, 1), "Q4_0": (4, 4, 2), "Q8_0": (4, 4, 4), "IQ3_S": (2, 4, 4)}
    for w, want in rows.items():
        assert tuple(matmul(by_name(w), VNNI, 2048, n).mr for n in GEMV_TOKENS) == want, w


def test_a_row_says_its_own_tiles() -> None:
    """A new row is a row alone: here one of 32 registers of 128 bits, which multiplies signed
    bytes.
    """
    tiles = Tiles((4, 5), (3, 4), (2, 4), gemv=((1, 8), (2, 6)), gemv_large=((1, 3), (2, 3)))
    row = replace(ROWS["portable"], name="own", regs=32, dot4_least=-128, dot4_top=127, tiles=tiles)

    def shape(w: str, tokens: int) -> tuple[int, int]:
        spec = matmul(by_name(w), row, 2048, tokens)
        return spec.mr, spec.nr

    many = {"F32": (4, 5), "Q8_0": (3, 4), "Q4_K": (3, 4), "Q6_K": (2, 4), "Q3_K": (3, 4)}
    assert {w: shape(w, MANY) for w in many} == many
    assert [shape("Q8_0", n) for n in GEMV_TOKENS] == [(8, 1), (6, 2), (1, 4)]
    assert [shape("Q4_K", n) for n in GEMV_TOKENS] == [(3, 1), (3, 2), (1, 4)]


def test_matrix_registers_are_for_prompts() -> None:
    """F64 would lose bits; F32 has three parts, too many for few tokens, and for other machines."""
    assert {fmt.name for fmt in READ if not has_matrix_act(fmt, AMX)} == {"F64"}
    assert AMX.matrix
    two_parts = replace(AMX, matrix=replace(AMX.matrix, parts=2))
    assert {fmt.name for fmt in READ if not has_matrix_act(fmt, two_parts)} == {"F32", "F64"}
    few, many = (matmul(Q8_0, NO_BYTES, 2048, n) for n in (16, 17))
    assert few == select.gemm(Q8_0, VNNI, 2048, tokens=16)
    assert many == MatrixGemm("Q8_0", "bf16", 2048, 16, 32)
    f32 = by_name("F32")
    assert matmul(f32, AMX, 2048, 17) == MatrixGemm("F32", "bf16x3", 2048, 16, 32, kc=512)
    assert matmul(f32, AMX, 2048, 16) == matmul(f32, VNNI, 2048, 16)
    assert matmul(f32, AMX, 2048, 16) == FloatLanes("F32", "f32", 2048, 8, 32, groups=8)
    assert [select.gemm(f32, VNNI, 2048, tokens=n).nr for n in (16, 9)] == [8, 9]
    assert not any(has_matrix_act(fmt, VNNI) for fmt in READ)
    assert select.gemm(Q8_0, AMX, 2048) == many
    assert select.gemm(Q8_0, AMX, 2048, matrix=False) == few


@pytest.mark.parametrize(
    ("k", "kc"), [(64, 0), (2048, 0), (2080, 1280), (4096, 2048), (14336, 2048), (1 << 16, 2048)]
)
def test_a_panel_for_matrix_registers_fits_the_second_level_cache(k: int, kc: int) -> None:
    """Parts of K, equal but for whole blocks of any format, leave room for all rows; a gated
    activation packs two panels for an item, of all of K.
    """
    spec = matmul(Q8_0, AMX, k, PROMPT)
    assert isinstance(spec, Gemm)
    assert (spec.rows_per_item(AMX.lanes), spec.kc) == (256, kc)
    assert spec.panel_pitch(AMX.lanes) <= PANEL_BYTES * 33 // 32
    assert fits(spec, AMX)
    both = select.gated(Q8_0, AMX, k, 4096, "silu", ActivationLayout("q8", 4096, 8), PROMPT)
    assert both is not None
    assert isinstance(both.product, MatrixGemm)
    least = both.rows_per_item(AMX.lanes) == 32
    assert least or 2 * both.product.panel_pitch(AMX.lanes) <= PANEL_BYTES * 33 // 32


def test_some_tokens_stand_in_lanes() -> None:
    """Up to half a vector of them, of blocks with several scales; or sixteen groups of a whole one,
    at most.
    """
    large = by_name("Q4_K")
    vnni = ROWS["avx2_vnni"]
    assert matmul(large, VNNI, 2048, 8) == LanesGemm("Q4_K", "q8", 2048, 8, 8)
    for fmt, n in ((large, 9), (Q8_0, 16), (Q8_0, 128)):
        spec = LanesGemm(fmt.name, "q8", 2048, 8, 16, groups=16)
        assert matmul(fmt, VNNI, 2048, n) == spec
        assert matmul(fmt, VNNI, 2048, n, experts=4) == replace(spec, experts=4)
        assert fits(spec, VNNI)
    assert select.gated(large, VNNI, 2048, 4096, "silu", ActivationLayout("q8", 4096, 8), 8) is None
    for other in (
        select.exact(large, VNNI, 2048, 16),
        matmul(large, VNNI, 2048, 8, heads=2),
        matmul(large, VNNI, 2048, 129),
        matmul(Q8_0, VNNI, 2048, 8),
        matmul(large, vnni, 2048, 16),
    ):
        assert type(other) is Gemm


@pytest.mark.parametrize(
    "spec",
    [
        BytesGemm("Q4_1", "q8", 352, 1, 16),
        FloatLanes("F32", "f32", 352, 1, 16),
    ],
)
def test_an_item_has_whole_strips(spec: StripGemm) -> None:
    """16 rows, of which one vector of AVX2 has eight."""
    isa = replace(ROWS["avx2"], matrix=AMX.matrix)
    assert not fits(spec, isa)
    assert fits(replace(spec, mr=2), isa)


def test_batches_of_a_few_more_have_plans_of_their_own() -> None:
    """Beside matrix registers, and where tokens stand in lanes: of floats on more rows."""
    for isa in ROWS.values():
        codes: tuple[int, ...] = (VECTOR_TOKENS,) if isa.matrix else ()
        floats = (8, *codes) if isa.name.startswith("amx") else codes
        if isa.name.startswith("avx2"):
            codes = (16,) if isa.name == "avx2" else ()
            floats = (*codes, 32)
        elif isa.name.startswith("avx512"):
            codes = () if isa.name == "avx512" else (8, 128)
            floats = (8, 128)
        assert batch_sizes(isa, False) == (*GEMV_TOKENS, *codes)
        assert batch_sizes(isa, True) == (*GEMV_TOKENS, *floats)


def test_a_table_for_matrix_registers_is_for_them_alone() -> None:
    table = TunedTable({"Q8_0": {"mr": 1, "nr": 6}}, matrix={"Q8_0": {"mr": 2}})
    assert matmul(Q8_0, AMX, 2048, PROMPT, table) == MatrixGemm("Q8_0", "bf16", 2048, 2, 32)
    vectors = Gemm("Q8_0", "q8", 2048, 1, 6)
    assert matmul(Q8_0, NO_BYTES, 2048, VECTOR_TOKENS, table) == vectors
    assert matmul(Q8_0, VNNI, 2048, PROMPT, table) == vectors
    assert matmul(Q4_0, AMX, 2048, PROMPT, table) == matmul(Q4_0, AMX, 2048, PROMPT)
    crossed = TunedTable(vector_tokens={"Q8_0": 8})
    assert select.family(matmul(Q8_0, AMX, 2048, VECTOR_TOKENS, crossed)) == "matrix"
    assert select.family(matmul(Q4_0, AMX, 2048, VECTOR_TOKENS, crossed)) == "gemm"
    out = ActivationLayout("q8", 4096, 8)
    fused = select.gated(Q8_0, AMX, 2048, 4096, "silu", out, VECTOR_TOKENS, crossed)
    assert fused is not None
    assert fused.matrix


@pytest.mark.parametrize(
    ("threads", "rows"), [(1, 256), (8, 256), (9, 128), (16, 128), (17, 64), (64, 32), (128, 32)]
)
def test_large_panels_are_cut_for_many_threads(threads: int, rows: int) -> None:
    """Each is to have an item of 2048 rows; a kernel in vectors, and sums, stay as they are."""
    spec = matmul(Q8_0, AMX, 5632, PROMPT)
    cut = select.narrowed(spec, [1024, 1000], AMX.lanes, threads)
    assert cut.rows_per_item(AMX.lanes) == rows
    assert replace(cut, mr=spec.mr) == spec
    few = matmul(Q8_0, NO_BYTES, 5632, VECTOR_TOKENS)
    assert select.narrowed(few, [1024, 1000], AMX.lanes, threads) == few
    by_bytes = select.narrowed(
        matmul(Q8_0, AMX, 5632, VECTOR_TOKENS), [1024, 1000], AMX.lanes, threads
    )
    assert by_bytes.rows_per_item(AMX.lanes) == (16 if threads > 64 else min(128, rows))


@pytest.mark.parametrize(
    ("height", "threads", "rows"), [(384, 2, 64), (1152, 2, 128), (384, 1, 128), (256, 4, 64)]
)
def test_no_thread_waits_long_for_the_last_rows(height: int, threads: int, rows: int) -> None:
    """Three items are too few for two threads; nine will do."""
    spec = matmul(by_name("F32"), VNNI, 384, 128)
    cut = select.narrowed(spec, [height], VNNI.lanes, threads, 16)
    assert cut.rows_per_item(VNNI.lanes) == rows
    assert replace(cut, mr=spec.mr) == spec


def test_threads_share_many_tokens_of_few_rows() -> None:
    """Each packs all of these: less than to read all tokens."""
    spec = matmul(Q8_0, AMX, 2048, PROMPT)
    for threads, tokens, cut in (
        (2, 512, False),
        (2, 256, True),
        (4, 1024, False),
        (8, 1024, True),
    ):
        found = select.narrowed(spec, [128], AMX.lanes, threads, tokens)
        assert (found != spec) == cut
        assert cut or select.tokens_per_item(found, 1, tokens, threads) == 256


@ISAS
def test_scales_are_folded_where_a_dot_takes_such_codes(isa: Isa) -> None:
    """Q3_K's go up to 252, of which pairs overflow where a dot has 16 bits for them; Q2_K's end at
    45. No other format's products with whole-numbered scales are bytes. Outer products are added up
    in i16, which holds few products of such codes. Where dots are, a sign costs more than scaling.
    """
    isa = replace(isa, matrix=None)
    narrow = isa.dot4_top < 252 - 128 * (isa.dot4_least < 0 and not isa.shorts)
    outer = isa.tiles.unit == OUTER
    q8_0 = matmul(Q8_0, isa, 2048, PROMPT)
    for fmt in READ:
        want = not outer and (fmt.name == "Q2_K" or (fmt.name == "Q3_K" and not narrow))
        spec = matmul(fmt, isa, 2048, PROMPT)
        assert isinstance(spec, Gemm), spec.name
        assert spec.folded == want, spec.name
        if want:  # as many sums as for formats with one scale for 32 values
            assert (spec.mr, spec.nr) == (q8_0.mr, q8_0.nr), spec.name
        table = TunedTable({fmt.name: {"mr": 1, "nr": 6}})
        tuned = matmul(fmt, isa, 2048, PROMPT, table)
        # A machine's own table has no say in it.
        assert tuned == replace(spec, mr=1, nr=6), spec.name


def test_the_crossover_is_a_formats_own() -> None:
    table = TunedTable(gemv_tokens={"Q8_0": 2, "F32": 16})

    def ops(w: str) -> list[str]:
        return [matmul(by_name(w), VNNI, 64, n, table).op for n in (*GEMV_TOKENS, MANY)]

    assert ops("Q8_0") == ["gemv", "gemv", "gemm", "gemm"]
    assert ops("F32") == ops("Q4_0") == ["gemv", "gemv", "gemv", "gemm"]
    assert [table.only_gemv(n) for n in (1, 2, 4, 5)] == [True, True, False, False]
    assert [SHIPPED.only_gemv(n) for n in (1, 2, 3, 4, 5)] == [True, True, False, True, False]
    tiled = TunedTable({"Q8_0": {"mr": 1, "nr": 6}}, gemv_tokens={"Q8_0": 2})
    assert matmul(Q8_0, VNNI, 64, 4, tiled) == Gemm("Q8_0", "q8", 64, 1, 6)


def test_a_newer_table_goes_over_an_older() -> None:
    old = TunedTable({"F32": {"nr": 2}, "Q8_0": {"nr": 3}}, {("F32", 1): {"mr": 1}}, {"F32": 1})
    old = replace(old, matrix={"Q4_0": {"mr": 2}, "Q8_0": {"mr": 2}})
    new = TunedTable({"Q8_0": {"nr": 4}}, {("F32", 2): {"mr": 2}}, {"Q8_0": 2}, {"Q8_0": {"mr": 4}})
    both = old.updated(new)
    assert both.gemm == {"F32": {"nr": 2}, "Q8_0": {"nr": 4}}
    assert both.gemv == {("F32", 1): {"mr": 1}, ("F32", 2): {"mr": 2}}
    assert both.gemv_tokens == {"F32": 1, "Q8_0": 2}
    assert both.matrix == {"Q4_0": {"mr": 2}, "Q8_0": {"mr": 4}}
    assert old.gemm["Q8_0"] == {"nr": 3}


def test_a_block_as_long_as_k_is_all_of_k() -> None:
    table = TunedTable({"Q8_0": {"fence": 8, "kc": 2048}})
    for k, kc in ((1024, 0), (2048, 0), (4096, 2048)):
        spec = matmul(Q8_0, VNNI, k, MANY, table)
        assert isinstance(spec, Gemm)
        assert (spec.fence, spec.kc) == (8, kc)


@pytest.mark.parametrize("spec", [Gemm("F32", "f32", 64, 9, 9), Gemv("F32", "f32", 64, 9, 9)])
def test_every_swept_field_makes_a_kernel_of_its_own(spec: Gemm | Gemv) -> None:
    """In its name, so in the cache: a tuned kernel is never taken for another."""
    variants = [
        replace(spec, **{name: value})  # type: ignore[arg-type]
        for stage in TUNING_CANDIDATES[spec.op]
        for name, values in stage.items()
        for value in values
        if value != getattr(spec, name)
    ]
    files = {cache.path_of(v.name, isa_key(VNNI)) for v in (spec, *variants)}
    assert len(files) == len(variants) + 1


@ISAS
def test_what_cannot_be_used_does_not_fit(isa: Isa) -> None:
    def gemm(mr: int, nr: int) -> bool:
        return fits(Gemm("F32", "f32", 64, mr, nr), isa)

    def gemv(mr: int, nr: int) -> bool:
        return fits(Gemv("F32", "f32", 64, mr, nr), isa)

    assert gemm(1, 2)
    assert gemv(1, 1)
    assert not gemm(3, 2)  # 3 vectors do not fill 64 columns
    assert not gemv(3, 1)  # nor 3 rows a strip of 16
    assert not gemv(2 * ITEM_ROWS, 1)
    assert not gemm(2, isa.regs)
    assert not gemv(ITEM_ROWS, isa.regs)
    assert not gemm(2 * COLUMNS, 1)
    assert not any(gemm(mr, nr) or gemv(mr, nr) for mr, nr in ((0, 4), (1, 0), (-1, 4), (1, -4)))


def test_outer_products_are_for_rows_that_say_so() -> None:
    """Large codes have i32 sums, so smaller tiles; floats and single tokens are as on all rows."""
    rvv = ROWS["rvv256"]
    for name, mr in (("Q4_0", 8), ("Q6_K", 8), ("Q3_K", 8), ("Q8_0", 4), ("IQ4_XS", 4)):
        spec = matmul(by_name(name), rvv, 2048, MANY)
        assert isinstance(spec, Gemm)
        assert (spec.unit, spec.mr, spec.act) == (OUTER, mr, "q8")
    floats = matmul(by_name("F16"), rvv, 2048, PROMPT)
    assert floats == Gemm("F16", "f32", 2048, *rvv.tiles.floats)
    fused = select.gated(Q4_0, rvv, 2048, 4096, "silu", ActivationLayout("q8", 4096, 6), MANY)
    assert fused is not None
    assert fused.product == matmul(Q4_0, rvv, 2048, MANY)
    assert not any(matmul(Q8_0, isa, 64, MANY).name.endswith("unit1") for isa in (VNNI, AMX))


def test_outer_products_fit_where_no_register_is_too_many() -> None:
    rvv = ROWS["rvv256"]

    def outer(w: str, mr: int, nr: int) -> bool:
        return fits(Gemm(w, "q8", 768, mr, nr, unit=OUTER), rvv)

    assert outer("Q4_0", 8, 7)  # 2 registers of a column, 4 of sums for each token
    assert not outer("Q4_0", 8, 8)
    assert outer("Q8_0", 4, 7)  # a column of 1 register and as i16 of 2, 4 of sums for each token
    assert not outer("Q8_0", 4, 8)


def test_pairs_are_for_rows_that_say_so() -> None:
    arm = ROWS["neon_i8mm"]
    for name in ("Q8_0", "Q6_K", "Q3_K"):
        spec = matmul(by_name(name), arm, 2048, MANY)
        assert isinstance(spec, Gemm)
        assert (spec.unit, spec.mr, spec.nr, spec.folded) == (PAIRS, 2, 6, name == "Q3_K")
    assert ROWS["neon_dotprod"].tiles.unit == 4

    def fit(mr: int, nr: int) -> bool:
        return fits(Gemm("Q8_0", "q8", 64, mr, nr, unit=PAIRS), arm)

    assert fit(2, 6)
    assert fit(1, 12)
    assert not fit(2, 5)  # half a pair
    assert not fit(2, 8)


def test_what_matrix_registers_can_use() -> None:
    def matrix(mr: int, nr: int, isa: Isa = AMX) -> bool:
        return fits(MatrixGemm("Q8_0", "bf16", 64, mr, nr), isa)

    assert [mr for mr in range(-1, 2 * COLUMNS) if matrix(mr, 32)] == [2, 4, 8, 16]
    assert not any(matrix(2, nr) for nr in (0, 1, 16, 64))  # four registers hold 32 tokens
    assert not any(matrix(2, 32, isa) for isa in ROWS.values() if isa not in (AMX, SME))


def test_few_strips_are_cut_into_more_items() -> None:
    gemm = Gemm("F32", "f32", 64, 2, 6)
    gemv = Gemv("F32", "f32", 64, 2, 4)
    assert select.tokens_per_item(gemv, 1, 4, 64) == 4
    assert select.tokens_per_item(gemm, 100, 512, 2) == 516  # all tokens, in whole groups
    assert select.tokens_per_item(gemm, 2, 512, 2) == 132  # four items for each of two threads
    assert select.tokens_per_item(gemm, 1, 512, 64) == 48  # but eight groups in each
    assert select.tokens_per_item(gemm, 1, 5, 64) == 6


@ISAS
def test_words_are_for_prompts_of_wide_codes_with_avx2_alone(isa: Isa) -> None:
    every = [*READ, *(mlx(bits, group, "F16") for bits in BITS for group in (32, 64))]
    k = 256
    wide = {"Q8_0", "IQ4_NL", "IQ4_XS", "IQ3_KS", "IQ4_KS", "IQ4_KSS", "IQ5_KS", "BF16"}
    wide |= {"IQ1_KT", "IQ2_KT", "IQ3_KT", "IQ4_KT"}
    wide = wide if isa.name == "avx2" else set()
    assert {fmt.name for fmt in every if matmul(fmt, isa, k, 512).act == "q16"} == wide
    few = {fmt.name for fmt in every if select.gemv(fmt, isa, k, 1).act == "q16"}
    assert few == wide & {"Q8_0"}  # other codes are unpacked faster to bytes, and floats keep f32
    for fmt in every:
        assert matmul(fmt, isa, k, 16).act != "q16"
        assert all(matmul(fmt, isa, k, n, alone=True).act != "q16" for n in (1, 4, 512))


@ISAS
def test_two_bytes_are_for_few_tokens_where_they_cost_little(isa: Isa) -> None:
    every = [fmt for fmt in READ if fmt.codes]
    k = 768
    plain, fine = (
        {fmt.name: matmul(fmt, isa, k, 1, fine=asked).act for fmt in every}
        for asked in (False, True)
    )
    assert "q8x2" not in plain.values()
    two = {name for name, act in fine.items() if act == "q8x2"}
    assert {name: act for name, act in fine.items() if name not in two} == {
        name: act for name, act in plain.items() if name not in two
    }
    if isa.dot4_single:  # in one instruction: all formats of bytes
        assert two == set(fine)
    elif isa.shorts is None:
        assert not two
    else:  # not with a sign, nor with steps
        assert {"Q4_0", "Q4_1", "Q5_0", "Q5_1"} <= two
        assert not two & {"Q8_0", "IQ4_NL", "IQ4_XS", "Q4_K", "Q6_K"}
    for fmt in READ:
        for n, alone in ((4, False), (16, False), (512, False), (1, True), (512, True)):
            usual = matmul(fmt, isa, k, n, alone=alone)
            assert matmul(fmt, isa, k, n, alone=alone, fine=True) == usual


@ISAS
def test_words_by_length_are_for_f16_where_asked(isa: Isa) -> None:
    every = [fmt for fmt in READ if matmul(fmt, isa, 256, 512, int16=True).act == "q16n"]
    serves = isa.tiles.words[0] and isa.matrix is None
    assert [fmt.name for fmt in every] == (["F16"] if serves else [])
    pairs = [fmt.name for fmt in READ if matmul(fmt, isa, 256, 512, int16=True).act == "q16x2"]
    assert pairs == (["F16"] if isa.matrix is not None and isa.matrix.dot_bytes else [])
    for fmt in READ:
        assert matmul(fmt, isa, 256, 512).act not in ("q16n", "q16x2")
        for n, alone in ((16, False), (512, True)):
            plain = matmul(fmt, isa, 256, n, alone=alone)
            assert matmul(fmt, isa, 256, n, alone=alone, int16=True) == plain


def test_rows_that_meet_words_together() -> None:
    def rows(tokens: int) -> tuple[int, int]:
        spec = select.gemv(by_name("Q8_0"), ROWS["avx2"], 576, tokens)
        return spec.mr, spec.ahead

    assert [rows(tokens) for tokens in (1, 2, 4)] == [(4, 1024), (4, 1024), (1, 1024)]


def test_spans_of_a_row_where_dots_are_two_steps_of_256_bits() -> None:
    def rows(w: str, tokens: int, k: int = 512, row: str = "avx2") -> tuple[bool, int]:
        spec = select.gemv(by_name(w), ROWS[row], k, tokens)
        return spec.spans, spec.mr

    for w in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"):
        assert [rows(w, tokens) for tokens in (1, 2, 4)] == [(True, 1)] * 3, w
    for w in ("Q4_0", "Q5_1", "IQ4_NL", "MXFP4"):  # alone they meet four rows, scales together
        assert [rows(w, tokens) for tokens in (1, 2, 4)] == [(False, 4), (True, 1), (True, 1)], w
        assert [rows(w, tokens, k=352) for tokens in (1, 2, 4)] == [(False, 4)] * 3, w
    assert not any(rows("Q8_0", tokens)[0] for tokens in (1, 2, 4))  # these meet words
    assert not any(rows(w, 1)[0] for w in ("F16", "IQ3_S", "TQ2_0", "NVFP4"))
    others = [name for name in ROWS if name != "avx2"]
    assert not any(rows("Q4_K", 2, row=name)[0] for name in others)


def test_rows_are_runs_where_that_was_measured() -> None:
    """Not of spans: there neighbours are faster."""

    def ahead(w: str, tokens: int, row: str = "avx2") -> int:
        return select.gemv(by_name(w), ROWS[row], 512, tokens).ahead

    assert all(ahead(w, 1) for w in ("Q8_0", "BF16", "F16", "F32", "NVFP4"))
    assert all(ahead("BF16", tokens) for tokens in (2, 4))
    assert not any(ahead(w, 1) for w in ("Q4_K", "Q6_K", "IQ4_XS"))
    assert not any(ahead(w, 2) for w in ("Q4_0", "MXFP4"))
    assert all(ahead("Q8_0", tokens) for tokens in (2, 4))
    assert ahead("Q4_K", 1, "avx512_vnni")
    assert not ahead("Q8_0", 1, "avx2_vnni")

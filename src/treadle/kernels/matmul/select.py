"""Choice of the matrix product for a weight format, an instruction set and a number of tokens.

The shipped choice is a formula and a few measured rows. ``treadle tune`` measures a ``TunedTable``
for a machine, which the plan's builder passes in: nothing here reads a file or keeps state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.formats import Format, by_name
from treadle.formats.format import Codes
from treadle.jit.language import Isa
from treadle.kernels.activation_layout import BLOCK, BYTES, NARROW, SPANNED, WORDS, ActivationLayout
from treadle.kernels.matmul.gated import Gated
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import GROUPED, Gemv, GroupGemv
from treadle.kernels.matmul.gemv_spans import kind_of
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import EDGE, SIDE, MatrixGemm
from treadle.kernels.matmul.matrix_words import WordsMatrixGemm
from treadle.kernels.matmul.select_activation import (
    float_words,
    folds,
    gemm_act,
    gemv_act,
    has_matrix_act,
    matrix_act,
    matrix_words,
    prefers_q16,
)
from treadle.kernels.matmul.select_strips import fits_strips, strip_product
from treadle.kernels.matmul.sizes import COLUMNS
from treadle.kernels.matmul.strips import StripGemm
from treadle.kernels.matmul.tile_ordered import OrderedGemm
from treadle.kernels.matmul.tile_outer import OUTER, adds_in_i16, outer_registers
from treadle.kernels.matmul.tile_pairs import PAIRS, pairs_registers
from treadle.kernels.run_state import GEMV_TOKENS, round_up

# (mr, nr) of OrderedGemm's tiles, by number of tokens.
ORDERED = {1: (4, 1), 2: (4, 2), 3: (2, 4), 4: (2, 4)}
LARGE_BLOCK = 256  # values; see ``Tiles.gemv_large``
# Tokens of a gemv whose activations may have two bytes: with four, arithmetic bounds the product,
# and four streams of SmolLM2 took an eighth longer.
FINE_TOKENS = 2
FEW = 16  # tokens: the largest batch with one size of groups
MANY = 512  # tokens of a batch whose size is unknown
FEW_ROWS = 8  # rows of an expert: packing a panel takes longer than gemvs of GROUPED rows
MAX_IMBALANCE = 1.2  # the longest that the last items may take, relative to perfect balance
GATHERED = 2  # rows processed together for one token, if codes are gathered; four are slower

Fields = Mapping[str, int]

# Candidates of `treadle tune`, by kernel: fields that change speed but not results, and their
# values. All combinations of a stage's fields are tried; a later stage starts from the best of the
# earlier ones.
TUNING_CANDIDATES: dict[str, tuple[Mapping[str, tuple[int, ...]], ...]] = {
    "gemm": (
        {"mr": (1, 2, 4, 8), "nr": (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24)},
        {"fence": (0, 1, 2, 4, 8)},
        {"kc": (0, 512, 1024, 2048, 4096)},
    ),
    "matrix": ({"mr": (2, 4, 8, 16), "kc": (0, 1024, 2048, 4096)},),
    "gemv": ({"ahead": (0, 1024, 2048, 4096)}, {"mr": (1, 2, 4, 8, 16)}),
}
# Sums and rows of weights that a kernel may hold, in register files. A q8 tile keeps part of its
# sums in L1 at little cost; decoding processes more rows than registers hold, because memory is the
# limit.
REGISTER_SHARE = {"gemm": 1.25, "gemv": 2.0}


@dataclass(frozen=True)
class TunedTable:
    """Tuning results of one machine for one instruction set. A missing entry means the shipped
    choice.
    """

    # Fields of the gemm, by weight format.
    gemm: Mapping[str, Fields] = field(default_factory=dict)
    # Fields of the gemv, by format and number of tokens.
    gemv: Mapping[tuple[str, int], Fields] = field(default_factory=dict)
    # By format: tokens of the largest batch for a gemv.
    gemv_tokens: Mapping[str, int] = field(default_factory=dict)
    # Fields of the gemm on matrix registers, by format.
    matrix: Mapping[str, Fields] = field(default_factory=dict)
    # By format: tokens of the largest batch that does not use matrix registers.
    vector_tokens: Mapping[str, int] = field(default_factory=dict)

    def is_gemv(self, w: str, tokens: int) -> bool:
        """Whether batches of up to ``tokens`` tokens use a gemv for weight format ``w``."""
        return tokens in GEMV_TOKENS and tokens <= self.gemv_tokens.get(w, GEMV_TOKENS[-1])

    def only_gemv(self, tokens: int) -> bool:
        """Whether batches of up to ``tokens`` tokens use a gemv for every weight format: then no
        kernel writes rows past the last token.
        """
        return all(self.is_gemv(w, tokens) for w in (*self.gemv_tokens, ""))

    def is_matrix(self, w: str, isa: Isa, tokens: int) -> bool:
        """Whether batches of up to ``tokens`` tokens use matrix registers for weight format ``w``,
        if the machine has them.
        """
        unit = isa.matrix
        if unit is None:
            return False
        fmt = by_name(w)
        fast = fmt.codes is None and matrix_act(fmt, isa) != "bf16x3"
        few = unit.float_tokens if fast else unit.vector_tokens
        return tokens > self.vector_tokens.get(w, few)

    def updated(self, newer: TunedTable) -> TunedTable:
        """Return a copy of this table, with the entries of ``newer`` in place of or besides its
        own.
        """
        return TunedTable(
            **{name: {**said, **newer.items()[name]} for name, said in self.items().items()}
        )

    def items(self) -> dict[str, Mapping[Any, Any]]:
        """Return the table's five mappings by name; their keys are formats, or (format, tokens)."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


SHIPPED = TunedTable()


def matmul(
    fmt: Format,
    isa: Isa,
    k: int,
    tokens: int,
    table: TunedTable = SHIPPED,
    *,
    alone: bool = False,
    int16: bool = False,
    fine: bool = False,
    vectors: bool = False,
    **fields: Any,
) -> Matmul:
    """Return the product with rows of ``k`` weights for batches of up to ``tokens`` tokens (one of
    GEMV_TOKENS, or more). ``fields``: its fields that no choice depends on, such as ``bias``.

    ``alone``: a token's results are bitwise independent of the rest of the batch. ``int16``: F16
    weights may be multiplied as i16 (``q16n``, ``q16x2``). ``fine``: the model's results are most
    sensitive to this product's rounding, so up to FINE_TOKENS tokens have activations of 15 bits
    where that costs little. ``vectors``: do not use matrix registers.
    """
    if alone:
        return exact(fmt, isa, k, tokens, table, vectors=vectors, **fields)
    if table.is_gemv(fmt.name, tokens) or is_float_gemv(fmt, isa, tokens):
        return gemv(fmt, isa, k, tokens, table, fine=fine, **fields)
    matrix = not vectors and table.is_matrix(fmt.name, isa, tokens)
    strips = None if matrix or fields.get("heads") else strip_product(fmt, isa, k, tokens, **fields)
    if strips is not None:
        return strips
    return gemm(fmt, isa, k, table, matrix=matrix, tokens=tokens, int16=int16, **fields)


def is_float_gemv(fmt: Format, isa: Isa, tokens: int) -> bool:
    """Whether batches of up to ``tokens`` tokens use a gemv for these weights, though that is more
    than GEMV_TOKENS: if ``isa.tiles.float_gemv`` is this number, for floats whose products are not
    in bf16 (those were not measured).
    """
    return fmt.codes is None and fmt.act != "bf16" and tokens == isa.tiles.float_gemv


def few_rows(isa: Isa) -> int:
    """Return the largest number of an expert's rows that gemvs multiply. For more, packing a panel
    is faster.
    """
    if isa.simt is not None:
        return 0
    return GROUPED if isa.matrix is not None else FEW_ROWS


def gemv(
    fmt: Format,
    isa: Isa,
    k: int,
    tokens: int,
    table: TunedTable = SHIPPED,
    *,
    fine: bool = False,
    **fields: Any,
) -> Gemv:
    """Return the gemv for ``tokens`` tokens and rows of ``k`` weights, which reads blocks as they
    are stored. ``fine`` and ``fields``: as in ``matmul``.
    """
    chosen: dict[str, Any] = {"mr": gemv_rows(fmt, isa, tokens), "ahead": isa.tiles.gemv_ahead}
    act = gemv_act(fmt, isa, fine=fine and tokens <= FINE_TOKENS)
    kind = kind_of(fmt, isa, k)
    # One token times blocks of 32 is faster without: four rows share the work on their scales.
    if act in BYTES and kind and (tokens > 1 or fmt.block > BLOCK):
        chosen |= {"spans": True, "mr": 1, "ahead": 0}
    chosen |= table.gemv.get((fmt.name, tokens), {})
    return Gemv(fmt.name, act, k, nr=tokens, **chosen, **fields)


def group_gemv(
    fmt: Format,
    isa: Isa,
    k: int,
    table: TunedTable = SHIPPED,
    *,
    of_tokens: bool = False,
    **fields: Any,
) -> GroupGemv:
    """Return the gemv for experts with few rows, which multiplies at most ``GROUPED`` rows of x at
    a time. ``of_tokens``: as in ``GroupGemv``; ``fields``: as in ``matmul``.
    """
    one, two, most = (gemv(fmt, isa, k, n, table, **fields) for n in (1, 2, GROUPED))
    return replace(GroupGemv.from_gemvs(one, two, most), of_tokens=of_tokens)


def gemv_rows(fmt: Format, isa: Isa, tokens: int) -> int:
    """Return the number of rows of weights that a gemv for ``tokens`` tokens processes together.
    With more tokens, sums and unpacked rows exceed the registers and spill, so fewer rows are
    faster.
    """
    rows = dict(isa.tiles.gemv).get(tokens, 1)
    large = dict(isa.tiles.gemv_large)
    if gemv_act(fmt, isa) == "q16":
        return rows if tokens < GEMV_TOKENS[-1] else 1
    if fmt.codes and fmt.codes.gathers:
        return min(rows, GATHERED if tokens == 1 else max(large.values()))
    if fmt.block >= LARGE_BLOCK:
        return min(rows, large.get(tokens, 1))
    if fmt.codes and fmt.dtype.itemsize < fmt.block:  # codes narrower than a byte
        if isa.shorts and fmt.block == fmt.codes.sub == BLOCK:
            return isa.lanes // 2  # their scales of two blocks fill a register
        return min(rows, 8 // tokens)
    return rows


def gemm(
    fmt: Format,
    isa: Isa,
    k: int,
    table: TunedTable = SHIPPED,
    *,
    matrix: bool = True,
    tokens: int = MANY,
    alone: bool = False,
    int16: bool = False,
    **fields: Any,
) -> Gemm:
    """Return the gemm, which packs panels, for any number of tokens and rows of ``k`` weights.
    ``matrix``: on matrix registers if they support the format. ``tokens``: the usual upper limit of
    batches. ``alone``: the same kernel multiplies single tokens, for which packing words would take
    too long. ``int16`` and ``fields``: as in ``matmul``.
    """
    kind: type[Gemm]
    if matrix and has_matrix_act(fmt, isa):
        act = matrix_act(fmt, isa)
        kind = MatrixGemm
        if tokens > FEW and not alone and int16 and matrix_words(fmt, isa):
            act = "q16x2"
            kind = WordsMatrixGemm
        assert act is not None, fmt.name
        n_parts = NARROW.get(act, 1)  # a word takes as much memory as a bf16
        kc = matrix_kc(isa, k, n_parts)
        rows = matrix_rows(isa, kc or k, n_parts)
        shape: dict[str, Any] = {"mr": rows // isa.lanes, "kc": kc}
        shape |= {"act": act, "nr": EDGE, **table.matrix.get(fmt.name, {})}
    else:
        act = gemm_act(fmt, isa)
        if tokens > FEW and not alone and prefers_q16(fmt, isa):
            act = "q16"
        elif tokens > FEW and not alone and int16 and float_words(fmt, isa):
            act = "q16n"
        folded = act == "q8" and folds(fmt, isa)
        codes = fmt.codes.folded if fmt.codes and folded else fmt.codes
        mr, nr = tile(isa, act, codes)
        mr = isa.tiles.few[0] if tokens <= isa.tiles.few[1] else mr
        if act == "f32" and tokens <= FEW:  # padding a group takes as long as real tokens
            nr = -(-tokens // -(-tokens // nr))
        shape = {"mr": mr, "nr": nr, "act": act, "folded": folded}
        if act == "q8":
            shape["unit"] = isa.tiles.unit
        shape |= table.gemm.get(fmt.name, {})
        kind = Gemm
    if shape.get("kc", 0) >= k:  # all of K: the same kernel for every such kc
        shape["kc"] = 0
    return kind(fmt.name, k=k, **shape, **fields)


def exact(
    fmt: Format,
    isa: Isa,
    k: int,
    tokens: int,
    table: TunedTable = SHIPPED,
    *,
    vectors: bool = False,
    **fields: Any,
) -> Gemm:
    """Return the gemm for batches of up to ``tokens`` tokens that gives a token the same bits in
    every batch: one kernel serves all batches, or two with the same order of addition. ``vectors``
    and ``fields``: as in ``matmul``.
    """
    unit = None if vectors else isa.matrix
    if unit is None or not unit.ordered or matrix_act(fmt, isa) != "bf16":
        few = isa.tiles.few[1]
        some = few if few > GEMV_TOKENS[-1] else MANY
        return gemm(fmt, isa, k, table, matrix=False, tokens=some, alone=True, **fields)
    many = gemm(fmt, isa, k, table, **fields)
    # Rows of large blocks are unpacked faster one by one than sixteen together.
    if tokens > unit.vector_tokens or fmt.block >= LARGE_BLOCK:
        return many
    mr, nr = ORDERED[min(tokens, GEMV_TOKENS[-1])]
    return OrderedGemm(fmt.name, many.act, k, mr, nr, kc=many.kc, **fields)


def gated(
    fmt: Format,
    isa: Isa,
    k: int,
    m: int,
    fn: str,
    out: ActivationLayout,
    tokens: int,
    table: TunedTable = SHIPPED,
    *,
    alone: bool = False,
    int16: bool = False,
) -> Gated | None:
    """Return the kernel for both products of a gated activation, matrices ``[m, k]``, and the
    activation ``fn``, for batches of up to ``tokens``; its result has the layout ``out``. None if
    ``m`` is no multiple of 32, if the result is written for more tokens at a time than a tile has,
    if the result or the products need spans of words, or if a strip product is used. ``alone`` and
    ``int16``: as in ``matmul``.
    """
    if m % BLOCK or out.kind in SPANNED:
        return None
    if alone:
        like = exact(fmt, isa, k, tokens, table)
    else:
        is_matrix = table.is_matrix(fmt.name, isa, tokens)
        if not is_matrix and strip_product(fmt, isa, k, tokens) is not None:
            return None
        like = gemm(fmt, isa, k, table, matrix=is_matrix, tokens=tokens, int16=int16)
    if isinstance(like, WordsMatrixGemm):
        return None
    if like.nr % out.together:
        return None
    mr = like.mr
    matrix = isinstance(like, MatrixGemm)
    if matrix:
        # Two panels an item.
        mr = min(mr, matrix_rows(isa, k, 2 * NARROW[like.act]) // isa.lanes)
    return Gated(
        fmt.name,
        like.act,
        k,
        mr,
        like.nr,
        segments=2,
        fence=like.fence,
        folded=like.folded,
        unit=like.unit,
        matrix=matrix,
        ordered=isinstance(like, OrderedGemm),
        fn=fn,
        m=m,
        to=out.kind,
        to_group=out.group,
        to_sub=out.sub,
        to_unit=out.unit,
    )


def matrix_rows(isa: Isa, k: int, n_parts: int = 1) -> int:
    """Return the number of rows of weights in a panel for matrix registers: as many as fit
    ``isa.matrix.panel_bytes``, doubled from EDGE up to ``isa.matrix.panel_rows``. ``k``: values of
    a row; ``n_parts``: number of bf16 that represent a value, times the panels of an item.
    """
    assert isa.matrix is not None, isa.name
    rows = EDGE
    while rows < isa.matrix.panel_rows and n_parts * 2 * rows * k * 2 <= isa.matrix.panel_bytes:
        rows *= 2
    return rows


def matrix_kc(isa: Isa, k: int, n_parts: int = 1) -> int:
    """Return ``kc`` (see ``MatrixGemm``) for panels of ``isa.matrix.panel_rows`` rows of ``k``
    values, each ``n_parts`` bf16: K cut into equal parts that fit the second-level cache; 0 if all
    of it fits.
    """
    assert isa.matrix is not None, isa.name
    most = isa.matrix.panel_bytes // (2 * isa.matrix.panel_rows * n_parts)
    n = -(-k // most)
    return round_up(-(-k // n), LARGE_BLOCK) if n > 1 else 0


def tile(isa: Isa, act: str, codes: Codes | None) -> tuple[int, int]:
    """Return the size of a gemm's tile as (vectors of rows, tokens), for the activation kind
    ``act`` and the format's ``codes``, None for float formats.
    """
    if act in WORDS:
        return isa.tiles.words
    if act != "q8" or codes is None:
        return isa.tiles.floats
    if isa.tiles.unit == OUTER and not adds_in_i16(codes):
        return isa.tiles.bytes_i32
    return isa.tiles.bytes if codes.sub == BLOCK else isa.tiles.bytes16


def family(spec: Matmul) -> str:
    """Return the key of ``spec`` in TUNING_CANDIDATES: its ``op``, or "matrix"."""
    return "matrix" if isinstance(spec.product, MatrixGemm) else spec.op


def fits(spec: Matmul, isa: Isa) -> bool:
    """Whether a product of this shape can be used on ``isa``, and is not far too large to be fast.

    Items are written whole, so their rows must divide the columns that y is padded to, and an item
    must be a whole number of the rows processed together (strips, on matrix registers).
    """
    rows = spec.rows_per_item(isa.lanes)
    if family(spec) == "matrix":
        if isa.matrix is None or rows <= 0 or spec.nr != EDGE:
            return False
        return rows % EDGE == isa.matrix.panel_rows % rows == 0
    if isinstance(spec, StripGemm):
        return fits_strips(spec, isa)
    whole = spec.mr > 0 and spec.nr > 0 and COLUMNS % rows == 0 and rows % spec.mr == 0
    if isinstance(spec, Gemm) and spec.unit == OUTER:
        return whole and outer_registers(spec) <= isa.regs
    if isinstance(spec, Gemm) and spec.unit == PAIRS:
        return whole and spec.nr % 2 == 0 and pairs_registers(spec, isa.lanes) <= isa.regs
    return whole and spec.mr * (spec.nr + 1) <= REGISTER_SHARE[spec.op] * isa.regs


def narrowed(
    spec: Matmul, heights: Sequence[int], lanes: int, n_threads: int, n_tokens: int = 0
) -> Matmul:
    """Return ``spec`` with fewer rows an item, if otherwise some of ``n_threads`` threads would
    have no item: only for matrix registers, whose panels are large, and for strips. Strips cost
    nothing to cut; they are cut until no thread waits long for the last items. With few rows and
    many tokens, threads split the tokens instead. The order of addition does not change.

    ``heights``: rows of each segment; ``lanes``: of a vector; ``n_tokens``: of the batch, 0 if
    unknown.
    """
    strips = isinstance(spec, StripGemm)
    least = SIDE if strips else EDGE
    if family(spec) != "matrix" and not strips:
        return spec
    if n_tokens >= n_threads * max(sum(heights), 8 * spec.nr):
        return spec
    while spec.rows_per_item(lanes) > least:
        n = spec.strips(heights, lanes)
        if n >= n_threads and (not strips or round_up(n, n_threads) <= MAX_IMBALANCE * n):
            break
        spec = replace(spec, mr=spec.mr // 2)
    return spec


def tokens_per_item(spec: Matmul, strips: int, n_tokens: int, n_threads: int) -> int:
    """Return the number of tokens that an item handles, of a batch of ``n_tokens``: all, or part of
    them if there are few ``strips`` of rows for the threads. A panel is then packed more than once.
    For a gemv, ``nr``.
    """
    if not isinstance(spec.product, Gemm):
        return spec.nr
    cuts = max(1, min(-(-n_tokens // (8 * spec.nr)), -(-n_threads * 4 // strips)))
    return round_up(-(-n_tokens // cuts), spec.nr)

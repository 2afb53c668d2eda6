"""gemm and gemv of every format on every instruction set, against their numpy twin.

Two kinds of data. *Whole numbers* (scales of one, every product and partial sum below 2**24)
leave nothing to round: the kernel must agree exactly, whatever its order of summation, and one
wrong quant shows. Formats with scales of their own inside a block have no such data: they are
compared within the bound on all occasions. *Random numbers* check scales and order: with u = 2**-24
and gamma_c = c u / (1 - c u) the error of a sum in chains of c additions is at most gamma_c times
the sum of magnitudes, c counted below for each kernel; integer parts are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.kernels import registry, rows
from tests.kernels.harness import Memory, Run, assert_close, call
from tests.kernels.pairwise import covering, options, parametrized
from tests.kernels.registry import GEMMS, GEMVS
from tests.kernels.stored import stored
from treadle.formats import FORMATS, by_name
from treadle.formats.packing import join_bits
from treadle.isa import portable
from treadle.isa.isa import Isa
from treadle.jit.kernel import trace
from treadle.kernels.activation_layout import (
    BLOCK,
    BYTES,
    DWORD,
    SPAN,
    SPANNED,
    WORDS,
    ActivationLayout,
    words_ref,
)
from treadle.kernels.matmul import select
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv
from treadle.kernels.matmul.gemv_spans import kind_of
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import MatrixGemm
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.matmul.matrix_words import WordsMatrixGemm
from treadle.kernels.matmul.select_activation import matrix_act
from treadle.kernels.matmul.strips import StripGemm
from treadle.kernels.matmul.tile_ordered import OrderedGemm
from treadle.kernels.matmul.vector_bytes import LanesGemm
from treadle.kernels.run_state import round_up
from treadle.selftest.rounding_bounds import product_error

HEIGHTS = (1, 5, 50, 105)


def on_matrix(spec: Matmul) -> bool:
    """Whether the kernel needs matrix registers."""
    return isinstance(spec, (MatrixGemm, BytesGemm))


def rows_for(spec: Matmul) -> list[Isa]:
    """The rows that it is tested on: of units that few rows are for, the best that is here."""
    if isinstance(spec, (BytesGemm, WordsMatrixGemm)):
        some = [row for row in rows.MATRICES if row.matrix and row.matrix.dot_bytes]
        return [row for row in some if select.fits(spec, row)]
    if on_matrix(spec):
        return rows.MATRICES
    if isinstance(spec, LanesGemm):
        return rows.VECTORS[-1:]
    if isinstance(spec, Gemv) and spec.spans:
        return [row for row in rows.VECTORS if kind_of(spec.fmt, row, spec.k)]
    return rows.VECTORS[-1:] if getattr(spec, "unit", DWORD) != DWORD else rows.VECTORS


def orders(isa: Isa) -> bool:
    """Whether vectors can add as its matrix registers do."""
    return isa.matrix is not None and isa.matrix.ordered


def takes_signed(spec: Matmul) -> bool:
    """Whether the codes, or what is left after the offset, are signed bytes."""
    codes = spec.fmt.codes
    return codes is not None and spec.act in BYTES and codes.top - codes.offset <= 127


def once_is_enough(spec: Matmul) -> bool:
    """Whether a format of MLX meets the best row alone: gemv has all widths and groups there, and
    embeddings on every row; other rows have each width once.
    """
    return spec.fmt in registry.MLX and spec.fmt not in registry.MLX_PANELS


def can_run(spec: Matmul, isa: Isa) -> bool:
    """Whether a row has what the kernel's activations need."""
    if spec.act == "bf16":
        return bool(isa.dot_bf16) or on_matrix(spec) or isinstance(spec, OrderedGemm)
    return spec.act not in WORDS or bool(isa.shorts or (spec.act == "q16n" and isa.dot_words))


# Formats whose codes are unpacked by shifts and masks, and the operations that others ask for.
PLAIN = {"F64", "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "TQ1_0", "Q2_0", "IQ1_S", "IQ1_M"}
PLAIN |= {f.name for f in registry.MLX}
UNPACKING = {"lookup", "bit_extract", "multishift", "bit_spread"}
# Fields of a row that products of f32 activations do not read, and fields that no product reads.
WHOLE = {"dot4", "dot4_least", "dot4_top", "dot4_single", "shorts", "dot_words"}
NEVER = {"name", "needs", "cpu", "features", "tiles", "slow_with"}


def told_apart(spec: Matmul, a: Isa, b: Isa) -> bool:
    """Whether the kernels of two rows can differ in more than what LLVM knows of the CPU."""
    ignored = NEVER | ({"dot_bf16", "narrow_bf16"} if not spec.act.startswith("bf16") else set())
    ignored |= WHOLE if spec.act == "f32" else set()
    ignored |= UNPACKING if spec.w in PLAIN else set()
    names = {field.name for field in fields(Isa)} - ignored
    return any(getattr(a, name) != getattr(b, name) for name in names)


def classes(spec: Matmul) -> list[list[Isa]]:
    """The rows that it is tested on, neighbours whose kernels are the same together."""
    found: list[list[Isa]] = []
    for isa in rows.VECTORS[-1:] if once_is_enough(spec) else rows_for(spec):
        if not can_run(spec, isa):
            continue
        if found and not told_apart(spec, found[-1][-1], isa):
            found[-1].append(isa)
        else:
            found.append([isa])
    return found


SPECS: list[Matmul] = [*GEMMS, *GEMVS]
# Of rows with one kernel each spec meets one, in turns.
EVERY_PAIR: list[tuple[Matmul, Isa]] = [
    (spec, same[turn % len(same)]) for turn, spec in enumerate(SPECS) for same in classes(spec)
]
EVERY_PAIR += [
    (spec, rows.SIGNED)
    for spec in SPECS
    if takes_signed(spec)
    and not once_is_enough(spec)
    and getattr(spec, "unit", DWORD) == DWORD
    and not isinstance(spec, (MatrixGemm, StripGemm))
    and not getattr(spec, "spans", False)
]
TOGETHER = ("w", "act", "folded")
# Fields of a row that are no part of the code around its matrix registers; and fields of a spec
# that decide how often these are loaded, multiplied and stored.
AROUND = NEVER | {"matrix", "dot_bf16"}
IN_REGISTERS = {"act", "k", "kc", "mr", "nr"}


def of_row(spec: Matmul, option: object, isa: Isa) -> object:
    """What an option tells of a row. Formats, segments, biases and the like meet matrix registers
    in memory alone, in a panel or in sums that vectors write and read: of rows whose vectors are
    the same and whose registers take the same panels one meets each.
    """
    assert isinstance(option, tuple)
    if not on_matrix(spec) or isa.matrix is None:
        return isa.name
    if len(option) < 4 and option[1] in IN_REGISTERS:
        return isa.name
    around = [getattr(isa, field.name) for field in fields(Isa) if field.name not in AROUND]
    return *around, isa.matrix.turn is None, isa.matrix.dot_bytes is None


# A row unpacks each format in every kind of product, with every kind of activations; segments and
# whatever else a product can have meet each row with some format.
PAIRS = covering(EVERY_PAIR, TOGETHER, of_row)


def thirds(pairs: Sequence[tuple[Matmul, Isa]]) -> list[tuple[Matmul, Isa]]:
    """Of each spec's rows every third, in turns: each spec meets one or more, and each row a third
    of the specs.
    """
    of: dict[Matmul, list[Isa]] = {}
    for spec, isa in pairs:
        of.setdefault(spec, []).append(isa)
    return [
        (spec, isa)
        for turn, (spec, own) in enumerate(of.items())
        for isa in own[turn % min(3, len(own)) :: 3]
    ]


def cases(
    keep: Callable[[Matmul], bool] = lambda spec: True,
    pairs: Sequence[tuple[Matmul, Isa]] = PAIRS,
) -> pytest.MarkDecorator:
    """A test of each spec that ``keep`` keeps, on its rows in ``pairs``."""
    return parametrized(kept(keep, pairs))


def kept(
    keep: Callable[[Matmul], bool], pairs: Sequence[tuple[Matmul, Isa]] = PAIRS
) -> list[tuple[Matmul, Isa]]:
    """Return the pairs whose spec ``keep`` keeps, and for each kind of product, format, activations
    and row that only others of ``pairs`` have, one of all pairs.
    """
    found = [(spec, isa) for spec, isa in pairs if keep(spec)]
    wanted = {kind_on_row(spec, isa) for spec, isa in pairs}
    missing = {
        kind_on_row(spec, isa): (spec, isa)
        for spec, isa in EVERY_PAIR
        if keep(spec) and kind_on_row(spec, isa) in wanted
    }
    for spec, isa in found:
        missing.pop(kind_on_row(spec, isa), None)
    return [*found, *missing.values()]


def kind_on_row(spec: Matmul, isa: Isa) -> tuple[object, ...]:
    """Return what a case shows of a row: the kind of product, its format and activations."""
    own = options(spec, TOGETHER)[0]
    return type(spec), spec.w, spec.act, of_row(spec, own, isa)


def heights(spec: Matmul) -> list[list[int]]:
    """Heights of the segments: every M alone, or several at once."""
    if spec.segments == 1:
        return [[m] for m in HEIGHTS]
    return [list(HEIGHTS[-spec.segments :]), list(HEIGHTS[: spec.segments])]


def counts(spec: Matmul) -> list[int]:
    """Numbers of tokens: gemv is made for one; gemm takes any. Where several groups meet a strip,
    the last may be half empty.
    """
    if isinstance(spec, Gemv):
        return [spec.nr]
    if isinstance(spec, StripGemm) and spec.groups > 1:
        half = spec.nr // 2
        whole = spec.groups * spec.nr
        return [1, half, half + 1, spec.nr, spec.nr + half, whole, whole + half - 1]
    return [1, spec.nr - 1, spec.nr, 2 * spec.nr + 13 if spec.nr > 13 else 13]


@dataclass
class Problem:
    """Inputs and outputs of one product, as the plan lays them out."""

    spec: Matmul
    isa: Isa
    n: int
    heights: list[int]
    x: np.ndarray  # f32 [n, k]
    weights: list[np.ndarray]  # bytes [m, row_bytes] of whole blocks, one for each segment
    biases: list[np.ndarray]
    residual: np.ndarray
    front: bool = False
    factors: Sequence[float] = ()  # one for each segment

    def __post_init__(self) -> None:
        rows_ = self.spec.rows_per_item(self.isa.lanes)
        self.padded = [round_up(m, rows_) for m in self.heights]
        self.columns = [sum(self.padded[:i]) for i in range(len(self.heights))]
        self.stride = sum(self.padded) + 3
        self.strips = sum(self.padded) // rows_

    @property
    def run(self) -> Run:
        if self.spec.outputs:
            return Run(n_tokens=99, output_rows=np.arange(self.n, dtype=np.int32))
        return Run(n_tokens=self.n // self.spec.per)

    def _args(self, **more: Any) -> dict[str, Any]:
        sizes = {"stride": self.stride, "rows": self.heights, "column": self.columns}
        factors = [np.array([factor], np.float32) for factor in self.factors]
        return {**sizes, "factor": factors or None, **more}

    def copies(self, memory: Memory, front: bool) -> list[tuple[np.ndarray, ...]]:
        """The weights' arrays, guarded."""
        return [
            tuple(memory.copy(part, name="w", front=front) for part in self.spec.fmt.split(w))
            for w in self.weights
        ]

    def reference(self) -> np.ndarray:
        layout = self.spec.layout()
        x = np.zeros(layout.n_bytes(self.n), np.uint8)
        layout.write_ref(x, self.x)
        y = np.full((self.n, self.stride), np.nan)
        with np.errstate(invalid="ignore", over="ignore"):
            weights = [self.spec.fmt.split(w) for w in self.weights]
            args = self._args(x=x, residual=self.residual, y=y, w=weights, bias=self.biases)
            self.spec.run_ref(self.spec.args(**args), self.run)
        return y

    def compute(self, memory: Memory, chunk: int = 0) -> np.ndarray:
        """y by the kernel, ``[n, stride]``; NaN where nothing is to be written."""
        spec = self.spec
        layout = spec.layout()
        n_rows = round_up(self.n, spec.nr)
        raw = np.full(layout.n_bytes(self.n), 0xFF, np.uint8)
        layout.write_ref(raw, self.x)
        poison(raw, layout, self.n)
        x = memory.copy(raw, name="x", front=self.front)
        y = memory.array((n_rows, self.stride), np.float32, name="y", front=self.front)
        residual = np.full(y.shape, np.nan, np.float32)
        residual[: self.n] = self.residual
        weights = self.copies(memory, self.front)
        biases = [memory.array(p, np.float32, name="bias", front=self.front) for p in self.padded]
        for b, values in zip(biases, self.biases, strict=True):
            b[: len(values)] = values
        chunk = chunk or n_rows
        n_items = self.strips * (-(-self.n // chunk) if isinstance(spec, Gemm) else 1)
        kept = memory.copy(residual, name="residual", front=self.front)
        args = self._args(x=x, residual=kept, y=y, tokens=chunk, w=weights, bias=biases)
        args["factor"] = [memory.copy(factor, name="factor") for factor in args["factor"] or ()]
        call(spec, self.isa, memory, args, self.run, n_items)
        written = y[: self.n].copy()
        for m, padded, column in zip(self.heights, self.padded, self.columns, strict=True):
            written[:, column + m : column + padded] = np.nan
        assert np.isnan(y[:, self.stride - 3 :]).all(), "columns past the last panel were written"
        return written

    def check(self, memory: Memory, tolerance: np.ndarray | float, chunk: int = 0) -> None:
        got = self.compute(memory, chunk)
        want = self.reference()
        what = f"{self.spec.name} on {self.isa.name}, M={self.heights}, N={self.n}, chunk={chunk}"
        assert_close(got, want, tolerance, what)


def poison(raw: np.ndarray, layout: ActivationLayout, n: int) -> None:
    """The rows that fill up the last group hold whatever an earlier run left: NaN, here."""
    if layout.group > 1 and n % layout.group:
        last = raw.reshape(-1, layout.group_bytes)[-1]
        units = last[: layout.d_off].reshape(-1, layout.group, layout.unit)
        units[:, n % layout.group :] = 0xFF
        scales = (
            last[layout.d_off : layout.comp_off].view(np.uint32).reshape(layout.kb, layout.group)
        )
        scales[:, n % layout.group :] = 0xFFFFFFFF


def is_simple(spec: Matmul) -> bool:
    """Whether a block has one scale, which can be one, and keeps it in a panel; and whether sums
    are so small that f32 holds them.
    """
    if spec.act in SPANNED or spec.act == "q8x2":
        return False
    return spec.fmt.codes is None or spec.fmt.codes.scales is None


NOT_NUMBERS = {"<f2": (np.nan, np.inf), "<f4": (np.nan, np.inf), "<u2": (0x7FC0, 0x7F80)}  # bf16


def has_float_scale(spec: Matmul) -> bool:
    """Whether a block can say NaN and infinity, or a weight itself can."""
    fmt = spec.fmt
    names = fmt.whole.names
    return not names or ("d" in names and fmt.whole["d"].str in NOT_NUMBERS)


def some(
    spec: Matmul, isa: Isa, rng: np.random.Generator, n: int, ms: list[int]
) -> tuple[Problem, np.ndarray | float]:
    """Whole numbers where the format has them, and what the kernel may miss."""
    if is_simple(spec):
        return whole(spec, isa, rng, n, ms), 0
    problem = random(spec, isa, rng, n, ms)
    return problem, bound(problem)


def whole(
    spec: Matmul,
    isa: Isa,
    rng: np.random.Generator,
    n: int,
    ms: list[int],
    make: Callable[..., np.ndarray] | None = None,
) -> Problem:
    """Data that leaves nothing to round; ``make(rng, shape)`` gives the blocks of formats whose
    fields do not take any byte.
    """
    fmt = spec.fmt
    k = spec.k

    def weights(m: int) -> np.ndarray:
        if fmt.codes is None:
            return fmt.quantize_rows(rng.integers(-8, 9, (m, k)).astype(np.float32))
        if make:
            return make(rng, (m, k // fmt.block)).view(np.uint8).reshape(m, -1)
        blocks = np.zeros((m, k // fmt.block), fmt.dtype)
        for field in fmt.dtype.names or ():
            shape = blocks[field].shape
            if field == fmt.codes.d:
                blocks[field] = 1
            elif field == fmt.codes.m:
                blocks[field] = rng.integers(-7, 8, shape)
            else:
                limits = np.iinfo(fmt.dtype[field].base)
                blocks[field] = rng.integers(limits.min, limits.max + 1, shape)
        return blocks.view(np.uint8).reshape(m, -1)

    top = 127 if spec.act in BYTES else 8
    x = rng.integers(-top, top + 1, (n, k)).astype(np.float32)
    if spec.act in BYTES:
        x[:, ::32] = 127  # so that every scale is one, of two bytes 2**-7
    biases = [rng.integers(-99, 100, m).astype(np.float32) for m in ms]
    made = Problem(spec, isa, n, ms, x, [weights(m) for m in ms], biases, np.zeros(0))
    made.residual = rng.integers(-99, 100, (n, made.stride)).astype(np.float32)
    return made


def shapes(spec: Matmul) -> Iterator[tuple[list[int], int, bool]]:
    """Heights, a number of tokens, and the side of the guard. Strips of rows know nothing of how
    tokens are grouped: each height meets every second number of tokens, and each number heights of
    every kind, with a guard on either side. What has few heights or numbers has all pairs.
    """
    all_heights = heights(spec)
    all_counts = counts(spec)
    many = len(all_heights) > 2 and len(all_counts) > 2
    for i, ms in enumerate(all_heights):
        for j, n in enumerate(all_counts):
            if not many or (i + j) % 2 == 0:
                yield ms, n, (i // 2 if many else i) % 2 == 1


@pytest.mark.slow
@cases()
def test_whole_numbers_are_exact(
    spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    for ms, n, front in shapes(spec):
        problem, tolerance = some(spec, isa, rng, n, ms)
        problem.front = front
        problem.check(memory, tolerance)
    if isinstance(spec, Gemm):  # chunks of tokens share nothing but the panels they each pack
        for chunk in (spec.nr, 2 * spec.nr):
            problem, tolerance = some(spec, isa, rng, counts(spec)[-1], heights(spec)[0])
            problem.check(memory, tolerance, chunk=chunk)


@cases(lambda spec: spec.act in SPANNED)
def test_the_largest_words_fit_a_sum(
    spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """Spans whose every product is the largest there is, of either sign."""
    for sign in (1, -1):
        problem = random(spec, isa, rng, spec.nr, heights(spec)[0])
        same = spec.fmt.quantize_rows(np.ones((1, spec.k), np.float32))
        for w in problem.weights:
            w[:] = same
        problem.x[:] = sign
        problem.check(memory, bound(problem))


@cases(lambda spec: spec.act == "q16n")
@pytest.mark.parametrize("n_large", [1, 2, 7])
def test_the_longest_spans_fit_a_sum(
    spec: Matmul, isa: Isa, n_large: int, memory: Memory, rng: np.random.Generator
) -> None:
    """Tokens that point where a row of weights does, with few values or one beside the rest."""
    problem = random(spec, isa, rng, spec.nr, heights(spec)[0])
    row = np.full(spec.k, 2.0**-9, np.float32)
    row[rng.choice(spec.k, n_large, replace=False)] = 1.0
    row *= rng.choice(np.array([-1, 1], np.float32), spec.k)
    for w in problem.weights:
        w[:] = spec.fmt.quantize_rows(row[None])
    problem.x[:] = row
    problem.x[1::2] = -row
    problem.check(memory, bound(problem))


def test_words_by_length_are_as_precise_as_f16(rng: np.random.Generator) -> None:
    """Of a row of normal numbers; q16, which has the largest possible word in view, is three times
    as far off.
    """
    x = rng.standard_normal((64, 1024)).astype(np.float32)

    def error(words: np.ndarray, d: np.ndarray) -> float:
        return float(np.sqrt(np.square(words * d.repeat(SPAN, 1) - x).mean()))

    of_f16 = float(np.sqrt(np.square(x.astype(np.float16) - x).mean()))
    assert error(*words_ref(x, "q16x2")) < of_f16
    by_length = error(*words_ref(x, "q16n"))
    assert by_length < 1.1 * of_f16
    assert error(*words_ref(x)) > 2.5 * by_length


def test_products_without_low_bytes_are_as_precise_as_f16(rng: np.random.Generator) -> None:
    """Of rows of normal numbers: rounding both sides to words, and leaving out the products of two
    low bytes, costs no more than rounding one side to f16.
    """
    spec = WordsMatrixGemm("F16", "q16x2", 1024, 2, 32)
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    w = rng.standard_normal((64, 1024)).astype(np.float16)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    layout = spec.layout()
    stored = np.zeros(layout.n_bytes(64), np.uint8)
    layout.write_ref(stored, x)
    parts = [w.view(np.uint8)]
    made = layout.read_ref(stored, 64) @ spec.weights_ref(parts, 64).T
    made = made - spec.left_out_ref(stored, np.arange(64), parts, 64)

    def error(y: np.ndarray) -> float:
        return float(np.sqrt(np.square(y - exact).mean()))

    of_f16 = error(x.astype(np.float16).astype(np.float64) @ w.T.astype(np.float64))
    assert error(made) < 1.2 * of_f16


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q6_K"])
def test_two_bytes_of_several_blocks_in_a_vector(
    name: str, memory: Memory, rng: np.random.Generator
) -> None:
    """In vectors of 64 bytes, which LLVM takes apart where registers are narrower."""
    plain: dict[str, Any] = {"dot4": portable.dot4, "dot4_least": 0, "dot4_top": 255}
    plain |= {"lookup": portable.lookup, "shorts": None, "memory_operands": False}
    isa = replace(rows.VECTORS[-1], name="wide", vector_bits=512, **plain)
    fmt = by_name(name)
    k = 11 * BLOCK if fmt.block == BLOCK else 3 * fmt.block
    for act in BYTES:
        problem = random(Gemv(name, act, k, 2, 1), isa, rng, 1, [50])
        problem.check(memory, bound(problem))


CODE_FIELDS = {"qs", "ql", "qh", "hmask"}  # any byte will do in them


@pytest.mark.slow
def is_extreme(spec: Matmul) -> bool:
    return spec.act in BYTES and spec.k <= 768


@cases(is_extreme)
def test_extreme_codes(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Codes 0 and 255 against +-127: a 16-bit pair sum would saturate, ``|w| sign(x, w)`` would
    lose -128. Rows have them in turns, as each has sums of its own.
    """
    problem, tolerance = some(spec, isa, rng, spec.nr, [50] * spec.segments)
    problem.x[:] = 127
    problem.x[1::2] = -127
    # The bound wants blocks whose codes come near their ends: those as quantised, of the same
    # scales, do.
    tolerance = tolerance if is_simple(spec) else bound(problem)
    for w in problem.weights:
        fmt = spec.fmt
        stored = w.reshape(-1, fmt.row_bytes(spec.k))
        blocks = fmt.blocks_of(stored)
        codes = np.resize(np.array([0x00, 0x7F, 0x80, 0xFF], np.uint8), len(stored))
        for field in CODE_FIELDS & set(fmt.dtype.names or ()):
            old = blocks[field]
            every = codes.repeat(old.nbytes // len(stored))
            blocks[field] = every.view(fmt.dtype[field].base).reshape(old.shape)
        stored[:] = fmt.bytes_of(blocks)
    problem.check(memory, tolerance if is_simple(spec) else tolerance + bound(problem))


def q3_k_extremes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of Q3_K with scales and codes at their ends and around zero."""
    blocks = np.zeros(shape, by_name("Q3_K").dtype)
    sc = rng.choice(np.array([0, 1, 31, 32, 33, 63], np.uint8), (*shape, 16))
    blocks["scales"][..., :8] = join_bits(sc & np.uint8(15), 4, 8)
    blocks["scales"][..., 8:] = join_bits(sc >> np.uint8(4), 2, 4)
    q = rng.choice(np.array([0, 3, 4, 5, 7], np.uint8), (*shape, 256))
    q[..., :128] = rng.choice(np.array([0, 7], np.uint8), (*shape, 8)).repeat(16, -1)
    blocks["qs"], blocks["hmask"] = join_bits(q & np.uint8(3), 2, 32), join_bits(q >> 2, 1, 32)
    blocks["d"] = rng.choice([1, -1, 0], shape, p=[0.4, 0.4, 0.2])
    return blocks


def q2_k_extremes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """The same of Q2_K, with minimums."""
    blocks = np.zeros(shape, by_name("Q2_K").dtype)
    ends = np.array([0, 1, 15, 15], np.uint8)
    blocks["scales"] = rng.choice(ends, (*shape, 16)) | rng.choice(ends, (*shape, 16)) << 4
    q = rng.choice(np.arange(4, dtype=np.uint8), (*shape, 256))
    q[..., :128] = rng.choice(np.array([0, 3], np.uint8), (*shape, 8)).repeat(16, -1)
    blocks["qs"] = join_bits(q, 2, 32)
    for field in ("d", "dmin"):
        blocks[field] = rng.choice([1, -1, 0], shape, p=[0.4, 0.4, 0.2])
    return blocks


# By format: such blocks, and weights that are among them.
EXTREMES: dict[str, tuple[Callable[..., np.ndarray], set[float]]] = {
    "Q3_K": (q3_k_extremes, {128, -124, 93, -96, 0, 1, -128, 124}),
    "Q2_K": (q2_k_extremes, {45, -45, 60, -60, 15, -15, 0}),
}


@pytest.mark.slow
@cases(lambda spec: spec.w in EXTREMES)
def test_whole_numbered_scales_are_exact(
    spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """With ``d`` of one, minus one or zero all weights are whole numbers, so is every sum (below
    128 * 127 * 768 or 60 * 127 * 2048, and so below 2**24), and nothing is rounded, whichever way
    the scales come in.
    """
    make, known = EXTREMES[spec.w]
    for sign in (0, 1, -1):  # tokens of random numbers; then those of the largest sums
        problem = whole(spec, isa, rng, spec.nr, [50] * spec.segments, make)
        if sign:
            problem.x[:] = sign * 127
        values = spec.fmt.dequantize_rows(np.concatenate(problem.weights))
        assert known <= set(np.unique(values))
        assert np.abs(values).max() * 127 * spec.k < 2**24
        problem.check(memory, 0)


@pytest.mark.slow
@pytest.mark.parametrize("isa", rows.VECTORS, ids=rows.name)
def test_both_panels_of_a_format_agree(isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    """Panels of folded codes give what others give, also where a scale or a minimum is no number:
    the same results are none.
    """
    for spec in (s for s in registry.FOLDED if s.k <= 768):
        plain = replace(spec, folded=False)
        (make, _) = EXTREMES[spec.w]
        problem = whole(spec, isa, rng, spec.nr, [50] * spec.segments, make)
        fields = [name for name in ("d", "dmin") if name in (spec.fmt.dtype.names or ())]
        for w in problem.weights:
            blocks = w.view(spec.fmt.dtype)
            for i, (field, value) in enumerate(product(fields, NOT_NUMBERS["<f2"])):
                blocks[7 * i, 0][field] = value
                blocks[7 * i + 1, -1][field] = -value
                blocks[7 * i + 1, -1]["scales"] = 0  # zero times infinity, in Q2_K
        folded = problem.compute(memory)
        other = replace(problem, spec=plain).compute(memory)
        kept = np.isfinite(folded)
        assert (kept == np.isfinite(other)).all(), spec.name
        assert (folded[kept] == other[kept]).all(), spec.name
        spoilt = [7 * i + j for i in range(2 * len(fields)) for j in (0, 1)]
        assert not kept[:, spoilt].any(), spec.name
        assert kept[:, 2:7].all(), spec.name


@cache
def pool(name: str, k: int) -> np.ndarray:
    """Quantised rows. Some formats search long for them: one process does it for all of a run."""

    def made() -> np.ndarray:
        x = np.random.default_rng(1).standard_normal((max(HEIGHTS), k)).astype(np.float32)
        return by_name(name).quantize_rows(x)

    return stored(f"pool-{name}-{k}-{max(HEIGHTS)}", made)


def random(spec: Matmul, isa: Isa, rng: np.random.Generator, n: int, ms: list[int]) -> Problem:
    scale = rng.lognormal(0, 1, (n, 1))
    x = (rng.standard_normal((n, spec.k)) * scale).astype(np.float32)
    weights = [rng.permutation(pool(spec.w, spec.k))[:m] for m in ms]
    biases = [rng.standard_normal(m).astype(np.float32) for m in ms]
    made = Problem(spec, isa, n, ms, x, weights, biases, np.zeros(0))
    made.residual = rng.standard_normal((n, made.stride)).astype(np.float32)
    return made


def bound(problem: Problem) -> np.ndarray:
    """The derived error of every y; see ``product_error``."""
    spec = problem.spec
    layout = spec.layout()
    raw = np.zeros(layout.n_bytes(problem.n), np.uint8)
    layout.write_ref(raw, problem.x)
    x = layout.read_ref(raw, problem.n)
    out = np.full((problem.n, problem.stride), np.nan)
    for w, b, m, column in zip(
        problem.weights, problem.biases, problem.heights, problem.columns, strict=True
    ):
        values = spec.fmt.dequantize_rows(w).astype(np.float64)
        added = np.abs(b) + np.abs(problem.residual[:, column : column + m])
        out[:, column : column + m] = product_error(spec, x, values, w, added)
    return out


@pytest.mark.slow
@cases(is_simple)  # others have such data, and this bound, in the test of whole numbers
def test_random_numbers(spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator) -> None:
    problem = random(spec, isa, rng, counts(spec)[-1], heights(spec)[0][-1:] * spec.segments)
    problem.check(memory, bound(problem))


@pytest.mark.slow
def has_not_a_number(spec: Matmul) -> bool:
    return not spec.residual and has_float_scale(spec)


@cases(has_not_a_number, thirds(PAIRS))
def test_not_a_number_stays_in_its_row(
    spec: Matmul, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """A NaN or infinite weight or scale spoils its row of y, a NaN token its own; all others stay
    right.
    """
    n = counts(spec)[-1]
    problem, tolerance = some(spec, isa, rng, n, [50] * spec.segments)
    fmt = spec.fmt
    stored = problem.weights[0].reshape(50, -1)
    w = fmt.blocks_of(stored)
    bad = fmt.whole["d"] if fmt.codes else fmt.dtype
    for row, value in zip((3, 48), NOT_NUMBERS.get(bad.str, (np.nan, np.inf)), strict=True):
        if fmt.codes:
            w[row, 0]["d"] = value
        else:
            w[row, spec.k // 2] = value
    stored[:] = fmt.bytes_of(w)
    want = problem.reference()
    got = problem.compute(memory)
    assert (np.isfinite(got) == np.isfinite(want)).all()
    ours, right = (np.where(np.isfinite(y), y, 0) for y in (got, want))
    assert_close(ours, right, np.where(np.isnan(tolerance), 0, tolerance), spec.name)
    assert not np.isfinite(got[:, [3, 48]]).any()


def test_same_bits_for_every_cut(memory: Memory, rng: np.random.Generator) -> None:
    """Neither the chunk of tokens nor the ranges of items may change a bit."""
    for spec in (GEMMS[0], GEMMS[4], GEMMS[5], registry.MATRIX[0]):
        isa = (rows.MATRICES if on_matrix(spec) else rows.VECTORS)[-1]
        problem = random(spec, isa, rng, counts(spec)[-1], heights(spec)[0])
        first = problem.compute(memory)
        for chunk in (spec.nr, 2 * spec.nr):
            again = problem.compute(memory, chunk)
            assert (again.view(np.uint32) == first.view(np.uint32)).all(), spec.name


def test_several_rows_of_a_token(memory: Memory, rng: np.random.Generator) -> None:
    """The bits of as many tokens."""
    few = next(s for s in GEMVS if s.nr == 4 and not (s.outputs or s.experts or s.heads))
    for spec, n, per in ((few, 4, 2), (few, 3, 3), (GEMMS[0], 21, 3)):
        problem = random(spec, rows.VECTORS[-1], rng, n, heights(spec)[0])
        first = problem.compute(memory)
        of_tokens = replace(problem, spec=replace(spec, per=per))
        again = of_tokens.compute(memory)
        assert (again.view(np.uint32) == first.view(np.uint32)).all(), spec.name
        assert np.array_equal(of_tokens.reference(), problem.reference(), equal_nan=True)


# Of large blocks batches of all sizes meet the same kernel.
ORDERED = [
    f.name
    for f in FORMATS.values()
    if matrix_act(f, rows.MATRICES[0]) == "bf16" and f.block < select.LARGE_BLOCK
]

ORDERING = [row for row in rows.MATRICES if orders(row)]
WHOLLY = ("Q8_0", "BF16")  # codes, and floats: with everything, on every row
# A format decides what is added, and a row how: the other formats meet one row, in turns.
IN_ORDER = [
    (w, isa)
    for turn, w in enumerate(ORDERED)
    for i, isa in enumerate(ORDERING)
    if w in WHOLLY or i == turn // 2 % len(ORDERING)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("w", "isa"), [pytest.param(w, isa, id=f"{w}-{isa.name}") for w, isa in IN_ORDER]
)
def test_vectors_add_as_matrix_registers_do(
    w: str, isa: Isa, memory: Memory, rng: np.random.Generator
) -> None:
    """To the bit: with ``deterministic=True`` a token may meet either. K is whole, or in parts, of
    which a format's own code, that of one block, knows nothing: formats take turns. It knows the
    rows of a tile and not its tokens: of tiles with as many rows a format meets one, in turns.
    """
    k = 3 * max(by_name(w).block, 32)
    every, turn = w in WHOLLY, ORDERED.index(w)
    widths: dict[int, list[int]] = {}
    for mr, nr in dict.fromkeys(select.ORDERED.values()):
        widths.setdefault(mr, []).append(nr)
    tiles = [
        (mr, nr)
        for mr, some in widths.items()
        for nr in (some if every else [some[turn // 2 % len(some)]])
    ]
    for kc in (0, k // 3) if every else (turn % 2 * k // 3,):
        many = MatrixGemm(w, "bf16", k, 32 // isa.lanes, 32, bias=True, kc=kc)
        problem = random(many, isa, rng, 37, [70])
        want = problem.compute(memory)[:, :70].view(np.uint32)
        for mr, nr in tiles:
            spec = OrderedGemm(w, "bf16", k, mr, nr, bias=True, kc=kc)
            given = problem.x, problem.weights, problem.biases, np.zeros(0)
            few = Problem(spec, isa, problem.n, problem.heights, *given)
            few.residual = np.zeros((few.n, few.stride), np.float32)
            assert (few.compute(memory)[:, :70].view(np.uint32) == want).all(), spec.name


@pytest.mark.slow
def test_rows_with_one_kernel_have_the_same_ir() -> None:
    """A spec meets one of them. Of each kind of kernel, format, and type of activations."""
    kinds = {
        (type(spec), spec.w, spec.act, same[0].name): (spec, same)
        for spec in SPECS
        for same in classes(spec)
        if len(same) > 1
    }
    for spec, same in kinds.values():
        assert len({trace(spec, isa) for isa in same}) == 1, spec.name


OPERATIONS = (
    *("begin", "begin_bytes", "end", "zero", "load", "load_passing", "store"),
    *("dots_bf16", "dot_bytes"),
)


def around_registers(isa: Isa) -> Isa:
    """The row with matrix registers that do nothing."""
    assert isa.matrix is not None
    nothing: dict[str, Any] = dict.fromkeys(OPERATIONS, lambda *_: None)
    return replace(isa, matrix=replace(isa.matrix, **nothing))


@pytest.mark.slow
def test_around_matrix_registers_rows_have_the_same_ir() -> None:
    """Where formats and the like meet one of them. A spec of each kind and type of activations."""
    kinds = {(type(spec), spec.act): spec for spec in SPECS if on_matrix(spec)}
    assert len(kinds) > 3
    for spec in kinds.values():
        own = options(spec, TOGETHER)[0]
        texts: dict[object, set[str]] = {}
        for isa in rows_for(spec):
            found = texts.setdefault(of_row(spec, own, isa), set())
            found.add(trace(spec, around_registers(isa)))
        assert all(len(found) == 1 for found in texts.values()), spec.name


def test_every_row_meets_every_kind_of_product() -> None:
    """Whatever turns are taken."""
    whole_row = {kind_on_row(spec, isa) for spec, isa in EVERY_PAIR}
    assert {kind_on_row(spec, isa) for spec, isa in PAIRS} == whole_row
    for keep in (is_extreme, has_not_a_number):
        whole_row = {kind_on_row(spec, isa) for spec, isa in EVERY_PAIR if keep(spec)}
        assert {kind_on_row(spec, isa) for spec, isa in kept(keep)} == whole_row
    for some_pairs in (PAIRS, thirds(PAIRS)):
        met = {(type(spec), isa.name) for spec, isa in some_pairs if type(spec) in (Gemm, Gemv)}
        assert met >= {(kind, isa.name) for kind in (Gemm, Gemv) for isa in rows.VECTORS}
        assert {spec for spec, _ in some_pairs} == {spec for spec, _ in EVERY_PAIR}


def test_names_are_the_specs_own() -> None:
    names = [s.name for s in registry.ALL]
    assert len(set(names)) == len(names)
    of: dict[str, set[type]] = {}  # op: the classes that define it
    for kind in {type(spec) for spec in registry.ALL}:
        of.setdefault(kind.op, set()).add(next(c for c in kind.__mro__ if "op" in vars(c)))
    assert {op: kinds for op, kinds in of.items() if len(kinds) > 1} == {}
    assert GEMMS[1].name == "gemm_Q8_0_q8_k32_mr1_nr6_bias"
    assert replace(GEMMS[0], bias=True).name != GEMMS[0].name

"""``treadle tune``: finds the fastest shape of each kernel on this machine.

For one weight format and kernel, a *sweep* tries every combination of the first stage of
``select.TUNING_CANDIDATES`` that fits the register file, then the fields of later stages on the
best variants so far, and last a final among the best and the shipped. Each variant must match its
numpy twin's results before it is timed. Variants take turns, in rounds, so that a slow moment of a
shared machine affects part of every variant's runs and no variant's minimum.

The winner is the quickest with cold caches, as a model reads its weights from memory. The shipped
shape stays unless it is beaten by more than noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import product
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from treadle.base.fast_classes import dataclass
from treadle.jit.language import Isa
from treadle.kernels.matmul import select
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import MatrixGemm
from treadle.kernels.matmul.select import SHIPPED, TUNING_CANDIDATES, TunedTable, fits
from treadle.kernels.matmul.select_activation import has_matrix_act
from treadle.kernels.matmul.select_strips import strip_product
from treadle.kernels.run_state import GEMV_TOKENS

if TYPE_CHECKING:
    from treadle.formats import Format

Progress = Callable[[str, int, int], None]

KERNELS = ("gemm", "matrix", "gemv", "crossover")
ROUNDS = 3  # over which a variant's runs are spread
KEPT = 3  # best variants of a stage that go on to the next one, or to the final
GAIN = 1.02  # least speedup over the shipped shape: minima differ by a percent
CROSSOVER = (2, 4, 8, 16)  # numbers of tokens at which gemv and gemm are compared


class VariantTimer(Protocol):
    """Compiles, checks and times variants: ``trial.KernelTrial``, or a test's stand-in."""

    def compile(self, spec: Matmul) -> str | None:
        """Compile the kernel of ``spec``; return the error as text, or None if it succeeds."""

    def check(self, spec: Matmul, n: int) -> str | None:
        """Check the kernel's results for ``n`` tokens; return the error as text, or None if all are
        right.
        """

    def seconds(self, spec: Matmul, n: int, cold: bool, runs: int) -> float:
        """Return the least seconds of a product of ``n`` tokens over ``runs`` runs, with ``cold``
        or hot caches.
        """


@dataclass
class Variant:
    """One configuration of a kernel, and its measurements."""

    spec: Matmul
    fields: Mapping[str, int]  # those of the spec that a sweep may change
    shipped: bool = False  # whether it is the one that treadle ships
    best: bool = False  # whether it won the sweep
    hot_s: float = inf  # least seconds of one product with hot caches
    cold_s: float = inf  # and with cold ones
    problem: str | None = None  # why it cannot be used; such a variant is never the best

    @property
    def name(self) -> str:
        """The fields as text, such as ``mr 2 nr 8``."""
        return " ".join(f"{name} {value}" for name, value in self.fields.items())


@dataclass
class Sweep:
    """All variants of the kernel family ``kernel`` for one weight format and number of tokens,
    ordered by their fields.
    """

    kernel: str
    format: str
    tokens: int
    variants: list[Variant] = field(default_factory=list)
    left_out: int = 0  # number that do not fit this instruction set

    @property
    def sound(self) -> list[Variant]:
        """The variants with correct results, the quickest first."""
        right = [v for v in self.variants if v.problem is None]
        return sorted(right, key=lambda v: (v.cold_s, v.hot_s))

    @property
    def best(self) -> Variant:
        """The winning variant."""
        return next(v for v in self.variants if v.best)

    @property
    def gain(self) -> float | None:
        """The winner's speedup over the shipped variant, as a factor; None if the latter is
        wrong.
        """
        shipped = next(v for v in self.variants if v.shipped)
        return None if shipped.problem else shipped.cold_s / self.best.cold_s


@dataclass(frozen=True)
class Crossover:
    """The numbers of tokens at which kernels are about equally fast, for one weight format.

    tokens: the most at which gemv is no slower than vector gemm. vector_tokens: the most at which
    vector gemm is no slower than gemm on matrix registers; None without those. gemv_s, gemm_s,
    matrix_s: the seconds of each kernel by the number of tokens tried.
    """

    format: str
    tokens: int
    gemv_s: Mapping[int, float]
    gemm_s: Mapping[int, float]
    vector_tokens: int | None = None
    matrix_s: Mapping[int, float] = field(default_factory=dict)


def tune(
    timer: VariantTimer,
    fmt: Format,
    isa: Isa,
    k: int,
    n: int,
    kernels: Sequence[str] = KERNELS,
    *,
    table: TunedTable = SHIPPED,
    runs: int = 12,
    progress: Progress | None = None,
) -> tuple[list[Sweep], Crossover | None, TunedTable]:
    """Sweep ``kernels`` (of KERNELS) for one format and rows of ``k`` weights.

    gemm is swept for ``n`` tokens, on vectors and on matrix registers if the format uses them, gemv
    for each of GEMV_TOKENS. Then the best gemv and gemm are compared (the crossover), with
    ``table`` for kernels that were not swept. Returns the sweeps, the crossover (None unless it is
    among ``kernels``), and the table of the results.
    """
    tell = progress or (lambda stage, done, total: None)
    starts: list[tuple[Matmul, int]] = []
    if "gemm" in kernels:
        starts.append((select.gemm(fmt, isa, k, matrix=False), n))
    if "matrix" in kernels and has_matrix_act(fmt, isa):
        starts.append((select.gemm(fmt, isa, k), n))
    if "gemv" in kernels:
        starts += [(select.gemv(fmt, isa, k, tokens), tokens) for tokens in GEMV_TOKENS]
    sweeps = []
    crossed = None
    found = SHIPPED
    for start, tokens in starts:
        made = sweep(timer, start, isa, tokens, runs=runs, progress=tell)
        sweeps.append(made)
        if made.sound:
            at = (fmt.name, tokens) if made.kernel == "gemv" else fmt.name
            row: dict[str, Any] = {made.kernel: {at: made.best.fields}}
            found = found.updated(TunedTable(**row))
    if "crossover" in kernels:
        crossed = measure_crossover(
            timer, fmt, isa, k, table.updated(found), runs=runs, progress=tell
        )
        found = found.updated(TunedTable(gemv_tokens={fmt.name: crossed.tokens}))
        if crossed.vector_tokens is not None:
            found = found.updated(TunedTable(vector_tokens={fmt.name: crossed.vector_tokens}))
    return sweeps, crossed, found


def sweep(
    timer: VariantTimer, start: Matmul, isa: Isa, n: int, *, runs: int, progress: Progress
) -> Sweep:
    """Time the shipped spec ``start`` and its variants on ``n`` tokens, and mark the best.
    ``runs``: of each variant.

    The shipped one is checked like the others. If all are wrong, it is still marked as the best, as
    its fields stay in use.
    """
    kernel = select.family(start)
    result = Sweep(kernel, start.w, n)
    title = f"tuning {kernel} {start.w}, {n} tokens"
    for number, stage in enumerate(TUNING_CANDIDATES[kernel]):
        seeds = [v.spec for v in result.sound[:KEPT]] if number else [start]
        known = {v.spec.name for v in result.variants}
        tried = [*seeds, *(s for seed in seeds for s in combinations(seed, stage))]
        unique = {spec.name: spec for spec in tried if spec.name not in known}
        fitting = [spec for spec in unique.values() if spec == start or fits(spec, isa)]
        here = [Variant(spec, swept_fields(spec), shipped=spec == start) for spec in fitting]
        result.left_out += len(unique) - len(here)
        result.variants += here
        prepare(timer, here, n, title, progress)
        measure(timer, here, n, runs, title, progress)
    shipped = result.variants[0]
    final = [v for v in result.variants if v is shipped or v in result.sound[:KEPT]]
    measure(timer, final, n, runs, title, progress)
    best = result.sound[0] if result.sound else shipped
    if shipped.problem is None and shipped.cold_s <= GAIN * best.cold_s:
        best = shipped
    best.best = True
    result.variants.sort(key=lambda v: tuple(v.fields.values()))
    return result


def swept_fields(spec: Matmul) -> dict[str, int]:
    """Return the current values of a spec's fields that a sweep may change."""
    return {
        name: getattr(spec, name)
        for stage in TUNING_CANDIDATES[select.family(spec)]
        for name in stage
    }


def combinations(seed: Matmul, stage: Mapping[str, tuple[int, ...]]) -> Iterator[Matmul]:
    """Yield ``seed`` with every combination of the values of ``stage``, lists of values by field.

    kc >= k means no K blocking, which kc = 0 already covers; skipped.
    """
    for values in product(*stage.values()):
        given: dict[str, Any] = dict(zip(stage, values, strict=True))
        if given.get("kc", 0) < seed.k:
            yield replace(seed, **given)


def prepare(
    timer: VariantTimer, variants: Sequence[Variant], n: int, title: str, progress: Progress
) -> None:
    """Compile each variant and check its results for ``n`` tokens, once; an error goes to its
    ``problem``.
    """
    for done, variant in enumerate(variants):
        progress(f"{title}: compiling", done, len(variants))
        variant.problem = timer.compile(variant.spec) or timer.check(variant.spec, n)


def measure(
    timer: VariantTimer,
    variants: Sequence[Variant],
    n: int,
    runs: int,
    title: str,
    progress: Progress,
) -> None:
    """Time the correct variants for ``n`` tokens in rounds, ``runs`` runs each; each variant keeps
    its minimum, over earlier calls too.
    """
    sound = [variant for variant in variants if variant.problem is None]
    n_rounds = min(ROUNDS, runs)
    for i in range(n_rounds):
        share = runs // ROUNDS + (i < runs % ROUNDS)
        for done, variant in enumerate(sound):
            progress(title, i * len(sound) + done, n_rounds * len(sound))
            hot, cold = (timer.seconds(variant.spec, n, c, share) for c in (False, True))
            variant.hot_s, variant.cold_s = min(variant.hot_s, hot), min(variant.cold_s, cold)
    progress(title, len(sound), len(sound))


def measure_crossover(
    timer: VariantTimer,
    fmt: Format,
    isa: Isa,
    k: int,
    table: TunedTable,
    *,
    runs: int,
    progress: Progress,
) -> Crossover:
    """Compare the seconds of the best gemv, vector gemm and, if any, matrix gemm with cold caches,
    at the numbers of tokens in CROSSOVER, for rows of ``k`` weights. ``table``: the best
    parameters.

    gemv always serves one token, as a tile of one is mostly padding. A format with a separate
    kernel for few tokens uses that in place of gemm.
    """
    gemv_s: dict[int, float] = {}
    gemm_s: dict[int, float] = {}
    matrix_s: dict[int, float] = {}
    gemm, matrix = (select.gemm(fmt, isa, k, table, matrix=on) for on in (False, True))
    for tokens in CROSSOVER:
        few = strip_product(fmt, isa, k, tokens) or gemm
        specs: list[Matmul] = [select.gemv(fmt, isa, k, tokens, table), few]
        specs += [matrix] if isinstance(matrix, MatrixGemm) else []
        tried = [Variant(spec, swept_fields(spec)) for spec in specs]
        title = f"comparing {fmt.name}, {tokens} tokens"
        prepare(timer, tried, tokens, title, progress)
        measure(timer, tried, tokens, runs, title, progress)
        for variant, times in zip(tried, (gemv_s, gemm_s, matrix_s), strict=False):
            times[tokens] = variant.cold_s if variant.problem is None else inf
    vectors = last_no_slower(gemm_s, matrix_s, 0) if matrix_s else None
    return Crossover(fmt.name, last_no_slower(gemv_s, gemm_s, 1), gemv_s, gemm_s, vectors, matrix_s)


def last_no_slower(one: Mapping[int, float], other: Mapping[int, float], least: int) -> int:
    """Return the largest number of tokens up to which ``one`` is no slower than ``other``;
    ``least`` if there is none. ``one``, ``other``: seconds by the number of tokens, ascending.

    A wrong variant has infinite time.
    """
    best = least
    for tokens, seconds in one.items():
        if seconds == inf or seconds > other[tokens]:
            break
        best = tokens
    return best

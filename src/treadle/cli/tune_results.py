"""Results of ``treadle tune`` for one format, as numbers and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import counted, scaled
from treadle.cli.speed import products_of
from treadle.cli.ui.table import heading, print_table, say

if TYPE_CHECKING:
    from treadle.kernels.matmul.select import TunedTable
    from treadle.profiling.tune import Crossover, Sweep, Variant

Peaks = Mapping[str, float]  # operations a second of each kind, and one of READ
READ = {"bytes_s": "memory", "cache_bytes_s": "caches"}  # read peaks, and what was read
KEPT = 0.8  # least share of the wanted processor time: below it, minimum times are chance


@dataclass(frozen=True)
class ProductShape:
    """Shape of a product: M rows of K weights; N tokens for gemm."""

    k: int
    m: int
    n: int


@dataclass(frozen=True)
class TuneResult:
    """The result of ``treadle tune`` for one format."""

    format: str
    sweeps: list[Sweep]
    crossover: Crossover | None  # of gemv and gemm; None if it was not measured
    n_bytes: int  # of the weights
    ops_a_token: int  # operations of the product for one token
    table: TunedTable  # the best tiles
    cpu_share: float = 1.0  # share of the wanted processor time that the threads got
    from_memory: bool = True  # False: cold times are from caches, because memory is short

    @property
    def doubt(self) -> str | None:
        """The reason why the result should not be saved; None if it may be."""
        if self.cpu_share < KEPT:
            return (
                f"the threads got less than {KEPT:.0%} of their processor time, so the best may "
                "be chance; stop other programs"
            )
        if not self.from_memory:
            return (
                "the memory limit is no larger than the caches, so the cold times are cache "
                "times too; raise the limit (treadle doctor names it)"
            )
        return None


def read_rate(peaks: Peaks) -> float:
    """Return the measured read bandwidth in bytes a second: from memory, else from caches."""
    return next(rate for name, rate in peaks.items() if name in READ)


def rows_of(sweep: Sweep, result: TuneResult, peaks: Peaks) -> Iterator[dict[str, Any]]:
    """Yield each configuration of a sweep as a JSON object: seconds of one product, speeds, shares
    of limits.

    ``share_of_peak``: hot speed over the arithmetic peak. ``share_of_limit``: cold speed over the
    lower of the limits that arithmetic and reading memory set.
    """
    n_ops = result.ops_a_token * sweep.tokens
    for variant in sweep.variants:
        row: dict[str, Any] = {
            "kernel": sweep.kernel,
            "format": sweep.format,
            "tokens": sweep.tokens,
            "fields": dict(variant.fields),
            "best": variant.best,
            "shipped": variant.shipped,
            "problem": variant.problem,
        }
        if variant.problem is None:
            act = variant.spec.act
            op_s = peaks.get(act.partition("x")[0], peaks["f32"]) / products_of(act)
            least_s = max(n_ops / op_s, result.n_bytes / read_rate(peaks))
            row |= {
                "hot_s": variant.hot_s,
                "hot_ops_s": n_ops / variant.hot_s,
                "share_of_peak": n_ops / op_s / variant.hot_s,
                "cold_s": variant.cold_s,
                "cold_ops_s": n_ops / variant.cold_s,
                "cold_bytes_s": result.n_bytes / variant.cold_s,
                "share_of_limit": least_s / variant.cold_s,
            }
        yield row


def sweep_of(sweep: Sweep, result: TuneResult, peaks: Peaks) -> dict[str, Any]:
    """Return one sweep as a JSON object: kernel, format, tokens, gain, and its configurations as
    ``rows_of`` yields them.
    """
    return {
        "kernel": sweep.kernel,
        "format": sweep.format,
        "tokens": sweep.tokens,
        "left_out": sweep.left_out,
        "gain": sweep.gain,
        "configurations": list(rows_of(sweep, result, peaks)),
    }


HEADERS = (
    "configuration",
    "hot us ",
    "hot GOP/s ",
    "of peak ",
    "cold us ",
    "cold GOP/s ",
    "cold GB/s ",
    "of limit ",
    "",
)


def print_results(
    results: Sequence[TuneResult], shape: ProductShape, about: dict[str, Any], peaks: Peaks
) -> None:
    """Print a table for each sweep, and the crossovers of gemv, gemm and matrix registers.
    ``about``: this machine's ``cpu``, ``isa`` and ``threads``.
    """
    rates = [
        f"{name} {scaled(rate, 'op/s')}"
        for name, rate in peaks.items()
        if not name.endswith("bytes_s")
    ]
    read = f"{READ[next(name for name in peaks if name in READ)]} {scaled(read_rate(peaks), 'B/s')}"
    say(f"{about['cpu']}, {about['isa']}, {about['threads']} threads")
    say(f"peaks: {', '.join([*rates, read])}")
    for result in results:
        for sweep in result.sweeps:
            tokens = counted(sweep.tokens, "token")
            print()
            heading(f"{sweep.kernel} {sweep.format}, K {shape.k}, M {shape.m}, {tokens}")
            lines = map(cells, rows_of(sweep, result, peaks), sweep.variants)
            print_table(HEADERS, lines, optional=("hot us ", "cold us ", "cold GB/s "))
            say(summary(sweep))
    crossed = [result.crossover for result in results if result.crossover]
    if crossed:
        print()
        heading(f"gemv against gemm, cold, K {shape.k}, M {shape.m}: us by number of tokens")
        print_crossovers(crossed)


def print_crossovers(crossed: Sequence[Crossover]) -> None:
    """Print a line for each kernel of each format: its times by number of tokens. The last column
    is the largest number of tokens for which that kernel is used; above it the next line's is.
    """
    numbers = list(crossed[0].gemv_s)
    lines = []
    for c in crossed:
        gemm: object = ""
        if c.vector_tokens is not None:
            gemm = c.vector_tokens if c.vector_tokens > c.tokens else "never"
        kernels = [("gemv", c.gemv_s, c.tokens), ("gemm", c.gemm_s, gemm)]
        kernels += [("matrix", c.matrix_s, "")] if c.matrix_s else []
        for i, (kernel, times, most) in enumerate(kernels):
            cells = [f"{1e6 * times[n]:.1f}" if n in times else "" for n in numbers]
            lines.append(("" if i else c.format, kernel, *cells, most))
    print_table(["format", "kernel", *(f"{n} " for n in numbers), "up to "], lines)


def cells(row: dict[str, Any], variant: Variant) -> list[str]:
    """Return the table cells of one configuration: ``row``, as ``rows_of`` yields it, and its
    ``variant``.
    """
    if row["problem"] is not None:
        return [variant.name, *[""] * 7, "WRONG, see above"]
    marks = [word for word in ("best", "shipped") if row[word]]
    return [
        variant.name,
        f"{1e6 * row['hot_s']:.1f}",
        f"{row['hot_ops_s'] / 1e9:.1f}",
        f"{row['share_of_peak']:.0%}",
        f"{1e6 * row['cold_s']:.1f}",
        f"{row['cold_ops_s'] / 1e9:.1f}",
        f"{row['cold_bytes_s'] / 1e9:.1f}",
        f"{row['share_of_limit']:.0%}",
        ", ".join(marks),
    ]


def summary(sweep: Sweep) -> str:
    """Return the result of a sweep as a line: the best configuration, and its gain over the shipped
    one.
    """
    parts = []
    if not sweep.sound:
        parts.append("no configuration computes correct results")
    elif sweep.best.shipped:
        parts.append(f"best: {sweep.best.name}, as shipped")
    else:
        gain = sweep.gain
        than = "" if gain is None else f", {gain - 1:.0%} faster than shipped"
        parts.append(f"best: {sweep.best.name}{than}")
    if sweep.left_out:
        parts.append(f"{sweep.left_out} left out: too large for the registers, or not whole panels")
    return "; ".join(parts)

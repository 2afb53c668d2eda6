"""What ``treadle bench`` finds out: one result, and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.cli.speed import BANDWIDTH
from treadle.cli.table import print_table, scaled


@dataclass(frozen=True)
class Result:
    """One line of the report; the speeds are of the median repetition, of all sequences together.

    Of another program nothing but its speed is known: the fields about work are None.
    """

    test: str  # pp512, tg128
    depth: int  # tokens held before
    threads: int
    sequences: int
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    bytes_s: float | None  # what the plan's steps read, by the second: weights, keys and values
    ops_s: float | None
    share_of_peak: float | None  # the least time these steps could take, over that taken: median
    engine: str
    model: str  # the file's name
    format: str  # of most of its weights
    peak: str | None  # what share_of_peak is mostly a share of: "bandwidth", "int8", "bf16", "f32"
    shares: dict[str, float] | None  # of each of these peaks that the steps use
    peaks: dict[str, float]  # of this machine meanwhile, medians: bytes or operations a second

    @property
    def work(self) -> tuple[str, str, int, int, int]:
        """What was timed: results that agree in it differ in the program alone."""
        return self.model, self.test, self.depth, self.threads, self.sequences


def print_results(results: Sequence[Result]) -> None:
    """Print the results for people: their speeds, their shares, and what the shares are of."""
    by_model = len({r.model for r in results}) > 1
    by_sequences = max(r.sequences for r in results) > 1
    others = {r.work: r for r in results if r.bytes_s is None}
    headers = ["model"] * by_model + ["engine", "test", "depth ", "threads "]
    headers += ["seqs "] * by_sequences + ["tokens/s ", "spread", "bytes/s ", "op/s ", "of peak"]
    headers += ["times the other "] * bool(others)
    rows = []
    for r in results:
        other = None if r.bytes_s is None else others.get(r.work)
        cells: list[object] = [r.model] * by_model + [r.engine, r.test, r.depth, r.threads]
        cells += [r.sequences] * by_sequences
        cells += [f"{r.tok_s:.1f}", f"{r.tok_s_min:.1f} to {r.tok_s_max:.1f}"]
        cells += ["" if r.bytes_s is None else scaled(r.bytes_s, "B/s")]
        cells += ["" if r.ops_s is None else scaled(r.ops_s, "op/s")]
        cells += ["" if r.share_of_peak is None else f"{r.share_of_peak:.0%} {r.peak or ''}"]
        cells += ["" if other is None else f"{r.tok_s / other.tok_s:.2f}"] * bool(others)
        rows.append(cells)
    print_table(headers, rows)
    print(f"peaks of this machine meanwhile: {', '.join(peaks_of(results))}")


def peaks_of(results: Sequence[Result]) -> list[str]:
    """Each peak's lowest and highest measurement: ``int8 2.0 to 2.1 Top/s``."""
    lines = []
    for name in dict.fromkeys(name for r in results for name in r.peaks):
        unit = "B/s" if name == BANDWIDTH else "op/s"
        found = [r.peaks[name] for r in results if name in r.peaks]
        low, high = scaled(min(found), unit), scaled(max(found), unit)
        number, _, same_unit = low.partition(" ")
        both = high.partition(" ")[2] == same_unit
        lines.append(f"{name} {low if low == high else f'{number if both else low} to {high}'}")
    return lines

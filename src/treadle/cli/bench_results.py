"""Results of ``treadle bench``: one result, and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import scaled
from treadle.cli.speed import BANDWIDTH, CACHES, STREAM, explain_caches
from treadle.cli.ui.table import heading, print_table, printable, remark, say
from treadle.machine.topology import busy_warning


@dataclass(frozen=True)
class Result:
    """One result of a test. Speeds are in tokens a second of all sequences together; ``tok_s`` is
    the median repetition's.

    The work of an engine other than treadle is not counted: bytes_s, ops_s, share_of_peak, peak and
    shares are None.
    """

    test: str  # pp512, tg128
    depth: int  # tokens already in the cache
    threads: int
    sequences: int
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    bytes_s: float | None  # bytes of weights, keys and values that the plan's steps read, a second
    ops_s: float | None
    share_of_peak: float | None  # least possible time of these steps over the time taken: median
    engine: str
    model: str  # the file's name
    format: str  # of most of its weights
    # The peak that bounds most of the time: "bandwidth" ("caches" if memory could not be
    # measured), "int8", "bf16", "f32".
    peak: str | None
    shares: dict[str, float] | None  # share of each peak that the steps use, by the peak's name
    peaks: dict[str, float]  # by name, medians during the test: bytes or operations a second
    # Share of the processor time that the threads wanted and got; None if the test was too short.
    processor_time_share: float | None = None
    device: str | None = None  # its name; None: the CPU
    # Of a test that encodes a picture, else None: "size" and "resized" (pixels), "n_patches" (rows
    # of patches), "n_rows" (rows that the model reads), "seconds" (of the median repetition).
    picture: dict[str, Any] | None = None

    @property
    def spread(self) -> float:
        """Half the range from the slowest to the fastest repetition, relative to the median."""
        return (self.tok_s_max - self.tok_s_min) / 2 / self.tok_s

    @property
    def work(self) -> tuple[str, str, int, int, int]:
        """The timed work: model, test, depth, threads, sequences. Results with the same work differ
        only in the engine.
        """
        return self.model, self.test, self.depth, self.threads, self.sequences


def print_results(results: Sequence[Result]) -> None:
    """Print speeds, shares of peaks, and the peaks.

    Each file has a table; columns that would be the same in all rows are omitted.
    """
    for model in dict.fromkeys(r.model for r in results):
        of_model = [r for r in results if r.model == model]
        say_facts(of_model)
        print_speeds(of_model)
        for r in of_model:
            if r.picture is not None:
                say(picture_text(r), indent="  ")
        print()
    peaks = {name for r in results for name in r.peaks}
    say(f"peaks of this machine, measured meanwhile: {', '.join(peaks_of(results))}", indent="  ")
    note = explain_caches(peaks)
    if note:
        say(note, indent="  ")


# Facts printed above a table if they are the same in all results: column header, and format.
FACTS = {
    "threads": ("threads ", "{} threads"),
    "depth": ("depth ", "at depth {}"),
    "sequences": ("seqs ", "{} sequences"),
}
USUAL = {"threads": None, "depth": 0, "sequences": 1}  # not worth printing


def varying(results: Sequence[Result]) -> list[str]:
    """Return those of "engine" and the names in FACTS whose values differ among the results."""
    return [f for f in ("engine", *FACTS) if len({getattr(r, f) for r in results}) > 1]


def say_facts(results: Sequence[Result]) -> None:
    """Print the file's name, its format, and the values of FACTS that all of its results share and
    that are not the usual ones; for a device other than the CPU its name in place of the threads.
    """
    first = results[0]
    vary = varying(results)
    given = {f: getattr(first, f) for f in FACTS if f not in vary}
    facts = [FACTS[f][1].format(value) for f, value in given.items() if value != USUAL[f]]
    if first.device and "threads" in given and all(r.device for r in results):
        facts[0] = f"on {printable(first.device)}"  # CPU threads only wait for the device
    text = ", ".join([printable(first.model), first.format, *facts])
    heading(text.replace(" 1 threads", " 1 thread"))


def print_speeds(results: Sequence[Result]) -> None:
    """Print the table of one file's results."""
    vary = varying(results)
    others = {r.work: r for r in results if r.bytes_s is None}
    headers = ["engine"] * ("engine" in vary) + ["test"]
    headers += [header for f, (header, _) in FACTS.items() if f in vary]
    headers += ["tokens/s ", "bytes/s ", "op/s ", "of peak"] + ["× the other "] * bool(others)
    rows = []
    for r in results:
        other = None if r.bytes_s is None else others.get(r.work)
        cells = [r.engine] * ("engine" in vary) + [r.test]
        cells += [str(getattr(r, f)) for f in FACTS if f in vary]
        cells += [f"{r.tok_s:.{0 if r.tok_s >= 1000 else 1}f} ± {r.spread:.0%}"]
        cells += ["" if r.bytes_s is None else scaled(r.bytes_s, "B/s")]
        cells += ["" if r.ops_s is None else scaled(r.ops_s, "op/s")]
        cells += ["" if r.share_of_peak is None else share_of(r)]
        cells += ["" if other is None else f"{r.tok_s / other.tok_s:.2f}"] * bool(others)
        rows.append(cells)
    print_table(headers, rows, optional=("op/s ", "bytes/s "))


def picture_text(result: Result) -> str:
    """Format a result of ``--image``: the size that was encoded, patches, rows, seconds, FLOP/s."""
    facts = result.picture or {}
    sides = " x ".join(map(str, reversed(facts["resized"])))
    return (
        f"{result.test}: read at {sides}, {facts['n_patches']} patches to {facts['n_rows']} tokens "
        f"in {facts['seconds']:.2f} s, {scaled(result.ops_s or 0.0, 'FLOP/s')}"
    )


def share_of(result: Result) -> str:
    """Format a result's share of the peak that bounds its test, such as ``86% bandwidth, 95%
    stream``.
    """
    text = f"{result.share_of_peak:.0%} {result.peak or ''}"
    if result.peak == BANDWIDTH and STREAM in (result.shares or {}):
        text += f", {(result.shares or {})[STREAM]:.0%} {STREAM}"
    return text


def warn_busy(results: Sequence[Result]) -> None:
    """Warn on standard error if other programs kept the processors busy during the tests."""
    shares = [share for r in results if (share := r.processor_time_share) is not None]
    if warning := busy_warning(shares, ", so these speeds are too low; stop them and run again"):
        remark(warning)


def peaks_of(results: Sequence[Result]) -> list[str]:
    """Return a line for each peak, with its lowest and highest measurement among the results:
    ``int8 2.0 to 2.1 Top/s``.
    """
    lines = []
    for name in dict.fromkeys(name for r in results for name in r.peaks):
        unit = "B/s" if name in (BANDWIDTH, STREAM, CACHES) else "op/s"
        found = [r.peaks[name] for r in results if name in r.peaks]
        low = scaled(min(found), unit)
        high = scaled(max(found), unit)
        number, _, same_unit = low.partition(" ")
        both = high.partition(" ")[2] == same_unit
        lines.append(f"{name} {low if low == high else f'{number if both else low} to {high}'}")
    return lines

"""Profile of a forward pass: time of each step and each kind of step, and whether they add up.

A step's time runs from the end of the previous step to the end of its own last item; the thread
that finishes that item reads the clock. So waiting for the slowest thread counts for the step that
it works on, the hand-over counts for the next step, and no time between the first step's start and
the last one's end is omitted.

The whole pass is timed in separate runs, as a caller sees it: without those clock readings, and
with Python's work around the compiled loop (laying out the batch, waking the threads, copying
logits).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.cli.bench_engines import streams
from treadle.cli.speed import PassCost, Peaks, part_of
from treadle.cli.ui.progress import ProgressBar
from treadle.models.switch import without_control_tokens

RUNS = 7  # of steps and of whole passes each, after one to warm up


@dataclass(frozen=True)
class Profile:
    """Seconds of each step, by label, and of a whole pass."""

    seconds: Mapping[str, float]
    whole_s: float

    @property
    def sum_s(self) -> float:
        """Seconds of all steps."""
        return fsum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The sum of the steps' times over the whole pass's time."""
        return self.sum_s / self.whole_s


def profile_of(model: Any, n_tokens: int, depth: int, progress: ProgressBar) -> Profile:
    """Time a run of ``n_tokens`` after ``depth`` cached tokens: its steps, and the whole,
    alternately.
    """
    from treadle.api.model import BatchItem  # type: ignore[attr-defined]

    session = model.session()
    (ids,) = streams(1, depth + n_tokens, model.config.n_vocab)
    ids = without_control_tokens(model.config.switch, ids)
    writes = model.config.main_output == "logits"
    stamped: list[dict[str, float]] = []
    wholes: list[float] = []
    try:
        if depth:
            progress("processing the context", 0, 0)
            session.feed(ids[:depth])
        for i in range(RUNS + 1):
            progress("timing the steps", i, RUNS + 1)
            stamped.append(dict(model.engine.run_timed([BatchItem(session.seq, ids[depth:])])))
            session.truncate(depth)
            began = time.perf_counter()
            if writes:
                model.engine.run([BatchItem(session.seq, ids[depth:])])
            else:
                model.engine.embed([ids])
            wholes.append(time.perf_counter() - began)
            session.truncate(depth)
        progress("timing the steps", RUNS + 1, RUNS + 1)
    finally:
        session.close()
    return summary_of(stamped[1:], wholes[1:])


def summary_of(stamped: Sequence[Mapping[str, float]], wholes: Sequence[float]) -> Profile:
    """Return the mean of the faster half of the runs: ``stamped`` with seconds by step label,
    ``wholes`` with seconds of whole passes.

    Means of runs add up, medians of steps do not; the faster half, because other programs can only
    add time.
    """
    n = (len(stamped) + 1) // 2
    quick = sorted(stamped, key=lambda run: fsum(run.values()))[:n]
    seconds = {label: fsum(run[label] for run in quick) / n for label in quick[0]}
    return Profile(seconds, fsum(sorted(wholes)[:n]) / n)


def facts_of(
    steps: Sequence[Any], parts: Sequence[tuple[int, int]], profile: Profile | None, peaks: Peaks
) -> dict[str, Any]:
    """Return the bytes and operations of ``steps`` and, with a profile, their seconds, speeds and
    share of a peak, as JSON has them. ``parts``: (cached tokens, new tokens) of each sequence.
    """
    work = PassCost.of(steps, [(parts, 1)], peaks)
    facts: dict[str, Any] = {"n_bytes": work.n_bytes, "n_flops": work.ops}
    if profile is None:
        return facts
    seconds = fsum(profile.seconds[step.label] for step in steps)
    return facts | {
        "share_of_time": seconds / profile.sum_s,
        "seconds": seconds,
        "bytes_s": work.n_bytes / seconds,
        "ops_s": work.ops / seconds,
        "share_of_peak": work.share_of_peak(seconds),
        "peak": work.bound,
    }


def kinds_of(
    steps: Sequence[Any], profile: Profile, parts: Sequence[tuple[int, int]], peaks: Peaks
) -> list[dict[str, Any]]:
    """Return one object for each kind of step (``part_of``), the kind that took longest first:
    ``kind``, ``n_steps``, and the fields of ``facts_of`` for these steps together. ``parts``:
    (cached tokens, new tokens) of each sequence.
    """
    groups: dict[str, list[Any]] = {}
    for step in steps:
        groups.setdefault(part_of(step.kernel), []).append(step)
    rows = [
        {"kind": kind, "n_steps": len(members), **facts_of(members, parts, profile, peaks)}
        for kind, members in groups.items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))

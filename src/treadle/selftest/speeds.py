"""Speeds of prefill and of decoding compared with this machine's peak rates, and the time of each
kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.engine.batch import BatchItem
from treadle.models.switch import without_control_tokens
from treadle.selftest.batches import new_sequence

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.engine.engine import Engine
    from treadle.plan.plan import Plan

Progress = Callable[[str, int, int], None]
PROMPT = 512  # tokens
N_DECODED = 16
REPEATS = 3
MOST_S = 8.0  # seconds for one kind of run


@dataclass(frozen=True)
class Speed:
    """The speed of prefill (``kind`` "prompt", ``n_tokens`` in one run) or of decoding ("text", one
    token a run): the best of up to REPEATS measurements.

    tokens_s: tokens per second. bytes_s, ops_s: bytes of weights and pages read, and operations,
    per second. of_read, of_ops: bytes_s and ops_s as shares of the peak reading rate and of the
    highest peak of operations; None if the device has no such peak. kernels: seconds by kernel in
    the last run.
    """

    kind: str
    n_tokens: int
    tokens_s: float
    bytes_s: float
    ops_s: float
    of_read: float | None
    of_ops: float | None
    kernels: dict[str, float]


@dataclass(frozen=True)
class SpeedCheck:
    """The speeds ``runs``, and the peak rates measured just before, by name. ``cpu_share``: share
    of the requested processor time that the threads got while peaks of arithmetic were measured;
    below 0.9 other programs ran, and speeds say little. None for a device that reports its own
    peaks.
    """

    peaks: dict[str, float]
    cpu_share: float | None
    runs: list[Speed]


def measure_speeds(model: Model, progress: Progress | None = None) -> SpeedCheck:
    """Measure the device's peaks, then prefill and, unless the model is an encoder, decoding."""
    engine = model.engine
    device: Any = engine.device
    peaks: dict[str, float]
    share = None
    if hasattr(device, "peak_rates"):
        peaks = dict(device.peak_rates())
    else:
        from treadle.profiling.peaks import measure_peaks

        found = measure_peaks(device.isa, model.n_threads, progress=progress)
        peaks = found.as_dict()
        share = found.cpu_share
    runs = [_speed(engine, "prompt", peaks)]
    if engine.config.main_output == "logits":
        runs.append(_speed(engine, "text", peaks))
    return SpeedCheck(peaks, share, runs)


def _speed(engine: Engine, kind: str, peaks: dict[str, float]) -> Speed:
    rng = np.random.default_rng(5)
    of_logits = engine.config.main_output == "logits"
    n = min(PROMPT, engine.max_tokens, engine.n_ctx - N_DECODED - 2)
    drawn = rng.integers(0, engine.config.n_vocab, n).tolist()
    ids = without_control_tokens(engine.config.switch, drawn)
    best = np.inf
    began = time.perf_counter()
    times: dict[str, float] = {}
    plan: Plan | None = None
    history = 8
    for _ in range(REPEATS):
        with engine.lock:
            seq = new_sequence(engine)
            try:
                if kind == "text":
                    engine.run([BatchItem(seq, ids[:history], 0)])
                    start = time.perf_counter()
                    for token in ids[:N_DECODED]:
                        engine.run([BatchItem(seq, [token])])
                    best = min(best, (time.perf_counter() - start) / N_DECODED)
                    part = BatchItem(seq, ids[-1:])
                else:
                    part = BatchItem(seq, ids, int(of_logits))
                timed = time.perf_counter()
                steps = engine.run_timed([part])
                if kind != "text":
                    best = min(best, time.perf_counter() - timed)
                plan = engine.plan(len(part.ids), max(part.n_outputs, 1))
                times = _by_kernel(plan, steps)
            finally:
                seq.close()
                engine.cache.forget()
        if time.perf_counter() - began > MOST_S:
            break
    assert plan is not None
    n_tokens = 1 if kind == "text" else n
    before = history if kind == "text" else 0
    work = [step.cost([(before, n_tokens)], int(of_logits)) for step in plan.steps]
    n_bytes = sum(n for n, _ in work)
    n_ops = sum(n for _, n in work)
    read = peaks.get("bytes_s") or peaks.get("cache_bytes_s")
    most = max((peaks[name] for name in ("q8", "q16", "bf16", "f32") if name in peaks), default=0.0)
    return Speed(
        kind,
        n_tokens,
        n_tokens / best,
        n_bytes / best,
        n_ops / best,
        n_bytes / best / read if read else None,
        n_ops / best / most if most else None,
        times,
    )


def _by_kernel(plan: Plan, steps: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the seconds by kernel, from those of each step; ``steps``: label and seconds."""
    kernels = {step.label: step.kernel for step in plan.steps}
    found: dict[str, float] = {}
    for label, seconds in steps:
        found[kernels[label]] = found.get(kernels[label], 0.0) + seconds
    return found

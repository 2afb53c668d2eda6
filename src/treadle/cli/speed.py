"""Speeds, and what share they are of this machine's own measured peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_dataclass import dataclass

if TYPE_CHECKING:
    from treadle.api.model import Model

BANDWIDTH = "bandwidth"
STREAM = "stream"  # reading in one long stream a thread: what a model read in order can come to
CACHES = "caches"  # in place of BANDWIDTH where too little memory may be had to read beyond them
# A kernel's name has the kind of numbers it multiplies: which peak that is, as people call it.
ARITHMETIC = {"q8": "int8", "q16": "int16", "bf16": "bf16", "f32": "f32"}
NAMES = {
    "bytes_s": BANDWIDTH,
    "stream_bytes_s": STREAM,
    "cache_bytes_s": CACHES,
    **ARITHMETIC,
}  # of measured peaks
MATRIX = "matrix"  # how names of kernels on matrix registers end, which multiply bf16
SEVERAL = {"bf16x2": 3, "bf16x3": 6}  # and if a value is several of them, products made for one
PLAIN = "f32"  # what kernels whose name has none multiply
# Kernels that do one thing between them, as a profile sums them up.
PARTS = {"gemm": "matmul", "gated": "matmul", "gemv": "matmul", "merge": "attention"}
OF_BLOCKS = "simt", "tile"  # before that, where a kernel is for blocks of threads

Peaks = Mapping[
    str, float
]  # bytes a second of BANDWIDTH or CACHES, operations a second of the others
Parts = Sequence[tuple[int, int]]  # of one run: tokens held before, and tokens, of each sequence


def measured_peaks(model: Model, progress: Callable[[str, int, int], None] | None) -> Peaks:
    """Measure what this machine reaches at best, now, with the threads and instructions in use; of
    a device with memory of its own, what that says of itself.
    """
    device: Any = model.engine.device
    if hasattr(device, "peak_rates"):
        return {NAMES[name]: rate for name, rate in device.peak_rates().items()}
    from treadle.profiling.peaks import measure_peaks

    found = measure_peaks(model.isa, model.n_threads, progress=progress).as_dict()
    return {NAMES[name]: rate for name, rate in found.items()}


def reading(peaks: Iterable[str]) -> str:
    """The name of the peak of reading among ``peaks``: BANDWIDTH, or CACHES."""
    return CACHES if CACHES in peaks else BANDWIDTH


def alike(measured: Sequence[Peaks]) -> list[Peaks]:
    """Peaks of several moments under the same names: if one read from caches, none is trusted."""
    if not any(CACHES in peaks for peaks in measured):
        return list(measured)
    return [
        {CACHES if n == BANDWIDTH else n: rate for n, rate in p.items() if n != STREAM}
        for p in measured
    ]


def explain_caches(peaks: Iterable[str]) -> str | None:
    """What to know of a peak of CACHES, if that is among ``peaks``."""
    if CACHES not in peaks:
        return None
    from treadle.machine.memory import usable_memory

    usable = usable_memory()
    why = f": {usable.what}; {usable.cure}" if usable else ""
    return (
        "caches: no buffer larger than the caches may be had to measure memory with, so shares "
        f"of memory's bandwidth are in truth higher{why}"
    )


@dataclass(frozen=True)
class PassCost:
    """What forward passes cost, however fast: bytes read, operations, and the least time."""

    n_bytes: int
    n_ops: Mapping[str, int]  # by the peak that bounds them
    made: Mapping[str, int]  # the same, as many as the kernels make for them
    least_s: Mapping[str, float]  # of the steps that each peak bounds; empty without peaks
    peaks: Peaks

    @classmethod
    def of(cls, steps: Iterable[Any], runs: Iterable[tuple[Parts, int]], peaks: Peaks) -> PassCost:
        """Add up ``steps`` over ``runs``, each of some parts and a number of rows of logits."""
        steps, total_bytes, read = list(steps), 0, reading(peaks)
        total_ops: dict[str, int] = {}
        made: dict[str, int] = {}
        least_s: dict[str, float] = {}
        for parts, n_outputs in runs:
            for step in steps:
                n_bytes, n_ops = step.work(parts, n_outputs)
                kind = kind_of(step.kernel, peaks)
                total_bytes += n_bytes
                n_made = n_ops * products_of(step.kernel)
                if n_ops:
                    total_ops[kind] = total_ops.get(kind, 0) + n_ops
                    made[kind] = made.get(kind, 0) + n_made
                if peaks:
                    reading_s = n_bytes / peaks[read]
                    computing_s = n_made / peaks[kind] if kind in peaks else 0.0
                    bound = kind if computing_s > reading_s else read
                    least_s[bound] = least_s.get(bound, 0.0) + max(reading_s, computing_s)
        return cls(total_bytes, total_ops, made, least_s, peaks)

    @property
    def ops(self) -> int:
        """Operations of every kind."""
        return sum(self.n_ops.values())

    @property
    def bound(self) -> str | None:
        """The peak that most of the least time waits for; None where nothing is counted."""
        if not any(self.least_s.values()):
            return None
        return max(self.least_s, key=lambda name: self.least_s[name])

    def share_of_peak(self, seconds: float) -> float:
        """The least time that the steps could take here, over the time they took."""
        return sum(self.least_s.values()) / seconds

    def shares(self, seconds: float) -> dict[str, float]:
        """The share of each peak in use: bytes of the bandwidth and of the stream, operations of
        their kind's.
        """
        used = {reading(self.peaks): self.n_bytes, **self.made}
        used |= {STREAM: self.n_bytes} if STREAM in self.peaks else {}
        known = {name: n for name, n in used.items() if n and name in self.peaks}
        return {name: n / seconds / self.peaks[name] for name, n in known.items()}


def kind_of(kernel: str, peaks: Peaks) -> str:
    """The arithmetic peak that bounds ``kernel``: of the numbers it multiplies, where there is one.

    Only products are told by their names, and what works on matrix registers; what else has a type
    in its name works in f32.
    """
    words = kernel.split("_")
    if words[-1] == MATRIX and ARITHMETIC["bf16"] in peaks:
        return ARITHMETIC["bf16"]
    named = (kind for word in words for kind in ARITHMETIC if word.startswith(kind))
    kind = ARITHMETIC[next(named, PLAIN) if part_of(kernel) == "matmul" else PLAIN]
    return kind if kind in peaks or ARITHMETIC[PLAIN] not in peaks else ARITHMETIC[PLAIN]


def products_of(kernel: str) -> int:
    """How many products ``kernel`` makes for one, by the type in its name."""
    return next((SEVERAL[word] for word in kernel.split("_") if word in SEVERAL), 1)


def part_of(kernel: str) -> str:
    """What ``kernel`` does, as a profile sums it up: matmul, attention, norm, rope, pack, ..."""
    op = next(word for word in kernel.split("_") if word not in OF_BLOCKS)
    return PARTS.get(op, op)

"""Speeds as shares of this machine's measured peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass

if TYPE_CHECKING:
    from treadle.api.model import Model

BANDWIDTH = "bandwidth"
STREAM = "stream"  # one long sequential read per thread: the limit for weights read in order
CACHES = "caches"  # replaces BANDWIDTH if too little memory is available to read beyond the caches
# From the number type in a kernel's name to the name of its peak.
ARITHMETIC = {"q8": "int8", "q16": "int16", "bf16": "bf16", "f32": "f32"}
NAMES = {
    "bytes_s": BANDWIDTH,
    "stream_bytes_s": STREAM,
    "cache_bytes_s": CACHES,
    **ARITHMETIC,
}  # of measured peaks
MATRIX = "matrix"  # suffix of kernels that use matrix registers, which multiply bf16
SEVERAL = {"bf16x2": 3, "bf16x3": 6, "q8x2": 2}  # hardware products per product of split values
PLAIN = "f32"  # the number type of kernels without one in their name
# Kernels that a profile sums up under one name.
PARTS = {"gemm": "matmul", "gated": "matmul", "gemv": "matmul", "merge": "attention"}
GPU_PREFIXES = "simt", "tile"  # prefixes of the names of GPU kernels

Peaks = Mapping[
    str, float
]  # bytes a second of BANDWIDTH or CACHES, operations a second of the others
Parts = Sequence[tuple[int, int]]  # of one run: cached tokens and new tokens of each sequence


def measured_peaks(model: Model, progress: Callable[[str, int, int], None] | None) -> Peaks:
    """Return the peak rates of the model's device, measured now; see ``peaks_of``."""
    return peaks_of(model.engine.device, model.n_threads, progress)


def peaks_of(
    device: Any, n_threads: int, progress: Callable[[str, int, int], None] | None
) -> Peaks:
    """Return peak rates, measured now: by the device's ``peak_rates`` if it has that method (CUDA),
    else those of this machine's CPU with ``n_threads`` and the device's instruction set.
    """
    if hasattr(device, "peak_rates"):
        return {NAMES[name]: rate for name, rate in device.peak_rates().items()}
    from treadle.profiling.peaks import measure_peaks

    found = measure_peaks(device.isa, n_threads, progress=progress).as_dict()
    return {NAMES[name]: rate for name, rate in found.items()}


def reading(peaks: Iterable[str]) -> str:
    """Return the name under which ``peaks`` has the read bandwidth: BANDWIDTH or CACHES."""
    return CACHES if CACHES in peaks else BANDWIDTH


def alike(measured: Sequence[Peaks]) -> list[Peaks]:
    """Return peaks measured at several times under the same names: if any of them has CACHES, all
    use CACHES for BANDWIDTH, and none has STREAM.
    """
    if not any(CACHES in peaks for peaks in measured):
        return list(measured)
    return [
        {CACHES if n == BANDWIDTH else n: rate for n, rate in p.items() if n != STREAM}
        for p in measured
    ]


def explain_caches(peaks: Iterable[str]) -> str | None:
    """Return a sentence about the peak CACHES; None if it is not among ``peaks``."""
    if CACHES not in peaks:
        return None
    from treadle.machine.memory import usable_memory

    usable = usable_memory()
    why = f": {usable.what}; {usable.cure}" if usable else ""
    return (
        "caches: too little free memory to measure memory bandwidth, so the true shares of "
        f"bandwidth are higher{why}"
    )


@dataclass(frozen=True)
class PassCost:
    """Cost of forward passes, independent of their speed: bytes read, operations, and the least
    time that the measured peaks allow.
    """

    n_bytes: int
    n_ops: Mapping[str, int]  # by the peak that bounds them
    n_products: Mapping[str, int]  # the same in hardware products
    least_s: Mapping[str, float]  # by the peak that bounds each step; empty without peaks
    peaks: Peaks

    @classmethod
    def of(cls, steps: Iterable[Any], runs: Iterable[tuple[Parts, int]], peaks: Peaks) -> PassCost:
        """Add up the work of ``steps`` over ``runs``, each (parts, number of logits rows)."""
        steps = list(steps)
        total_bytes = 0
        read = reading(peaks)
        total_ops: dict[str, int] = {}
        n_products: dict[str, int] = {}
        least_s: dict[str, float] = {}
        for parts, n_outputs in runs:
            for step in steps:
                n_bytes, n_ops = step.cost(parts, n_outputs)
                kind = kind_of(step.kernel, peaks)
                total_bytes += n_bytes
                n_made = n_ops * products_of(step.kernel)
                if n_ops:
                    total_ops[kind] = total_ops.get(kind, 0) + n_ops
                    n_products[kind] = n_products.get(kind, 0) + n_made
                if peaks:
                    reading_s = n_bytes / peaks[read]
                    computing_s = n_made / peaks[kind] if kind in peaks else 0.0
                    bound = kind if computing_s > reading_s else read
                    least_s[bound] = least_s.get(bound, 0.0) + max(reading_s, computing_s)
        return cls(total_bytes, total_ops, n_products, least_s, peaks)

    @classmethod
    def sum_of(cls, costs: Sequence[PassCost]) -> PassCost:
        """Add up costs that were computed with the same peaks; at least one."""

        def total(sums: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
            made: dict[str, Any] = {}
            for each in sums:
                for name, n in each.items():
                    made[name] = made.get(name, 0) + n
            return made

        return cls(
            sum(cost.n_bytes for cost in costs),
            total(cost.n_ops for cost in costs),
            total(cost.n_products for cost in costs),
            total(cost.least_s for cost in costs),
            costs[0].peaks,
        )

    @property
    def ops(self) -> int:
        """Operations of all kinds together."""
        return sum(self.n_ops.values())

    @property
    def bound(self) -> str | None:
        """The name of the peak that accounts for most of the least time; None without peaks or
        work.
        """
        if not any(self.least_s.values()):
            return None
        return max(self.least_s, key=lambda name: self.least_s[name])

    def share_of_peak(self, seconds: float) -> float:
        """Return the least time that the peaks allow for this work, over ``seconds``, the time it
        took.
        """
        return sum(self.least_s.values()) / seconds

    def shares(self, seconds: float) -> dict[str, float]:
        """Return the share of each peak that was in use during ``seconds``: bytes against BANDWIDTH
        and STREAM, operations against the peak of their number type.
        """
        used = {reading(self.peaks): self.n_bytes, **self.n_products}
        used |= {STREAM: self.n_bytes} if STREAM in self.peaks else {}
        known = {name: n for name, n in used.items() if n and name in self.peaks}
        return {name: n / seconds / self.peaks[name] for name, n in known.items()}


def kind_of(kernel: str, peaks: Peaks) -> str:
    """Return the name of the arithmetic peak that applies to ``kernel``: that of the number type
    that it multiplies, if measured, else f32.

    Only names of matrix products and of kernels on matrix registers contain the type; all other
    kernels compute in f32.
    """
    words = kernel.split("_")
    if words[-1] == MATRIX and ARITHMETIC["bf16"] in peaks:
        return ARITHMETIC["bf16"]
    named = (kind for word in words for kind in ARITHMETIC if word.startswith(kind))
    kind = ARITHMETIC[next(named, PLAIN) if part_of(kernel) == "matmul" else PLAIN]
    return kind if kind in peaks or ARITHMETIC[PLAIN] not in peaks else ARITHMETIC[PLAIN]


def products_of(kernel: str) -> int:
    """Return how many hardware products ``kernel`` computes per product, as its name tells: several
    for values that are split into parts.
    """
    return next((SEVERAL[word] for word in kernel.split("_") if word in SEVERAL), 1)


def part_of(kernel: str) -> str:
    """Return the kind of step of ``kernel`` in a profile: matmul, attention, norm, rope, pack..."""
    op = next(word for word in kernel.split("_") if word not in GPU_PREFIXES)
    return PARTS.get(op, op)

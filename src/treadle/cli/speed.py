"""Speeds, and what share they are of this machine's own measured peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.model import Model

Peaks = Mapping[str, float]  # "bytes_s", and operations a second of each kind in KINDS

KINDS = ("q8", "bf16", "f32")  # of the numbers that a kernel multiplies; its name has one of them


def measured_peaks(model: Model, progress: Callable[[str, int, int], None] | None) -> Peaks:
    """Measure what this machine reaches at best, now, with the threads and instructions in use."""
    from treadle.runtime.peaks import measure_peaks

    return measure_peaks(model.isa, model.n_threads, progress=progress).as_dict()


@dataclass(frozen=True)
class Work:
    """What a forward pass costs, however fast: bytes of weights, operations, and the least time."""

    n_bytes: int
    n_ops: int
    least_s: float  # each step bound by this machine's memory or by its arithmetic

    @classmethod
    def of(cls, steps: Iterable[Any], n_tokens: int, n_passes: int, peaks: Peaks) -> Work:
        """Add up ``steps`` for ``n_tokens`` tokens, in ``n_passes`` passes over the weights."""
        total_bytes, total_ops, least_s = 0, 0, 0.0
        for step in steps:
            n_bytes, n_ops = step.n_bytes * n_passes, operations(step, n_tokens, n_passes)
            total_bytes += n_bytes
            total_ops += n_ops
            if peaks:
                op_s = peaks.get(kind_of(step.kernel), peaks["f32"])
                least_s += max(n_bytes / peaks["bytes_s"], n_ops / op_s)
        return cls(total_bytes, total_ops, least_s)


def operations(step: Any, n_tokens: int, n_passes: int = 1) -> int:
    """Count a step's operations; what works on outputs does so for one token of a pass."""
    count = n_passes if step.grid.count == "n_outputs" else n_tokens
    return int(step.n_flops) * count


def kind_of(kernel: str) -> str:
    """Name the kind of numbers that ``kernel`` multiplies; plain float32 if its name has none."""
    parts = kernel.split("_")
    return next((kind for kind in KINDS if kind in parts), "f32")

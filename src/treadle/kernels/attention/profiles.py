"""Biases of scores by distance that each query makes for itself (Inkling, 2026).

A layer has ``rank`` profiles, each a number for every distance back to ``reach``. A query mixes
them for each of its heads; a key farther back has no bias. The rows are made for all tokens of a
run before attention, which reads them at the distances of its keys.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.jit.language import Builder, Isa, Val
from treadle.jit.types import f32
from treadle.kernels.attention.records import PAGE
from treadle.kernels.spec import Args, Frame, Spec, widest


def profile_values(reach: int) -> int:
    """Return the f32 values of a head's row: those of the distances from the farthest one to 0, and
    on both sides as many zeros as a page has keys, so that a vector of keys can be clamped.
    """
    return reach + 2 * PAGE


def farthest(reach: int) -> int:
    """Return key - query, in tokens, of a row's first value."""
    return 1 - reach - PAGE


def by_place(profiles: np.ndarray) -> np.ndarray:
    """Return profiles ``[rank, reach]`` in the order of a row, whose distances end at 0."""
    return np.ascontiguousarray(profiles[:, ::-1], np.float32)


@dataclass(frozen=True)
class MixProfiles(Spec):
    """Rows of biases, f32 ``[N, n_head, profile_values(reach)]``, from mixes ``[N, n_head * rank]``
    at ``column`` of ``x`` and profiles ``[rank, reach]`` (``by_place``). Items: tokens x heads.
    """

    op: ClassVar[str] = "mix_profiles"
    args = Args("x:in profiles:const out:out stride column")
    n_head: int
    rank: int
    reach: int

    def build(self, k: Builder, isa: Isa, frame: Frame) -> None:
        width = widest(isa.lanes, self.reach)
        ty = f32 * width
        ends = f32 * widest(isa.lanes, PAGE)
        with k.loop(frame.end, start=frame.begin) as item:
            token = item // self.n_head
            head = item % self.n_head
            mix = frame.x + (token * frame.stride + frame.column + head * self.rank) * 4
            row = frame.out + item * (4 * profile_values(self.reach))

            def nothing(at: Val, row: Val = row) -> None:
                k.store(row, k.zero(ends), offset=at * 4)
                k.store(row, k.zero(ends), offset=at * 4 + 4 * (self.reach + PAGE))

            with k.loop(PAGE, step=ends.lanes) as at:
                nothing(at)
            with k.loop(self.reach, step=width) as at:
                total = k.var(k.zero(ty))
                with k.loop(self.rank) as d:
                    profile = frame.profiles + (d * self.reach + at) * 4
                    part = k.splat(k.load(mix, f32, offset=d * 4), ty)
                    total.v = k.fma(part, k.load(profile, ty, align=4), total.v)
                k.store(row, total.v, offset=at * 4 + 4 * PAGE)

    def run_ref(self, args: Any, run: Any) -> None:
        n = int(run["n_tokens"])
        width = self.n_head * self.rank
        mixes = args.x.reshape(-1, args.stride)[:n, args.column : args.column + width]
        profiles = args.profiles[: self.rank * self.reach].reshape(self.rank, self.reach)
        mixed = mixes.reshape(n, self.n_head, -1).astype(np.float64) @ profiles.astype(np.float64)
        rows = args.out[: n * self.n_head * profile_values(self.reach)]
        rows = rows.reshape(n, self.n_head, -1)
        rows[:] = 0.0
        rows[..., PAGE : PAGE + self.reach] = mixed

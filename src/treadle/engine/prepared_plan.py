"""A plan with its buffers placed; ``Device.ready`` compiles its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from treadle.engine.batch import RunInputs
from treadle.kernels.spec import MEDIA
from treadle.plan.plan import Buffer, DeviceMemory, Plan

if TYPE_CHECKING:
    from treadle.devices.protocol import Device


class PlanKey(NamedTuple):
    """One of an engine's plans: the most tokens and outputs of a batch, its output; with adapters
    or without, with rows of media or without, with control vectors (``steered``) or without.
    """

    n_tokens: int
    n_outputs: int
    output: str
    adapted: bool = False
    media: bool = False
    steered: bool = False


class PreparedPlan:
    """A prepared plan of one engine, with the inputs of its runs."""

    def __init__(self, plan: Plan, run: RunInputs) -> None:
        self.plan = plan
        self.run = run
        self.first_masked = plan.first_masked  # read in each run that has late masks

    def place(self, arena: DeviceMemory, device: Device) -> None:
        """Place the plan's buffers in ``arena``."""
        self.program = device.ready(self.plan, arena, self.run.memory)
        self.arena = arena

    def write_media(self) -> None:
        """Write the run's rows of media to the plan's buffer."""
        assert self.run.media is not None
        buffer = self.plan.takes[MEDIA]
        rows = self.run.media[: self.run["n_tokens"]]
        self.arena.write(self.plan.offsets[buffer], rows.reshape(-1).view(np.uint8))

    def rows(self, buffer: Buffer, n: int, columns: int) -> np.ndarray:
        """Return a buffer's first rows, float32 ``[n, columns]``; see ``DeviceMemory.read``."""
        return self.reader(buffer, n, columns)()

    def reader(self, buffer: Buffer, n: int, columns: int) -> Callable[[], np.ndarray]:
        """Return a function that reads the same later, even if the plan is moved to another
        arena.
        """
        arena = self.arena
        at = self.plan.offsets[buffer]
        row_bytes = buffer.row_bytes
        return lambda: np.ndarray(
            (n, columns), np.float32, arena.read(at, n * row_bytes), 0, (row_bytes, 4)
        )


def plan_sizes(
    n_tokens: int, n_outputs: int, sizes: Sequence[int], limits: tuple[int, int], many: int
) -> tuple[int, int]:
    """Return the token and output counts of the plan that serves such a batch: each is the next of
    ``sizes``, or its limit. Below ``many`` tokens a plan has one output or as many as tokens, so
    that a server can prepare all plans it may need at start.
    """

    def enough(n: int, most: int) -> int:
        return next((size for size in sizes if n <= size < most), most)

    tokens = enough(n_tokens, limits[0])
    if n_outputs > 1 and tokens < min(many, limits[0]):
        return tokens, tokens
    return tokens, enough(n_outputs, limits[1])

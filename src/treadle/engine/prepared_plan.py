"""A plan that is compiled and has its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.batch import RunInputs
from treadle.kernels.elementwise.top_logits import TopLogitsKernel
from treadle.plan.plan import Buffer, DeviceMemory, Plan

if TYPE_CHECKING:
    from treadle.devices.protocol import Device


class PreparedPlan:
    """A plan of one engine, and the inputs of its runs."""

    def __init__(self, plan: Plan, run: RunInputs) -> None:
        self.plan, self.run = plan, run
        masked = (i for i, step in enumerate(plan.steps) if isinstance(step.spec, TopLogitsKernel))
        self.first_masked = next(masked, len(plan.steps))

    def place(self, arena: DeviceMemory, device: Device) -> None:
        """Let its buffers be in ``arena`` from now on."""
        self.program, self.arena = device.ready(self.plan, arena, self.run.memory), arena

    def rows(self, buffer: Buffer, n: int, columns: int) -> np.ndarray:
        """The first rows of a buffer, float32 ``[n, columns]``; see ``DeviceMemory.read``."""
        return self.reader(buffer, n, columns)()

    def reader(self, buffer: Buffer, n: int, columns: int) -> Callable[[], np.ndarray]:
        """The same for later, though the plan may have another arena by then."""
        arena, at, row_bytes = self.arena, self.plan.offsets[buffer], buffer.row_bytes
        return lambda: np.ndarray(
            (n, columns), np.float32, arena.read(at, n * row_bytes), 0, (row_bytes, 4)
        )


def plan_sizes(
    n_tokens: int, n_outputs: int, sizes: Sequence[int], limits: tuple[int, int], many: int
) -> tuple[int, int]:
    """Tokens and outputs of the plan that serves such a batch: each the next of ``sizes``, or its
    limit. Of fewer tokens than ``many`` one is an output, or all may be: a server makes the plans
    that it may need before it begins.
    """

    def enough(n: int, most: int) -> int:
        return next((size for size in sizes if n <= size < most), most)

    tokens = enough(n_tokens, limits[0])
    if n_outputs > 1 and tokens < min(many, limits[0]):
        return tokens, tokens
    return tokens, enough(n_outputs, limits[1])

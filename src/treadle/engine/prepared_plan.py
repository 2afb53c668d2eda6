"""PreparedPlan: a plan whose buffers have memory and whose kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import NamedTuple
from treadle.engine.batch import RunInputs
from treadle.kernels.run_state import MEDIA
from treadle.plan.plan import Buffer, DeviceMemory, Plan

if TYPE_CHECKING:
    from treadle.devices.protocol import Device


class PlanKey(NamedTuple):
    """Key of one of an engine's plans.

    n_tokens, n_outputs: the most tokens and outputs of a batch.
    output: an output of the graph, such as "logits".
    adapted, media, steered: whether it supports adapters, rows of pictures and sound, control
        vectors.
    """

    n_tokens: int
    n_outputs: int
    output: str
    adapted: bool = False
    media: bool = False
    steered: bool = False


class PreparedPlan:
    """A compiled plan of one engine, with its place in memory and the inputs of its runs."""

    def __init__(self, plan: Plan, run: RunInputs) -> None:
        self.plan = plan
        self.run = run
        self.first_masked = plan.first_masked  # read in each run that has late masks

    def place(self, arena: DeviceMemory, device: Device) -> None:
        """Place the plan's buffers in ``arena``, and compile its kernels for these addresses."""
        self.program = device.ready(self.plan, arena, self.run.memory)
        self.arena = arena

    def write_media(self) -> None:
        """Write the batch's rows of pictures and sound into the plan's memory."""
        assert self.run.media is not None
        self.write(MEDIA, self.run.media[: self.run["n_tokens"]])

    def write(self, name: str, rows: np.ndarray, column: int = 0) -> None:
        """Write rows of an input into the plan's memory; see ``write_rows``."""
        write_rows(self.plan, self.arena, name, rows, column)

    def rows(self, buffer: Buffer, n: int, columns: int) -> np.ndarray:
        """Return the first ``n`` rows of a buffer, float32 ``[n, columns]``: a copy, or a view that
        is valid until the next run.
        """
        return self.reader(buffer, n, columns)()

    def reader(self, buffer: Buffer, n: int, columns: int) -> Callable[[], np.ndarray]:
        """Return a function without arguments that returns what ``rows`` returns for these, even if
        the plan has been moved to another arena by then.
        """
        arena = self.arena
        at = self.plan.offsets[buffer]
        row_bytes = buffer.row_bytes
        return lambda: np.ndarray(
            (n, columns), np.float32, arena.read(at, n * row_bytes), 0, (row_bytes, 4)
        )


def write_rows(
    plan: Plan, memory: DeviceMemory, name: str, rows: np.ndarray, column: int = 0
) -> None:
    """Write ``rows``, f32 ``[n, width]``, into the input ``name`` of ``plan``, whose buffers are in
    ``memory``: into the input's first ``n`` rows, from ``column`` on, with zeros in their other
    columns.
    """
    buffer = plan.takes[name]
    n, width = rows.shape
    if 4 * width < buffer.row_bytes:
        padded = np.zeros((n, buffer.row_bytes // 4), np.float32)
        padded[:, column : column + width] = rows
        rows = padded
    given = np.ascontiguousarray(rows, np.float32)
    memory.write(plan.offsets[buffer], given.reshape(-1).view(np.uint8))


def plan_sizes(
    n_tokens: int, n_outputs: int, sizes: Sequence[int], limits: tuple[int, int], many: int
) -> tuple[int, int]:
    """Return the token and output counts of the plan for a batch of ``n_tokens`` and ``n_outputs``:
    each is the next larger one of ``sizes``, at most its limit in ``limits`` (tokens, outputs). A
    plan for fewer than ``many`` tokens has one output or as many as tokens, so that a server can
    prepare all plans that it may need at its start.
    """

    def enough(n: int, most: int) -> int:
        return next((size for size in sizes if n <= size < most), most)

    tokens = enough(n_tokens, limits[0])
    if n_outputs > 1 and tokens < min(many, limits[0]):
        return tokens, tokens
    return tokens, enough(n_outputs, limits[1])

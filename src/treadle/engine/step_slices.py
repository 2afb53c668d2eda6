"""StepSlices: runs a plan in slices of time, so that others can use the device in between."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from treadle.kernels.run_state import round_up

if TYPE_CHECKING:
    from treadle.devices.protocol import Device, DeviceProgram

SLICE_S = 0.05  # seconds of work of a slice
MOST_PARTS = 32  # of a step; a first part, whose speed is unknown, is 1/MOST_PARTS of it
ITEMS_PER_THREAD = 4  # at least, of a part: at its end threads wait for the last item


class StepSlices:
    """Runs a program in slices of about SLICE_S seconds, by the measured speed of each kernel."""

    def __init__(self, device: Device, program: DeviceProgram) -> None:
        self._device = device
        self.program = program
        # By kernel: seconds of an item, and the rows of its run.
        self._seconds: dict[int, tuple[float, int]] = {}

    def run(self, n_rows: int, step: int, item: int) -> tuple[int, int]:
        """Run about SLICE_S seconds of work, from item ``item`` of step ``step`` on; return the
        step and the item to go on with. ``n_rows``: rows of the whole run.

        Steps with the same kernel are assumed to need the same time per item, which grows with the
        rows.
        """
        device = self._device
        program = self.program
        left = SLICE_S
        if not item:
            end = step
            while end < program.n_steps:
                seconds = self._step_seconds(end, n_rows)
                if seconds is None or seconds > left:
                    break
                left -= seconds
                end += 1
            if end > step:
                self._run_whole(range(step, end), n_rows)
                # What is left is for a part of the next step, unless it would be a short one.
                if end == program.n_steps or left < SLICE_S / 2 or seconds is None:
                    return end, 0
                step = end
        n_items = device.n_items(program, step)
        each = self._item_seconds(step, n_rows)
        n = max(-(-n_items // MOST_PARTS), ITEMS_PER_THREAD * device.n_threads)
        if each is not None:
            n = max(n, int(left / max(each, 1e-9)))
        n = round_up(n, device.n_threads)
        began = time.perf_counter()
        items = range(item, min(item + n, n_items))
        after = device.run_items(program, step, items)
        self._update_estimate(step, time.perf_counter() - began, after - item, n_rows)
        return (step, after) if after < n_items else (step + 1, 0)

    def _run_whole(self, steps: range, n_rows: int) -> None:
        """Run whole steps of a run with ``n_rows`` rows, and record their speeds."""
        times: list[float] = []
        self._device.run(self.program, steps, times=times)
        for step, taken in zip(steps, times, strict=True):
            self._update_estimate(step, taken, self._device.n_items(self.program, step), n_rows)

    def _step_seconds(self, step: int, n_rows: int) -> float | None:
        """Return an upper estimate of a step's seconds in a run with ``n_rows`` rows; None if its
        kernel was never run.
        """
        n_items = self._device.n_items(self.program, step)
        if not n_items:
            return 0.0
        each = self._item_seconds(step, n_rows)
        return None if each is None else each * n_items

    def _item_seconds(self, step: int, n_rows: int) -> float | None:
        """Return an upper estimate of the seconds of one item of a step in a run with ``n_rows``
        rows; None if its kernel was never run.
        """
        known = self._seconds.get(self._device.kernel_of(self.program, step))
        return None if known is None else known[0] * max(1.0, n_rows / known[1])

    def _update_estimate(self, step: int, taken: float, n_items: int, n_rows: int) -> None:
        if n_items:
            kernel = self._device.kernel_of(self.program, step)
            self._seconds[kernel] = taken / n_items, n_rows

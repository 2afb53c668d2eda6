"""Runs of plans in slices of time, so that others can use the device between two of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from treadle.kernels.spec import round_up

if TYPE_CHECKING:
    from treadle.devices.protocol import Device, DeviceProgram

SLICE_S = 0.05  # seconds of work of a slice
MOST_PARTS = 32  # of a step; the first part of one whose speed is not known is as small
ITEMS_PER_THREAD = 4  # at least, of a part: at its end threads wait for the last item


class StepSlices:
    """The speeds of a program's kernels, measured slice by slice."""

    def __init__(self, device: Device, program: DeviceProgram) -> None:
        self._device = device
        self.program = program
        # By kernel: seconds of an item, and the rows of its run.
        self._seconds: dict[int, tuple[float, int]] = {}

    def run(self, n_rows: int, step: int, item: int) -> tuple[int, int]:
        """Run about ``SLICE_S`` of work of a run of ``n_rows`` from an item of a step on; return
        the step and item behind it. Steps with the same kernel are assumed to need the same time
        per item, and in runs of more rows as much more.
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
        self._learn(step, time.perf_counter() - began, after - item, n_rows)
        return (step, after) if after < n_items else (step + 1, 0)

    def _run_whole(self, steps: range, n_rows: int) -> None:
        """Run whole steps and measure each."""
        times: list[float] = []
        self._device.run(self.program, steps, times=times)
        for step, taken in zip(steps, times, strict=True):
            self._learn(step, taken, self._device.n_items(self.program, step), n_rows)

    def _step_seconds(self, step: int, n_rows: int) -> float | None:
        """Return the seconds of a step, at most; None if its kernel has not been run."""
        n_items = self._device.n_items(self.program, step)
        if not n_items:
            return 0.0
        each = self._item_seconds(step, n_rows)
        return None if each is None else each * n_items

    def _item_seconds(self, step: int, n_rows: int) -> float | None:
        """Return the seconds of an item of a step, at most; None if its kernel has not been run."""
        known = self._seconds.get(self._device.kernel_of(self.program, step))
        return None if known is None else known[0] * max(1.0, n_rows / known[1])

    def _learn(self, step: int, taken: float, n_items: int, n_rows: int) -> None:
        if n_items:
            kernel = self._device.kernel_of(self.program, step)
            self._seconds[kernel] = taken / n_items, n_rows

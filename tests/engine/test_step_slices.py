"""Runs of plans in slices of time, on a device whose items take known times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from treadle.engine.step_slices import ITEMS_PER_THREAD, MOST_PARTS, SLICE_S, StepSlices


class TimedDevice:
    """Steps of so many items, each of so many seconds; ``clock`` is what has passed. A step's
    kernel is its place in ``items``, or the step that ``same`` has for it.
    """

    n_threads = 2

    def __init__(self, items: list[tuple[int, float]], same: dict[int, int] | None = None) -> None:
        self.items = items
        self.same = same or {}
        self.clock = 0.0
        self.done: list[tuple[int, int]] = []  # steps and items

    def n_items(self, program: object, step: int) -> int:
        return self.items[step][0]

    def kernel_of(self, program: object, step: int) -> int:
        return self.same.get(step, step)

    def run(self, program: object, steps: range, times: list[float]) -> None:
        for step in steps:
            self.run_items(program, step, range(self.items[step][0]))
            times.append(self.items[step][0] * self.items[step][1])

    def run_items(self, program: object, step: int, items: range) -> int:
        self.done += [(step, item) for item in items]
        self.clock += len(items) * self.items[step][1]
        return items.stop


def slices_of(device: TimedDevice, monkeypatch: pytest.MonkeyPatch) -> StepSlices:
    program = SimpleNamespace(n_steps=len(device.items))
    monkeypatch.setattr("time.perf_counter", lambda: device.clock)
    return StepSlices(cast("Any", device), cast("Any", program))


def run(slices: StepSlices, device: TimedDevice, n_rows: int = 1024) -> list[float]:
    """Run a whole program; return the seconds of each slice."""
    device.done.clear()
    taken = []
    at = (0, 0)
    while at[0] < len(device.items):
        began = device.clock
        at = slices.run(n_rows, *at)
        taken.append(device.clock - began)
    every = [(step, item) for step, (n, _) in enumerate(device.items) for item in range(n)]
    assert device.done == every  # each item once, in order
    return taken


def test_the_first_run_is_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TimedDevice([(64 * MOST_PARTS, 1e-4), (3, 1e-4)])
    slices = slices_of(device, monkeypatch)
    first = run(slices, device)
    assert first[0] == pytest.approx(64e-4)
    assert max(first[1:]) <= SLICE_S * 1.001


def test_slices_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps go together, a long one is cut, what is left behind short ones is used, and
    steps without items end no slice.
    """
    layer = [(100, 1e-4), (0, 0.0), (1000, 1e-4), (0, 0.0), (50, 1e-4)]
    device = TimedDevice(layer * 8, {i: i % 5 for i in range(40)})
    slices = slices_of(device, monkeypatch)
    run(slices, device)
    taken = run(slices, device)
    assert max(taken) <= SLICE_S * 1.001
    total = sum(n * each for n, each in device.items)
    assert len(taken) <= 1.5 * total / SLICE_S


def test_steps_without_items_are_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    device = TimedDevice([(0, 0.0)] * 5)
    slices = slices_of(device, monkeypatch)
    assert run(slices, device) == [0.0]


def test_a_part_has_items_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a part's end threads wait for the last item, so that fewer would be slow."""
    device = TimedDevice([(64, SLICE_S)])
    slices = slices_of(device, monkeypatch)
    n = ITEMS_PER_THREAD * device.n_threads
    assert run(slices, device) == pytest.approx([n * SLICE_S] * (64 // n))


def test_more_rows_take_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel measured with few rows is expected to need as much more with more of them."""
    device = TimedDevice([(400, 1e-4)])
    slices = slices_of(device, monkeypatch)
    run(slices, device, 256)
    assert len(run(slices, device, 256)) == 1
    device.items[0] = (400, 4e-4)
    assert max(run(slices, device, 1024)) <= SLICE_S + device.n_threads * 4e-4

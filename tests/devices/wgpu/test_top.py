"""The largest logits of long rows: several slices, ties, masks, NaN and infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.devices.wgpu.test_steps import check_top
from treadle.devices.wgpu.device import Wgpu
from treadle.engine.batch import Inputs
from treadle.kernels.elementwise.top_logits import PARTIAL, SLICE, JoinTop, TopLogitsKernel, slices
from treadle.kernels.run_state import RESULT, RUN_STATE, SAMPLED, run_offset
from treadle.kernels.spec import Grid
from treadle.plan.plan import Buffer, Plan, Step

INF = np.inf


def block_of(looks: list[tuple[int, np.ndarray | None, bool, bool]]) -> np.ndarray:
    """A run's block: SAMPLED records, and behind them masks of whole i64."""
    records = np.zeros(len(looks), SAMPLED)
    at = RUN_STATE.itemsize + records.nbytes
    masks = list[np.ndarray]()
    for record, (row, mask, first, total) in zip(records, looks, strict=True):
        record["row"] = row
        record["first"] = first
        record["total"] = total
        if mask is not None:
            bits = np.packbits(mask, bitorder="little")
            masks.append(np.pad(bits, (0, -len(bits) % 8)))
            record["mask"] = at
            at += masks[-1].nbytes
    state = np.zeros(1, RUN_STATE)
    state["sampled"], state["n_sampled"] = RUN_STATE.itemsize, len(looks)
    assert run_offset("sampled") == RUN_STATE.fields["sampled"][1]  # type: ignore[index]
    return np.concatenate([state.view(np.uint8), records.view(np.uint8), *masks])


def results(device: Wgpu, x: np.ndarray, looks: Any) -> np.ndarray:
    """RESULTs, held against the twins on the way."""
    (n_rows, k), n_slices = x.shape, slices(x.shape[1])
    stride = -(-k // 128) * 128
    rows = Buffer("x", n_rows, stride * 4)
    partials = Buffer("partials", len(looks) * n_slices, PARTIAL.itemsize, "u1")
    out = Buffer("out", len(looks), RESULT.itemsize, "u1")
    # All of them live to the end, to be looked at.
    plan = Plan(
        n_rows, n_rows, takes={"x": rows}, outputs={"x": rows, "partials": partials, "out": out}
    )
    plan.emit(
        Step(
            "top",
            TopLogitsKernel(),
            {"x": rows, "out": partials, "stride": stride, "n": k},
            Grid(n_slices, "n_sampled"),
        )
    )
    plan.emit(
        Step("join", JoinTop(), {"partials": partials, "out": out, "n": k}, Grid(1, "n_sampled"))
    )
    plan.place()
    block = block_of(looks)
    arena = device.memory(plan.arena_bytes)
    inputs = device.memory(len(block), host=True)
    assert inputs.bytes is not None
    inputs.bytes[: len(block)] = block
    memory = np.full(plan.arena_bytes, 0xFF, np.uint8)
    at = plan.offsets[rows]
    padded = np.full((n_rows, stride), np.nan, np.float32)
    padded[:, :k] = x
    memory[at : at + padded.nbytes] = padded.reshape(-1).view(np.uint8)
    arena.write(0, memory)
    assert device.run(device.ready(plan, arena, inputs))
    found = arena.read(0, plan.arena_bytes).copy()
    for buffer, dtype in ((partials, PARTIAL), (out, RESULT)):
        place = slice(plan.offsets[buffer], plan.offsets[buffer] + buffer.n_bytes)
        step = plan.steps[0 if dtype is PARTIAL else 1]
        twin = found.copy()
        twin[place] = 0xFF
        with np.errstate(invalid="ignore"):
            step.spec.run_ref(plan.arrays(step, twin), Inputs(block))
        check_top(dtype, found[place], twin[place])
    made: np.ndarray = found[plan.offsets[out] :][: len(looks) * RESULT.itemsize].view(RESULT)
    return made


@pytest.mark.parametrize("k", [40, SLICE + 100, 3 * SLICE])
def test_the_largest_of_long_rows(k: int, device: Wgpu) -> None:
    rng = np.random.default_rng(k)
    x = rng.standard_normal((3, k)).astype(np.float32) * 4
    x[1] = np.round(x[1])  # many ties
    x[2, :7] = [INF, -INF, 0.0, -0.0, INF, 3.0, -INF]
    mask = rng.random(k) < 0.3
    mask[5] = True
    looks = [
        (0, None, False, True),
        (0, mask, False, True),
        (1, None, False, True),
        (1, None, True, True),
        (1, mask, True, False),
        (2, None, False, False),
        (2, None, True, False),
    ]
    made = results(device, x, looks)
    best = np.argsort(-x[1].astype(np.float64), kind="stable")[: min(64, k)]
    assert made["ids"][2][: len(best)].tolist() == best.tolist()
    assert made["values"][5][:2].tolist() == [INF, INF]
    assert made["ids"][5][:2].tolist() == [0, 4]


def test_a_nan_shows_first(device: Wgpu) -> None:
    x = np.random.default_rng(1).standard_normal((1, 300)).astype(np.float32)
    x[0, 77] = np.nan
    none = np.zeros(300, bool)
    made = results(device, x, [(0, None, False, False), (0, none, True, False)])
    assert made["ids"][:, 0].tolist() == [77, 77]
    assert np.isnan(made["values"][:, 0]).all()

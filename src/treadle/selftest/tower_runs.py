"""Plans of a model's towers (encoders of pictures and sound) with random rows, to be run step by
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from treadle.media.tower_engine import RunItem, TowerEngine
from treadle.selftest.kernel_check import PlanRun

if TYPE_CHECKING:
    from treadle.api.model import Model

ROWS = 144  # rows of a run: a grid of 12 by 12, which 2, 3 and 4 divide


def tower_runs(model: Model) -> Iterator[PlanRun]:
    """Yield a run, with random rows, of each plan of the model's towers and projectors; none
    without them.
    """
    media = model.media
    if media is None:
        return
    rng = np.random.default_rng(0)
    for tower in media.projector.towers.values():
        for engine in (tower.engine, *tower.projectors):
            with model.engine.lock:
                yield tower_run(engine, rng)


def tower_run(engine: TowerEngine, rng: np.random.Generator, n_rows: int = ROWS) -> PlanRun:
    """Return a run of a tower's plan for ``n_rows`` rows; its function ``before`` writes random
    rows as inputs.
    """
    ready = engine.plan_for(n_rows)
    plan = ready.plan
    windows = tuple(range(0, n_rows, 48))
    ropes = []
    i = 0
    while (given := plan.inputs.get(f"rope{i or ''}")) is not None:
        angles = rng.uniform(0, 100, (n_rows, given.shape[-1]))
        ropes.append(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))
        i += 1
    ready.inputs.lay_out([RunItem(n_rows, windows)], ropes)

    def write() -> None:
        for name, buffer in plan.takes.items():
            width = buffer.row_bytes // 4
            ready.write(name, rng.standard_normal((n_rows, width)).astype(np.float32))

    device = engine.device
    name = f"{engine.config.arch.name}, {n_rows} rows"
    return PlanRun(device, plan, ready.program, ready.arena, ready.inputs, name, write)

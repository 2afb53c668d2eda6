"""A model's logits by the numpy twins of its kernels: nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.engine.batch import BatchItem
    from treadle.engine.engine import Engine
    from treadle.plan.plan import Plan


def logits_of_twins(engine: Engine, parts: Sequence[BatchItem]) -> tuple[Plan, np.ndarray]:
    """The plan of a batch, and its logits ``[n_outputs, n_vocab]``."""
    plan, arena = engine.run_reference(parts)
    logits = plan.outputs["logits"]
    at = plan.offsets[logits]
    n = sum(part.n_outputs for part in parts)
    rows = arena[at : at + n * logits.row_bytes].view(np.float32).reshape(n, -1)
    return plan, rows[:, : engine.config.n_vocab]

"""Lines of a batch file, answered by several models, on Ray Data: each takes some lines at a time.

The order is kept, and what is answered is written by one process, as ``treadle batch`` does it on
one machine. When a model's process dies, its lines are answered anew by another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import ray.data

from treadle.server.batch_file.lines import InputLine
from treadle.server.batch_file.local import LocalAnswers
from treadle.server.batch_file.work import OutputLine, work
from treadle.server.requests.service import Service

if TYPE_CHECKING:
    from treadle.distributed.cluster.plan import ReplicaPlan

SLICE = 50_000  # lines that are in memory at once; the models are loaded anew for each
AT_ONCE = 64  # lines that a model is given: they share its batches


class Answerer:
    """One model, in an actor of Ray Data's."""

    def __init__(self, plan: ReplicaPlan, defaults: Mapping[str, Any]) -> None:
        self._model = plan.open()
        self._local = LocalAnswers(Service(self._model, plan.settings), defaults)
        asyncio.run(self._local.ready())

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Rows of lines to rows of answers."""
        lines = [
            InputLine(int(number), bytes(raw))
            for number, raw in zip(batch["number"], batch["raw"], strict=True)
        ]
        made: list[OutputLine] = []
        asyncio.run(work(iter(lines), self._local.answer, made.append))
        return {
            "data": np.array([written.data for written in made], object),
            "n_tokens": np.array([written.n_tokens for written in made]),
            "failed": np.array([written.failed for written in made]),
        }


def answers(
    lines: Iterator[InputLine], plan: ReplicaPlan, defaults: Mapping[str, Any]
) -> Iterator[OutputLine]:
    """The answers of ``plan.replicas`` models, in the order of the lines."""
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    while some := list(islice(lines, SLICE)):
        items = [{"number": line.number, "raw": line.raw} for line in some]
        rows = ray.data.from_items(items, override_num_blocks=-(-len(items) // AT_ONCE))
        made = rows.map_batches(
            Answerer,
            fn_constructor_args=(plan, dict(defaults)),
            batch_size=AT_ONCE,
            compute=ray.data.ActorPoolStrategy(size=plan.replicas),
            num_cpus=plan.cpus,
        )
        for row in made.iter_rows():
            yield OutputLine(bytes(row["data"]), int(row["n_tokens"]), bool(row["failed"]))

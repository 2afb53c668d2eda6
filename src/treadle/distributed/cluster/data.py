"""Answers the lines of a batch file with several replicas of a model, on Ray Data.

Each call of a replica gets AT_ONCE lines. The order is kept, and one process writes the answers, as
``treadle batch`` does on one machine. If a replica's process dies, another one answers its lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
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

SLICE = 50_000  # lines in memory at once; each slice loads the models again
SLICE_BYTES = 4 << 30  # of these lines: a line of pictures may have 64 MiB
AT_ONCE = 64  # lines per call of a model, which share its batches


class Answerer:
    """One model in a Ray Data actor, which answers lines of a batch file. ``defaults``: fields of
    requests that a line does not set.
    """

    def __init__(self, plan: ReplicaPlan, defaults: Mapping[str, Any]) -> None:
        self._model = plan.open()
        self._local = LocalAnswers(Service(self._model, plan.settings), defaults)
        asyncio.run(self._local.ready())

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Answer a batch of lines. Columns in: ``number`` of the line and ``raw``, its bytes; out:
        ``data`` (the bytes of the answer's line), ``n_tokens``, and ``failed``, in the order of the
        lines.
        """
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


def next_slice(lines: Iterator[InputLine]) -> list[InputLine]:
    """Return the next lines: at most SLICE, and none after the line with which they have
    SLICE_BYTES; [] at the end.
    """
    some: list[InputLine] = []
    n_bytes = 0
    while len(some) < SLICE and n_bytes < SLICE_BYTES and (line := next(lines, None)):
        some.append(line)
        n_bytes += len(line.raw)
    return some


def answers(
    lines: Iterator[InputLine], plan: ReplicaPlan, defaults: Mapping[str, Any]
) -> Iterator[OutputLine]:
    """Yield the answers to ``lines``, in their order, computed by ``plan.replicas`` replicas.
    ``defaults``: see ``Answerer``.
    """
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    while some := next_slice(lines):
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

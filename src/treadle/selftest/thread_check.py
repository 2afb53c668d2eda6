"""Checks that results have the same bits on any number of threads, whichever thread takes which
work item.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.engine.text_encoder import TextEncoder
from treadle.machine.topology import affinity
from treadle.selftest.batches import new_sequence

if TYPE_CHECKING:
    from treadle.api.model import Model

PROMPT = 41  # tokens: more than any plan for few but the largest
N_DECODED = 4
REPEATS = 3  # of each run: threads race for items in another order each time
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ThreadCheck:
    """The result of running the same texts on each of ``counts`` threads; ``n_values`` values were
    compared.

    problem: the first difference, in a sentence; empty if there is none. skipped: why the check did
    not run; empty if it did.
    """

    counts: tuple[int, ...]
    n_values: int
    problem: str = ""
    skipped: str = ""


def check_threads(
    model: Model, *, quick: bool = False, progress: Progress | None = None
) -> ThreadCheck:
    """Compare the logits of a prompt and of N_DECODED tokens after it, or an encoder's vector, bit
    by bit between the thread counts of ``thread_counts``. Skipped if the device is not the CPU.
    ``quick``: one run on each count, not REPEATS.
    """
    from treadle.devices.cpu.device import Cpu

    ours = model.engine.device
    if not isinstance(ours, Cpu):
        return ThreadCheck((), 0, skipped=f"{ours.isa.name} has no threads of ours")
    counts = thread_counts(model.n_threads)
    device_type = type(ours)

    @contextmanager
    def engine_of(n_threads: int) -> Iterator[Engine]:
        kv = model.engine.cache.kv
        n_ctx = min(model.n_ctx, 2 * PROMPT)
        device = device_type(ours.isa, n_threads)
        made = Engine(model.gguf, model.config, device, n_ctx=n_ctx, kv=kv)
        with closing(made):
            if model.engine.encoder is not None:
                made.encoder = TextEncoder(made)
            yield made

    results = []
    for i, n in enumerate(counts):
        if progress is not None:
            progress("check threads", i, len(counts))
        with engine_of(n) as engine:
            results += [(n, run) for run in runs_of(engine, 1 if quick else REPEATS)]
    if progress is not None:
        progress("check threads", len(counts), len(counts))
    return compared(results, counts)


def thread_counts(n_threads: int) -> tuple[int, ...]:
    """Return the thread counts to compare, ascending: 1, 2, ``n_threads`` and the number of usable
    processors.
    """
    return tuple(sorted({1, 2, n_threads, len(affinity())}))


def runs_of(engine: Engine, repeats: int) -> Iterator[np.ndarray]:
    """Run the same random text ``repeats`` times. Yield each run's result: the logits of the prompt
    and of each decoded token, f32 ``[1 + N_DECODED, n_vocab]``, or an encoder's vector.
    """
    rng = np.random.default_rng(7)
    n = min(PROMPT, engine.n_ctx - N_DECODED - 1)
    ids = rng.integers(0, engine.config.n_vocab, n + N_DECODED).tolist()
    for _ in range(repeats):
        if engine.config.main_output != "logits":
            yield engine.embed([ids[:n]])
            continue
        seq = new_sequence(engine)
        try:
            rows = []
            for part in (ids[:n], *([token] for token in ids[n:])):
                with engine.lock:
                    rows.append(engine.run([BatchItem(seq, part)])[-1].copy())
            yield np.stack(rows)
        finally:
            seq.close()
            engine.cache.forget()  # the next run computes the prompt again


def compared(results: Sequence[tuple[int, np.ndarray]], counts: Sequence[int]) -> ThreadCheck:
    """Compare ``results``, each a thread count and its values f32, bit by bit with the first of
    them.
    """
    first = results[0][1]
    problem = ""
    for n_threads, found in results:
        differ = (found.view(np.uint32) != first.view(np.uint32)).any(-1)
        if differ.any() and not problem:
            run = int(np.flatnonzero(differ)[0])
            what = "the prompt's result" if run == 0 else f"decoded token {run}"
            row = int(np.flatnonzero(found[run].view(np.uint32) != first[run].view(np.uint32))[0])
            problem = (
                f"{n_threads} threads give other bits than {results[0][0]}: {what}, value {row}: "
                f"{found[run][row]:.9g}, expected {first[run][row]:.9g}"
            )
    return ThreadCheck(tuple(counts), sum(found.size for _, found in results), problem)

"""An engine without a model: real pages, a clock of its own, and ids as a function says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.kvcache.test_cache import CPU, SEEN, check_pages, specs
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.kvcache.cache import KVCache
from treadle.scheduler.scheduler import Scheduler

EOG = 256
BOS = 257
N_VOCAB = 100_000


class Bytes:
    """A tokenizer whose tokens are pieces of text: 0 to 255 are bytes, more are given."""

    adds_space = False
    eog = frozenset({EOG})

    def __init__(self, pieces: Sequence[str] = ()) -> None:
        self.pieces = [bytes([i]) for i in range(256)] + [b"", b""]
        self.pieces += [piece.encode() for piece in pieces]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_control(self, token: int) -> bool:
        return token in (EOG, BOS)

    is_special = is_control


class FakeEngine:
    """``next_id(ids)`` says what comes behind ``ids``: a row of logits is this one number.

    A run takes ``cost(prefill, decode, context)`` seconds of ``now``.
    """

    def __init__(
        self,
        next_id: Callable[[list[int]], int],
        *,
        n_ctx: int = 10_000,
        n_sequences: int = 1,
        window: int = 0,
        max_tokens: int = 512,
        cost: Callable[[int, int, int], float] = lambda prefill, decode, context: 0.01,
    ) -> None:
        self.next_id = next_id
        self.cost = cost
        self.n_ctx = n_ctx
        self.max_tokens = max_tokens
        self.now = 0.0
        self.cache: Any = KVCache(
            specs(0, window) if window else SEEN, CPU, n_ctx, n_sequences=n_sequences
        )
        self.few: list[int] = []
        self.kernels, self.lock = SimpleNamespace(seconds=0.0), threading.RLock()
        self.config = SimpleNamespace(n_vocab=N_VOCAB)
        self.runs: list[list[tuple[list[int], int]]] = []  # the ids of each part, and those before

    @property
    def batches(self) -> list[list[int]]:
        """How many tokens each part of each run had."""
        return [[len(ids) for ids, _ in run] for run in self.runs]

    def clock(self) -> float:
        return self.now

    media: Any = Engine.media
    check_ids: Any = Engine.check_ids
    match: Any = Engine.match
    truncate: Any = Engine.truncate

    def run(self, parts: Sequence[BatchItem]) -> np.ndarray:
        sizes = [len(part.ids) for part in parts]
        assert 0 < sum(sizes) <= self.max_tokens
        assert sum(part.n_outputs for part in parts) <= OUTPUTS
        assert len({id(part.seq) for part in parts}) == len(parts)
        assert all(0 <= part.n_outputs <= len(part.ids) for part in parts)
        before = [len(part.seq) for part in parts]
        for part in parts:
            self.cache.extend(part.seq, part.ids)
        for part in parts:
            self.cache.commit(part.seq)
        decode = sum(len(part.ids) for part in parts if len(part.ids) == part.n_outputs)
        context = sum(n * at for n, at in zip(sizes, before, strict=True))
        self.now += self.cost(sum(sizes) - decode, decode, context)
        self.runs.append([(list(p.ids), at) for p, at in zip(parts, before, strict=True)])
        ends = ((p.seq.ids, len(p.seq) - i) for p in parts for i in range(p.n_outputs - 1, -1, -1))
        return np.array([[self.next_id(ids[:end])] for ids, end in ends]).reshape(-1, 1)

    def sample(self, parts: Sequence[BatchItem], *_: Any) -> np.ndarray:
        return self.run(parts)


def check_scheduler(scheduler: Scheduler, *others: Any) -> None:
    """Pages are counted right, and nothing is held or reserved for nobody."""
    scheduler.process_inbox()
    held = [request.seq for request in scheduler.queue.running if request.session is None]
    check_pages(scheduler.engine.cache, [*held, *others])  # type: ignore[list-item]

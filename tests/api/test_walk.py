"""A random walk over sessions and texts of a model in few pages, with Ctrl-C now and then: every
logit and every text is, to the bit, that of the same ids alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.engine.test_engine import pressed_in_a_run
from tests.scheduler.fake_engine import check_scheduler
from tests.spec_decode.test_draft_model import Always
from treadle.api.session import Session
from treadle.errors import NoRoomError

N_CTX = 130
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"window": 16, "n_layer": 6},
    "qwen3moe": {"n_expert": 4, "n_ff_exp": 32},
    "qwen35": {},  # some layers keep a state
    "mamba2": {},  # all do
    "deepseek2": {},  # latent attention
}


class Walk:
    def __init__(self, model: treadle.Model, seed: int) -> None:
        self.model, self.rng = model, random.Random(seed)
        self.sessions: list[Session] = []
        self.texts: list[tuple[treadle.Generation, dict[str, Any]]] = []
        self.checks: list[Callable[[], object]] = []  # against the truth, once all is over
        ids = [[self.rng.randrange(3, 250) for _ in range(N_CTX)] for _ in range(2)]
        self.families = [*ids, [*ids[0][:70], *ids[1][70:]], ids[0][:5] * 26]
        self.truth: dict[tuple[int, ...], np.ndarray] = {}

    def ids(self) -> list[int]:
        n = self.rng.choice([self.rng.randint(1, N_CTX), 31, 32, 33, 64, 97, N_CTX])
        return self.rng.choice(self.families)[:n]

    def session(self) -> Session:
        if len(self.sessions) < 2:
            self.sessions.append(self.model.session())
        return self.rng.choice(self.sessions)

    def expect(self, rows: np.ndarray, ids: list[int]) -> None:
        self.checks.append(lambda: self._compare(rows, ids))

    def _compare(self, rows: np.ndarray, ids: list[int]) -> None:
        key = tuple(ids)
        if key not in self.truth:
            self.model.engine.cache.forget()
            self.truth[key] = self.model.logits(ids)
        rows = rows.reshape(-1, rows.shape[-1])
        assert np.array_equal(rows, self.truth[key][-len(rows) :])

    # -- what is done --------------------------------------------------------------------------

    def prefill(self) -> None:
        session = self.session()
        ids = self.ids()
        self.expect(session.prefill(ids), ids)

    def feed(self) -> None:
        session = self.session()
        more = self.ids()[: min(self.rng.choice([1, 3, 40]), N_CTX - session.n_past)]
        ids = [*session.ids, *more]
        if more:
            every = self.rng.random() < 0.5
            self.expect(session.logits(more) if every else session.feed(more), ids)

    def truncate(self) -> None:
        session = self.session()
        session.truncate(self.rng.randint(0, session.n_past))

    def close(self) -> None:
        session = self.session()
        self.sessions.remove(session)
        self.rng.choice([session.close, session.retire])()

    def begin(self) -> None:
        asked: dict[str, Any] = {"prompt": self.ids(), "max_tokens": self.rng.choice([1, 7, 40])}
        asked |= {"temperature": self.rng.choice([0, 0.8]), "seed": self.rng.randrange(9)}
        session = self.rng.choice([None, self.session()])
        anew = self.rng.random() < 0.2
        end = (0, 70, 77)[len(self.texts) % 3]  # of the system prompt; the truth needs none
        more: dict[str, Any] = {"session": session, "cache_prompt": not anew, "system_end": end}
        made = self.model.generate(**asked, **more)
        self.texts.append((made, asked))

    def read(self) -> None:
        if self.texts:
            made, _ = self.rng.choice(self.texts)
            for _ in range(self.rng.randint(1, 9)):
                next(made, None)

    def drop(self) -> None:
        if len(self.texts) > 3:
            made, asked = self.texts.pop(self.rng.randrange(len(self.texts)))
            self.rng.choice([made.close, made.finish])()
            self.checks.append(lambda: self._compare_text(made, asked))

    def _compare_text(self, made: treadle.Generation, asked: dict[str, Any]) -> None:
        self.model.engine.cache.forget()
        alone = self.model.generate(**asked)
        alone.finish()
        assert made.ids == alone.ids[: len(made.ids)]
        assert made.finish_reason in (None, alone.finish_reason)
        assert made.finish_reason is None or len(made.ids) == len(alone.ids)

    def go(self, n_steps: int) -> None:
        every = (self.prefill, self.feed, self.truncate, self.begin, self.read, self.drop)
        for _ in range(n_steps):
            step = self.rng.choice((*every, *every, self.close))
            pressed: AbstractContextManager[object] = nullcontext()
            if self.rng.random() < 0.2:
                pressed = pressed_in_a_run(self.model.engine)
            with pressed, suppress(KeyboardInterrupt, NoRoomError):
                step()
            check_scheduler(self.model.stepper.scheduler, *(s.seq for s in self.sessions))
        for made, _ in self.texts:
            made.close()
        for session in self.sessions:
            session.close()
        for check in self.checks:
            check()
        cache = self.model.engine.cache
        cache.forget()
        assert all(len(pool.free) == pool.n_pages and not pool.reserved for pool in cache.pools)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: WriteTiny) -> Iterator[treadle.Model]:
    path = tiny(request.param, **MODELS[request.param])
    settings: dict[str, Any] = {"deterministic": True, "speculate": True, "n_sequences": 2}
    with treadle.load(path, threads=2, context=N_CTX, **settings) as model:
        model.stepper.scheduler.drafting.controller = Always()
        model.logits([5] * 40)  # its team is there
        yield model


@pytest.mark.parametrize("seed", range(2))
def test_a_walk(model: treadle.Model, seed: int) -> None:
    walk = Walk(model, seed)
    walk.go(60)
    assert len(walk.checks) > 10

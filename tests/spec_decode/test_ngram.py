"""Drafts change how long a text takes, and nothing of the text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import treadle
from tests.conftest import WriteTiny
from tests.kvcache.test_cache import check_pages
from tests.scheduler.fake_engine import Bytes, FakeEngine, check_scheduler
from treadle.api.session import Session
from treadle.engine.batch import MOST_DRAFTED
from treadle.grammar.grammar import Grammar
from treadle.kernels.run_state import PAGE
from treadle.scheduler.output import RequestOutput
from treadle.scheduler.request import Request
from treadle.scheduler.scheduler import Scheduler
from treadle.spec_decode.ngram import (
    LOSS,
    RECENT,
    STALE_STEPS,
    WIDTH,
    AcceptanceTracker,
    Draft,
    DraftController,
    Lookup,
)


def repeating(ids: Sequence[int]) -> int:
    """A text that repeats itself, but for a new id now and then."""
    if len(ids) % 23 == 0 or len(ids) < 12:
        return (sum(ids[-40:]) * 31 + len(ids) * 7) % 250
    return ids[-9] % 250


def fresh(ids: Sequence[int]) -> int:
    """A text whose beginnings of repeats go on otherwise: every draft is wrong."""
    n = len(ids)
    return 250 if n % 4 else (n // 4) % 250


class World:
    """An engine and its scheduler; ``cost`` of a step by its tokens, in seconds."""

    def __init__(self, next_id: Any, cost: Any = None, **given: Any) -> None:
        cost = cost or (lambda prefill, n, context: 0.03 + 0.002 * n + 0.001 * prefill)
        self.next_id = next_id
        self.engine = FakeEngine(next_id, cost=cost, **{"n_ctx": 40 * PAGE, **given})
        engine: Any = self.engine
        self.scheduler = Scheduler(engine, clock=self.engine.clock)

    def sample(self, logits: np.ndarray, ids: list[int]) -> int:
        assert int(logits[0]) == self.next_id(ids)
        return int(logits[0])

    def add(self, prompt: list[int], n: int, *, speculate: bool = True, **given: Any) -> Request:
        answer = RequestOutput(Bytes(), prompt, n_ctx=self.engine.n_ctx, max_tokens=n)  # type: ignore[arg-type]
        sampler: Any = SimpleNamespace(choose=self.sample, query=lambda n: None, forced=list)
        made = Request(prompt, sampler, answer, speculate=speculate, **given)
        self.scheduler.add(made)
        return made

    def run(self) -> None:
        while not self.scheduler.idle:
            self.scheduler.step()
        check_scheduler(self.scheduler)


def alone(world: World, prompt: list[int], n: int) -> list[int]:
    ids = list(prompt)
    for _ in range(n):
        ids.append(world.next_id(ids))
    return ids


@settings(max_examples=40, deadline=None)
@given(data=st.data(), window=st.sampled_from([0, 40]))
def test_texts_are_those_without_drafts(data: st.DataObject, window: int) -> None:
    """Several texts, that come and are cancelled in the middle, in few pages."""
    world = World(repeating, window=window, n_ctx=12 * PAGE, n_sequences=2)
    asked: list[tuple[Request, list[int], int]] = []
    for _ in range(data.draw(st.integers(1, 5))):
        prompt = [i * 7 % 50 for i in range(data.draw(st.integers(1, 90)))]
        n = data.draw(st.integers(1, 200))
        speculate = data.draw(st.booleans())
        asked.append((world.add(prompt, n, speculate=speculate), prompt, n))
        for _ in range(data.draw(st.integers(0, 30))):
            world.scheduler.step()
            check_scheduler(world.scheduler)
    lost = data.draw(st.sampled_from(asked))[0] if data.draw(st.booleans()) else None
    if lost is not None and not lost.answer.done:
        world.scheduler.cancel(lost)
    world.run()
    for request, prompt, n in asked:
        if request is not lost:
            assert request.answer.error is None
            assert request.ids == alone(world, prompt, n)
        else:
            assert request.ids == alone(world, prompt, len(request.answer.ids))


@pytest.mark.parametrize("window", [0, 40])
def test_a_text_that_repeats_itself_takes_fewer_steps(window: int) -> None:
    times = []
    for speculate in (False, True):
        world = World(repeating, window=window)
        request = world.add([1, 2, 3], 600, speculate=speculate)
        world.run()
        times.append(world.engine.now)
        timings = request.answer.timings
        assert (timings.n_accepted > 300) == speculate
        assert 0 <= timings.n_accepted <= timings.n_drafted
    assert times[0] > 1.6 * times[1]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("each", [0.002, 0.03])
def test_drafts_that_are_wrong_cost_at_most_3_per_cent(n: int, each: float) -> None:
    """Where another token in a step costs little, and where it costs as much as a step."""
    times = []
    for speculate in (False, True):
        world = World(fresh, lambda prefill, n, context: 0.03 + each * n)
        asked = [world.add([i], 300, speculate=speculate) for i in range(n)]
        world.run()
        times.append(world.engine.now)
        if speculate and each < 0.03:
            assert sum(request.answer.timings.n_drafted for request in asked)
    assert times[1] <= 1.03 * times[0]


def test_a_session_holds_no_draft() -> None:
    """Whoever looks at it between two steps finds the text, without what was wrong of a draft."""
    world = World(repeating)
    engine: Any = world.engine
    session = Session(engine)
    request = world.add([1, 2, 3], 200, session=session)
    while not request.answer.done:
        world.scheduler.step()
        assert session.ids == request.ids[: len(session.ids)]
        assert len(session.ids) == len(request.ids) - 1
        check_pages(world.engine.cache, [session.seq])
    assert request.answer.timings.n_accepted


def test_a_wrong_draft_is_in_no_page_that_others_find() -> None:
    world = World(repeating)
    request = world.add([1, 2, 3], 400)
    world.run()
    nodes = list(world.engine.cache.tree.root.next.values())
    assert request.answer.timings.n_drafted > request.answer.timings.n_accepted
    while nodes:
        node = nodes.pop()
        ids: list[int] = []
        at = node
        while at.parent is not None:
            ids[:0] = at.ids
            at = at.parent
        assert ids == request.ids[: len(ids)]
        nodes += node.next.values()


def test_a_signal_in_a_run_costs_no_token() -> None:
    world = World(repeating)
    request, plain, rng = world.add([1, 2, 3], 300), world.engine.run, random.Random(1)

    def run(parts: Any) -> Any:
        made = plain(parts)
        if rng.random() < 0.2:
            raise KeyboardInterrupt
        return made

    world.engine.run = run  # type: ignore[method-assign]
    while not request.answer.done:
        try:
            world.scheduler.step()
        except KeyboardInterrupt:
            check_scheduler(world.scheduler)
    assert request.ids == alone(world, [1, 2, 3], 300)


def test_lookup() -> None:
    lookup = Lookup()
    assert lookup.guess([1, 2, 3], 5) == []
    assert lookup.guess([1, 2, 3, 4, 5, 1, 2, 3], 3) == [4, 5, 1]
    assert lookup.guess([1, 2, 3, 4, 5, 1, 2, 3], 9) == [4, 5, 1, 2, 3]
    assert lookup.guess([1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]  # the last one counts
    assert lookup.guess([1] * (WIDTH - 1), 5) == []


def test_a_track_learns_from_guesses_that_were_never_run() -> None:
    track = AcceptanceTracker()
    text = [1, 2, 3]
    track.note_guess(3, [4, 5, 6])
    track.note_guess(3, [9, 9])  # the first is followed
    assert [track.compare_guess(text + more) for more in ([], [4], [4, 5], [4, 5, 6, 7])] == [
        None,
        None,
        None,
        1.0,
    ]
    assert (track.acceptance, track.length) == (1.0, MOST_DRAFTED)
    track.note_guess(3, [4, 8, 6])
    assert track.compare_guess([*text, 4, 5]) == 0.5
    assert track.acceptance is not None
    assert 0.5 < track.acceptance < 1
    for _ in range(9):
        track.note_guess(3, [0])
        assert track.compare_guess([*text, 4]) == 0.0
    assert (track.acceptance < 0.1, track.length) == (True, 1)
    assert track.compare_guess([*text, 4]) is None  # nothing is open


def guess(n: int, odds: float) -> Draft:
    track = AcceptanceTracker()
    track.acceptance = odds
    return Draft([0] * n, "text", track)


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1), st.floats(0.001, 2)), max_size=60))
def test_a_gate_bounds_what_is_lost(steps: list[tuple[int, float, float]]) -> None:
    """However long steps take, where nothing is known of guesses: what it lets in costs, by its own
    measure, no more than it may.
    """
    gate = DraftController()
    for n, share, seconds in steps:
        n_drafted = n * MOST_DRAFTED if gate.allows(n, n * MOST_DRAFTED) else 0
        if n_drafted:
            extra = gate.times.predicted(n + n_drafted) - gate.times.predicted(n)
            assert extra <= gate.loss_left_s + 1e-9
        gate.note(n, n_drafted, int(share * n_drafted), seconds)
        assert gate.loss_left_s <= 2 * LOSS * gate._total + 1e-9


def test_a_gate_saves_up_no_more_than_some_steps() -> None:
    """A server that has run for hours does not slow a text down for minutes."""
    gate = DraftController()
    for _ in range(100_000):
        gate.note(1, 0, 0, 1.0)
    n = 0
    while gate.allows(1, 4):
        gate.note(1, 4, 0, 1.5)
        n += 1
    assert n * 0.5 <= LOSS * RECENT + 0.5


def test_a_gate_chooses_what_pays() -> None:
    gate = DraftController()
    assert gate.choose(1, [guess(3, 0.99)], 512) == 0  # nothing was measured
    for _ in range(RECENT):
        gate.note(2, 0, 0, 1.0)
    gate.note(2, 3, 3, 1.3)
    gate.note(2, 6, 6, 1.9)
    good = guess(3, 0.9)
    bad = guess(3, 0.05)
    assert gate.choose(2, [good, bad], 512) == 1
    assert gate.choose(2, [good, good], 512) == 2
    assert gate.choose(2, [good, good], 5) == 1  # of two texts, with three ids
    assert gate.choose(2, [good], 4) == 0
    gate._lost = 2 * LOSS * gate._total
    assert gate.choose(2, [good, good], 512) == 0  # whatever they promise
    assert gate.choose(2, [], 512) == 0


def test_a_pause_of_the_system_is_not_the_drafts() -> None:
    gate = DraftController()
    for _ in range(5 * RECENT):
        gate.note(1, 0, 0, 1.0)
    gate.note(1, 3, 3, 1.2)
    gate.note(1, 3, 3, 60.0)
    assert gate.choose(1, [guess(3, 0.9)], 512) == 1
    gate.note(1, 0, 0, 60.0)
    assert gate.times.predicted(1) == 1.0


def test_what_steps_took_long_ago_is_forgotten() -> None:
    """Else a long text's steps would keep a short one from drafts for ever."""
    gate = DraftController()
    gate.note(1, 3, 0, 100.0)
    for _ in range(2 * STALE_STEPS):
        gate.note(1, 0, 0, 1.0)
    assert gate.choose(1, [guess(3, 0.9)], 512) == 1


def test_guesses_that_were_never_run_open_and_close_the_gate() -> None:
    """A text that repeats nothing and then itself: what is drafted follows, at no cost."""
    world = World(lambda ids: fresh(ids) if len(ids) < 300 else repeating(ids))
    request = world.add([1], 600)
    while len(request.ids) < 300:
        world.scheduler.step()
    first = request.answer.timings.n_drafted
    assert first < 30  # of 75 guesses, while it is not known that they are wrong
    assert (request.tracks["text"].acceptance or 1) < 0.1
    world.run()
    assert request.answer.timings.n_accepted > 150


def draft_always(model: treadle.Model) -> None:
    """Whatever it costs: the clock decides nothing."""
    gate = model.stepper.scheduler.drafting.controller
    gate.choose = lambda n, guesses, most: len(guesses)  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"arch": "gemma3", "window": 16, "n_layer": 6, "tied": 0}])
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.3, "seed": 5}])
def test_a_model_writes_the_same_text(
    sizes: dict[str, Any], how: dict[str, Any], tiny: WriteTiny
) -> None:
    """A small random model repeats itself when it is greedy."""
    made = []
    for speculate in (False, True):
        with treadle.load(
            tiny(**sizes), threads=1, context=700, deterministic=True, speculate=speculate
        ) as model:
            draft_always(model)
            made.append(model.generate([5, 6, 7] * 20, max_tokens=150, ignore_eos=True, **how))
            made[-1].finish()
    assert made[0].ids == made[1].ids
    assert made[0].text == made[1].text
    assert made[0].timings.n_drafted == 0
    assert made[1].timings.n_drafted > 0


SCHEMA = {
    "type": "object",
    "properties": {
        "temperature_celsius": {"type": "integer"},
        "humidity": {"enum": ["low", "high"]},
    },
    "required": ["temperature_celsius", "humidity"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}])
def test_a_grammars_forced_tokens_are_drafted(how: dict[str, Any]) -> None:
    """Two texts in a batch, each in its own place of its grammar, one with log-probabilities."""
    made = []
    for speculate in (False, True):
        with treadle.load(
            threads=1, context=256, n_sequences=2, deterministic=True, speculate=speculate
        ) as model:
            draft_always(model)
            texts = [
                model.generate(prompt, max_tokens=80, json_schema=SCHEMA, logprobs=n, **how)
                for prompt, n in (("The weather: ", None), ("It is ", 2))
            ]
            for text in texts:
                text.begin(look_ahead=float("inf"))
            made.append([(text.finish(), text.ids, text.logprobs) for text in texts])
            json.loads(texts[0].text)
    assert made[0] == made[1]
    assert all(text.timings.n_accepted > 4 for text in texts)


def test_what_a_grammar_forces_is_known_though_a_run_was_stopped() -> None:
    with treadle.load(threads=1, context=64) as model:
        matcher = Grammar.from_regex("The answer: [0-9]", model.tokenizer).matcher()
        assert model.detokenize(matcher.forced()).startswith("The answer")
        late = matcher.start_bits()  # of a step that Ctrl-C has stopped
        ids = matcher.forced()
        assert late.wait()
        assert ids
        for id in ids:
            matcher.accept(id)  # nothing of it was accepted yet

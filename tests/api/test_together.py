"""Several texts from one model at once: threads, interrupts, and many prompts in one call."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import treadle
from tests.api.test_generation import Script, say
from tests.conftest import WriteTiny
from tests.scheduler.fake_engine import check_scheduler
from treadle.engine.batch import BatchItem
from treadle.engine.logits import LogitsBatch
from treadle.errors import ContextFullError, NoRoomError, SamplingError, TreadleError

PROMPTS = [f"{i} texts that begin in {i} ways" for i in range(32)]
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def model(tiny: WriteTiny) -> Iterator[treadle.Model]:
    path = tiny("gemma3", window=16, n_layer=6, tied=0)
    settings: dict[str, Any] = {"threads": 2, "context": 200, "n_sequences": 8}
    with treadle.load(path, deterministic=True, **settings) as model:
        yield model


@pytest.fixture(scope="module")
def alone(model: treadle.Model) -> list[str]:
    return [model.generate(prompt, **GREEDY).finish() for prompt in PROMPTS]


@pytest.fixture(autouse=True)
def nothing_leaks(model: treadle.Model) -> Iterator[None]:
    yield
    gc.collect()
    check_scheduler(model.stepper.scheduler)
    assert not model.stepper.scheduler.queue.running
    assert not model.stepper.scheduler.queue.waiting
    assert not model.stepper._sleepers
    assert not model.stepper._step_lock.locked()


class Watched:
    """How many sequences each run of a model had."""

    def __init__(self, model: treadle.Model, patch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.n_first = 0  # requests that the first run waits for
        self._sample = model.engine.sample
        self._scheduler = model.stepper.scheduler
        patch.setattr(model.engine, "sample", self.sample)

    def sample(self, parts: Any, *given: Any) -> LogitsBatch:
        inbox = self._scheduler.queue.inbox
        until(lambda: self.sizes or len(parts) + len(inbox) >= self.n_first)
        self.sizes.append(len(parts))
        return self._sample(parts, *given)


@pytest.fixture
def watched(model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(model, monkeypatch)


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def in_threads(n: int, work: Callable[[int], object]) -> None:
    ready = threading.Barrier(n)

    def start(i: int) -> None:
        ready.wait()
        work(i)

    threads = [threading.Thread(target=start, args=(i,), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("n", [2, 32])
def test_threads_share_batches_and_each_gets_its_own_text(
    n: int, whole: bool, model: treadle.Model, alone: list[str], watched: Watched
) -> None:
    found: dict[int, str] = {}
    watched.n_first = n

    def write(i: int) -> None:
        made = model.generate(PROMPTS[i], **GREEDY)
        found[i] = made.finish() if whole else "".join(made)
        assert made.text == found[i]

    in_threads(n, write)
    assert [found[i] for i in range(n)] == alone[:n]
    assert max(watched.sizes) > n / 2
    if whole:  # a reader that is slow to take its pieces leaves a batch for a while
        assert len(watched.sizes) <= 12 + n  # by themselves 12 each; and not all have room at once


@pytest.mark.slow
def test_one_thread_that_reads_two_texts_in_turns(
    model: treadle.Model, alone: list[str], watched: Watched
) -> None:
    a, b = (model.generate(prompt, **GREEDY) for prompt in PROMPTS[:2])
    texts = ["", ""]
    for pieces in zip(a, b, strict=False):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
    assert [a.finish(), b.finish()] == alone[:2]
    assert len(watched.sizes) <= 12 + 3  # most of them for both


def test_a_text_that_nobody_reads_on_is_a_few_pieces_ahead_and_no_more(
    model: treadle.Model, alone: list[str]
) -> None:
    left = model.generate(PROMPTS[0], **GREEDY)
    first = next(left)
    assert model.generate(PROMPTS[1], **GREEDY | {"max_tokens": 30}).finish()
    assert (left.text, len(left.logprobs or []), left.finish_reason) == (first, 0, None)
    ahead = len(left._answer.ids) - len(left.ids)
    assert 0 < ahead < 12
    assert left.finish() == alone[0]
    dropped = model.generate(PROMPTS[0], **GREEDY)
    next(dropped)
    assert model.stepper.scheduler.queue.running
    del dropped  # what is not closed and is forgotten is cancelled


def test_many_tasks_of_one_loop(model: treadle.Model, alone: list[str], watched: Watched) -> None:
    async def write(prompt: str) -> str:
        return "".join([piece async for piece in model.generate(prompt, **GREEDY)])

    async def together() -> list[str]:
        return list(await asyncio.gather(*map(write, PROMPTS[:12])))

    watched.n_first = 4  # the loop's threads are five, or more: one runs this batch
    assert asyncio.run(together()) == alone[:12]
    assert max(watched.sizes) > 3


# -- interrupts ---------------------------------------------------------------------------------


def test_ctrl_c_harms_nobody_else(
    model: treadle.Model, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run that the main thread has started for itself and three others, who sleep."""
    settings: dict[str, Any] = GREEDY | {"max_tokens": 40}
    expected = [model.generate(prompt, **settings).finish() for prompt in PROMPTS[1:4]]
    others = [model.generate(prompt, **settings) for prompt in PROMPTS[1:4]]
    threads = [threading.Thread(target=made.finish, daemon=True) for made in others]
    sample, pressed = model.engine.sample, threading.Event()

    def presses(parts: list[BatchItem], *given: Any) -> LogitsBatch:
        if len(parts) == 4 and not pressed.is_set():
            pressed.set()
            for thread in threads:
                thread.start()
            until(lambda: len(model.stepper._sleepers) == 3)
            signal.raise_signal(signal.SIGINT)
        return sample(parts, *given)

    monkeypatch.setattr(model.engine, "sample", presses)
    for made in others:
        made.begin(look_ahead=4)
    mine = model.generate(PROMPTS[0], **settings)
    with pytest.raises(KeyboardInterrupt):
        mine.finish()
    assert pressed.is_set()
    assert list(mine) == []
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert [made.text for made in others] == expected


def test_ctrl_c_while_another_thread_is_at_work(model: treadle.Model, alone: list[str]) -> None:
    """The main thread only waits: it is told at once, and the other one goes on."""
    inside, go, found = threading.Event(), threading.Event(), []

    def slow(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        inside.set()
        assert go.wait(60)
        return logits

    def write() -> None:
        sampling = treadle.Sampling(custom=slow, temperature=0)
        found.append(model.generate(PROMPTS[0], max_tokens=12, sampling=sampling).finish())

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert inside.wait(60)
    main = threading.get_ident()

    def press() -> None:
        until(lambda: model.stepper._sleepers)  # so it waits, and nobody else hears of the signal
        signal.pthread_kill(main, signal.SIGINT)

    presser = threading.Thread(target=press, daemon=True)
    mine = model.generate(PROMPTS[1], **GREEDY)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        mine.finish()
    go.set()
    thread.join(60)
    presser.join()
    assert found == alone[:1]


def test_closing_from_another_thread_while_it_waits(model: treadle.Model, alone: list[str]) -> None:
    inside, go = threading.Event(), threading.Event()

    def slow(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        inside.set()
        assert go.wait(60)
        return logits

    first = model.generate(
        PROMPTS[0], max_tokens=12, sampling=treadle.Sampling(custom=slow, temperature=0)
    )
    second = model.generate(PROMPTS[1], **GREEDY)
    texts: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda: texts.update(first=first.finish()), daemon=True),
        threading.Thread(target=lambda: texts.update(second=second.finish()), daemon=True),
    ]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    until(lambda: model.stepper._sleepers)
    second.close()
    go.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert texts == {"first": alone[0], "second": ""}


def test_a_sampler_may_ask_the_model(model: treadle.Model, alone: list[str]) -> None:
    asked: list[str] = []

    def curious(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        if not asked:
            asked.append(model.generate(PROMPTS[1], **GREEDY).finish())
            assert model.logits([5, 6]).shape[0] == 2
        return logits

    made = model.generate(
        PROMPTS[0], max_tokens=12, sampling=treadle.Sampling(custom=curious, temperature=0)
    )
    assert made.finish() == alone[0]
    assert asked == [alone[1]]


def test_a_sampler_that_waits_for_what_waits_for_it(model: treadle.Model, alone: list[str]) -> None:
    """It turned round for ever. Texts of other steps go on."""
    other = model.generate(PROMPTS[1], max_tokens=40, temperature=0)
    other.begin(look_ahead=4)

    def curious(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        next(other)
        return logits

    made = model.generate(PROMPTS[0], max_tokens=40, custom=curious, temperature=0)
    with pytest.raises(TreadleError, match="waiting for that sampler"):
        made.finish()
    assert model.generate(PROMPTS[0], **GREEDY).finish() == alone[0]


def test_a_sampler_that_fails_fails_alone(model: treadle.Model, alone: list[str]) -> None:
    def fail(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        return logits * np.nan

    bad = model.generate(PROMPTS[1], sampling=treadle.Sampling(custom=fail))
    bad.begin(look_ahead=4)
    assert model.generate(PROMPTS[0], **GREEDY).finish() == alone[0]
    with pytest.raises(SamplingError):
        bad.finish()
    assert bad.text == bad.finish() == ""


# -- many prompts -------------------------------------------------------------------------------


def test_many_prompts(model: treadle.Model, alone: list[str], watched: Watched) -> None:
    made = list(model.generate_many(PROMPTS, **GREEDY))
    assert [one.text for one in made] == alone
    assert all(isinstance(one, treadle.Generation) and one.finish_reason for one in made)
    assert [one.prompt_ids for one in made] == [model.tokenize(prompt) for prompt in PROMPTS]
    assert np.mean(watched.sizes) > 8
    assert list(model.generate_many([])) == []


def test_many_prompts_are_taken_as_they_are_needed(
    model: treadle.Model, alone: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.api.generation.AHEAD", 3)
    taken: list[int] = []

    def prompts() -> Iterator[str]:
        for i, prompt in enumerate(PROMPTS[:9]):
            taken.append(i)
            yield prompt

    for i, made in enumerate(model.generate_many(prompts(), **GREEDY)):
        assert made.text == alone[i]
        assert len(taken) <= i + 1 + 2 * 3  # three are written, and three may be whole already
    several = model.generate_many(PROMPTS, **GREEDY)
    assert next(several).text == alone[0]
    del several  # the others are cancelled


class Free:
    """A constraint that allows all."""

    def mask(self, logits: np.ndarray) -> None: ...
    def accept(self, id: int) -> None: ...


def test_what_can_be_read_once_holds_for_all_texts(model: treadle.Model) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "session": None, "constraint": None}
    stages = ("top_k", "temperature")

    def made(stop: Any, samplers: Any) -> list[str]:
        many = model.generate_many(
            PROMPTS[:3], stop=stop, samplers=samplers, temperature=0, **settings
        )
        return [one.text for one in many]

    stop = [text[4:6] for text in made((), stages)]
    assert made(iter(stop), iter(stages)) == made(stop, stages) != made((), stages)


def test_a_prompt_that_is_too_long_is_told_in_its_turn(
    model: treadle.Model, alone: list[str]
) -> None:
    made = model.generate_many([PROMPTS[0], [5] * 201, PROMPTS[1]], **GREEDY)
    assert next(made).text == alone[0]
    with pytest.raises(ContextFullError, match="201 tokens"):
        next(made)
    for settings, error in (
        ({"temprature": 0}, TypeError),
        ({"session": model.session()}, TreadleError),
        ({"constraint": Free()}, TreadleError),  # which knows where in one text it is
        ({"top_p": 7}, SamplingError),
    ):
        with pytest.raises(error):
            model.generate_many(PROMPTS, **settings)  # at once
    with pytest.raises(TreadleError, match="prompts: expected a list, found str"):
        model.generate_many("one text")


def test_many_texts_by_one_grammar(model: treadle.Model) -> None:
    made = list(model.generate_many(PROMPTS[:6], grammar='root ::= "yes" | "no"', max_tokens=5))
    assert {one.text for one in made} <= {"yes", "no"}
    again = list(model.generate_many(PROMPTS[:2], json_schema={"enum": ["a"]}, max_tokens=9))
    assert {one.text for one in again} == {'"a"'}


def test_a_session_leaves_no_room(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama"), threads=1, context=128) as model:
        session = model.session()
        session.feed([5] * 100)
        with pytest.raises(NoRoomError, match="the KV cache is full"):
            model.generate([7] * 60).finish()
        session.close()
        assert model.generate([7] * 60, max_tokens=3).finish() is not None


# -- whose turn it is ---------------------------------------------------------------------------


def test_a_lone_reader_changes_no_thread() -> None:
    script = Script(say("hello"))
    threads = set[int]()
    run = script.engine.run

    def noting(parts: Any) -> np.ndarray:
        threads.add(threading.get_ident())
        return run(parts)

    script.engine.run = noting  # type: ignore[method-assign]
    assert script.generate().finish() == "hello"
    assert threads == {threading.get_ident()}


def test_readers_that_come_and_go_strand_nobody() -> None:
    """Many threads, each text closed or finished at any time: all return."""
    script = Script([*(b"x" * 60), *say("")])

    def read(i: int) -> None:
        for k in range(30):
            made = script.generate()
            for n, _ in enumerate(made):
                if n == (i + k) % 7:
                    break
            if k % 3 == 0:
                made.close()

    in_threads(8, read)
    gc.collect()
    check_scheduler(script.turns.scheduler)
    assert script.turns.scheduler.idle

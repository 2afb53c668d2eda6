"""``async for`` over a text, and what a cancelled one leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treadle
from tests.api.test_generation import Script, say
from tests.conftest import WriteTiny
from tests.scheduler.fake_engine import BOS, check_scheduler
from treadle.engine.logits import LogitsBatch
from treadle.errors import SamplingError

GREEDY = treadle.Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(tiny: WriteTiny) -> Iterator[treadle.Model]:
    path = tiny("gemma3", window=16, n_layer=6, tied=0)
    with treadle.load(path, threads=2, context=1200, n_sequences=3) as model:
        yield model


async def pieces_of(made: treadle.Generation) -> list[str]:
    return [piece async for piece in made]


def test_the_same_text(model: treadle.Model) -> None:
    expected = model.generate("once", max_tokens=20, sampling=GREEDY)
    pieces = list(expected)
    made = model.generate("once", max_tokens=20, sampling=GREEDY)
    assert asyncio.run(pieces_of(made)) == pieces
    assert (made.text, made.ids) == (expected.text, expected.ids)
    assert made.finish_reason == expected.finish_reason == "length"


def test_the_loop_goes_on_meanwhile() -> None:
    """A step runs in another thread, which waits here until the loop has done something."""
    script, loop_ran = Script(say("hello")), threading.Event()
    sample = script.sample

    def waits(logits: np.ndarray, ids: list[int]) -> int:
        assert loop_ran.wait(60)
        loop_ran.clear()
        return sample(logits, ids)

    script.sample = waits  # type: ignore[method-assign]

    async def both() -> list[str]:
        text = asyncio.ensure_future(pieces_of(script.generate()))
        while not text.done():
            loop_ran.set()
            await asyncio.sleep(0.001)
        return await text

    assert asyncio.run(both()) == list("hello")


def test_several_at_once_in_sessions_of_their_own(model: treadle.Model) -> None:
    prompts = ["the first", "another one", "and the last"]
    expected = [model.generate(p, max_tokens=15, sampling=GREEDY).finish() for p in prompts]
    sessions = [model.session() for _ in prompts]

    async def together() -> list[list[str]]:
        made = [
            model.generate(p, max_tokens=15, sampling=GREEDY, session=s)
            for p, s in zip(prompts, sessions, strict=True)
        ]
        return list(await asyncio.gather(*map(pieces_of, made)))

    assert ["".join(pieces) for pieces in asyncio.run(together())] == expected
    for session in sessions:
        session.close()


def test_errors_come_out_as_they_are(model: treadle.Model) -> None:
    def fail(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        return logits * np.nan

    made = model.generate("once", sampling=treadle.Sampling(custom=fail))
    with pytest.raises(SamplingError):
        asyncio.run(pieces_of(made))


class Held:
    """A custom sampler that waits in the third token until it is let go on."""

    def __init__(self) -> None:
        self.n, self.inside, self.go = 0, threading.Event(), threading.Event()

    def __call__(self, logits: np.ndarray, ids: list[int]) -> np.ndarray:
        self.n += 1
        if self.n == 3:
            self.inside.set()
            assert self.go.wait(60)
        return logits


def test_a_cancelled_text_ends_with_the_step_in_hand(model: treadle.Model) -> None:
    held, session = Held(), model.session()
    made = model.generate(
        "once",
        max_tokens=50,
        temperature=0,
        sampling=treadle.Sampling(custom=held),
        session=session,
    )

    async def cancel() -> None:
        task = asyncio.ensure_future(pieces_of(made))
        await asyncio.to_thread(held.inside.wait, 60)
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()  # the step is not left running behind the caller's back
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        n = held.n
        assert session.ids == (made.prompt_ids + made.ids)[:-1]
        assert await pieces_of(made) == []  # and no more comes
        assert list(made) == []
        assert held.n == n == 3

    asyncio.run(cancel())
    assert made.finish_reason is None
    assert len(made.ids) == 3
    assert model.generate("once", max_tokens=3, sampling=GREEDY).finish()
    session.close()
    check_scheduler(model.stepper.scheduler)


def test_a_timeout_while_a_long_prompt_is_read(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left after the batch in hand; what was read stays, and serves the next."""
    session = model.session()
    engine = model.engine
    started, go, sample = threading.Event(), threading.Event(), engine.sample
    sizes: list[int] = []

    def slow(parts: Any, *given: Any) -> LogitsBatch:
        sizes.append(len(parts[0].ids))
        started.set()
        assert go.wait(60)
        return sample(parts, *given)

    async def cancel() -> None:
        made = model.generate([5, 6, 7] * 350, session=session)
        task = asyncio.ensure_future(pieces_of(made))
        await asyncio.to_thread(started.wait, 60)
        task.cancel()
        await asyncio.sleep(0.02)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert made.ids == []

    with monkeypatch.context() as patch:
        patch.setattr(engine, "sample", slow)
        asyncio.run(cancel())
    assert sizes == [512]
    assert session.n_past == 512
    again = model.generate([5, 6, 7] * 350, max_tokens=1, session=session)
    again.finish()
    assert again.timings.n_cached == 512
    session.close()


def test_two_threads_take_turns_with_one_text() -> None:
    """Python's own generators would say that they are at work already."""
    made = Script(say("x" * 300)).generate()
    found: list[list[str]] = [[], []]

    def take(pieces: list[str]) -> None:
        pieces += made

    threads = [threading.Thread(target=take, args=(pieces,)) for pieces in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found[0]) + len(found[1]) == 300
    assert made.text == "x" * 300


def test_closing_a_text() -> None:
    script = Script(say("hello"))
    made = script.generate()
    assert next(made) == "h"
    made.close()
    assert list(made) == []
    assert (made.text, made.finish_reason) == ("h", None)
    script = Script([BOS])
    made = script.generate()
    made.close()
    assert list(made) == []
    assert script.engine.runs == []  # and nothing was read for it

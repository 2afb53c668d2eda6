"""Requests with pictures: encoding in slices between steps, once for each picture."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.media.decoder_cases import CASES, load, prompt_of
from treadle.errors import TreadleError
from treadle.kvcache.media import MediaEntry
from treadle.sampling import Sampler, Sampling
from treadle.scheduler.output import RequestOutput
from treadle.scheduler.request import Request
from treadle.scheduler.scheduler import Scheduler

BY_NAME = {case.name: case for case in CASES}
SLICES = 5


@pytest.fixture
def model(data: Path) -> Iterator[treadle.Model]:
    with load(data / "media", BY_NAME["llava"]) as made:
        yield made


class Encoder:
    """Gives an entry's rows after SLICES slices, and counts how often it is begun."""

    def __init__(self, rows: np.ndarray, error: TreadleError | None = None) -> None:
        self.rows = rows
        self.error = error
        self.n_begun = 0
        self.n_slices = 0
        self.n_closed = 0

    def __call__(self) -> Generator[None, None, np.ndarray]:
        self.n_begun += 1
        try:
            for _ in range(SLICES - 1):
                self.n_slices += 1
                yield
            if self.error is not None:
                raise self.error
            return self.rows
        finally:
            self.n_closed += 1


class Prompts:
    """The family's prompt as requests of one scheduler."""

    def __init__(self, model: treadle.Model, data: Path) -> None:
        self.model = model
        self.scheduler = Scheduler(model.engine)
        self.prompt = prompt_of(model, data / "media", BY_NAME["llava"])
        (self.entry,) = self.prompt.entries
        assert self.entry.rows is not None
        self.rows = self.entry.rows
        self.entry.rows = None

    def request(self, encoder: Encoder | None, ids: list[int] | None = None, n: int = 8) -> Request:
        ids = self.prompt.ids if ids is None else ids
        answer = RequestOutput(self.model.tokenizer, ids, n_ctx=512, max_tokens=n)
        sampler = Sampler(Sampling(temperature=0, repeat_penalty=1.1), 320, eog=frozenset())
        media = {} if encoder is None else {self.entry: encoder}
        made = Request(ids, sampler, answer, media=media, speculate=True)
        self.scheduler.add(made)
        return made

    def run(self, until: Callable[[], bool], most: int = 200) -> int:
        for n in range(most):
            if until():
                return n
            self.scheduler.step()
        raise AssertionError("not done")


@pytest.fixture
def prompts(model: treadle.Model, data: Path) -> Prompts:
    return Prompts(model, data)


def test_a_picture_is_encoded_in_slices_while_others_decode(prompts: Prompts) -> None:
    other = prompts.request(None, [65, 66, 67], n=100)
    prompts.run(lambda: len(other.answer.ids) >= 2)
    encoder = Encoder(prompts.rows)
    request = prompts.request(encoder)
    before = len(other.answer.ids)
    prompts.run(lambda: bool(request.answer.ids))
    # A token of the other for each slice, not all slices at once.
    assert len(other.answer.ids) - before >= SLICES
    assert encoder.n_begun == encoder.n_closed == 1
    assert request.answer.timings.media_s > 0
    assert other.answer.timings.media_s == 0
    prompts.run(lambda: request.answer.done)
    assert request.answer.error is None


def test_the_output_is_that_of_rows_that_were_there(prompts: Prompts) -> None:
    request = prompts.request(Encoder(prompts.rows), n=12)
    prompts.run(lambda: request.answer.done)
    prompts.model.engine.cache.forget()
    prompts.entry.rows = prompts.rows
    again = prompts.request(None, n=12)
    prompts.run(lambda: again.answer.done)
    assert request.answer.ids == again.answer.ids != []
    assert len(request.text_ids) == len(request.ids) - prompts.entry.n_rows


def test_a_picture_is_encoded_once(prompts: Prompts) -> None:
    first = Encoder(prompts.rows)
    second = Encoder(prompts.rows)
    requests = [prompts.request(first), prompts.request(second)]
    prompts.run(lambda: all(request.answer.done for request in requests))
    assert first.n_begun + second.n_begun == 1
    # Its rows are kept for a request whose pages are gone,
    prompts.model.engine.cache.forget()
    third = prompts.request(Encoder(prompts.rows))
    prompts.run(lambda: third.answer.done)
    assert first.n_begun + second.n_begun == 1
    # and not needed where the cache has the pages.
    prompts.model.engine.cache.forget()
    long = prompts.prompt.ids + [65] * 40
    fourth = prompts.request(Encoder(prompts.rows), long)
    prompts.run(lambda: fourth.answer.done)
    prompts.entry.rows = None
    encoder = Encoder(prompts.rows)
    fifth = prompts.request(encoder, [*long, 66])
    prompts.run(lambda: fifth.answer.done)
    assert encoder.n_begun == 0
    assert fifth.answer.timings.n_cached >= len(long) // 32 * 32


def test_cancelling_stops_the_encoding(prompts: Prompts) -> None:
    encoder = Encoder(prompts.rows)
    request = prompts.request(encoder)
    prompts.run(lambda: encoder.n_slices == 2)
    prompts.scheduler.cancel(request)
    prompts.scheduler.step()
    prompts.scheduler.step()
    assert encoder.n_closed == 1
    assert encoder.n_slices == 2
    assert prompts.entry.holders == 0
    assert prompts.entry.rows is None


def test_cancelling_one_of_two_goes_on_for_the_other(prompts: Prompts) -> None:
    encoder = Encoder(prompts.rows)
    first = prompts.request(encoder)
    second = prompts.request(Encoder(prompts.rows))
    prompts.run(lambda: encoder.n_slices == 2)
    prompts.scheduler.cancel(first)
    prompts.run(lambda: second.answer.done)
    assert second.answer.error is None
    assert second.answer.ids


def test_an_error_fails_the_requests_that_wait(prompts: Prompts) -> None:
    other = prompts.request(None, [65, 66, 67], n=30)
    encoder = Encoder(prompts.rows, TreadleError("broken"))
    request = prompts.request(encoder)
    prompts.run(lambda: request.answer.done)
    assert "broken" in str(request.answer.error)
    prompts.run(lambda: other.answer.done)
    assert other.answer.error is None
    again = prompts.request(Encoder(prompts.rows))
    prompts.run(lambda: again.answer.done)
    assert again.answer.error is None


def test_rows_beyond_the_limit_are_dropped_unless_held(prompts: Prompts) -> None:
    media = prompts.model.engine.media
    media._rows_bytes = 0
    request = prompts.request(Encoder(prompts.rows))
    prompts.run(lambda: bool(request.answer.ids))
    assert prompts.entry.rows is not None
    prompts.run(lambda: request.answer.done)
    assert prompts.entry.rows is None


def test_a_request_without_the_picture_fails(prompts: Prompts) -> None:
    request = prompts.request(None)
    prompts.run(lambda: request.answer.done)
    assert "no picture" in str(request.answer.error)


def test_a_request_without_the_picture_waits_for_anothers(prompts: Prompts) -> None:
    """It came first and has only the ids: the other has the picture, so neither fails."""
    first = prompts.request(None)
    second = prompts.request(Encoder(prompts.rows))
    prompts.run(lambda: first.answer.done and second.answer.done)
    assert first.answer.error is None
    assert second.answer.error is None
    assert first.answer.ids == second.answer.ids != []


def test_numbers_are_given_again_once_no_page_names_them(prompts: Prompts) -> None:
    media = prompts.model.engine.media
    tree = prompts.model.engine.cache.tree
    request = prompts.request(Encoder(prompts.rows), prompts.prompt.ids + [65] * 40)
    prompts.run(lambda: request.answer.done)
    last = (1 << 15) - 1
    made = [
        media.enter(MediaEntry(f"{i}".encode().ljust(32), 2), tree)
        for i in range(media.first_number + 1, last + 1)
    ]
    assert made[-1].number == last
    new = media.enter(MediaEntry(b"new".ljust(32), 2), tree)
    assert new.number == made[0].number  # the oldest has pages, so the next one goes
    # Without the engine's lock no number is given again.
    assert media.add(MediaEntry(b"newer".ljust(32), 2)) is None
    assert media.add(MediaEntry(b"new".ljust(32), 2)) is new
    assert made[0].digest not in media._by_digest
    assert media._by_digest[prompts.entry.digest] is prompts.entry

"""Requests with pictures: encoding in slices between steps, once for each picture."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.media.decoder_cases import CASES, load, prompt_of
from treadle.errors import TreadleError
from treadle.kvcache.media import MediaEntry
from treadle.sampling import Sampler, Sampling
from treadle.scheduler.output import RequestOutput
from treadle.scheduler.request import MediaEncoder, Request
from treadle.scheduler.scheduler import Scheduler

BY_NAME = {case.name: case for case in CASES}
SLICES = 5


@pytest.fixture
def model(data: Path) -> Iterator[treadle.Model]:
    with load(data / "media", BY_NAME["llava"]) as made:
        yield made


class Encoder:
    """Gives an entry's rows after SLICES slices, and counts how often it is begun, as the first of
    those that are encoded with it.
    """

    def __init__(
        self,
        rows: np.ndarray,
        error: TreadleError | None = None,
        *,
        shape: object = "shape",
        n_patches: int = 100,
    ) -> None:
        self.rows = rows
        self.error = error
        self.shape = shape
        self.n_patches = n_patches
        self.n_begun = 0
        self.n_slices = 0
        self.n_closed = 0
        self.groups: list[list[Encoder]] = []

    def begin(self, encoders: Sequence[Encoder]) -> Generator[None, None, list[np.ndarray]]:
        assert encoders[0] is self
        self.groups.append(list(encoders))
        self.n_begun += 1
        try:
            for _ in range(SLICES - 1):
                self.n_slices += 1
                yield
            for each in encoders:
                if each.error is not None:
                    raise each.error
            return [each.rows for each in encoders]
        finally:
            self.n_closed += 1

    def made(self) -> MediaEncoder:
        return MediaEncoder(self.begin, self, self.shape, self.n_patches)


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
        media = {} if encoder is None else {self.entry: encoder.made()}
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


# -- pictures of several requests -----------------------------------------------------------------


class Pictures:
    """Requests of one scheduler, each with pictures of its own, a few rows each."""

    def __init__(self, prompts: Prompts) -> None:
        self.prompts = prompts
        self.n_made = 0

    def entry(self) -> MediaEntry:
        self.n_made += 1
        digest = f"picture {self.n_made}".encode().ljust(32)
        return self.prompts.model.engine.media.enter(MediaEntry(digest, 2))

    def rows(self, value: float) -> np.ndarray:
        return np.full_like(self.prompts.rows[:2], value)

    def request(self, *encoders: Encoder) -> Request:
        """A request with a picture for each encoder."""
        entries = {self.entry(): encoder.made() for encoder in encoders}
        ids = [65, *(id for entry in entries for id in entry.ids), 66]
        answer = RequestOutput(self.prompts.model.tokenizer, ids, n_ctx=512, max_tokens=2)
        sampler = Sampler(Sampling(temperature=0), 320, eog=frozenset())
        made = Request(ids, sampler, answer, media=entries)
        self.prompts.scheduler.add(made)
        return made

    def encoders(self, n: int, **settings: Any) -> list[Encoder]:
        return [Encoder(self.rows(i / 8), **settings) for i in range(n)]

    def finish(self, *requests: Request) -> None:
        self.prompts.run(lambda: all(request.answer.done for request in requests))


@pytest.fixture
def pictures(prompts: Prompts) -> Pictures:
    return Pictures(prompts)


def entry_of(request: Request) -> MediaEntry:
    (entry,) = request.media
    return entry


def test_small_pictures_of_one_shape_are_encoded_together(pictures: Pictures) -> None:
    """Up to 256 patches; the others, and larger ones, in the order in which they came."""
    small = pictures.encoders(5)
    other = pictures.encoders(1, shape="other")
    large = pictures.encoders(2, shape="large", n_patches=300)
    order = [small[0], other[0], small[1], large[0], *small[2:], large[1]]
    requests = {encoder: pictures.request(encoder) for encoder in order}
    pictures.finish(*requests.values())
    assert small[0].groups == [small[:2]]
    assert small[2].groups == [small[2:4]]
    assert small[4].groups == [[small[4]]]
    assert [each.groups for each in (other[0], *large)] == [
        [[other[0]]],
        [[large[0]]],
        [[large[1]]],
    ]
    for encoder, request in requests.items():
        assert request.answer.error is None
        made = entry_of(request).rows
        assert made is not None
        assert np.array_equal(made, encoder.rows)
    media = pictures.prompts.scheduler.media
    assert (media.n_encoded, media.n_rows) == (8, 16)


def test_pictures_of_one_request_are_encoded_together(pictures: Pictures) -> None:
    encoders = pictures.encoders(3, n_patches=64)
    request = pictures.request(*encoders)
    pictures.finish(request)
    assert encoders[0].groups == [encoders]
    # The time of a run is a request's once, however many of its pictures are in it.
    media = pictures.prompts.scheduler.media
    assert request.answer.timings.media_s == pytest.approx(media.seconds)


def test_the_first_is_never_passed_by(pictures: Pictures) -> None:
    """However many of another shape come while it waits."""
    first = pictures.encoders(1, shape="rare")[0]
    others = pictures.encoders(2)
    requests = [pictures.request(others[0]), pictures.request(first), pictures.request(others[1])]
    pictures.prompts.run(lambda: others[0].n_slices == 1)
    late = [pictures.request(each) for each in pictures.encoders(6)]
    pictures.prompts.run(lambda: first.n_begun == 1)
    assert all(entry_of(request).rows is None for request in late)
    pictures.finish(*requests, *late)


def test_cancelling_one_leaves_the_others_pictures(pictures: Pictures) -> None:
    encoders = pictures.encoders(2)
    first, second = (pictures.request(each) for each in encoders)
    pictures.prompts.run(lambda: encoders[0].n_slices == 2)
    pictures.prompts.scheduler.cancel(first)
    pictures.finish(second)
    assert second.answer.error is None
    assert encoders[0].groups == [encoders]
    assert encoders[1].n_begun == 0
    third, fourth = (pictures.request(each) for each in pictures.encoders(2))
    pictures.prompts.run(lambda: pictures.prompts.scheduler.media._current is not None)
    for request in (third, fourth):
        pictures.prompts.scheduler.cancel(request)
    pictures.prompts.run(lambda: pictures.prompts.scheduler.media._current is None)
    assert entry_of(third).rows is None


def test_a_broken_picture_fails_its_own_request_alone(pictures: Pictures) -> None:
    good = pictures.encoders(2, n_patches=50)
    bad = Encoder(pictures.rows(1), TreadleError("broken"), n_patches=50)
    requests = [pictures.request(each) for each in (good[0], bad, good[1])]
    pictures.finish(*requests)
    assert "broken" in str(requests[1].answer.error)
    assert [requests[i].answer.error for i in (0, 2)] == [None, None]
    assert good[0].groups == [[good[0], bad, good[1]], [good[0]]]
    assert good[1].groups == [[good[1]]]
    later = pictures.encoders(2)
    pictures.finish(*(pictures.request(each) for each in later))
    assert later[0].groups == [later]


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

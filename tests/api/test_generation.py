"""Text out of an engine. Where that will do, the engine is a script that says what comes next."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treadle
from tests.conftest import WriteTiny
from tests.scheduler.fake_engine import BOS, EOG, Bytes, FakeEngine, check_scheduler
from treadle.api.generation import Generation
from treadle.engine.batch import BatchItem
from treadle.errors import ContextFullError, GrammarError, TreadleError
from treadle.sampling import Sampling
from treadle.scheduler.output import IndentStop, RequestOutput
from treadle.scheduler.request import Request
from treadle.scheduler.scheduler import CooperativeStepper, Scheduler

GREEDY = Sampling(temperature=0)


class Script:
    """A model that says ``ids`` behind any prompt, and a sampler that obeys."""

    def __init__(self, ids: Sequence[int], n_ctx: int = 10_000) -> None:
        self.script = list(ids)
        self.n_prompt = 0
        self.engine = FakeEngine(self.next_id, n_ctx=n_ctx)
        self.turns = CooperativeStepper(Scheduler(self.engine))  # type: ignore[arg-type]

    def next_id(self, ids: list[int]) -> int:
        return self.script[len(ids) - self.n_prompt]

    def sample(self, logits: np.ndarray, ids: list[int]) -> int:
        return int(logits[0])

    def generate(self, *, tokenizer: Any = None, prompt: int = 3, **settings: Any) -> Generation:
        self.n_prompt = prompt
        ids = [BOS] * prompt
        sampler: Any = SimpleNamespace(choose=self.sample, query=lambda n: None)
        words: Any = tokenizer or Bytes()
        answer = RequestOutput(words, ids, n_ctx=self.engine.n_ctx, **settings)
        return Generation(Request(ids, sampler, answer), self.turns)


def say(text: str) -> list[int]:
    return [*text.encode(), EOG]


# -- what ends a text ---------------------------------------------------------------------------


def test_lines_end_a_text_in_whatever_pieces_they_come() -> None:
    text = "a\n  b\n\tc\n  d\n"
    now = 0.0

    def ended(lines: IndentStop, size: int) -> str:
        nonlocal now
        said = ""
        for at in range(0, len(text), size):
            piece = text[at : at + size]
            end = lines.end(piece)
            if end is not None:
                return said + piece[:end]
            said = said + piece
            now = now + 1
        return said

    for size in (1, 2, 3, 100):
        assert ended(IndentStop(2, 0), size) == "a\n  b\n\t"
        assert ended(IndentStop(1, 0), size) == text
        assert ended(IndentStop(0, -1), size) == text
    assert ended(IndentStop(0, 4500, lambda: now), 1) == "a\n  b\n"
    assert ended(IndentStop(0, 7500, lambda: now), 1) == "a\n  b\n\tc\n"


def test_the_end_of_the_text() -> None:
    made = Script(say("hello")).generate()
    assert not made.finish_reason
    assert list(made) == ["h", "e", "l", "l", "o"]
    assert (made.text, made.finish_reason, made.ids) == ("hello", "stop", list(b"hello"))
    assert list(made) == []


@pytest.mark.parametrize("n", [0, 1, 3, 5, 6])
def test_a_number_of_tokens(n: int) -> None:
    script = Script(say("hello"))
    made = script.generate(max_tokens=n)
    assert made.finish() == "hello"[:n]
    assert made.finish_reason == ("length" if n <= 5 else "stop")
    assert made.timings.n_generated == len(made.ids) == min(n, 5)
    # what came last is not fed: nobody asked for what follows it
    assert script.engine.batches == ([[3], *[[1]] * min(n - 1, 5)] if n else [])


def test_a_full_context() -> None:
    made = Script(say("hello"), n_ctx=5).generate(prompt=3)
    assert made.finish() == "he"
    assert made.finish_reason == "context"
    none = Script(say("hello"), n_ctx=3).generate(prompt=3)
    assert (none.finish(), none.finish_reason) == ("", "context")
    with pytest.raises(ContextFullError, match="3 tokens"):
        Script(say("hello"), n_ctx=2).generate(prompt=3).finish()


def test_a_stop_string_is_held_back_until_it_is_sure() -> None:
    made = Script(say("so be it. EN ENDED")).generate(stop=["END", "ENOUGH"])
    pieces = list(made)
    assert "".join(pieces) == made.text == "so be it. EN "
    assert pieces[-1] == "EN "  # as soon as it could not become END any more
    assert made.finish_reason == "stop"


def test_what_only_began_like_a_stop_string_comes_out_at_the_end() -> None:
    for settings in ({}, {"max_tokens": 4}):
        made = Script(say("a EN")).generate(stop=["END", "", "N,"], **settings)
        assert made.finish() == "a EN"
        assert made.finish_reason == ("length" if settings else "stop")
    full = Script(say("a ENDED"), n_ctx=7).generate(stop=["END"])
    assert (full.finish(), full.finish_reason) == ("a EN", "context")


def test_a_stop_string_in_the_last_token_that_was_allowed() -> None:
    made = Script(say("a END")).generate(stop=["END"], max_tokens=5)
    assert (made.finish(), made.finish_reason) == ("a ", "stop")


def test_a_character_never_comes_in_parts() -> None:
    made = Script(say("aé€😀")).generate()
    assert list(made) == ["a", "é", "€", "😀"]
    for cut in range(1, 4):  # a limit within a character: nothing is shown of it
        for limit in ({"max_tokens": 2 + cut}, {}):
            n_ctx = 10_000 if limit else 5 + cut
            script = Script([*"hi😀".encode()[: 2 + cut], *b"xx"], n_ctx=n_ctx)
            made = script.generate(stop=["\ufffd", "hix"], **limit)
            assert "".join(made) == made.text == "hi"
            assert made.finish_reason == ("length" if limit else "context")
            assert len(made.ids) == 2 + cut
    broken = Script([*"é".encode()[:1], EOG]).generate(stop=["\ufffdx"])
    assert list(broken) == ["\ufffd"]
    stopped = Script([*"é".encode()[:1], EOG]).generate(stop=["\ufffd"])
    assert (list(stopped), stopped.finish_reason) == ([], "stop")


words = st.text("abc", max_size=4)


@given(st.lists(words, max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_any_pieces_and_any_stop_strings(pieces: list[str], stops: list[str]) -> None:
    script = Script([*range(258, 258 + len(pieces)), EOG])
    made = script.generate(tokenizer=Bytes(pieces), stop=stops)
    found = list(made)
    text = "".join(pieces)
    assert "".join(found) == made.text
    assert "" not in found
    assert text.startswith(made.text)
    assert not any(stop in made.text for stop in stops)
    rest = text[len(made.text) :]
    assert any(map(rest.startswith, stops)) if rest else not any(stop in text for stop in stops)


def test_compiling_is_in_no_other_number() -> None:
    script = Script(say("hello"))
    run = script.engine.run
    kernels = script.engine.kernels

    def compiles(parts: Sequence[BatchItem]) -> np.ndarray:
        began = time.perf_counter()
        time.sleep(0.002)
        kernels.seconds += time.perf_counter() - began
        return run(parts)

    script.engine.run = compiles  # type: ignore[method-assign]
    began, made = time.perf_counter(), script.generate()
    made.finish()
    wall = time.perf_counter() - began
    t = made.timings
    assert t.compile_s == pytest.approx(kernels.seconds)
    assert t.compile_s >= 6 * 0.002
    assert t.prefill_s >= 0
    assert t.decode_s >= 0
    assert t.prefill_s + t.decode_s + t.compile_s <= wall


# -- the real engine ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny: WriteTiny) -> Iterator[treadle.Model]:
    path = tiny("gemma3", window=16, n_layer=6, tied=0)
    with treadle.load(path, threads=2, context=200) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "model" in request.fixturenames:
        model = request.getfixturevalue("model")
        check_scheduler(model.stepper.scheduler)


def greedy(model: treadle.Model, prompt: str, n: int = 40, **settings: Any) -> list[int]:
    made = model.generate(prompt, max_tokens=n, sampling=GREEDY, **settings)
    made.finish()
    return made.ids


def test_timings_and_what_the_cache_has_saved(model: treadle.Model) -> None:
    model.engine.cache.forget()
    first = model.generate("a text that is longer than one page of keys", max_tokens=8)
    n = len(first.prompt_ids)
    first.finish()
    t = first.timings
    assert (t.n_prompt, t.n_cached, t.n_generated) == (n, 0, len(first.ids))
    assert t.prefill_s > 0
    assert t.prefill_tok_s == pytest.approx(n / t.prefill_s)
    assert t.decode_tok_s == pytest.approx((len(first.ids) - 1) / t.decode_s)
    assert t.load_s == model.load_s > 0
    again = model.generate("a text that is longer than one page of them", max_tokens=1)
    again.finish()
    assert again.timings.n_cached > 32
    assert again.timings.decode_tok_s == 0


def test_the_same_text_again_whatever_the_cache_holds(model: treadle.Model) -> None:
    model.engine.cache.forget()
    ids = greedy(model, "some words to begin with, and some more")
    assert len(set(ids)) > 3
    for _ in range(2):
        assert greedy(model, "some words to begin with, and some more") == ids
        greedy(model, "something else")
    session = model.session()
    assert greedy(model, "some words to begin with, and some more", session=session) == ids
    session.close()


def test_two_texts_in_turns_over_one_session(model: treadle.Model) -> None:
    prompts = ["the first of them", "another one"]
    alone = [greedy(model, prompt) for prompt in prompts]
    both = [model.generate(p, max_tokens=40, sampling=GREEDY) for p in prompts]
    for _ in range(60):
        for made in both:
            next(made, None)
    assert [made.ids for made in both] == alone


def test_a_session_of_its_own_and_its_end(tiny: WriteTiny) -> None:
    path = tiny("llama")
    with treadle.load(path, threads=1, context=64, n_sequences=2) as model:
        session = model.session()
        made = model.generate("abc", session=session, max_tokens=4)
        made.finish()
        assert session.ids == (made.prompt_ids + made.ids)[:-1]
        assert model.engine.cache._retired is None
        session.close()
        for use in (session.feed, session.logits, session.prefill, session.match):
            with pytest.raises(TreadleError, match="the session is closed"):
                use([5])
        assert session.n_past == 0
        session.close()


def test_a_prompt_that_does_not_fit(model: treadle.Model) -> None:
    ids = greedy(model, "short")
    with pytest.raises(ContextFullError, match="201 tokens do not fit the context of 200"):
        model.generate([5] * 201)
    assert greedy(model, "short") == ids
    for n in (200, 199):
        made = model.generate([5] * n, sampling=Sampling(ignore_eos=True))
        made.finish()
        assert (len(made.ids), made.finish_reason) == (200 - n, "context")
    made = model.generate([5] * 190, sampling=Sampling(ignore_eos=True))
    made.finish()
    assert (len(made.ids), made.finish_reason) == (10, "context")


def test_a_prompt_of_tokens_that_are_not_there(model: treadle.Model) -> None:
    for token in (-1, 320):
        with pytest.raises(TreadleError, match=r"a token id outside 0\.\.319"):
            model.generate([5, token], max_tokens=1).finish()


def test_an_empty_prompt(model: treadle.Model, data: Path) -> None:
    """This model begins a text with no token of its own; stories260K does with one."""
    with pytest.raises(TreadleError, match="the text is empty"):
        model.generate("")
    with pytest.raises(TreadleError, match="the prompt is empty"):
        model.generate([])
    with treadle.load(data / "models" / "stories260K.gguf", threads=1) as stories:
        made = stories.generate("", max_tokens=5, sampling=GREEDY)
        assert made.prompt_ids == [1]
        assert made.finish() == "Once upon a time,"  # without the space before a first word


def test_custom_samplers(model: treadle.Model) -> None:
    seen: list[int] = []

    def count_up(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        seen.append(len(ids))
        out = np.full_like(logits, -np.inf)
        out[3 + len(ids)] = 0.0
        return out

    made = model.generate([7, 8], max_tokens=4, sampling=Sampling(custom=count_up))
    made.finish()
    assert made.ids == [5, 6, 7, 8]
    assert seen == [2, 3, 4, 5]


def test_a_sampler_that_fails_leaves_the_model_usable(model: treadle.Model) -> None:
    ids = greedy(model, "short")

    def fail(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        if len(ids) > 8:
            raise KeyboardInterrupt
        return logits

    made = model.generate("short", sampling=Sampling(custom=fail))
    with pytest.raises(KeyboardInterrupt):
        made.finish()
    assert list(made) == []
    assert made.finish_reason is None
    assert greedy(model, "short") == ids


def test_a_sampler_that_runs_out_does_not_look_like_the_end(model: treadle.Model) -> None:
    def stop(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        list(model.generate("short", sampling=Sampling(custom=stop)))


def test_grammars(model: treadle.Model) -> None:
    for seed in range(4):
        made = model.generate("?", grammar='root ::= "yes" | "no"', sampling=Sampling(seed=seed))
        assert made.finish() in ("yes", "no")
        assert made.finish_reason == "stop"
    made = model.generate("?", json_schema={"enum": ["red", "green"]}, sampling=GREEDY)
    assert made.finish() in ('"red"', '"green"')
    assert made.finish_reason == "stop"
    with pytest.raises(GrammarError, match="choose one"):
        model.generate("?", grammar="root ::= [a]", json_schema={})
    with pytest.raises(GrammarError):
        model.generate("?", grammar="root ::= nothing")


def interrupt_at(line: int, work: Callable[[], object]) -> int:
    """Press Ctrl-C before the ``line``th line that the engine's own files run; how many ran."""
    engine = (
        "engine/engine.py",
        "api/session.py",
        "thread_team.py",
        "engine/batch.py",
        "kvcache/cache.py",
        "kvcache/prefix_tree.py",
    )
    files = (
        *engine,
        "scheduler/scheduler.py",
        "scheduler/request.py",
        "scheduler/output.py",
        "scheduler/scheduler.py",
        "api/generation.py",
    )
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(files):
            return None
        count += event == "line"
        if count == line and event == "line":
            signal.raise_signal(signal.SIGINT)
        return trace

    usual = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(usual)
    return count


@pytest.mark.slow
def test_ctrl_c_at_any_line_leaves_the_model_usable(model: treadle.Model) -> None:
    prompts = ["a text that is longer than one page of keys", "and one that is quite different"]
    truth = [greedy(model, prompt, 4) for prompt in prompts]
    n_lines = interrupt_at(-1, lambda: greedy(model, prompts[0], 4))
    caught = 0
    assert n_lines > 500
    for line in range(1, n_lines, n_lines // 60):
        try:
            interrupt_at(line, lambda: greedy(model, prompts[0], 4))
        except KeyboardInterrupt:
            caught += 1
        check_scheduler(model.stepper.scheduler)
        assert [greedy(model, prompt, 4) for prompt in prompts] == truth
    assert caught > 50  # of 60: when more is cached, fewer lines run

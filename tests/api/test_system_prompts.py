"""Models whose layers keep a state: other questions under one system prompt, or after one
beginning, read only what is new, and answer as if they were alone, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from tests.scheduler.fake_engine import check_scheduler
from tests.server.conftest import running, talking
from treadle.kernels.run_state import PAGE

N_SYSTEM = 2000
N_QUESTION = 40
FILES = (  # written by llama.cpp's converter
    *("falconh1", "granitehybrid", "lfm2", "lfm2moe", "mamba2", "nemotronh"),
    *("qwen35", "qwen35moe", "qwen3next"),
)
TINY = ("rwkv7", "mamba", "kimi-linear", "jamba", "olmo_hybrid", "arwkv7")
QUICK = ("qwen35", "lfm2", "rwkv7")
EVERY = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in (*FILES, *TINY)
]
SETTINGS: dict[str, Any] = {"threads": 2, "deterministic": True}
GREEDY: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "logprobs": 1}


def ids(seed: int, n: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, 200, n)]


SYSTEM = ids(0, N_SYSTEM)
QUESTIONS = [ids(seed, N_QUESTION) for seed in range(1, 11)]
WORDS = [f"{word} {i}" for i, word in enumerate(("alpha", "beta", "gamma", "delta") * 6)]
RULES = "Answer in one word. " + ", ".join(WORDS) + "."
CHATML: dict[str, Any] = {"chat_template": "chatml", "context": 4096, **SETTINGS}


def n_read(made: Sequence[treadle.Generation]) -> list[int]:
    return [each.timings.n_prompt - each.timings.n_cached for each in made]


def finished(made: treadle.Generation) -> treadle.Generation:
    made.finish()
    return made


def conversation(question: str, rules: str = RULES) -> list[dict[str, Any]]:
    return [{"role": "system", "content": rules}, {"role": "user", "content": question}]


@contextmanager
def loaded(name: str, data: Path, tiny: WriteTiny, **settings: Any) -> Iterator[treadle.Model]:
    path = tiny(name) if name in TINY else data / "arch" / f"{name}.gguf"
    with treadle.load(path, context=2200, **SETTINGS, **settings) as model:
        yield model


@pytest.mark.every_case
@pytest.mark.parametrize("name", EVERY)
def test_ten_questions_read_the_system_prompt_once(name: str, data: Path, tiny: WriteTiny) -> None:
    with loaded(name, data, tiny) as model:
        made = [
            finished(model.generate([*SYSTEM, *question], system_end=N_SYSTEM, **GREEDY))
            for question in QUESTIONS
        ]
        assert n_read(made) == [N_SYSTEM + N_QUESTION, *[N_QUESTION] * 9]
        assert [each.timings.cache.state for each in made] == ["none", *["system"] * 9]
        alone = finished(model.generate([*SYSTEM, *QUESTIONS[-1]], cache_prompt=False, **GREEDY))
        assert (made[-1].ids, made[-1].logprobs) == (alone.ids, alone.logprobs)


def test_texts_with_one_beginning_read_it_twice(data: Path, tiny: WriteTiny) -> None:
    """Nobody says where it ends: the second text shows that, and the third finds the last whole
    page.
    """
    with loaded("qwen35", data, tiny) as model:
        made = [finished(model.generate([*SYSTEM, *each], **GREEDY)) for each in QUESTIONS[:4]]
        most = N_QUESTION + PAGE - 1
        assert max(n_read(made)[2:]) <= most
        assert n_read(made)[1] <= 512 + most  # it begins at a state of the first text
        states = [each.timings.cache.state for each in made]
        assert states == ["none", "run", "parting", "parting"]
        alone = finished(model.generate([*SYSTEM, *QUESTIONS[3]], cache_prompt=False, **GREEDY))
        assert (made[-1].ids, made[-1].logprobs) == (alone.ids, alone.logprobs)


def test_questions_at_once_read_it_once(data: Path, tiny: WriteTiny) -> None:
    """All come before any is read; so do several answers to one question."""
    with loaded("lfm2", data, tiny, n_sequences=4) as model:
        prompts = [[*SYSTEM, *question] for question in (*QUESTIONS[:5], QUESTIONS[0])]
        made = [model.generate(each, system_end=N_SYSTEM, **GREEDY) for each in prompts]
        for each in made:
            each.begin(look_ahead=inf)
        for each in made:
            each.finish()
        assert sum(n_read(made)) == N_SYSTEM + 6 * N_QUESTION
        assert made[0].ids == made[-1].ids
        check_scheduler(model.stepper.scheduler)


@pytest.mark.parametrize("n_steps", [1, 5])
def test_a_text_that_is_cancelled_while_it_is_read(
    n_steps: int, data: Path, tiny: WriteTiny
) -> None:
    """Before the state is kept, and after: the next text finds what there is."""
    with loaded("qwen35", data, tiny) as model:
        left = model.generate([*SYSTEM, *QUESTIONS[0]], system_end=N_SYSTEM, **GREEDY)
        left.begin(look_ahead=inf)
        for _ in range(n_steps):
            model.stepper.step()
        left.close()
        made = model.generate([*SYSTEM, *QUESTIONS[1]], system_end=N_SYSTEM, **GREEDY)
        made.finish()
        assert n_read([made]) == [N_SYSTEM + N_QUESTION - (512 if n_steps == 1 else N_SYSTEM)]
        alone = finished(model.generate([*SYSTEM, *QUESTIONS[1]], cache_prompt=False, **GREEDY))
        assert (made.ids, made.logprobs) == (alone.ids, alone.logprobs)


def test_a_session_goes_on_from_the_system_prompt(
    data: Path, tiny: WriteTiny, tmp_path: Path
) -> None:
    """It can be saved there, forgets what followed, and has its own copy of the last page."""
    with loaded("lfm2", data, tiny, n_sequences=3) as model:
        finished(model.generate([*SYSTEM, *QUESTIONS[0]], system_end=N_SYSTEM - 5, **GREEDY))
        with model.session() as session:
            assert session.match([*SYSTEM, 7]) == N_SYSTEM - 5
            session.save(tmp_path / "system")
            first = session.feed([*SYSTEM[-5:], *QUESTIONS[1]])
            session.truncate(N_SYSTEM)
            again = session.feed(QUESTIONS[1])
        model.engine.cache.forget()
        alone = model.logits([*SYSTEM, *QUESTIONS[1]])[-1]
        assert np.array_equal(first, alone)
        assert np.array_equal(again, alone)
        with model.load_session(tmp_path / "system") as session:
            assert np.array_equal(session.feed([*SYSTEM[-5:], *QUESTIONS[1]]), alone)


# -- chats ----------------------------------------------------------------------------------------


def test_a_chat_finds_the_end_of_its_system_prompt(tiny: WriteTiny) -> None:
    with treadle.load(tiny("mamba2"), **CHATML) as model:
        beginning = model.tokenize(model.chat_prompt(conversation("A")).partition("A<")[0])
        made = [
            finished(model.chat(conversation(question), **GREEDY))
            for question in ("Why?", "7 of them", "Ä", "")
        ]
        assert [each.timings.n_cached for each in made] == [0, *[len(beginning)] * 3]
        other = finished(model.chat(conversation("Why?", RULES + "!"), **GREEDY))
        assert other.timings.n_cached < len(beginning)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        replies = [
            finished(model.chat(conversation(question), tools=tools, **GREEDY))
            for question in ("Why?", "7 of them")
        ]
        assert replies[1].timings.cache.state == "system"
        assert replies[1].timings.n_cached > len(beginning)  # tools stand there, too


def test_a_server_reads_the_system_prompt_once(tiny: WriteTiny) -> None:
    with (
        treadle.load(tiny("qwen35"), n_sequences=2, **CHATML) as model,
        running(model) as service,
        talking(service) as client,
    ):
        timings = []
        for i in range(10):
            body = {"messages": conversation(f"{WORDS[i]}?"), "max_tokens": 1}
            answer = client.post("/v1/chat/completions", json=body)
            timings.append(answer.json()["timings"])
        beginning = model.tokenize(model.chat_prompt(conversation("A")).partition("A<")[0])
        n = len(beginning)
        assert [each["cache_n"] for each in timings] == [0, *[n] * 9]
        assert [each["cache"]["state"] for each in timings] == ["none", *["system"] * 9]
        assert timings[1]["cache"]["left_at"] == n
        message = {"system": RULES, "messages": [{"role": "user", "content": "So?"}]}
        said = client.post("/v1/messages", json={**message, "model": "m", "max_tokens": 1})
        assert said.json()["usage"]["cache_read_input_tokens"] == n
        body = {"input": "So!", "instructions": RULES, "max_output_tokens": 1}
        said = client.post("/v1/responses", json=body)
        assert said.json()["usage"]["input_tokens_details"]["cached_tokens"] == n

"""Texts that real models write: those of float32, and the same by every path."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.real.conftest import Fetched
from tests.real.truth import texts, values

GREEDY: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}
# Texts of several prompts in one batch round their inputs otherwise than one alone. A logit moves
# by as much (docs/performance.md); where two tokens are nearer, either may come.
TIE = 0.23
ASKED = ("What is the capital of France?", "And of Italy?", "Which of them is older?")
SOME_PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def add(a, b):",
    "1, 2, 3, 4,",
    "Der Zug nach",
    "Water is made of",
    "import numpy as",
    "The three primary colours are",
)


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        ("smollm2", False),
        ("smollm2", True),
        ("gemma3", False),
        pytest.param("gemma3", True, marks=pytest.mark.whole_real),
    ],
)
def test_greedy_texts_are_those_of_float32(
    name: str, deterministic: bool, fetched: Fetched
) -> None:
    cases = values()["greedy"][name]
    assert len(cases) >= 4
    with treadle.load(
        fetched(name), threads=2, context=256, n_sequences=4, deterministic=deterministic
    ) as model:
        ends = model.tokenizer.eog
        prompts = [case["prompt"] for case in cases]
        expected = [[token for token in case["ids"] if token not in ends] for case in cases]
        for prompt, ids in zip(prompts, expected, strict=True):
            made = model.generate(prompt, max_tokens=len(ids), **GREEDY)
            made.finish()
            assert made.ids == ids, (prompt, made.text)
        together = model.generate_many(prompts, max_tokens=max(map(len, expected)), **GREEDY)
        for made, ids, case in zip(together, expected, cases, strict=True):
            if made.ids[: len(ids)] != ids:
                assert not deterministic
                at = next(i for i, id in enumerate(ids) if made.ids[i] != id)
                row = model.logits([*model.tokenize(case["prompt"]), *ids[:at]])[-1]
                gap = row[ids[at]] - row[made.ids[at]]
                assert gap < TIE, (case["prompt"], made.text)
            elif len(ids) < len(case["ids"]):
                assert made.finish_reason == "stop"


def conversation(
    model: treadle.Model, session: treadle.Session | None = None, *, anew: bool = False
) -> list[list[int]]:
    """The ids of the answers to a conversation of three turns; ``anew``: without the cache."""
    messages: list[dict[str, str]] = []
    found: list[list[int]] = []
    for question in ASKED:
        if anew:
            model.engine.cache.forget()
        messages.append({"role": "user", "content": question})
        settings: dict[str, Any] = {"max_tokens": 10, **GREEDY}
        made: treadle.Generation = model.chat(messages, session=session, **settings)
        messages.append({"role": "assistant", "content": made.finish()})
        assert not (anew and made.timings.n_cached)
        assert anew or not found or made.timings.n_cached
        found.append(made.ids)
    return found


def test_a_conversation_from_the_cache_is_the_one_read_anew(steady: treadle.Model) -> None:
    anew = conversation(steady, anew=True)
    assert conversation(steady) == anew
    with steady.session() as session:
        assert conversation(steady, session) == anew


def test_texts_beside_others_are_those_alone(steady: treadle.Model) -> None:
    """Chats and plain texts of several lengths, eight at once on four sequences."""
    settings = {"max_tokens": 10, **GREEDY}
    prompts = [
        *SOME_PROMPTS,
        *(steady.chat_prompt([{"role": "user", "content": q}]) for q in ASKED),
    ]
    alone = []
    for prompt in prompts:
        steady.engine.cache.forget()
        made = steady.generate(prompt, **settings)
        made.finish()
        alone.append(made.ids)
    steady.engine.cache.forget()
    together = steady.generate_many(prompts, **settings)
    assert [made.ids for made in together] == alone


def test_a_prompt_from_the_cache_has_the_same_probabilities(steady: treadle.Model) -> None:
    """Of the first token and of those behind it, to the bit, whatever of the prompt is cached."""
    prompt = steady.chat_prompt([{"role": "user", "content": texts()["letter"][:400]}])
    ids = steady.tokenize(prompt)
    found = []
    for n_before in (0, 40, 64, len(ids)):  # none, within a page, at its end, all
        steady.engine.cache.forget()
        with steady.session() as session:
            if n_before:
                session.prefill(ids[:n_before])
            made = steady.generate(ids, max_tokens=6, session=session, logprobs=5, **GREEDY)
            made.finish()
            found.append([entry.as_dict() for entry in made.logprobs or ()])
            assert made.timings.n_cached == min(n_before, len(ids) - 1)
    assert len(found[0]) == 6
    assert found == [found[0]] * len(found)


def test_a_session_goes_on_after_it_was_saved(steady: treadle.Model, tmp_path: Path) -> None:
    beginning = texts()["english"]
    with steady.session() as session:
        first = steady.generate(beginning, max_tokens=8, session=session, **GREEDY)
        first.finish()
        session.save(tmp_path / "text.session")
        second = steady.generate(
            first.prompt_ids + first.ids, max_tokens=16, session=session, **GREEDY
        )
        second.finish()
    with treadle.load_session(tmp_path / "text.session", steady) as session:
        again = steady.generate(
            first.prompt_ids + first.ids, max_tokens=16, session=session, **GREEDY
        )
        again.finish()
    assert again.ids == second.ids
    assert again.timings.n_prompt - again.timings.n_cached == 1


def test_drafts_change_nothing(fetched: Fetched) -> None:
    """A prompt that the answer repeats, so that drafts are taken."""
    code = "\n".join(texts()["python"].splitlines()[8:20])
    prompt = f"{code}\n\n# The same class once more:\n\n{code[:200]}"
    found = []
    for speculate in (False, True):
        with treadle.load(
            fetched("smollm2"), threads=2, context=1024, deterministic=True, speculate=speculate
        ) as model:
            made = model.generate(prompt, max_tokens=32, **GREEDY)
            made.finish()
            found.append(made)
    assert found[1].ids == found[0].ids
    assert found[1].timings.n_accepted > 0


def test_stop_texts(smollm2: treadle.Model) -> None:
    plain = smollm2.generate("1, 2, 3, 4, 5,", max_tokens=24, **GREEDY).finish()
    assert plain.startswith(" 6, 7, 8, 9, 10")
    made = smollm2.generate("1, 2, 3, 4, 5,", max_tokens=24, stop=[" 9, 1", "zebra"], **GREEDY)
    assert made.finish() == " 6, 7, 8,"
    assert made.finish_reason == "stop"


def test_an_answer_ends_by_itself(smollm2: treadle.Model) -> None:
    made = smollm2.chat([{"role": "user", "content": "Say hello."}], max_tokens=200, **GREEDY)
    text = made.finish()
    assert made.finish_reason == "stop"
    assert text
    assert "<|im" not in text


def test_a_schema(smollm2: treadle.Model) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "country": {"enum": ["France", "Italy"]},
            "inhabitants": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
        },
        "required": ["city", "country", "inhabitants"],
        "additionalProperties": False,
    }
    question = [{"role": "user", "content": "Describe the city of Paris as JSON."}]
    made = smollm2.chat(question, json_schema=schema, max_tokens=100, **GREEDY)
    answer = json.loads(made.finish())
    assert made.finish_reason == "stop"
    assert set(answer) == {"city", "country", "inhabitants"}
    assert answer["country"] == "France"
    assert 1 <= answer["inhabitants"] <= 99_999_999


def test_a_grammar_and_a_regex(smollm2: treadle.Model) -> None:
    question = [{"role": "user", "content": "Is Paris the capital of France? Answer yes or no."}]
    made = smollm2.chat(question, grammar='root ::= "yes" | "no"', max_tokens=10, **GREEDY)
    assert made.finish() in ("yes", "no")
    assert made.finish_reason == "stop"
    date = r"\d{4}-\d{2}-\d{2}"
    made = smollm2.generate("The French Revolution began on ", regex=date, max_tokens=20, **GREEDY)
    assert re.fullmatch(date, made.finish())


def test_tools(smollm2: treadle.Model) -> None:
    def weather(place: str, days: int = 1) -> str:
        """The weather of a place in the next days."""
        raise AssertionError

    question = [{"role": "user", "content": "What is the weather in Oslo?"}]
    made = smollm2.chat(question, tools=[weather], tool_choice="required", max_tokens=120, **GREEDY)
    made.finish()
    (call, *_) = made.calls
    arguments = json.loads(call.arguments)
    assert call.name == "weather"
    assert arguments["place"] == "Oslo"
    assert set(arguments) <= {"place", "days"}


@pytest.mark.whole_real
def test_the_whole_context_and_no_token_more(fetched: Fetched) -> None:
    """8192 tokens, which SmolLM2 was trained with: a word from the beginning is found at the end,
    the text stops where the context ends, and a longer prompt is an error.
    """
    n_context = 8192
    filler = texts()["english"] + texts()["letter"]
    with treadle.load(fetched("smollm2"), threads=2, context=n_context) as model:
        ids = model.tokenize("The secret number is 4711.\n") + model.tokenize(filler) * 20
        question = model.tokenize("\nThe secret number is 4711.\nThe secret number is")
        ids = ids[: n_context - len(question) - 6] + question
        made = model.generate(ids, **GREEDY)
        assert made.finish().startswith(" 4711")
        assert made.finish_reason == "context"
        assert len(ids) + len(made.ids) in (n_context, n_context + 1)
        with pytest.raises(treadle.ContextFullError):
            model.generate(ids[:1] * (n_context + 1)).finish()


@pytest.mark.whole_real
def test_beyond_the_context_it_was_trained_with(fetched: Fetched) -> None:
    """12000 tokens: allowed, finite, and its windows are those of a shorter text."""
    with treadle.load(fetched("smollm2"), threads=2, context=12_288) as model:
        filler = model.tokenize(texts()["english"] + texts()["letter"])
        made = model.generate((filler * 30)[:12_000], max_tokens=8, logprobs=0, **GREEDY)
        made.finish()
        assert len(made.ids) == 8
        assert all(entry.logprob <= 0 for entry in made.logprobs or ())

"""Answers of messages whose marks are control tokens, as Solar Open's vocabulary has them: what a
model writes that writes anything at all.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.chat.tools.families import FAMILIES, JSON, OPEN, row
from tests.chat.tools.test_guide import SMALL, check, guide_of, planned
from tests.tokenizer.vocabularies import CONTROL, load_bpe
from treadle.chat.tools import ParsedOutput, TemplateDialect
from treadle.chat.tools.answer_plan import AnswerPlan
from treadle.chat.tools.constrained_decoding import ConstrainedDecoder
from treadle.grammar.compiled_cache import Grammars
from treadle.tokenizer.tokenizer import Tokenizer

SOLAR = row("solar")
MARKS = (
    "<|endoftext|>",
    "<|begin|>",
    "<|end|>",
    "<|think|>",
    "<|content|>",
    "<|flush|>",
    "<|calls|>",
    "<|tool_calls|>",
    "<|tool_call:begin|>",
    "<|tool_call:end|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
)
MANNER = TemplateDialect(thought=OPEN.thought, channels=OPEN, row=SOLAR, writes_calls=True)
SCHEMA: dict[str, Any] = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 2}
THINKS = f"<|think|>hm{OPEN.end}{OPEN.start}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "solar.gguf"
    return load_bpe(path, more=[(mark, CONTROL) for mark in MARKS], eos_token_id=256)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def spelt(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


def put(guide: ConstrainedDecoder, tokenizer: Tokenizer, text: str) -> None:
    """Go on with a text, each of whose tokens must be allowed."""
    for id in tokenizer.encode(text, bos=False, special=True):
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        guide.mask(logits)
        assert logits[id] == 0, (text, tokenizer.piece(id))
        guide.accept(id)


def written(
    guide: ConstrainedDecoder, tokenizer: Tokenizer, seed: int, first: str = "", then: str = ""
) -> str:
    """What a model writes that likes some tokens to begin with and some others behind them, and
    ends; all others alike.
    """
    rng = np.random.default_rng(seed)
    ids = list[int]()
    while len(ids) < 3000:
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        ends = tokenizer.encode(f"{OPEN.end}<|tool_call:end|>", bos=False, special=True)
        logits[[*tokenizer.eog, *ends]] += 4
        logits[tokenizer.encode(then if ids else first, bos=False, special=True)] += 20
        guide.mask(logits)
        id = int(logits.argmax())
        guide.accept(id)
        if id in tokenizer.eog:
            return spelt(tokenizer, ids)
        ids.append(id)
    raise AssertionError(f"no end: {spelt(tokenizer, ids)!r:.200}")


def told(plan: AnswerPlan, text: str) -> ParsedOutput:
    """The same whole and letter by letter."""
    found = []
    for parts in ([text], list(text)):
        scanner = plan.marks.scanner()
        said = [each for part in parts for each in scanner.feed(part)]
        found.append(ParsedOutput.of([*said, *scanner.feed("", last=True)]))
    whole, parted = found
    assert (whole.reasoning, whole.content) == (parted.reasoning, parted.content)
    assert [call[1:] for call in whole.calls] == [call[1:] for call in parted.calls]
    return whole


def test_what_ends_a_message_ends_no_answer(tokenizer: Tokenizer) -> None:
    ends = {tokenizer.piece(id) for id in tokenizer.eog}
    assert ends == {"<|endoftext|>", "<|flush|>", "<|calls|>"}


@pytest.mark.parametrize("liked", ["", "<|think|>"])
def test_required(liked: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    names = set()
    for parallel in (True, False):
        plan = planned(MANNER, grammars, forced=("f", "g"), parallel=parallel)
        for seed in range(6):
            text = written(guide_of(plan), tokenizer, seed, liked)
            found = told(plan, text)
            assert found.calls, text
            assert len(found.calls) == 1 or parallel
            assert not found.content, text
            assert text.startswith(liked)
            check(found.calls)
            names |= {call.name for call in found.calls}
            assert len({call.id for call in found.calls}) == len(found.calls)
            assert all(call.id in text for call in found.calls)
    assert names == {"f", "g"}


def test_one_that_is_named(tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(MANNER, grammars, forced=("f",))
    for seed in range(3):
        calls = told(plan, written(guide_of(plan), tokenizer, seed)).calls
        assert {call.name for call in calls} == {"f"}


@pytest.mark.parametrize("before", ["", THINKS, f"<|content|>so{OPEN.end}{OPEN.start}"])
def test_auto_binds_behind_the_mark(before: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(MANNER, grammars)
    for seed in range(3):
        guide = guide_of(plan)
        put(guide, tokenizer, f"{before}<|tool_calls|>")
        text = f"{before}<|tool_calls|>{written(guide, tokenizer, seed)}"
        found = told(plan, text)
        assert found.calls, text
        check(found.calls)
        assert found.reasoning == ("hm" if before == THINKS else "")
        assert found.content == ("so" if "so" in before else "")


def test_what_models_write_is_allowed(tokenizer: Tokenizer, grammars: Grammars) -> None:
    family = FAMILIES["solar"]
    for wanted in ({}, {"forced": ("f", "g")}, {"schema": SCHEMA}):
        plan = planned(MANNER, grammars, **wanted)
        for before in ("", THINKS):
            for text in family:
                said = text.replace(JSON, '{"text": "b", "n": 1}')
                put(guide_of(plan), tokenizer, before + said)
                assert told(plan, before + said).content == ""


@pytest.mark.parametrize("tools", [{}, SMALL])
@pytest.mark.parametrize("liked", ["<|think|>", "<|content|>"])
def test_a_schema(liked: str, tools: Any, tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(MANNER, grammars, tools=tools, schema=SCHEMA)
    for seed in range(4):
        found = told(plan, written(guide_of(plan), tokenizer, seed, liked))
        check(found.calls)
        assert found.calls or json.loads(found.content) in ([1], [1, 1])


@pytest.mark.parametrize("wanted", [{"forced": ("f",)}, {"tools": {}, "schema": SCHEMA}])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_of_reasoning(
    budget: int, wanted: dict[str, Any], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """A model that would rather reason for ever."""
    plan = planned(MANNER, grammars, **wanted, budget=budget)
    for seed in range(3):
        found = told(plan, written(guide_of(plan), tokenizer, seed, "<|think|>", "ab"))
        assert len(found.reasoning) <= budget
        assert bool(found.reasoning) == bool(budget)
        assert found.calls or json.loads(found.content) in ([1], [1, 1])


def test_all_marks_are_spelt(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """For the scanner; where there are no tools, those of messages."""
    shown = {tokenizer.piece(id) for id in planned(MANNER, grammars).shown}
    assert shown == {mark for mark in MARKS if mark not in ("<|endoftext|>", "<|flush|>")}
    alone = {tokenizer.piece(id) for id in planned(MANNER, grammars, tools={}).shown}
    messages = {"<|begin|>", "<|end|>", "<|think|>", "<|content|>"}
    assert alone == messages | {"<|tool_calls|>", "<|tool_call:begin|>"}

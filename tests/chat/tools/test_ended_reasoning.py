"""Reasoning that is ended: by a budget, with a message, or while it is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.chat.tools.families import GPT_OSS
from tests.chat.tools.test_guide import guide_of, own_dialect, planned, put, told
from treadle.api.options import packaged_model
from treadle.chat.tools import TemplateDialect, Thought
from treadle.chat.tools.answer_plan import AnswerPlan
from treadle.chat.tools.constrained_decoding import ConstrainedDecoder
from treadle.chat.tools.formats import HERMES, THOUGHTS
from treadle.errors import GrammarError
from treadle.files.gguf import open_gguf
from treadle.grammar.compiled_cache import Grammars
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

THINK = THOUGHTS[0]
DIALECT = TemplateDialect(thought=THINK, row=HERMES)
WORDS = " Time is up, so I answer now. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_gguf(packaged_model()))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def wishing(guide: ConstrainedDecoder, tokenizer: Tokenizer, wish: str, n: int) -> list[int]:
    """What a model writes in ``n`` tokens that wants ``wish`` again and again, where it may."""
    wanted = tokenizer.encode_plain(wish, start=False)
    ids = list[int]()
    for i in range(n):
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        logits[list(tokenizer.eog)] = -1
        logits[wanted[i % len(wanted)]] = 1
        guide.mask(logits)
        ids.append(int(logits.argmax()))
        guide.accept(ids[-1])
    return ids


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, start=False)


def opened(grammars: Grammars, **wanted: Any) -> AnswerPlan:
    return planned(DIALECT, grammars, THINK.open, **{"tools": {}, **wanted})


def test_it_ends_at_the_next_token(tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = opened(grammars, control=True)
    guide = guide_of(plan)
    before = wishing(guide, tokenizer, "so on", 7)
    assert guide.end_reasoning()
    after = wishing(guide, tokenizer, "<think>so on", 40)
    found = told(plan, text_of(tokenizer, before + after))
    assert found.reasoning == text_of(tokenizer, before)
    assert found.content
    assert not guide.end_reasoning()
    close = tokenizer.encode(THINK.close, bos=False, special=True)
    assert after[: len(close)] == close


def test_without_a_call_it_goes_on(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Control alone forbids nothing: reasoning may begin again, and needs no mask."""
    plan = opened(grammars, control=True)
    guide = guide_of(plan)
    for text in ("so on", THINK.close, "an answer", THINK.open, "again", THINK.close, "so"):
        assert guide.unbound()
        put(guide, tokenizer, text)
    found = told(plan, f"so on{THINK.close}an answer{THINK.open}again{THINK.close}so")
    assert found.reasoning == "so onagain"


@pytest.mark.parametrize("begun", ["", "<", "<thi"])
def test_what_has_not_begun_does_not(begun: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """A mark that is half written is completed, and closed at once."""
    plan = planned(DIALECT, grammars, tools={}, control=True)
    guide = guide_of(plan)
    put(guide, tokenizer, begun)
    assert guide.end_reasoning()
    ids = wishing(guide, tokenizer, f"{THINK.open.removeprefix(begun)}so on", 60)
    found = told(plan, begun + text_of(tokenizer, ids))
    assert found.reasoning == ""
    assert found.content


def test_a_schema_holds_behind_it(tokenizer: Tokenizer, grammars: Grammars) -> None:
    for prompt in (THINK.open, ""):
        wanted: dict[str, Any] = {"tools": {}, "schema": {"const": 57}, "control": True}
        plan = planned(DIALECT, grammars, prompt, **wanted)
        guide = guide_of(plan)
        before = wishing(guide, tokenizer, "so on", 4) if prompt else []
        assert guide.end_reasoning() == bool(prompt)  # this mark is several tokens: it may not come
        n = len(tokenizer.encode(THINK.close, bos=False)) if prompt else 0
        after = wishing(guide, tokenizer, "57", n + 2)
        found = told(plan, text_of(tokenizer, before + after))
        assert (found.reasoning, found.content.strip()) == (text_of(tokenizer, before), "57")


def test_a_call_within_it_is_completed_first(tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(DIALECT, grammars, THINK.open, control=True)
    guide = guide_of(plan)
    put(guide, tokenizer, '<tool_call>\n{"name": "g", "arguments": {')
    assert guide.end_reasoning()
    put(guide, tokenizer, "}}\n</tool_call>")
    assert text_of(tokenizer, guide.forced()) == THINK.close


@pytest.mark.parametrize("budget", [1, 6])
@pytest.mark.parametrize("thought", [THINK, GPT_OSS.thought])
def test_a_message_before_its_end(
    thought: Thought, budget: int, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    channels = GPT_OSS if thought is GPT_OSS.thought else None
    dialect = own_dialect("harmony") if channels else DIALECT
    dialect = TemplateDialect(thought=thought, channels=channels, row=dialect.row)
    plan = planned(dialect, grammars, tools={}, budget=budget, message=WORDS)
    guide = guide_of(plan)
    put(guide, tokenizer, thought.open.rstrip())
    n = budget + len(tokenizer.encode_plain(WORDS, start=False))
    ids = wishing(guide, tokenizer, "so on", n + len(plan.plan.ids(thought.close)))  # type: ignore[union-attr]
    text = text_of(tokenizer, ids)
    assert text == f"{text_of(tokenizer, ids[:budget])}{WORDS}{thought.close}"
    found = told(plan, f"{thought.open}{text}")
    assert found.reasoning.endswith(WORDS)


def test_the_message_is_of_what_was_ended(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Not of reasoning that is off, nor of that which ends by itself."""
    guide = guide_of(opened(grammars, control=True, message=WORDS))
    put(guide, tokenizer, "so on")
    assert guide.forced() == []
    guide.end_reasoning()
    assert text_of(tokenizer, guide.forced()) == WORDS + THINK.close
    off = guide_of(opened(grammars, budget=0, message=WORDS))
    assert text_of(tokenizer, off.forced()) == THINK.close


@pytest.mark.parametrize("words", ["it is </think> over", "<think>"])
def test_a_message_has_no_marks(words: str, grammars: Grammars) -> None:
    for wanted in ({"budget": 3}, {"control": True}):
        with pytest.raises(GrammarError, match="without marks of reasoning") as caught:
            opened(grammars, message=words, **wanted)
        assert caught.value.setting == "reasoning_budget_message"
    assert opened(grammars, message=words).plan is None  # it is never written


def test_no_character_is_cut(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """The packaged vocabulary has no such characters: each byte is a token."""
    char = "\N{HUNDRED POINTS SYMBOL}"
    parts = tokenizer.encode_plain(char, start=False)
    assert len(parts) == 4
    for budget in range(1, 6):
        for ends in (False, True):
            wanted = {"control": True} if ends else {"budget": budget}
            guide = guide_of(opened(grammars, **wanted))
            written = list[int]()
            while not guide.forced():
                written.append((parts * 3)[len(written)])
                guide.accept(written[-1])
                if ends and len(written) == budget:
                    guide.end_reasoning()
            whole = -(-budget // 4)
            assert text_of(tokenizer, written) == char * whole, (budget, ends)


def test_bytes_that_are_no_character_do_not_wait_for_ever(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    (first, *_) = tokenizer.encode_plain("\N{HUNDRED POINTS SYMBOL}", start=False)
    guide = guide_of(opened(grammars, budget=2))
    n = 0
    while not guide.forced():
        guide.accept(first)
        n += 1
    assert n == 2 + 3


@pytest.mark.parametrize("tools", [{}, None])
def test_where_all_is_free_there_is_no_mask(
    tools: Any, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """What ``unbound`` says is so, wherever a text has got to."""
    own = {"tools": tools} if tools is not None else {}
    text = f"{THINK.open}so on{THINK.close}an answer{THINK.open}again{THINK.close}\nso"
    plans: list[dict[str, Any]] = [
        {"control": True},
        {"budget": 9},
        {"budget": 0},
        {"schema": {"type": "string"}, "control": True},
    ]
    n_free = 0
    for wanted in plans:
        guide = guide_of(planned(DIALECT, grammars, **own, **wanted))
        rng = np.random.default_rng(5)
        for id in tokenizer.encode_plain(text, start=False):
            if guide.unbound():
                n_free += 1
                assert guide.bits() is None
            logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
            logits[id] += 9
            guide.mask(logits)
            guide.accept(int(logits.argmax()))
    assert n_free > 5

"""What may come next: a model that writes anything at all writes calls that hold."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from typing import Any

import numpy as np
import pytest

import treadle
from tests.chat.tools.families import ARGUMENTS, FAMILIES, GPT_OSS, JSON, TOOLS, row
from treadle.chat.tools import AnswerMarks, OutputPiece, ParsedOutput, TemplateDialect, Thought
from treadle.chat.tools.answer_plan import AnswerOptions, AnswerPlan, plan_answer
from treadle.chat.tools.constrained_decoding import ConstrainedDecoder
from treadle.chat.tools.formats import HERMES, ROWS, THOUGHTS
from treadle.errors import GrammarError
from treadle.grammar.compiled_cache import Grammars
from treadle.grammar.grammar import LEXER_BYTES
from treadle.scheduler.output import RequestOutput
from treadle.tokenizer.tokenizer import Tokenizer

THINK = THOUGHTS[0]
SMALL: dict[str, Any] = {  # arguments that come to an end soon
    "f": {
        "type": "object",
        "properties": {"text": {"enum": ['é"<', "b"]}, "n": {"enum": [1, -3]}},
        "required": ["text", "n"],
        "additionalProperties": False,
    },
    "g": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from treadle.api.options import packaged_model
    from treadle.files.gguf import open_gguf
    from treadle.tokenizer.tokenizer import load_tokenizer

    return load_tokenizer(open_gguf(packaged_model()))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def planned(
    dialect: TemplateDialect, grammars: Grammars, prompt: str = "", **wanted: Any
) -> AnswerPlan:
    return plan_answer(AnswerOptions(**{"tools": SMALL, **wanted}), dialect, prompt, grammars)


def own_dialect(name: str) -> TemplateDialect:
    own = row(name)
    return TemplateDialect(row=own, channels=own.channels, writes_calls=True)


def guide_of(plan: AnswerPlan) -> ConstrainedDecoder:
    guide = plan.guide()
    assert guide is not None
    return guide


def put(guide: ConstrainedDecoder, tokenizer: Tokenizer, text: str) -> None:
    """Go on with a text, each of whose tokens must be allowed."""
    for id in tokenizer.encode_plain(text, start=False):
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        guide.mask(logits)
        assert logits[id] == 0, (text, tokenizer.piece(id))
        guide.accept(id)


def written(guide: ConstrainedDecoder, tokenizer: Tokenizer, seed: int, most: int = 600) -> str:
    """What a model writes that likes all tokens alike, up to an end of text."""
    rng = np.random.default_rng(seed)
    ids = list[int]()
    while len(ids) < most:
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        logits[list(tokenizer.eog)] += 5.0
        guide.mask(logits)
        id = int(logits.argmax())
        guide.accept(id)
        if id in tokenizer.eog:
            return tokenizer.decode(ids, start=False)
        ids.append(id)
    raise AssertionError(f"no end: {tokenizer.decode(ids)!r}")


def told(plan: AnswerPlan, text: str) -> ParsedOutput:
    return ParsedOutput.of(plan.marks.scanner().feed(text, last=True))


def check(calls: list[Any]) -> None:
    """They fulfil the schemas of SMALL."""
    for call in calls:
        arguments = json.loads(call.arguments)
        if call.name == "g":
            assert arguments == {}
        else:
            assert set(arguments) == {"text", "n"}
            assert arguments["text"] in SMALL["f"]["properties"]["text"]["enum"]
            assert arguments["n"] in (1, -3)


# The packaged vocabulary's texts end with <|end|>, which is a mark within gpt-oss's and Solar's.
ENDING = [name for name in FAMILIES if row(name).channels is None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDING)
def test_required(name: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(own_dialect(name), grammars, forced=("f", "g"))
    names = set()
    for seed in range(6):
        text = written(guide_of(plan), tokenizer, seed)
        found = told(plan, text)
        assert found.calls, text
        assert not found.content, text
        check(found.calls)
        names |= {call.name for call in found.calls}
    assert names == {"f", "g"}


@pytest.mark.parametrize("name", ENDING)
def test_named(name: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(own_dialect(name), grammars, forced=("f",), parallel=False)
    (call,) = told(plan, written(guide_of(plan), tokenizer, 1)).calls
    assert call.name == "f"


@pytest.mark.slow
def test_the_number_of_a_call_ends(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """A model that likes digits would write them up to its limit, and no call."""
    plan = planned(own_dialect("kimi"), grammars, forced=("f",), parallel=False)
    guide = guide_of(plan)
    text = ""
    while len(text) < 200 and not text.endswith("<|tool_call_argument_begin|>"):
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        digits = [id for id in range(tokenizer.n_vocab) if tokenizer.piece(id).strip().isdigit()]
        logits[digits] += 1.0
        guide.mask(logits)
        guide.accept(id := int(logits.argmax()))
        text += tokenizer.piece(id)
    assert re.search(r"functions\.f:\d{1,6}<\|tool_call_argument_begin\|>$", text)


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_binds_behind_the_mark(name: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    own = row(name)
    plan = planned(own_dialect(name), grammars)
    guide = guide_of(plan)
    begun = {"json": '{"name": "', "harmony": "<|channel|>commentary to=functions."}
    begun["actions"] = f"{own.trigger}{own.before}f"  # another name begins an answer in words
    before = "" if not own.trigger or own.channels else "so: "
    begin = before + begun.get(name, own.trigger)
    if not own.channels and own.trigger:
        assert guide.bits() is None  # what it says is free
    put(guide, tokenizer, begin)
    assert guide.bits() is not None
    rng = np.random.default_rng(3)
    ids = list[int]()
    while guide._state == "call":
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        guide.mask(logits)
        ids.append(int(logits.argmax()))
        guide.accept(ids[-1])
    text = begin + tokenizer.decode(ids, start=False)
    found = told(plan, text)
    assert len(found.calls) >= 1, text
    check(found.calls)
    assert found.content == before


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_what_models_write_is_allowed(name: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """The canonical calls of a family, token by token, called or not."""
    family = FAMILIES[name]
    for forced in ((), ("f", "g")):
        plan = planned(own_dialect(name), grammars, tools=TOOLS, forced=forced)
        for text in filter(None, family):
            put(guide_of(plan), tokenizer, text)


@pytest.mark.parametrize("sure", [True, False])
@pytest.mark.parametrize("begin", row("actions").triggers)
def test_a_call_of_no_tool_is_an_answer_in_words(
    begin: str, sure: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """Command R+ says so that it needs no tool."""
    own = row("actions")
    plan = planned(own_dialect("actions"), grammars)
    none = f"{begin}{own.before}{own.content}{own.after}{{}}{own.behind}{own.wrap[1]}"
    guide = guide_of(plan)
    put(guide, tokenizer, none)
    assert not guide.accepting  # nothing is said yet
    put(guide, tokenizer, " 3 it is.")
    assert guide.accepting
    marks = replace(plan.marks, sure=sure)
    for text in (f"{none}\n 3 it is.", f"{none[:-9]}"):
        scanner = marks.scanner()
        said = list[OutputPiece]()
        for char in text:
            said += scanner.feed(char)
        found = ParsedOutput.of([*said, *scanner.feed("", last=True)])
        assert found.calls == []
        if text.endswith("."):
            assert found.content == " 3 it is."
        elif sure:
            assert found.content == ""
    call = FAMILIES["actions"].f.replace(own.trigger, begin).replace(JSON, '{"text": "b", "n": 1}')
    put(guide_of(plan), tokenizer, call)
    assert told(plan, call).calls[0].name == "f"
    with pytest.raises(AssertionError):  # where a call must be
        put(guide_of(planned(own_dialect("actions"), grammars, forced=("f",))), tokenizer, none)


def test_after_a_call_text_is_free_unless_one_is_the_most(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    text = FAMILIES["hermes"].g
    guide = guide_of(planned(own_dialect("hermes"), grammars))
    put(guide, tokenizer, text)
    assert guide.bits() is None
    put(guide, tokenizer, f"\n{text} and so on")
    once = guide_of(planned(own_dialect("hermes"), grammars, parallel=False))
    put(once, tokenizer, text)
    logits = np.zeros(tokenizer.n_vocab, np.float32)
    once.mask(logits)
    assert set(np.flatnonzero(logits == 0)) == tokenizer.eog


def test_a_grammar_holds_where_the_opening_mark_is_left_out(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """Qwen3-Coder begins calls so; words around them are free."""
    plan = planned(own_dialect("tags"), grammars)
    text = FAMILIES["tags"].g.removeprefix("<tool_call>\n")
    guide = guide_of(plan)
    put(guide, tokenizer, "so:\n<function=")
    assert guide.bits() is not None
    put(guide, tokenizer, text.removeprefix("<function="))
    assert guide.bits() is None
    put(guide, tokenizer, f"\n{FAMILIES['tags'].g}\n{text}")
    guide = guide_of(plan)
    put(guide, tokenizer, "<function=")
    with pytest.raises(AssertionError):
        put(guide, tokenizer, "h>")


def test_no_token_goes_past_a_mark_but_into_a_call(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    guide = guide_of(planned(own_dialect("hermes"), grammars))
    put(guide, tokenizer, "x <tool_call")
    bits = guide.bits()
    if bits is not None:
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        for id, piece in enumerate(tokenizer.all_token_bytes()):
            if piece.startswith(b">") and not b'\n{"name": "f'.startswith(piece[1:]):
                assert not allowed[id], piece
    put(guide, tokenizer, ">")
    assert guide.bits() is not None


# -- reasoning ----------------------------------------------------------------------------------


def test_a_schema_holds_behind_reasoning(tokenizer: Tokenizer, grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    dialect = TemplateDialect(thought=THINK)
    plan = planned(dialect, grammars, "<think>\n", tools={}, schema=schema)
    for gap in ("", "\n", "\n\n"):
        guide = guide_of(plan)
        put(guide, tokenizer, 'I {"b": 2} think</think>' + gap)
        text = written(guide, tokenizer, 1)
        assert json.loads(text) == {"a": 1}
    refused = guide_of(plan)
    put(refused, tokenizer, "</think>")
    with pytest.raises(GrammarError):
        refused.accept(tokenizer.encode_plain("x", start=False)[0])


@pytest.mark.parametrize("wanted", [{"forced": ("f",)}, {"tools": {}, "schema": {"const": 5}}])
def test_what_must_follow_reasoning_does(
    wanted: dict[str, Any], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """A model that would end its text within reasoning goes on with that."""
    dialect = replace(own_dialect("hermes"), thought=THINK)
    guide = guide_of(planned(dialect, grammars, THINK.open, **wanted))
    for text in ("", "hm", "hm </thi"):
        for id in tokenizer.encode_plain(text, start=False):
            guide.accept(id)
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        guide.mask(logits)
        assert np.isneginf(logits[list(tokenizer.eog)]).all()
        assert np.isfinite(logits).sum() > 1
    free = guide_of(planned(dialect, grammars, THINK.open, forced=(), budget=9))
    logits = np.zeros(tokenizer.n_vocab, np.float32)
    free.mask(logits)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_of_reasoning(budget: int, tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(TemplateDialect(thought=THINK), grammars, "<think>\n", tools={}, budget=budget)
    guide = guide_of(plan)
    ids = list[int]()
    rng = np.random.default_rng(1)
    close = tokenizer.encode("</think>", bos=False)
    for _ in range(budget + len(close) + 4):
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        logits[list(tokenizer.eog)] = -9
        guide.mask(logits)
        ids.append(int(logits.argmax()))
        guide.accept(ids[-1])
    assert ids[budget : budget + len(close)] == close
    found = told(plan, tokenizer.decode(ids, start=False))
    assert found.reasoning or not budget
    assert found.content


def test_reasoning_that_the_text_opens_counts_too(tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(TemplateDialect(thought=THINK), grammars, tools={}, budget=2)
    guide = guide_of(plan)
    put(guide, tokenizer, "<think>")
    for id in tokenizer.encode_plain("ab", start=False)[:1] * 2:
        guide.accept(id)
    logits = np.zeros(tokenizer.n_vocab, np.float32)
    guide.mask(logits)
    assert (logits == 0).sum() == 1


# The packaged vocabulary's texts end with <|end|>: another mark stands for it.
OF_CHANNELS = replace(GPT_OSS.thought, close="<|over|>")


def stubborn(guide: ConstrainedDecoder, tokenizer: Tokenizer, text: str, n: int) -> list[int]:
    """What a model writes that wants to write ``text``, again and again."""
    rng = np.random.default_rng(1)
    ids = list[int]()
    wanted = list[int]()
    for _ in range(n):
        wanted = wanted or tokenizer.encode_plain(text, start=False)
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        logits[list(tokenizer.eog)] = -9
        logits[wanted[0]] += 50
        guide.mask(logits)
        ids.append(int(logits.argmax()))
        wanted = wanted[1:] if ids[-1] == wanted[0] else []
        guide.accept(ids[-1])
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("thought", [*THOUGHTS, OF_CHANNELS], ids=lambda t: t.open)
@pytest.mark.parametrize("tools", [{}, SMALL], ids=["plain", "tools"])
def test_the_budget_is_of_all_reasoning(
    tools: Any, thought: Thought, opened: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """A model that opens it again and again, at once or behind some words."""
    channels = GPT_OSS if thought is OF_CHANNELS else None
    if channels and opened:
        pytest.skip("no prompt of its templates opens it")
    dialect = TemplateDialect(
        thought=thought, channels=channels, row=row("harmony") if channels else HERMES
    )
    plan = planned(dialect, grammars, thought.open if opened else "", tools=tools, budget=4)
    n_close = len(tokenizer.encode(thought.close, bos=False))
    message = f"{thought.between}{GPT_OSS.final}so" if channels else "so\n"
    for before in ("", "\n" if not channels else thought.between, message):
        ids = stubborn(guide_of(plan), tokenizer, f"{before}{thought.open}and so on", 120)
        scanner = plan.marks.scanner()
        n_thought = 0
        parts = list[OutputPiece]()
        for id in ids:
            n_thought += scanner.in_reasoning
            parts += scanner.feed(tokenizer.decode([id], start=False))
        assert n_thought <= 4 + n_close, tokenizer.decode(ids, start=False)
        assert bool(n_thought) == (opened or before != message), before
        content = ParsedOutput.of(parts).content
        assert content or channels  # which has no message without its mark
        assert thought.sign not in content


def test_without_a_budget_reasoning_may_be_opened_again(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """The mark of a call within it is none, for the guide as for the scanner."""
    begun = "<tool_call>\nx"
    for thought, between in ((THINK, "\n"), (GPT_OSS.thought, GPT_OSS.start)):
        channels = GPT_OSS if thought is GPT_OSS.thought else None
        dialect = TemplateDialect(thought=thought, channels=channels, row=HERMES)
        plan = planned(dialect, grammars)
        guide = guide_of(plan)
        one = f"{thought.open}{begun}{thought.close}"
        put(guide, tokenizer, f"{one}{between}{one}")
        if not channels:
            put(guide, tokenizer, FAMILIES["hermes"].f.replace(JSON, '{"text": "b", "n": 1}'))
        assert told(plan, f"{one}{between}{one}").reasoning == begun * 2


def test_without_anything_wanted_nothing_is_computed(grammars: Grammars) -> None:
    assert planned(TemplateDialect(thought=THINK), grammars, tools={}).guide() is None
    assert planned(TemplateDialect(), grammars, tools={}).guide() is None


def stopped(tokenizer: Tokenizer, marks: AnswerMarks, said: str, *stop: str) -> str:
    """What an answer gives of all that was said."""
    stop_filter = AnswerPlan(marks).stop_filter(stop)
    answer = RequestOutput(tokenizer, [1], n_ctx=2000, stop=stop, stop_filter=stop_filter)
    for id in tokenizer.encode_plain(said, start=False):
        if not answer.done:
            answer.push(id)
    if not answer.done:
        answer.push(None)
    return "".join(piece for piece, _ in answer.pieces)


def test_stop_strings_do_not_count_within_reasoning(tokenizer: Tokenizer) -> None:
    def text(said: str, opened: bool) -> str:
        return stopped(tokenizer, AnswerMarks(thought=THINK, opened=opened), said, "stop", "<th")

    assert text("a stop b</think>so stop c", True) == "a stop b</think>so "
    assert text("<think>a stop b</think>so stop c", False) == "<think>a stop b</think>so "
    assert text("so stop c<think>", False) == "so "
    assert text("a <th b", False) == "a "
    assert text("<thi", False) == ""
    assert text("never stop", True) == "never stop"
    gap = "<think>a</think>\n\nso\nb"
    assert stopped(tokenizer, AnswerMarks(thought=THINK), gap, "\n") == gap[:-2]


@pytest.mark.parametrize("sure", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_stop_strings_do_not_count_within_calls(
    name: str, sure: bool, tokenizer: Tokenizer
) -> None:
    """Nor in their marks; they do in what is said beside them."""
    own = row(name)
    marks = AnswerMarks(row=own, channels=own.channels, tools=TOOLS, sure=sure, streams=sure)
    said = FAMILIES[name].several or FAMILIES[name].f
    head = own.channels.final if own.channels else ""
    if name in ("recipient", "json"):
        before = behind = ""
    elif own.channels:
        start = own.channels.start
        before = f"{head}Look:{own.channels.end}{start}"
        behind = f"{start}{head}"
    else:
        before = "Look:\n"
        behind = "\nso"
    for stop in ('"', "}", "text", "<", "[", "f", "\n", "a", own.trigger or "{", own.close or "}"):
        found = stopped(tokenizer, marks, f"{before}{said}{behind}", stop)
        calls = ParsedOutput.of(marks.scanner().feed(found, last=True)).calls
        assert [call.name for call in calls] == (["f", "g"] if FAMILIES[name].several else ["f"])
        assert json.loads(calls[0].arguments) == ARGUMENTS
    if behind:
        whole = f"{before}{said}{behind} STOP it"
        assert stopped(tokenizer, marks, whole, "STOP") == whole.removesuffix("STOP it")
        begun = whole.replace("Look:", "Look: STOP")
        assert stopped(tokenizer, marks, begun, "STOP") == f"{head}Look: "


# -- schemas -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_calls_or_json(tokenizer: Tokenizer, grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 2}
    for name in FAMILIES:
        plan = planned(own_dialect(name), grammars, schema=schema)
        own = row(name).channels
        final = own.final if own else ""
        put(guide_of(plan), tokenizer, f"{final}[1, 1]")
        put(guide_of(plan), tokenizer, FAMILIES[name].g)
        for seed in range(5 * (name in ENDING)):
            found = told(plan, written(guide_of(plan), tokenizer, seed))
            check(found.calls)
            assert found.calls or json.loads(found.content) in ([1], [1, 1])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["hermes", "tags", "gemma"])
def test_objects_are_closed_in_every_notation(
    name: str, strict: bool, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    inner = {"type": "object", "properties": {}}
    tools: Any = {"f": {"type": "object", "properties": {"a": inner}, "required": ["a"]}}
    own = {"tools": tools, "forced": ("f",), "strict": frozenset({"f"} if strict else ())}
    plan = planned(own_dialect(name), grammars, **own)
    for seed in range(4):
        (call,) = told(plan, written(guide_of(plan), tokenizer, seed)).calls[:1]
        assert json.loads(call.arguments) == {"a": {}}


NOTHING: list[Any] = [
    False,
    {"enum": []},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/M"}}, "required": ["a"]},
    {"anyOf": [{"$ref": "#/$defs/M"}, {"type": "string", "minLength": 2, "maxLength": 1}]},
    {"allOf": [{"type": "integer"}, {"$ref": "#/$defs/M"}]},
]


@pytest.mark.parametrize("strict", [frozenset({"f"}), frozenset()])
@pytest.mark.parametrize("nothing", NOTHING)
def test_a_property_that_leads_to_nothing_is_left_out(
    nothing: Any, strict: frozenset[str], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    to: dict[str, Any] = {"$ref": "#/$defs/N"}
    schema = {
        "type": "object",
        "properties": {"a": to, "b": {"enum": [1]}, "c": {"anyOf": [to, {"enum": [2]}]}},
        "required": ["b", "c"],
        "$defs": {"N": nothing, "M": False},
    }
    for name in ("hermes", "tags", "gemma"):
        own: dict[str, Any] = {"tools": {"f": schema}, "forced": ("f",), "strict": strict}
        plan = planned(own_dialect(name), grammars, **own)
        assert plan.warnings == ()
        (call,) = told(plan, written(guide_of(plan), tokenizer, 0)).calls[:1]
        assert json.loads(call.arguments) == {"b": 1, "c": 2}
    plan = planned(TemplateDialect(), grammars, tools={}, schema=schema)
    put(guide_of(plan), tokenizer, '{"b": 1, "c": 2}')
    for broken in ({**schema, "required": ["a"]}, {"$ref": "#/$defs/N", "$defs": schema["$defs"]}):
        with pytest.raises(GrammarError):
            planned(own_dialect("hermes"), grammars, tools={"f": broken}, strict=frozenset({"f"}))
        assert planned(own_dialect("hermes"), grammars, tools={"f": broken}).warnings


def test_what_cannot_be_enforced(grammars: Grammars) -> None:
    odd: Any = {"f": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}
    lenient = planned(own_dialect("hermes"), grammars, tools=odd)
    assert any('"not"' in warning for warning in lenient.warnings)
    with pytest.raises(GrammarError, match=r"tool 'f'.*not"):
        planned(own_dialect("hermes"), grammars, tools=odd, strict=frozenset({"f"}))
    schema = odd["f"]
    with pytest.raises(GrammarError, match="not"):
        planned(TemplateDialect(), grammars, tools={}, schema=schema)
    said = planned(TemplateDialect(), grammars, tools={}, schema=schema, lenient=True)
    assert any('"not"' in warning for warning in said.warnings)
    broken: Any = {"f": {"$ref": "#/nowhere"}}
    found = planned(own_dialect("hermes"), grammars, tools=broken)
    assert any("f" in warning for warning in found.warnings)
    assert found.plan is not None


def test_references_are_of_each_schema(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Two tools may each have a definition of the same name."""
    tools: Any = {
        name: {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "required": ["x"],
            "additionalProperties": False,
            "$defs": {"X": {"const": value}},
        }
        for name, value in (("f", 1), ("g", 2))
    }
    for name in ("hermes", "tags", "gemma"):
        plan = planned(own_dialect(name), grammars, tools=tools, forced=("f", "g"))
        for seed in range(4):
            for call in told(plan, written(guide_of(plan), tokenizer, seed)).calls:
                assert json.loads(call.arguments) == {"x": 1 if call.name == "f" else 2}


STREET: Any = {"type": "object", "properties": {"street": {"type": "string"}}}
OBJECTS: list[Any] = [  # schemas of a parameter that may be {"street": "x"}
    STREET,
    {"$ref": "#/$defs/Street"},
    {"$ref": "#/properties/b"},
    {"allOf": [{"$ref": "#/$defs/Street"}], "description": "Where."},
    {"anyOf": [{"$ref": "#/$defs/Street"}, {"type": "null"}]},
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "string"}},
    {},
]
NESTED = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": {"street": "x"}}}\n</tool_call>',
    "tags": "<tool_call>\n<function=f>\n<parameter=a>\n"
    '{"street": "x"}\n</parameter>\n</function>\n</tool_call>',
    "gemma": '<|tool_call>call:f{a:{street:<|"|>x<|"|>}}<tool_call|>',
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("schema", OBJECTS, ids=str)
def test_objects_within_arguments(
    name: str, schema: Any, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    tool = {
        "type": "object",
        "properties": {"a": schema, "b": STREET},
        "$defs": {"Street": STREET},
    }
    plan = planned(own_dialect(name), grammars, tools={"f": tool}, forced=("f",), parallel=False)
    guide = guide_of(plan)
    put(guide, tokenizer, NESTED[name])
    assert guide.accepting
    (call,) = told(plan, NESTED[name]).calls
    assert json.loads(call.arguments) == {"a": {"street": "x"}}


def test_values_that_lead_to_themselves(tokenizer: Tokenizer, grammars: Grammars) -> None:
    tree = {"type": "object", "properties": {"n": {"type": "integer"}, "up": {"$ref": "#"}}}
    plan = planned(own_dialect("gemma"), grammars, tools={"f": tree}, forced=("f",))
    put(guide_of(plan), tokenizer, "<|tool_call>call:f{n:1,up:{up:{n:2}}}<tool_call|>")
    loop: Any = {"$defs": {"A": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$ref": "#/$defs/A"}
    assert planned(own_dialect("gemma"), grammars, tools={"f": loop}).warnings


@pytest.mark.parametrize("name", ["x y", "", "a"])
def test_names_and_choices_of_gemma(name: str, tokenizer: Tokenizer, grammars: Grammars) -> None:
    """Its names have no quotes."""
    tool = {"type": "object", "properties": {name: {"enum": [{"b": ["c", 1]}]}}, "required": [name]}
    plan = planned(own_dialect("gemma"), grammars, tools={"f": tool}, forced=("f",), parallel=False)
    (call,) = told(plan, written(guide_of(plan), tokenizer, 1)).calls
    assert json.loads(call.arguments) == {name: {"b": ["c", 1]}}


def test_compiled_grammars_are_kept(tokenizer: Tokenizer) -> None:
    grammars = Grammars(tokenizer)
    first = grammars.regex("a")
    assert grammars.regex("a") is first
    assert grammars.schema({"const": 1}) is grammars.schema('{"const": 1}')


def test_what_is_kept_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lexers go first, and are made again; then the grammars that were not asked for longest."""
    monkeypatch.setattr("treadle.grammar.compiled_cache.MOST_BYTES", 2 * LEXER_BYTES)
    grammars = Grammars(tokenizer)
    first = grammars.regex("a")
    first.matcher()
    assert first.n_bytes > LEXER_BYTES
    grammars.regex("b").matcher()
    assert grammars.regex("c") is grammars.regex("c")
    assert first.n_bytes < LEXER_BYTES
    assert grammars.regex("a") is first
    assert first.matcher().bits()
    for n in range(2 * LEXER_BYTES // grammars.regex("c").n_bytes + 1):
        grammars.regex(f"d{n}")
    assert grammars.regex("a") is not first


def test_control_tokens_that_marks_are() -> None:
    """Marks that are control tokens are matched as such, and spelt for the scanner."""
    with treadle.load() as model:
        (end,) = model.tokenizer.eog
        piece = model.tokenizer.piece(end)
        assert model.tokenizer.cut(f"a{piece}b") == ["a", end, "b"]
        own = HERMES.__class__("x", open=piece, after="=", behind=";")
        plan = plan_answer(AnswerOptions(tools=SMALL), TemplateDialect(row=own), "", model.grammars)
        assert plan.shown == {end}


@pytest.mark.slow
def test_all_rows_have_grammars(grammars: Grammars) -> None:
    for own in ROWS:
        found = planned(TemplateDialect(row=own, channels=own.channels), grammars)
        assert found.plan is not None
        assert found.plan.lazy is not None


SIZED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]$"},
        "day": {"type": "string", "format": "date"},
        "word": {"type": "string", "minLength": 2, "maxLength": 4},
        "n": {"type": "integer", "minimum": 7, "maximum": 12},
        "list": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["code", "day", "word", "n", "list"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hermes", "tags", "gemma", "functools"])
def test_calls_obey_sizes_in_every_notation(
    name: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    plan = planned(own_dialect(name), grammars, tools={"f": SIZED}, forced=("f",), parallel=False)
    for seed in range(4):
        (call,) = told(plan, written(guide_of(plan), tokenizer, seed)).calls
        arguments = json.loads(call.arguments)
        assert re.fullmatch("[a-z]{2}-[0-9]", arguments["code"])
        assert date.fromisoformat(arguments["day"].replace("0000-", "2000-"))  # its first year is 1
        assert 2 <= len(arguments["word"]) <= 4
        assert 7 <= arguments["n"] <= 12
        assert 1 <= len(arguments["list"]) <= 2

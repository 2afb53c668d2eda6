"""Marks of calls: as control tokens and as text, with white space behind them, or left out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.chat.tools.families import ARGUMENTS, FAMILIES, JSON, TEMPLATES, TOOLS, F, row
from tests.tokenizer.vocabularies import CONTROL, load_bpe
from treadle.chat.template.template import ChatTemplate
from treadle.chat.tools import OutputPiece, ParsedOutput, TemplateDialect, dialect_of
from treadle.chat.tools.answer_plan import AnswerOptions, AnswerPlan, plan_answer
from treadle.chat.tools.constrained_decoding import ConstrainedDecoder
from treadle.chat.tools.formats import ROWS, ToolCallFormat, core_of
from treadle.chat.tools.messages import messages_for_template
from treadle.errors import GrammarError
from treadle.grammar.compiled_cache import Grammars
from treadle.tokenizer.tokenizer import Tokenizer

END = "<eos>"
SPACED = [own.name for own in ROWS if own.trigger and core_of(own.trigger)[0] != own.trigger]
SHORTENED = [own.name for own in ROWS if own.shortened]


def marks_of(own: ToolCallFormat) -> set[str]:
    """Those that a vocabulary may have as one token."""
    several = (*own.triggers, own.open, own.close, *own.wrap, *own.shortened)
    marks = {core_of(mark.strip())[0].lstrip("]\n ") for mark in several}
    return {mark for mark in marks if mark[:1] in ("<", "[") and mark[-1:] in (">", "]", "｜")}


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "text"])
def control(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def grammars(control: bool, tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    marks = set().union(*map(marks_of, ROWS)) if control else set[str]()
    more = [(END, CONTROL), *((mark, CONTROL) for mark in sorted(marks))]
    path = tmp_path_factory.mktemp("vocab") / f"{control}.gguf"
    return Grammars(load_bpe(path, ["Ġ {", "[ {", "> Ċ"], more, eos_token_id=256 + 3))


def planned(name: str, grammars: Grammars, **wanted: Any) -> AnswerPlan:
    own = row(name)
    dialect = TemplateDialect(row=own, channels=own.channels, writes_calls=True)
    return plan_answer(AnswerOptions(**{"tools": TOOLS, **wanted}), dialect, "", grammars)


def put(guide: ConstrainedDecoder, tokenizer: Tokenizer, text: str) -> None:
    """Go on with a text, each of whose tokens must be allowed."""
    for id in tokenizer.encode(text, bos=False, special=True):
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        guide.mask(logits)
        assert logits[id] == 0, (text, tokenizer.piece(id))
        guide.accept(id)


def follow(plan: AnswerPlan, grammars: Grammars, text: str) -> ConstrainedDecoder:
    guide = plan.guide()
    assert guide is not None
    put(guide, grammars.tokenizer, text)
    return guide


def told(plan: AnswerPlan, text: str, size: int) -> ParsedOutput:
    scanner = plan.marks.scanner()
    said = list[OutputPiece]()
    for at in range(0, len(text), size):
        said += scanner.feed(text[at : at + size])
    return ParsedOutput.of([*said, *scanner.feed("", last=True)])


def check(plan: AnswerPlan, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    for size in (1, 2, 7, len(text)):
        found = told(plan, text, size)
        assert [(c.name, json.loads(c.arguments)) for c in found.calls] == calls, (text, size)
        assert found.content == content


@pytest.mark.parametrize("forced", [(), ("f", "g"), ("f",)], ids=["auto", "required", "named"])
@pytest.mark.parametrize("space", ["", " ", "\n", " \n"])
@pytest.mark.parametrize("name", SPACED)
def test_white_space_behind_a_mark(name: str, space: str, forced: Any, grammars: Grammars) -> None:
    own = row(name)
    before = "" if forced else "so:"
    core, bracket = core_of(own.trigger)
    text = FAMILIES[name].f.replace(own.trigger, f"{before}{core}{space}{bracket}", 1)
    plan = planned(name, grammars, forced=forced)
    guide = follow(plan, grammars, text)
    assert guide.accepting
    check(plan, text, before, [("f", ARGUMENTS)])


@pytest.mark.parametrize("name", [name for name in SPACED if row(name).trigger[-1] == "["])
def test_a_control_token_begins_a_call(name: str, control: bool, grammars: Grammars) -> None:
    """What follows it is a call; a mark that is text may be one of an answer in words."""
    core, bracket = core_of(row(name).trigger)
    plan = planned(name, grammars)
    tokenizer = grammars.tokenizer
    guide = follow(plan, grammars, f"so {core}")
    bits = guide.bits()
    if control and core in marks_of(row(name)):
        assert bits is not None
        allowed = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        pieces = {
            tokenizer.token_bytes(int(id)).decode().lstrip() for id in np.flatnonzero(allowed)
        }
        assert pieces <= {"", bracket, "[{"}
    else:
        put(guide, tokenizer, " is a mark")
        text = f"so {core} is a mark [1]\n\n"
        check(plan, text, text, [])


@pytest.mark.parametrize("name", SHORTENED)
def test_a_call_whose_first_mark_is_left_out(name: str, grammars: Grammars) -> None:
    """Qwen3-Coder leaves <tool_call> out, and closes it."""
    own = row(name)
    ((mark, _),) = own.shortened.items()
    for words in ("", "I look:\n\n"):
        text = words + FAMILIES[name].f[FAMILIES[name].f.index(mark) :]
        plan = planned(name, grammars)
        guide = follow(plan, grammars, text)
        assert guide.accepting
        content = "" if own.channels else words.rstrip("\n")
        if not own.channels or not words:
            check(plan, text, content, [("f", ARGUMENTS)])
        with pytest.raises((GrammarError, AssertionError)):  # it holds from the mark on
            follow(plan, grammars, words + mark + "no tool")
    if not own.wrap[0]:
        text = text.replace(own.close, "")
        check(plan, text, "I look:", [("f", ARGUMENTS)])
        check(plan, f"{text}\n{text}", "I look:I look:", [("f", ARGUMENTS)] * 2)
        check(plan, f"such as {mark}h>", f"such as {mark}h>", [])


def test_an_id_before_the_name(grammars: Grammars) -> None:
    """As Command R7B's own template writes calls."""
    for forced in ((), ("f", "g"), ("f",)):
        plan = planned("action", grammars, forced=forced)
        begin = '\n    {"tool_call_id": "'
        calls = [f'{begin}{n}", "tool_name": "f", "parameters": {JSON}}}' for n in range(3)]
        text = f"<|START_ACTION|>[{','.join(calls)}\n]<|END_ACTION|>"
        assert follow(plan, grammars, text).accepting
        check(plan, text, "", [("f", ARGUMENTS)] * 3)
        ids = [call.id for call in told(plan, text, 1).calls]
        assert len(set(ids)) == 3
        without = text.replace('"tool_call_id": "1", ', "")
        assert follow(plan, grammars, without).accepting
        check(plan, without, "", [("f", ARGUMENTS)] * 3)


# Mistral 7B v0.3 has a blank behind its mark, and wants ids of nine characters.
BLANK = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}{% set out = call.function | tojson %}{{ out[:-1] }}
{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
{{- ', "id": "' + call.id + '"}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}
{{- ']</s>' }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"""


def test_a_template_with_a_blank_behind_its_mark(grammars: Grammars) -> None:
    template = ChatTemplate(BLANK)
    dialect = dialect_of(template)
    assert dialect.row == row("mistral-list")
    assert dialect.writes_calls
    plan = plan_answer(AnswerOptions(tools=TOOLS), dialect, "", grammars)
    function = {"name": "f", "arguments": ARGUMENTS}
    id = told(plan, f"[TOOL_CALLS] [{json.dumps(function)}]", 1).calls[0].id
    call = {"id": id, "type": "function", "function": function}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": "3"},
    ]
    said, tools = messages_for_template(messages, [F], dialect)
    text = template.render(said, tools=tools)
    calls = text[text.index("[TOOL_CALLS]") : text.index("</s>")]
    assert calls.startswith('[TOOL_CALLS] [{"name": "f"')
    assert follow(plan, grammars, calls).accepting
    check(plan, calls, "", [("f", ARGUMENTS)])


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_allowed(name: str, grammars: Grammars) -> None:
    """A call of a conversation is written as its model may write it, too."""
    own = row(name)
    template = ChatTemplate(TEMPLATES[name])
    dialect = dialect_of(template)
    arguments = {"text": "a b", "n": 3, "list": ["x"]}
    ids = {"kimi": "functions.f:0", "solar": "a1b2c3d4e5"}
    call = {
        "id": ids.get(name, "abcdefgh1"),
        "type": "function",
        "function": {"name": "f", "arguments": arguments},
    }
    calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    said, tools = messages_for_template([{"role": "user", "content": "hi"}, calling], [F], dialect)
    text = template.render(said, tools=tools, add_generation_prompt=False)
    if own.by_header:
        return
    written = text[text.rindex(own.sign) :]
    plan = plan_answer(AnswerOptions(tools=TOOLS, forced=("f",)), dialect, "", grammars)
    guide = plan.guide()
    assert guide is not None
    ends = written.find(own.wrap[1] or own.close or "}", written.index("x"))
    put(guide, grammars.tokenizer, written[: ends + 1].rstrip("<"))
    assert [json.loads(call.arguments) for call in told(plan, written, 1).calls] == [arguments]


def test_white_space_behind_a_name_may_be_left_out(grammars: Grammars) -> None:
    """As Ling 3's template writes calls of a conversation."""
    text = FAMILIES["arg"].f.replace("<tool_call>f\n", "<tool_call>f")
    plan = planned("arg", grammars)
    assert follow(plan, grammars, text).accepting
    check(plan, text, "", [("f", ARGUMENTS)])

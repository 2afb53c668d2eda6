"""Reasoning that is not closed, that stands within content, that is switched off; and the marks of
both kinds: control tokens, and plain text.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.chat.tools.families import ARGUMENTS, FAMILIES, GPT_OSS, JSON, OPEN, TOOLS, row
from tests.chat.tools.test_guide import SMALL, planned
from tests.tokenizer.vocabularies import CONTROL, load_bpe
from treadle.chat.tools import AnswerMarks, OutputPiece, ParsedOutput, TemplateDialect, Thought
from treadle.chat.tools.answer_plan import AnswerPlan
from treadle.chat.tools.formats import HARMONY, HERMES, THOUGHTS, ToolCallFormat
from treadle.chat.tools.stop_filter import StopFilter
from treadle.chat.tools.stream_parser import MAX_DRAFTS
from treadle.grammar.compiled_cache import Grammars
from treadle.scheduler.output import RequestOutput
from treadle.tokenizer.tokenizer import Tokenizer

THINK = THOUGHTS[0]
GEMMA = THOUGHTS[2]
ANALYSIS = GPT_OSS.thought.open
FINAL = f"{GPT_OSS.end}{GPT_OSS.start}{GPT_OSS.final}"
Found = tuple[str, str, list[Any]]


def tell(text: str, **marks: Any) -> Found:
    """Reasoning, content and calls: the same of a whole text and letter by letter."""
    found: list[Found] = []
    for parts in ([text], list(text)):
        for streams in (False, True):
            scanner = AnswerMarks(**{"tools": TOOLS, "streams": streams, **marks}).scanner()
            said = [each for part in parts for each in scanner.feed(part)]
            told = ParsedOutput.of([*said, *scanner.feed("", last=True)])
            calls = [(call.name, json.loads(call.arguments)) for call in told.calls]
            assert scanner.n_calls == len(calls)
            found.append((told.reasoning, told.content, calls))
    assert all(each == found[0] for each in found), found
    return found[0]


def thought_of(own: ToolCallFormat) -> Thought:
    """The marks of reasoning of a family, or those of most."""
    return own.channels.thought if own.channels else THINK


def final_of(own: ToolCallFormat) -> str:
    """What begins an answer behind reasoning that is closed."""
    return f"{own.channels.start}{own.channels.final}" if own.channels else ""


MARKED = [name for name in FAMILIES if row(name).trigger]
CALLS = [
    pytest.param(name, text, calls, id=f"{name}-{len(calls)}")
    for name in MARKED
    for text, calls in (
        (FAMILIES[name].f, [("f", ARGUMENTS)]),
        (FAMILIES[name].several, [("f", ARGUMENTS), ("g", {})]),
    )
    if text
]


# -- calls in reasoning that is not closed ------------------------------------------------------


@pytest.mark.parametrize("sure", [True, False])
@pytest.mark.parametrize(("name", "text", "calls"), CALLS)
def test_a_call_ends_open_reasoning(name: str, text: str, calls: Any, sure: bool) -> None:
    own = row(name)
    thought = thought_of(own)
    marks: dict[str, Any] = {"thought": thought, "channels": own.channels, "row": own}
    for gap in ("", "\n"):
        found = tell(f"{thought.open}Let me think{gap}{text}\n", sure=sure, **marks)
        assert found == ("Let me think", "", calls)
    if not own.channels:  # which no prompt opens
        found = tell(f"Let me think{text}", sure=sure, opened=True, **marks)
        assert found == ("Let me think", "", calls)
    one = tell(f"{thought.open}Let me think{text}", parallel=False, **marks)
    assert one == ("Let me think", "", calls[:1])


@pytest.mark.parametrize("behind", ["", " so", "\n\nI could."])
@pytest.mark.parametrize(("name", "text", "calls"), CALLS)
def test_a_call_in_reasoning_that_is_closed_is_reasoning(
    name: str, text: str, calls: Any, behind: str
) -> None:
    own = row(name)
    thought = thought_of(own)
    marks: dict[str, Any] = {"thought": thought, "channels": own.channels, "row": own}
    said = f"Let me think\n{text}{behind}"
    whole = f"{thought.open}{said}{thought.close}{final_of(own)}Hi"
    assert tell(whole, **marks) == (said, "Hi", [])
    if behind.strip():  # the model has reasoned on: it was none
        assert tell(f"{thought.open}{said}", **marks) == (said, "", [])


@pytest.mark.parametrize("name", MARKED)
def test_a_mark_that_is_named_is_reasoning(name: str) -> None:
    own = row(name)
    thought = thought_of(own)
    marks: dict[str, Any] = {"thought": thought, "channels": own.channels, "row": own}
    named = f"Use {own.trigger} or\n\n{own.trigger}, then {FAMILIES[name].f.partition('é')[0]}"
    assert tell(f"{thought.open}{named}", **marks) == (named, "", [])
    closed = f"{thought.open}Use {own.trigger} tags.{thought.close}{final_of(own)}Hi"
    assert tell(closed, **marks) == (f"Use {own.trigger} tags.", "Hi", [])
    if own.by_header:
        return  # all up to the next message is one header
    both = f"{thought.open}Use {own.trigger} tags: {FAMILIES[name].g}"
    assert tell(both, **marks) == (f"Use {own.trigger} tags: ", "", [("g", {})])


def test_reasoning_is_told_on_as_soon_as_it_is_none() -> None:
    scanner = AnswerMarks(thought=THINK, opened=True, row=HERMES, tools=TOOLS).scanner()
    assert scanner.feed("so <tool_call>") == [OutputPiece("reasoning", "so ")]
    assert scanner.undecided
    assert scanner.feed(" is") == [OutputPiece("reasoning", "<tool_call> is")]
    assert scanner.in_reasoning
    assert scanner.feed(FAMILIES["hermes"].g) == []
    assert scanner.feed("\n then") == [OutputPiece("reasoning", f"{FAMILIES['hermes'].g}\n then")]


@pytest.mark.slow
def test_marks_that_are_tried_are_few() -> None:
    """Each that seems to begin a call may be read up to the end of the text."""
    begun = '<tool_call>\n{"name": "f", "arguments": {"text": "' * (MAX_DRAFTS + 9)
    assert tell(f"<think>{begun}", thought=THINK, row=HERMES) == (begun, "", [])


def test_stop_strings_do_not_count_in_a_call_within_reasoning() -> None:
    text = f"<think>stop{FAMILIES['hermes'].f}"
    ear = StopFilter(AnswerMarks(thought=THINK, row=HERMES, tools=TOOLS), ["stop", "name", "tool"])
    heard = ear.feed(text) + ear.feed("", last=True)
    assert len(heard) == len(text)
    assert not any(word in heard for word in ("stop", "name", "tool"))


# -- reasoning within content -------------------------------------------------------------------


@pytest.mark.parametrize("thought", THOUGHTS, ids=lambda t: t.open)
@pytest.mark.parametrize("own", [None, HERMES, row("gemma")])
def test_reasoning_within_content(thought: Thought, own: ToolCallFormat | None) -> None:
    marks: dict[str, Any] = {"thought": thought, "row": own}
    one = f"{thought.open}b{thought.close}"
    assert tell(f"a{one}c", **marks) == ("b", "ac", [])
    assert tell(f"{one}\na\n{one}\nc{one}", **marks) == ("bbb", "a\nc", [])
    assert tell(f"x{thought.open}", **marks)[1] == ("x" if thought.reserved else f"x{thought.open}")
    if own is HERMES:
        call = FAMILIES["hermes"].g
        assert tell(f"a{one}{call}{one}c", **marks) == ("bb", "ac", [("g", {})])
        assert tell(f"a{thought.open}b{call}", **marks)[2] == [("g", {})]


def test_a_mark_of_reasoning_that_prose_names_is_text() -> None:
    """Where none closes it: it is held back so long. A control token opens reasoning at once."""
    said = "Write <think> first.\n\nThen <think> again"
    assert tell(said, thought=THINK) == ("", said, [])
    scanner = AnswerMarks(thought=THINK).scanner()
    assert scanner.feed("a <think>b") == [OutputPiece("content", "a ")]
    assert scanner.undecided
    assert scanner.feed("</think>") == [OutputPiece("reasoning", "b")]
    surely = AnswerMarks(thought=GEMMA).scanner()
    assert surely.feed("a <|channel>thought\nb") == [
        OutputPiece("content", "a "),
        OutputPiece("reasoning", "b"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<|channel>thought\n<channel|>Hello<channel|>",
        "<|channel>thought\n<channel|>Hello<|channel>thought\n<channel|>",
        "<|channel>thought\n<channel|>Hello<|channel>thought\n<channel|><channel|>",
        "<|channel><|channel>thought\n<channel|>Hello",
        "<|channel>thought<channel|>Hello",
        "<channel|>Hello",
    ],
)
@pytest.mark.parametrize("own", [None, row("gemma")])
def test_marks_of_gemma_that_stand_alone(text: str, own: ToolCallFormat | None) -> None:
    assert tell(text, thought=GEMMA, row=own) == ("", "Hello", [])


# -- messages with headers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("hello", "", "hello"),
        (" hello", "", " hello"),
        ("to be", "", "to be"),
        ("t", "", "t"),
        ("<3", "", "<3"),
        (f"{ANALYSIS}hm{GPT_OSS.end}hello", "hm", "hello"),
        ("<|channel|>fin", "", ""),  # a header that was cut
        ("<|chan", "", ""),
        ("<|channel|>commentary to=python <|constrain|>code<|message|>print(1)", "print(1)", ""),
        ("<|channel|>commentary to=functions.h<|message|>{}", "{}", ""),
        (" to=container.exec<|channel|>commentary<|message|>ls", "ls", ""),
        ("<|channel|>analysis to=python<|message|>1", "1", ""),
        ("<|start|>functions.f to=assistant<|channel|>commentary<|message|>7", "7", ""),
        ("<|channel|>commentary to=assistant<|channel|>final<|message|>yes", "", "yes"),
        ("<|channel|>commentary to=assistant<|channel|>analysis<|message|>a", "a", ""),
        ("<|channel|>commentary<|message|>So:", "", "So:"),
        ("<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    ],
)
@pytest.mark.parametrize("tools", [{}, TOOLS])
def test_what_is_an_answer(text: str, reasoning: str, content: str, tools: Any) -> None:
    """Not what is said to a tool that was not offered, and what has no header at all."""
    marks: dict[str, Any] = {"thought": GPT_OSS.thought, "channels": GPT_OSS, "tools": tools}
    assert tell(text, row=HARMONY if tools else None, **marks) == (reasoning, content, [])


# -- what may be written ------------------------------------------------------------------------

HARMONY_MARKS = (
    "<|endoftext|>",
    "<|start|>",
    "<|end|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
SOLAR_MARKS = (
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
OTHERS = tuple(mark for thought in THOUGHTS for mark in (thought.begin, thought.close))
VOCABULARIES = {"tokens": (*HARMONY_MARKS, *SOLAR_MARKS[1:], *OTHERS), "plain": ("<|endoftext|>",)}
MANNERS = {
    "harmony": TemplateDialect(
        thought=GPT_OSS.thought, channels=GPT_OSS, row=HARMONY, writes_calls=True
    ),
    "solar": TemplateDialect(
        thought=OPEN.thought, channels=OPEN, row=row("solar"), writes_calls=True
    ),
    **{t.begin: TemplateDialect(thought=t, row=HERMES, writes_calls=True) for t in THOUGHTS},
}


@pytest.fixture(scope="module", params=VOCABULARIES)
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """Where marks are control tokens, and where they are text."""
    path = tmp_path_factory.mktemp("vocabulary") / "bpe.gguf"
    marks = VOCABULARIES[request.param]
    return load_bpe(path, more=[(mark, CONTROL) for mark in marks], eos_token_id=256)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def insists(
    plan: AnswerPlan, tokenizer: Tokenizer, text: str, n: int = 600
) -> tuple[str, ParsedOutput]:
    """What a model writes that wants to write ``text``, and then to end: it begins anew with the
    next letter where another token is all that it may write.
    """
    guide = plan.guide()
    ids = list[int]()
    rng = np.random.default_rng(1)
    wanted = tokenizer.encode(text, bos=False, special=True)
    end = min(tokenizer.eog)
    printed = [id for id in range(tokenizer.n_vocab) if tokenizer.token_bytes(id).isalnum()]
    for _ in range(n):
        logits = rng.normal(size=tokenizer.n_vocab).astype(np.float32)
        logits[printed] += 9
        logits[wanted[0] if wanted else end] += 99
        if guide is not None:
            guide.mask(logits)
        id = int(logits.argmax())
        wanted = wanted[1:] if wanted and id == wanted[0] else wanted
        if guide is not None:
            guide.accept(id)
        if id in tokenizer.eog:
            break
        ids.append(id)
    text = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
    scanner = plan.marks.scanner()
    return text, ParsedOutput.of(scanner.feed(text, last=True))


SCHEMA: dict[str, Any] = {"type": "array", "items": {"enum": [1]}, "minItems": 1, "maxItems": 2}
REASON = "abcdefghijklmnopqrst"


@pytest.mark.parametrize("wanted", [{"forced": ("f", "g")}, {"forced": ("g",)}, {"schema": SCHEMA}])
@pytest.mark.parametrize("budget", [0, 8])
@pytest.mark.parametrize("name", ["harmony", "solar"])
def test_a_budget_beside_what_must_hold(
    name: str, budget: int, wanted: dict[str, Any], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    dialect = MANNERS[name]
    assert dialect.thought is not None
    plan = planned(dialect, grammars, budget=budget, **wanted)
    text, found = insists(plan, tokenizer, f"{dialect.thought.open}{REASON}")
    assert found.reasoning == REASON[:budget]
    assert found.calls or json.loads(found.content) in ([1], [1, 1])
    free = planned(dialect, grammars, **wanted)  # the model may reason as long as it likes
    whole = f"{dialect.thought.open}{REASON}{dialect.thought.close}"
    text, found = insists(free, tokenizer, whole)
    assert text.startswith(whole)
    assert found.reasoning == REASON
    assert found.calls or json.loads(found.content) in ([1], [1, 1])


@pytest.mark.parametrize("own", [{"grammar": 'root ::= "yes"'}, {"regex": "yes"}])
@pytest.mark.parametrize("tools", [{}, SMALL])
@pytest.mark.parametrize("name", ["harmony", "solar"])
def test_a_grammar_of_ones_own_is_of_the_answer(
    name: str, tools: Any, own: dict[str, str], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """Its header is written before; a grammar that has the marks itself holds for all."""
    dialect = MANNERS[name]
    assert dialect.channels is not None
    plan = planned(dialect, grammars, tools=tools, **own)
    for text in ("yes", "no", f"{dialect.channels.final}yes"):
        written, found = insists(plan, tokenizer, text)
        assert (found.reasoning, found.content, found.calls) == ("", "yes", [])
        assert written.endswith(f"{dialect.channels.final}yes")
    marked = json.dumps(f"{dialect.channels.final}yes")
    plan = planned(dialect, grammars, tools=tools, grammar=f"root ::= {marked}")
    assert insists(plan, tokenizer, "no")[1].content == "yes"


@pytest.mark.parametrize("tools", [{}, SMALL], ids=["plain", "tools"])
@pytest.mark.parametrize("name", MANNERS)
def test_reasoning_that_is_off_is_not_opened(
    name: str, tools: Any, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """Neither at the beginning nor behind some words, whatever the model would rather write."""
    dialect = MANNERS[name]
    assert dialect.thought is not None
    plan = planned(dialect, grammars, tools=tools, budget=0)
    before = f"{dialect.channels.final}so " if dialect.channels else "so "
    for first in ("", before):
        text, found = insists(plan, tokenizer, f"{first}{dialect.thought.open}{REASON}", 40)
        assert dialect.thought.sign not in text
        assert found.reasoning == ""
    opened = planned(dialect, grammars, f"hi{dialect.thought.open}", tools=tools, budget=0)
    text, found = insists(opened, tokenizer, "so", 40)
    assert text.startswith(dialect.thought.close)
    assert found.reasoning == ""


def written_call(name: str) -> str:
    return FAMILIES[name].f.replace(JSON, '{"text": "b", "n": 1}')


@pytest.mark.parametrize("name", ["harmony", "solar", "<think>"])
def test_a_call_within_open_reasoning_follows_its_schema(
    name: str, tokenizer: Tokenizer, grammars: Grammars
) -> None:
    """From its arguments on; marks that are only named bind nothing."""
    dialect = MANNERS[name]
    assert dialect.thought is not None
    call = written_call(dialect.row.name)
    plan = planned(dialect, grammars)
    text, found = insists(plan, tokenizer, f"{dialect.thought.open}hm{call}")
    assert [each.name for each in found.calls] == ["f"]
    assert (found.reasoning, found.content) == ("hm", "")
    wrong = call.replace('"n": 1', '"n": 2')
    text, found = insists(plan, tokenizer, f"{dialect.thought.open}hm{wrong}", 99)
    assert '"n": 2' not in text
    named = f"{dialect.thought.open}Use {dialect.row.trigger} or to=functions.f now"
    assert insists(plan, tokenizer, named)[0] == named
    if name == "solar":
        return  # whose mark behind calls ends a text
    again = f"{dialect.thought.open}hm{call} so{dialect.thought.close}"
    assert insists(plan, tokenizer, again)[1].reasoning == f"hm{call} so"


@pytest.mark.parametrize("wanted", [{"forced": ("f", "g")}, {"schema": SCHEMA}])
@pytest.mark.parametrize("name", ["harmony", "solar", "<think>"])
def test_a_call_that_must_be_may_end_open_reasoning(
    name: str, wanted: dict[str, Any], tokenizer: Tokenizer, grammars: Grammars
) -> None:
    dialect = MANNERS[name]
    assert dialect.thought is not None
    prompt = "" if dialect.channels else dialect.thought.open
    opening = "" if prompt else dialect.thought.open
    plan = planned(dialect, grammars, prompt, **wanted)
    _, found = insists(plan, tokenizer, f"{opening}hm{written_call(dialect.row.name)}")
    assert [each.name for each in found.calls] == ["f"]
    assert (found.reasoning, found.content) == ("hm", "")


def test_reasoning_within_content_binds_nothing(tokenizer: Tokenizer, grammars: Grammars) -> None:
    plan = planned(MANNERS["<think>"], grammars)
    said = "so\n<think>Use <tool_call>\nor </think>yes"
    text, found = insists(plan, tokenizer, said)
    assert text == said
    assert (found.reasoning, found.content) == ("Use <tool_call>\nor ", "so\nyes")


def test_reasoning_in_an_answer(tokenizer: Tokenizer, grammars: Grammars) -> None:
    """The stop strings of an answer, whose marks are shown to the scanner."""
    plan = planned(MANNERS["<think>"], grammars)
    stop = ["stop"]
    given: Any = {"stop_filter": plan.stop_filter(stop), "shown": plan.shown}
    answer = RequestOutput(tokenizer, [1], n_ctx=2000, stop=stop, **given)
    said = "a<think>stop</think>b stop"
    for id in tokenizer.encode(said, bos=False, special=True):
        if not answer.done:
            answer.push(id)
    assert "".join(piece for piece, _ in answer.pieces) == "a<think>stop</think>b "

"""Answers told apart, however they are cut: reasoning, content, calls."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chat.tools.families import ARGUMENTS, BEFORE, FAMILIES, GPT_OSS, OPEN, TOOLS, row
from treadle.chat.tools import AnswerMarks, OutputPiece, ParsedOutput, Thought
from treadle.chat.tools.formats import BARE, HERMES, ROWS, THOUGHTS

THINK = THOUGHTS[0]


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def tell(text: str, sizes: list[int] | None = None, **marks: Any) -> tuple[str, str, list[Any]]:
    """Reasoning, content and calls of a text that comes in parts."""
    scanner = AnswerMarks(**{"tools": TOOLS, **marks}).scanner()
    parts: list[OutputPiece] = []
    at = 0
    for size in sizes or [len(text)]:
        parts += scanner.feed(text[at : at + size])
        at += size
    parts += scanner.feed(text[at:], last=True)
    told = ParsedOutput.of(parts)
    assert scanner.n_calls == len(told.calls)
    return told.reasoning, told.content, [(c.name, json.loads(c.arguments)) for c in told.calls]


R: dict[str, Any] = {"thought": THINK}
H: dict[str, Any] = {"row": HERMES}
S: dict[str, Any] = {"channels": OPEN, "thought": OPEN.thought, "row": row("solar")}
T: dict[str, Any] = {"row": row("tags")}
SHORT = FAMILIES["tags"].g.removeprefix("<tool_call>\n")
IN_ANALYSIS: dict[str, Any] = {
    "channels": GPT_OSS,
    "thought": GPT_OSS.thought,
    "opened": True,
    "within": True,
}
ANSWERS: list[tuple[str, dict[str, Any], Any]] = [
    ("plain", {}, ("", "plain", [])),
    ("<think>\na < b\n</think>\n\nyes", R, ("a < b", "yes", [])),
    ("a < b</think>yes", {**R, "opened": True}, ("a < b", "yes", [])),
    ("never ended", {**R, "opened": True}, ("never ended", "", [])),
    ("[THINK]a[/THINK]b", {"thought": THOUGHTS[1]}, ("a", "b", [])),
    ("\n\n plain \n", {}, ("", "\n\n plain \n", [])),
    ("\n x\n", H, ("", "\n x\n", [])),
    (
        f"<tool_call>{call('f')}</tool_call><tool_call>{call('g')}</tool_call> so",
        {**H, "parallel": False},
        ("", "", [("f", {})]),
    ),
    ("<thin", R, ("", "<thin", [])),
    ("<think>x</think>", {}, ("", "<think>x</think>", [])),
    (f"<tool_call>\n{call('f', a=1)}\n</tool_call>\n", H, ("", "", [("f", {"a": 1})])),
    ("a\n\n<tool_call>\n [1] \n", H, ("", "a<tool_call>\n [1] \n", [])),
    ("\n\n x\n\n", {**H, **R}, ("", " x\n\n", [])),
    (
        f"\nso:\n<tool_call>{call('f', a='</tool_call>}')}</tool_call>\n<tool_call>{call('g')}",
        H,
        ("", "\nso:", [("f", {"a": "</tool_call>}"}), ("g", {})]),
    ),
    (
        f"<think>t</think>\n\n<tool_call>{call('f', a=[{}])}</tool_call>",
        {**H, **R},
        ("t", "", [("f", {"a": [{}]})]),
    ),
    (
        '<tool_call>{"arguments": {"a": {"name": 1}}, "id": 2, "name": "f"}',
        H,
        ("", "", [("f", {"a": {"name": 1}})]),
    ),
    ("<tool_call>{broken}</tool_call>", H, ("", "<tool_call>{broken}</tool_call>", [])),
    ('<tool_call>{"name": []}', H, ("", '<tool_call>{"name": []}', [])),
    (
        '<tool_call>{"name": "f", "arguments": 5}',
        H,
        ("", '<tool_call>{"name": "f", "arguments": 5}', []),
    ),
    (f"<tool_call>{call('absent')}", H, ("", f"<tool_call>{call('absent')}", [])),
    ('<tool_call>{"name": "f', H, ("", '<tool_call>{"name": "f', [])),
    ('{"name": "f", "parameters": {"é": "\\""}}', {"row": BARE}, ("", "", [("f", {"é": '"'})])),
    ('\n<|python_tag|>{"name": "f", "parameters": {}}', {"row": BARE}, ("", "", [("f", {})])),
    ('{"name": "x"} then', {"row": BARE}, ("", '{"name": "x"} then', [])),
    ("a {} b", {"row": BARE}, ("", "a {} b", [])),
    ("<function=h>{}</function>", {"row": row("function")}, ("", "<function=h>{}</function>", [])),
    ("<function=f>[]</function>", {"row": row("function")}, ("", "<function=f>[]</function>", [])),
    ("all\nhello\n>>>f\n{}", {"row": row("recipient"), "begun": True}, ("", "hello", [("f", {})])),
    ("f\n{}", {"row": row("recipient"), "begun": True}, ("", "", [("f", {})])),
    ("f", {"row": row("recipient"), "begun": True}, ("", "f", [])),
    (
        f"{GPT_OSS.thought.open}why{GPT_OSS.end}{GPT_OSS.start}{GPT_OSS.final}yes",
        {"channels": GPT_OSS, "thought": GPT_OSS.thought},
        ("why", "yes", []),
    ),
    (
        f"{GPT_OSS.thought.open}why{GPT_OSS.end}{GPT_OSS.start} to=functions.f<|channel|>commentary"
        " json<|message|>{}",
        {"channels": GPT_OSS, "row": row("harmony")},
        ("why", "", [("f", {})]),
    ),
    (
        "<|channel|>commentary to=functions.h<|message|>{}",
        {"channels": GPT_OSS, "row": row("harmony")},
        ("{}", "", []),
    ),
    (f"<|think|>why{OPEN.end}{OPEN.start}<|content|>yes\n", S, ("why", "yes\n", [])),
    (f"<|think|>{OPEN.end}{OPEN.start}{FAMILIES['solar'].g}", S, ("", "", [("g", {})])),
    (
        f"<|think|>a <|content|> b{OPEN.end}\n{OPEN.start}<|think|>c{OPEN.end}yes",
        S,
        ("a <|content|> bc", "yes", []),
    ),
    (
        f"<|content|>so{OPEN.end}{OPEN.start}{FAMILIES['solar'].f}",
        S,
        ("", "so", [("f", ARGUMENTS)]),
    ),
    (
        f"<|content|>so{FAMILIES['solar'].f}{OPEN.start}<|content|> yes",
        S,
        ("", "so yes", [("f", ARGUMENTS)]),
    ),
    (FAMILIES["solar"].g.removeprefix("<|tool_calls|>"), S, ("", "", [("g", {})])),
    (
        FAMILIES["solar"].g,
        {**S, "row": None},
        (FAMILIES["solar"].g.removeprefix("<|tool_calls|>"), "", []),
    ),
    (
        "<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>h<|tool_call:args|>{}",
        S,
        ("<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>h<|tool_call:args|>{}", "", []),
    ),
    ("no mark at all", S, ("", "no mark at all", [])),
    ("< 3", S, ("", "< 3", [])),
    (f"{OPEN.start}<|content|>yes", S, ("", "yes", [])),
    # Qwen3-Coder may leave the opening mark out.
    (SHORT, T, ("", "", [("g", {})])),
    (f"so:\n{SHORT}\n{FAMILIES['tags'].g}", T, ("", "so:", [("g", {}), ("g", {})])),
    (f"{FAMILIES['tags'].g}\n{SHORT}", T, ("", "", [("g", {}), ("g", {})])),
    (f"<think>hm{SHORT}", {**T, **R}, ("hm", "", [("g", {})])),
    ("<function=h>\n</function>", T, ("", "<function=h>\n</function>", [])),
    # The prompt ends within reasoning.
    ("\nso</think>yes", {**R, "opened": True, "within": True}, ("\nso", "yes", [])),
    (
        f" so{OPEN.end}{OPEN.start}<|content|>yes",
        {**S, "opened": True, "within": True},
        (" so", "yes", []),
    ),
    (f" so{GPT_OSS.end}{GPT_OSS.start}{GPT_OSS.final}yes", IN_ANALYSIS, (" so", "yes", [])),
    (" so", IN_ANALYSIS, (" so", "", [])),
]


@pytest.mark.parametrize(("text", "marks", "told"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers(text: str, marks: dict[str, Any], told: Any) -> None:
    assert tell(text, **marks) == told


SEEDS = st.integers(0, 2**32)


def cut(seed: int, least: int = 0) -> list[int]:
    """Sizes of the parts that a text comes in."""
    rng = Random(seed)
    return [rng.randint(least, 7) for _ in range(rng.randint(1, 60))]


@given(st.sampled_from(ANSWERS), SEEDS)
def test_how_it_is_cut_changes_nothing(answer: Any, seed: int) -> None:
    text, marks, told = answer
    assert tell(text, cut(seed), **marks) == told


WRITTEN: list[tuple[str, str, Any]] = [
    (name, text, calls)
    for name, family in FAMILIES.items()
    for text, calls in (
        (family.f, [("f", ARGUMENTS)]),
        (family.g, [("g", {})]),
        (family.several, [("f", ARGUMENTS), ("g", {})]),
    )
    if text
]


def test_every_row_is_tried() -> None:
    assert set(FAMILIES) == {row.name for row in ROWS}


@given(st.sampled_from(WRITTEN), st.booleans(), SEEDS)
def test_calls_of_every_family(written: Any, streams: bool, seed: int) -> None:
    name, text, calls = written
    own = row(name)
    marks = {"row": own, "channels": own.channels, "streams": streams, "sure": streams}
    assert tell(text, cut(seed), **marks) == ("", "", calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_arguments_are_told_as_they_come(name: str) -> None:
    """Each character of the text in it by itself, as soon as no mark can begin with it."""
    own = row(name)
    text = FAMILIES[name].f
    marks = AnswerMarks(row=own, channels=own.channels, tools=TOOLS, streams=True, sure=True)
    scanner = marks.scanner()
    parts = [part for char in text for part in scanner.feed(char)]
    assert [part.kind for part in parts[:1]] == ["call"]
    fragments = [part.text for part in parts[1:] if part.kind == "arguments"]
    assert len(fragments) >= 8  # the text alone has six characters
    assert json.loads("".join(fragments)) == ARGUMENTS


Cut = tuple[str, list[tuple[str, str]]]


def told_of(text: str, sizes: list[int], marks: AnswerMarks) -> Cut:
    """Content, and calls with their arguments as written, of a text that is cut."""
    scanner = marks.scanner()
    parts = list[OutputPiece]()
    at = 0
    for size in sizes:
        parts += scanner.feed(text[at : at + size])
        at += size
    parts += scanner.feed(text[at:], last=True)
    told = ParsedOutput.of(parts)
    return told.content, [(call.name, call.arguments) for call in told.calls]


@pytest.mark.slow
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut(name: str, forced: bool) -> None:
    """It is a call once its name is known, with the arguments that were written; before that it is
    nothing. So it is however the text comes, and whether arguments are told at once.
    """
    own = row(name)
    family = FAMILIES[name]
    bare = not own.trigger
    before = "" if forced or bare else BEFORE.get(name, "so ")
    begun = before.startswith("all")
    marks = AnswerMarks(
        row=own, channels=own.channels, tools=TOOLS, forced=forced, sure=True, begun=begun
    )
    text = before + (family.several or family.f)
    whole = told_of(text, [], marks)
    n_before = 0
    for end in range(len(before), len(text) + 1):
        content, calls = found = told_of(text[:end], [], marks)
        # The two share all but how arguments are told, so they take turns.
        assert found == told_of(text[:end], cut(end), replace(marks, streams=end % 2 == 1))
        if not bare or forced or calls:
            mark = content.removeprefix("so ")  # a beginning of it may be text
            assert not mark or (not forced and own.sign.startswith(mark) and mark != own.sign)
        assert len(calls) >= n_before
        n_before = len(calls)
        for (name_of, written), (same, all_of_it) in zip(calls, whole[1], strict=False):
            assert name_of == same
            assert all_of_it.startswith(written)
    assert [json.loads(written) for _, written in whole[1]] == [ARGUMENTS, {}][: len(whole[1])]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "f', []),
        ("hermes", '<tool_call>\n{"name": "f"', [("f", "")]),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"text": "a', [("f", '{"text": "a')]),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}', [("f", "{}")]),
        ("json", '{"name": "f", "para', [("f", "")]),
        ("json", '<|python_tag|>{"name": "', []),
        ("tags", "<tool_call>\n<function=f", []),
        ("tags", "<tool_call>\n<function=f>", [("f", "")]),
        ("tags", "<tool_call>\n<function=f>\n<parameter=text>\na\n", [("f", '{"text": "a')]),
        ("tags", "<tool_call>\n<function=f>\n<parameter=n>\n-3", [("f", '{"n": ')]),
        ("mistral-id", "[TOOL_CALLS]f[CALL_", [("f", "")]),
        ("mistral-id", "[TOOL_CALLS]f[CALL_ID]abc", [("f", "")]),
        ("mistral-list", "[TOOL_CALLS]", []),
        ("action", "<|START_ACTION|>", []),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f", []),
        ("deepseek-r1", "<｜tool▁calls▁begin｜>", []),
        ("harmony", "<|channel|>commentary to=functions.f", []),
        ("solar", "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5", []),
        ("solar", "<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f", []),
        ("solar", "<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>f<|tool", [("f", "")]),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json", [("f", "")]),
        ("gemma", '<|tool_call>call:f{text:<|"|>a<|"', [("f", '{"text": "a')]),
    ],
)
def test_when_a_call_has_begun(name: str, text: str, calls: list[Any]) -> None:
    own = row(name)
    marks = AnswerMarks(row=own, channels=own.channels, tools=TOOLS, sure=True)
    assert told_of(text, [], marks) == ("", calls)


@pytest.mark.parametrize("name", FAMILIES)
def test_where_it_may_be_none_a_cut_call_is_content(name: str) -> None:
    own = row(name)
    text = FAMILIES[name].f
    for end in range(1, len(text) - 12):
        marks: dict[str, Any] = {"row": own, "channels": own.channels, "tools": TOOLS}
        told = ParsedOutput.of(AnswerMarks(**marks).scanner().feed(text[:end], last=True))
        assert own.channels or (told.content or told.calls)


def test_json_that_may_be_none_is_content_where_no_call_is_forced() -> None:
    marks = AnswerMarks(row=BARE, tools=TOOLS, sure=True)
    for text in ('{"x', '{"name": "x", "age": 1', "{", " "):
        assert told_of(text, [], marks) == (text, [])
        assert told_of(text, [], replace(marks, forced=True)) == ("", [])


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    scanner = AnswerMarks(row=HERMES, tools=TOOLS, thought=THINK).scanner()
    assert scanner.feed("<think>") == []
    assert scanner.feed("ab") == [OutputPiece("reasoning", "ab")]
    assert scanner.feed("c</th") == [OutputPiece("reasoning", "c")]
    assert scanner.feed("x") == [OutputPiece("reasoning", "</thx")]
    assert scanner.feed("</think>d <tool") == [OutputPiece("content", "d ")]
    assert scanner.feed("s") == [OutputPiece("content", "<tools")]


def test_ids_are_as_templates_want_them() -> None:
    for own in ROWS:
        text = FAMILIES[own.name].f
        marks = AnswerMarks(row=own, channels=own.channels, tools=TOOLS)
        (found,) = ParsedOutput.of(marks.scanner().feed(text, last=True)).calls
        if (own.id_mark and not own.numbered) or own.id_first:
            assert found.id in ("functions.f:0", "abcdefgh1", "a1b2c3d4e5")
            assert found.id in text
        else:
            assert len(found.id) == own.id_size or found.id.startswith("call_")


def test_an_id_that_a_model_repeats_is_another() -> None:
    """Random ids of one answer are the same where each token is the likeliest."""
    own = row("solar")
    text = FAMILIES["solar"].several.replace("a1b2c3d4e6", "a1b2c3d4e5")
    marks = AnswerMarks(row=own, channels=own.channels, tools=TOOLS)
    one, two = ParsedOutput.of(marks.scanner().feed(text, last=True)).calls
    assert one.id == "a1b2c3d4e5" != two.id
    assert re.fullmatch(own.id_form, two.id)


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(isinstance(thought, Thought) for thought in THOUGHTS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>xbye"),
        ("recipient", "a >>>f\nx\n"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>x"),
        ("hermes", "a<tool_call>\n\n<tool_call>"),
        ("solar", "<|tool_call:begin|>1<|tool_call:name|>f<|tool_call:args|>x"),
        (
            "action",
            '<|START_ACTION|>[{"tool_name": "f", "parameters": {"list": ["a"}},'
            '{"tool_name": "g", "parameters": {}}]<|END_ACTION|>',
        ),
    ],
)
@pytest.mark.parametrize("sure", [False, True])
def test_what_no_arguments_follow_is_the_same_in_parts(name: str, text: str, sure: bool) -> None:
    """A call was told before the first character behind its name said that it is none."""
    own = row(name)
    marks = AnswerMarks(row=own, channels=own.channels, tools=TOOLS, streams=True, sure=sure)

    def found(parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
        scanner = marks.scanner()
        said = [each for part in parts for each in scanner.feed(part)]
        told = ParsedOutput.of([*said, *scanner.feed("", last=True)])
        return told.content, [(call.name, call.arguments) for call in told.calls]

    assert found(list(text)) == found([text])

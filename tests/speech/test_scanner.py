"""Answers told apart, however they are cut: reasoning, content, calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.speech import ROWS, Row, Said, Speech, Told, find_row, reasons, shows_tools
from treadle.text.template import ChatTemplate

HERMES, BARE = ROWS
NAMES = frozenset({"f", "g"})

HERMES_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
BARE_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}{{ '<|h|>' + message.role + '<|e|>\\n\\n' }}
{%- if message.tool_calls %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
{%- else %}{{ message.content }}{% endif %}{{ '<|eot|>' }}{% endfor %}"""


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def tell(text: str, sizes: list[int] | None = None, **speech: Any) -> tuple[str, str, list[Any]]:
    """Reasoning, content and calls of a text that comes in parts."""
    scanner = Speech(names=NAMES, **speech).scanner()
    parts: list[Said] = []
    at = 0
    for size in sizes or [len(text)]:
        parts += scanner.feed(text[at : at + size])
        at += size
    parts += scanner.feed(text[at:], last=True)
    told = Told.of(parts)
    assert scanner.n_calls == len(told.calls)
    return told.reasoning, told.content, [(c.name, json.loads(c.arguments)) for c in told.calls]


ANSWERS = [
    ("plain", "", {}, ("", "plain", [])),
    ("<think>\na < b\n</think>\n\nyes", "", {"reasons": True}, ("a < b", "yes", [])),
    ("a < b</think>yes", "", {"reasons": True, "opened": True}, ("a < b", "yes", [])),
    ("never ended", "", {"reasons": True, "opened": True}, ("never ended", "", [])),
    ("\n\n plain \n", "", {}, ("", "\n\n plain \n", [])),
    ("\n x\n", "", {"row": HERMES}, ("", "\n x\n", [])),
    (
        f"<tool_call>{call('f')}</tool_call><tool_call>{call('g')}</tool_call> so",
        "", {"row": HERMES, "parallel": False}, ("", "", [("f", {})]),
    ),
    ("<thin", "", {"reasons": True}, ("", "<thin", [])),
    ("<think>x</think>", "", {}, ("", "<think>x</think>", [])),
    (
        f"<tool_call>\n{call('f', a=1)}\n</tool_call>\n",
        "", {"row": HERMES}, ("", "", [("f", {"a": 1})]),
    ),
    ("a\n\n<tool_call>\n [1] \n", "", {"row": HERMES}, ("", "a<tool_call>\n [1] \n", [])),
    ("\n\n x\n\n", "", {"row": HERMES, "reasons": True}, ("", " x\n\n", [])),
    (
        f"\nso:\n<tool_call>{call('f', a='</tool_call>}')}</tool_call>\n<tool_call>{call('g')}",
        "", {"row": HERMES}, ("", "\nso:", [("f", {"a": "</tool_call>}"}), ("g", {})]),
    ),
    (
        f"<think>t</think>\n\n<tool_call>{call('f', a=[{}])}</tool_call>",
        "", {"row": HERMES, "reasons": True}, ("t", "", [("f", {"a": [{}]})]),
    ),
    ("<tool_call>{broken}</tool_call>", "", {"row": HERMES}, ("", "<tool_call>{broken}", [])),
    ('<tool_call>{"name": []}', "", {"row": HERMES}, ("", '<tool_call>{"name": []}', [])),
    ('<tool_call>{"name": "f", "arguments": 5}', "", {"row": HERMES},
     ("", '<tool_call>{"name": "f", "arguments": 5}', [])),
    (f"<tool_call>{call('absent')}", "", {"row": HERMES}, ("", f"<tool_call>{call('absent')}", [])),
    ('<tool_call>{"name": "f', "", {"row": HERMES}, ("", '<tool_call>{"name": "f', [])),
    ('{"name": "f", "parameters": {"é": "\\""}}', "", {"row": BARE}, ("", "", [("f", {"é": '"'})])),
    ('{"name": "x"} then', "", {"row": BARE}, ("", '{"name": "x"} then', [])),
    ("a {} b", "", {"row": BARE}, ("", "a {} b", [])),
    (call("g", a=1), "", {"forced": True}, ("", "", [("g", {"a": 1})])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "_", "speech", "told"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers(text: str, _: str, speech: dict[str, Any], told: Any) -> None:
    assert tell(text, **speech) == told


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 7), max_size=60))
def test_how_it_is_cut_changes_nothing(answer: Any, sizes: list[int]) -> None:
    text, _, speech, told = answer
    assert tell(text, sizes or [0], **speech) == told


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    scanner = Speech(row=HERMES, names=NAMES, reasons=True).scanner()
    assert scanner.feed("<think>") == []
    assert scanner.feed("ab") == [Said("reasoning", "ab")]
    assert scanner.feed("c</th") == [Said("reasoning", "c")]
    assert scanner.feed("x") == [Said("reasoning", "</thx")]
    assert scanner.feed("</think>d <tool") == [Said("content", "d ")]
    assert scanner.feed("s") == [Said("content", "<tools")]


def test_the_row_is_found_by_trial() -> None:
    assert find_row(ChatTemplate(HERMES_TEMPLATE)) == HERMES
    assert find_row(ChatTemplate(BARE_TEMPLATE)) == BARE
    silent = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert find_row(silent) is None
    assert not shows_tools(silent)
    assert shows_tools(ChatTemplate(HERMES_TEMPLATE))
    unknown = HERMES_TEMPLATE.replace("<tool_call>", "<unheard_of>")
    assert find_row(ChatTemplate(unknown.replace('{"name"', '("name"'))) is None
    assert find_row(ChatTemplate("{{ nothing.at.all }}")) is None


def test_reasoning_shows_in_the_template() -> None:
    assert reasons(ChatTemplate("{{ '<think></think>' }}"))
    assert not reasons(ChatTemplate(HERMES_TEMPLATE))


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(isinstance(row, Row) for row in ROWS)

"""Which row a model's template has, found by trial: the template renders a conversation with one
call, and the row that finds the same call in it is the right one.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from treadle.errors import TemplateError, UnsupportedError
from treadle.speech.rows import ROWS, Row
from treadle.speech.scanner import THOUGHT, Speech, Told

if TYPE_CHECKING:
    from treadle.text.template import ChatTemplate

MAX_TRIED = 64  # places in a template's text where a call may begin
_NAME, _WORD = "treadle_try", "treadle_word"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Try it.",
        "parameters": {"type": "object", "properties": {_WORD: {"type": "string"}}},
    },
}


def reasons(template: ChatTemplate) -> bool:
    """Whether models of this template reason between marks."""
    return THOUGHT in template.source


def shows_tools(template: ChatTemplate) -> bool:
    """Whether a template tells the model which tools there are."""
    return _NAME in _rendered(template, [])


def find_row(template: ChatTemplate) -> Row | None:
    """The row that finds in a conversation the call that the template has written into it."""
    call = {"id": "callxxxx1", "type": "function"}
    arguments = {_WORD: "}</tool_call>{"}
    function = {"name": _NAME, "arguments": arguments}
    without = _rendered(template, [])
    whole = _rendered(template, [{"role": "assistant", "content": "", "tool_calls": [
        {**call, "function": function}
    ]}])  # fmt: skip
    at = next(
        (i for i, (a, b) in enumerate(zip(whole, without, strict=False)) if a != b),
        min(len(whole), len(without)),
    )
    for row in ROWS:
        # What stands before the call is the head of the assistant's message.
        mark = row.open or '{"'
        starts = (i for i in range(at, len(whole)) if whole.startswith(mark, i))
        for start in islice(starts, MAX_TRIED):
            scanner = Speech(row=row, names=frozenset({_NAME})).scanner()
            calls = Told.of(scanner.feed(whole[start:], last=True)).calls
            if len(calls) == 1 and json.loads(calls[0].arguments) == arguments:
                return row
    return None


def _rendered(template: ChatTemplate, more: list[dict[str, Any]]) -> str:
    """A conversation with a tool; nothing where the template cannot."""
    messages = [{"role": "user", "content": "hi"}, *more]
    try:
        return template.render(messages, add_generation_prompt=False, tools=[_TOOL])
    except (TemplateError, UnsupportedError):
        return ""

"""What a model says, told apart while it comes: reasoning, content, calls of tools.

A row says how a family of models writes a call. Which row a model's template has is found by
trial: the template renders a conversation with one call, and the row that finds the same call in
it is the right one. Calls end where their JSON ends, whatever a string in it says.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from treadle.answer import overlap
from treadle.errors import TemplateError, UnsupportedError

if TYPE_CHECKING:
    from treadle.text.template import ChatTemplate

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True)
class Row:
    """How a family writes a call: ``open``, an object of JSON with the name and the arguments,
    ``close``. Without ``open`` an answer that begins with a brace is a call.
    """

    name: str
    open: str = ""
    close: str = ""


ROWS = (
    Row("hermes", "<tool_call>", "</tool_call>"),  # Hermes, Qwen 2.5, Qwen 3
    Row("json"),  # Llama 3.1 to 3.3
)
ARGUMENTS = ("arguments", "parameters")
MAX_TRIED = 64  # places in a template's text where a call may begin


class ToolCall(NamedTuple):
    """One call: ``arguments`` is an object of JSON, as text."""

    id: str
    name: str
    arguments: str


class Said(NamedTuple):
    """A part of an answer: text of "reasoning" or "content", or a call with its number."""

    kind: str
    text: str = ""
    call: ToolCall | None = None
    number: int = 0


@dataclass(frozen=True)
class Speech:
    """What may be found in an answer: reasoning, if ``reasons``, which the prompt has perhaps
    ``opened``; calls of the tools in ``names`` as ``row`` writes them, or, if ``forced``, the whole
    answer as one.
    """

    reasons: bool = False
    opened: bool = False
    row: Row | None = None
    names: frozenset[str] = frozenset()
    forced: bool = False
    parallel: bool = True  # else what follows the first call is not told

    def scanner(self) -> Scanner:
        """For one answer."""
        return Scanner(self)


class Scanner:
    """Text comes in as it is written; parts come out. What may be the beginning of a mark is held
    back.
    """

    def __init__(self, speech: Speech) -> None:
        row = Row("forced") if speech.forced else speech.row
        self._speech, self._row = speech, row
        self._state, self._next = "content", "start"
        if speech.reasons:
            self._state, self._next = "gap", "reasoning" if speech.opened else "start"
        elif row is not None:
            self._state = "start"
        self._held = ""
        self._walk = _Walk()
        self.n_calls = 0

    def feed(self, text: str, *, last: bool = False) -> list[Said]:
        """What is certain now; all of it, if this text is the ``last``."""
        self._held += text
        out: list[Said] = []
        while True:
            before = self._state, len(self._held)
            out += getattr(self, f"_in_{self._state}")(last)
            if (self._state, len(self._held)) == before:
                return _merged(out)

    def _in_gap(self, last: bool) -> list[Said]:
        """Beside a mark: line breaks are no part of what is said."""
        self._held = self._held.lstrip("\n")
        if self._held or last:
            self._state = self._next
        return []

    def _behind(self, rest: str, state: str) -> None:
        """A mark was read; ``state`` follows."""
        self._held, self._state, self._next = rest, "gap", state

    def _in_start(self, last: bool) -> list[Said]:
        """Before anything was said: white space is left out where a mark follows."""
        text = self._held.lstrip()
        if self._speech.reasons and text.startswith(THINK):
            self._behind(text[len(THINK) :], "reasoning")
        elif self._row is not None and not self._row.open and text.startswith("{"):
            self._held, self._state = text, "call"
        elif last or (text and not (self._speech.reasons and THINK.startswith(text))):
            self._state = "content"
        return []

    def _in_reasoning(self, last: bool) -> list[Said]:
        text, found = self._until(THOUGHT, last)
        if found:
            self._behind(self._held, "start")
        return [Said("reasoning", text)]

    def _in_content(self, last: bool) -> list[Said]:
        mark = self._row.open if self._row is not None else ""
        if not mark:
            text, self._held = self._held, ""
            return [Said("content", text)]
        text, found = self._until(mark, last)
        if found:
            self._state = "call"
        return [Said("content", text)]

    def _in_call(self, last: bool) -> list[Said]:
        assert self._row is not None
        end = self._walk.end(self._held)
        if end is None and not last:
            return []
        close = self._row.close
        written = self._held[:end]
        rest = "" if end is None else self._held[end:]
        behind = rest.lstrip()
        if close and behind.startswith(close):
            rest = behind[len(close) :]
        elif close and not last and close.startswith(behind):
            return []  # its end may still come
        call = read_call(written, self._speech.names)
        self._walk = _Walk()
        # After a bare call nothing else is one.
        self._behind(rest, "content" if self._row.open else "rest")
        if call is None:
            self._state = self._next  # and so white space behind it counts
            return [Said("content", self._row.open + written)]
        self.n_calls += 1
        if not self._speech.parallel:
            self._state = "end"
        return [Said("call", "", call, self.n_calls - 1)]

    def _in_end(self, last: bool) -> list[Said]:
        self._held = ""
        return []

    def _in_rest(self, last: bool) -> list[Said]:
        text, self._held = self._held, ""
        return [Said("content", text)]

    def _until(self, mark: str, last: bool) -> tuple[str, bool]:
        """The held text up to a mark, and whether it is there; the mark is taken away, and line
        breaks before it.
        """
        before, found, behind = self._held.partition(mark)
        if found:
            self._held = behind
            return before.rstrip("\n"), True
        text = self._held
        if not last:
            text = text[: len(text) - overlap(text, mark)].rstrip("\n")
        self._held = self._held[len(text) :]
        return text, False


class _Walk:
    """Finds the end of an object of JSON that comes in parts: each character is looked at once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Behind its last brace; None where that has not come."""
        for at in range(self._at, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted, self._escaped = char != '"', char == "\\"
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._at = at
                    return at + 1
        self._at = len(text)
        return None


def _merged(parts: Iterable[Said]) -> list[Said]:
    """Neighbours of one kind as one; nothing that is empty."""
    out: list[Said] = []
    for part in parts:
        if part.call is None and not part.text:
            continue
        if out and part.call is None and out[-1].kind == part.kind:
            out[-1] = Said(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return out


def read_call(written: str, names: Collection[str]) -> ToolCall | None:
    """A call as it was written; None for what is none, which is then content."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments: Any = next((found[key] for key in ARGUMENTS if key in found), {})
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", name, text)


@dataclass
class Told:
    """A whole answer."""

    reasoning: str
    content: str
    calls: list[ToolCall]

    @classmethod
    def of(cls, parts: Sequence[Said]) -> Told:
        """All its parts."""
        texts = {kind: "".join(p.text for p in parts if p.kind == kind) for kind in KINDS}
        calls = [part.call for part in parts if part.call is not None]
        return cls(texts["reasoning"], texts["content"], calls)


KINDS = ("reasoning", "content")

# -- what a template writes -----------------------------------------------------------------------

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

"""Detection of a chat template's tool-call format. The template renders a conversation with a known
call; the format is the first row of ROWS whose parser finds that call in the rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from treadle.base.fast_classes import dataclass
from treadle.base.fork_safety import free_lock
from treadle.base.text_overlap import n_common
from treadle.chat.messages import REASONING
from treadle.chat.tools.formats import GENERIC, ROWS, THOUGHTS, Channels, Thought, ToolCallFormat
from treadle.chat.tools.history import CallContentStyle, text_before_calls, with_thought_parts
from treadle.chat.tools.output import ParsedOutput
from treadle.chat.tools.stream_parser import AnswerMarks
from treadle.errors import TemplateError, UnsupportedError

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate

_LOCK = free_lock()
_DIALECTS: WeakKeyDictionary[ChatTemplate, TemplateDialect] = WeakKeyDictionary()
MAX_TRIED = 64  # places in a rendering where a call may begin
_NAME = "treadle_try"
_WORD = "treadle_word"
_SYSTEM = "treadle says so"
_ARGUMENTS = {_WORD: "}</tool_call>{", "n": 3}


def _tool(properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [next(iter(properties))]}
    function = {"name": _NAME, "description": "Try it.", "parameters": parameters}
    return {"type": "function", "function": function}


_TOOL = _tool(
    {
        _WORD: {"type": "string", "description": "A word."},
        "n": {"type": "integer", "description": "A number."},
    }
)
_USER = {"role": "user", "content": "hi"}
_GIVEN = "gave 3"  # the test tool's result
_LATE = {"role": "system", "content": "treadle says more"}
_IDS = ("callxxxx1", "callxxxx2")
_NAMED = (f"functions.{_NAME}:0", f"functions.{_NAME}:1")
# Schema features that some templates fail on: macros of Hermes never return from "null", those of
# Functionary raise on a schema that is true.
_ODD: dict[str, Any] = {
    "a": {"type": ["string", "null"]},
    "b": {"type": "array", "items": True},
    "c": {"oneOf": [True, {"type": "null"}]},
}
# Schema without optional parts: macros of Command R+ raise on it.
_BARE: dict[str, Any] = {
    "a": {"type": "string"},
    "b": {"type": "array"},
    "c": {"type": "object", "properties": {"d": {}}, "additionalProperties": False},
}
_GAPS = ("", "Done.")  # assistant texts to try; some templates raise on ""


@dataclass(frozen=True)
class CallForm:
    """Form of a test message with calls. ``as_text``: arguments are JSON text, not objects.
    ``none``: the content is None, not "". ``ids``: ids of the calls.
    """

    as_text: bool = False
    none: bool = False
    ids: tuple[str, str] = _IDS


@dataclass(frozen=True)
class TemplateDialect:
    """Abilities of a chat template, detected by rendering tests, and the message forms that it
    expects. In the comments "it" is the template.
    """

    thought: Thought | None = None  # the marks around reasoning
    channels: Channels | None = None  # answers are messages with headers
    shows_tools: bool = False  # it lists the tools to the model
    row: ToolCallFormat = GENERIC  # format of calls
    writes_calls: bool = False  # it renders calls; else they are put into contents
    has_results: bool = False  # it renders tool results, though not calls
    arguments_as_text: bool = False
    content_is_none: bool = False  # the content of a message with calls must be None
    # How it writes text and reasoning of a message with calls.
    call_content: CallContentStyle = CallContentStyle()
    one_call: bool = False  # at most one call per message
    has_system: bool = True
    system_raises: bool = False  # it raises on a system message; if not, it may leave it out
    system_stays: bool = False  # it writes a later system message where it stands
    system_alone: bool = True  # it renders a conversation of one system message
    empty_raises: bool = False  # it raises on an assistant message without text
    thought_parts: bool = False  # reasoning is a part of the content
    alternates: bool = False  # it raises on two consecutive messages of one role
    gap: str | None = None  # assistant text that it requires between a result and the user
    plain_schemas: bool = False  # it raises on some schema features (``_ODD``)
    results_as_text: bool = True  # it does not write an object result as JSON
    full_schemas: bool = False  # it raises on schemas without optional parts (``_BARE``)
    within: bool = False  # the prompt ends inside reasoning that it has begun

    def begun(self) -> TemplateDialect:
        """Return the dialect for an answer whose content the prompt has already begun: no reasoning
        or header follows.
        """
        row = GENERIC if self.channels else self.row
        return replace(self, thought=None, channels=None, row=row)

    def marks(self, prompt: str, **more: Any) -> AnswerMarks:
        """Return the marks to look for in an answer to ``prompt``. ``more``: further fields of
        ``AnswerMarks``.
        """
        thought = self.thought
        row = self.row if more.get("tools") or self.row.content else None
        return AnswerMarks(
            thought=thought,
            opened=thought is not None
            and (self.within or prompt.rstrip().endswith(thought.open.rstrip())),
            within=thought is not None and self.within,
            channels=self.channels,
            row=row,
            begun=bool(row and row.open and prompt.endswith(row.open)),
            **more,
        )


def dialect_of(template: ChatTemplate) -> TemplateDialect:
    """Return a template's dialect; it is detected at the first call. Thread-safe."""
    with _LOCK:
        found = _DIALECTS.get(template)
        if found is None:
            found = _DIALECTS[template] = find_dialect(template)
        return found


def find_dialect(template: ChatTemplate) -> TemplateDialect:
    """Detect a template's dialect by rendering test conversations. ``messages_for_template`` makes
    up for abilities that the template lacks.
    """
    source = f"{template.source}{template.tool_source or ''}"
    families = (row.channels for row in ROWS if row.channels is not None)
    channels = next((own for own in families if all(m in source for m in own.known_by)), None)
    thought = find_thought(template)
    plain = _rendered(template, [])
    shows = _NAME in plain
    system = _rendered(template, [], system=True, tools=False)
    one, two = (_rendered(template, more, tools=False) for more in ([], [_USER]))
    own: dict[str, Any] = {
        "thought": channels.thought if channels else thought,
        "channels": channels,
        "shows_tools": shows,
        "has_system": _SYSTEM in system,
        "system_raises": bool(one) and not system,
        "alternates": bool(one) and not two,
        "plain_schemas": shows and not _rendered(template, [], properties=_ODD),
        "full_schemas": shows and not _rendered(template, [], properties=_BARE),
        "system_alone": not one or _system_alone(template, tools=shows),
        "empty_raises": bool(one) and _empty_raises(template),
        "thought_parts": _has_thought_parts(template, source),
        "system_stays": _SYSTEM in system and _system_stays(template, tools=shows),
    }
    named = any(row.named_ids and row.after in source for row in ROWS)
    for as_text in (False, True):
        for none in (False, True):
            form = CallForm(as_text, none, _NAMED if named else _IDS)
            row = _find_row(template, form, tools=shows)
            if row is not None:
                own |= {"arguments_as_text": as_text, "content_is_none": none}
                own["one_call"] = not _has_several(template, form, tools=shows)
                own["gap"] = _gap(template, form, tools=shows)
                own["call_content"], none = _call_content(template, form, own, tools=shows)
                own["content_is_none"] = none
                own["results_as_text"] = not _has_objects(template, form, tools=shows)
                talk = [_calling([_ARGUMENTS], form), _result(form, _GIVEN), _LATE]
                own["system_stays"] &= _LATE["content"] in _rendered(template, talk, tools=shows)
                return TemplateDialect(row=row, writes_calls=True, **own)
    row = next((row for row in ROWS if row.told_by and row.told_by in source), None)
    if row is None:
        return TemplateDialect(**{**own, "shows_tools": False})
    said = [{"role": "assistant", "content": ""}, _result(CallForm(), _GIVEN)]
    results = _GIVEN in _rendered(template, said, tools=False)
    return TemplateDialect(row=row, has_results=shows and results, **own)


def find_thought(template: ChatTemplate) -> Thought | None:
    """Return the marks around reasoning that a template's source or its prompt
    contains, or None.
    """
    source = f"{template.source}{template.tool_source or ''}"
    found = next((t for t in THOUGHTS if t.close in source), None)
    if found is not None or not any(t.composed_of in source for t in THOUGHTS if t.composed_of):
        return found
    asked = _rendered(template, [], tools=False, asks=True)
    return next((t for t in THOUGHTS if t.close in asked or asked.endswith(t.begin)), None)


def keeps_reasoning(template: ChatTemplate) -> bool:
    """Return whether the template renders the reasoning of an answer that precedes the last user
    message.
    """
    said = {"role": "assistant", "content": _GIVEN, **dict.fromkeys(REASONING, _SYSTEM)}
    said = with_thought_parts(said) if dialect_of(template).thought_parts else said
    return _SYSTEM in _rendered(template, [said, _USER], tools=False)


def _find_row(template: ChatTemplate, form: CallForm, *, tools: bool) -> ToolCallFormat | None:
    """Return the row of ROWS whose parser finds the test call, a message of ``form``, in the
    template's rendering; None if there is none. ``tools``: render with tools.
    """
    said = _calling([_ARGUMENTS], form)
    without, whole = (_rendered(template, more, tools=tools) for more in ([], [said]))
    at = n_common(whole, without)  # text before the call is the head of the assistant message
    schemas = {_NAME: _TOOL["function"]["parameters"]}
    for row in ROWS:
        # Skipped, so that rows without an id mark or with less white space are tried.
        if row.id_mark not in whole or (row.tags is not None and row.tags.then not in whole):
            continue
        mark = row.sign or '{"'
        if row.channels:
            mark = row.channels.start
        starts = (i for i in range(max(at - len(mark), 0), len(whole)) if whole.startswith(mark, i))
        for start in islice(starts, MAX_TRIED):
            marks = AnswerMarks(row=row, channels=row.channels, tools=schemas)
            found = ParsedOutput.of(marks.scanner().feed(whole[start:], last=True)).calls
            if len(found) == 1 and json.loads(found[0].arguments) == _ARGUMENTS:
                return row
    return None


def _has_several(template: ChatTemplate, form: CallForm, *, tools: bool) -> bool:
    """Whether the template renders two calls of one message, which has the given ``form``. Llama
    3's raises on them.
    """
    marks = f"{_WORD}_1", f"{_WORD}_2"
    said = _calling([{_WORD: mark} for mark in marks], form)
    text = _rendered(template, [said], tools=tools)
    return all(mark in text for mark in marks)


def _call_content(
    template: ChatTemplate, form: CallForm, own: Mapping[str, Any], *, tools: bool
) -> tuple[CallContentStyle, bool]:
    """Return the style in which the template renders text and reasoning before a call, in that
    order if possible; and whether such a message must have the content None. ``own``: the fields of
    the ``TemplateDialect`` found so far.
    """
    channels: Channels | None = own["channels"]
    ways = [
        CallContentStyle(),
        CallContentStyle(apart=True),
        CallContentStyle(apart=True, thought_with_call=True),
    ]
    if channels is not None and channels.preamble:
        both = f"{channels.end}{channels.start}{channels.preamble}"
        ways.insert(1, CallContentStyle(in_thought=both))
    words = f"{_WORD}_1"
    thought = f"{_WORD}_2"
    mark = f"{_WORD}_3"
    whole = {**_calling([{_WORD: mark}], form), "content": words}
    if own["thought"] is not None:
        whole |= dict.fromkeys(REASONING, thought)

    def rendered(way: CallContentStyle, none: bool, *more: dict[str, Any]) -> str:
        said = text_before_calls([whole], way)
        if none:
            said = [{**message, "content": message["content"] or None} for message in said]
        return _rendered(template, [*said, _result(form, _GIVEN), *more], tools=tools)

    def rank(way: CallContentStyle, none: bool) -> int:
        text = rendered(way, none)
        at = [text.find(each) for each in (thought, words, mark)]
        if min(at[1:]) < 0 or at[1] > at[2]:
            return 0
        return 1 if at[0] < 0 else 3 if at[0] < at[1] else 2

    tried = [(way, none) for none in sorted({form.none, True}) for way in ways]
    best, none = max(tried, key=lambda each: rank(*each))  # of equal ranks, the first
    # Some templates count the text as a turn, and raise on the answer after the call.
    if best.apart and not rendered(best, none, answer := {"role": "assistant", "content": "so"}):
        parted = replace(best, turn_between=True)
        best = parted if rendered(parted, none, answer) else best
    return best, none


def _system_alone(template: ChatTemplate, *, tools: bool) -> bool:
    """Whether the template renders a conversation of one system message, without tools and, with
    ``tools``, also with them.
    """
    ways = (True, False) if tools else (False,)
    return all(
        _SYSTEM in _rendered(template, [], tools=way, system=True, user=False) for way in ways
    )


def _empty_raises(template: ChatTemplate) -> bool:
    """Whether the template raises on an assistant message without text, and not on one
    with text.
    """
    none, some = (
        _rendered(template, [{"role": "assistant", "content": said}, _USER], tools=False)
        for said in ("", _GAPS[1])
    )
    return bool(some) and not none


def _has_thought_parts(template: ChatTemplate, source: str) -> bool:
    """Whether the template renders reasoning only as a part of an assistant message's content."""
    if not re.search(r"""['"]thinking['"]""", source):
        return False
    said = {"role": "assistant", "content": _GIVEN, "reasoning_content": _SYSTEM}
    plain, parts = (
        _rendered(template, [message, _USER], tools=False)
        for message in (said, with_thought_parts(said))
    )
    places = [parts.find(_SYSTEM), parts.find(_GIVEN)]
    # A template that prints the list itself prints its keys too.
    return _SYSTEM not in plain and -1 < places[0] < places[1] and "'type'" not in parts


def _has_objects(template: ChatTemplate, form: CallForm, *, tools: bool) -> bool:
    """Whether the template renders a tool result that is an object as JSON, as Llama 3's does.
    Others raise on it or write it as Python does.
    """
    result = _result(form, {f"{_WORD}_1": None})
    said = [_calling([_ARGUMENTS], form), result]
    return f'"{_WORD}_1": null' in _rendered(template, said, tools=tools)


def _gap(template: ChatTemplate, form: CallForm, *, tools: bool) -> str | None:
    """Return the assistant text without which the template raises on a user message after a tool
    result (Mistral's do). None if it needs no text, or no text helps. ``form``: of the message with
    the call.
    """
    talk = [_calling([_ARGUMENTS], form), _result(form, _GIVEN)]
    if _rendered(template, [*talk, _USER], tools=tools):
        return None
    tried = ((gap, {"role": "assistant", "content": gap}) for gap in _GAPS)
    return next(
        (gap for gap, m in tried if _rendered(template, [*talk, m, _USER], tools=tools)), None
    )


def _system_stays(template: ChatTemplate, *, tools: bool) -> bool:
    """Whether the template renders a later system message in its place and not as another role's,
    both after a first system message and without one. Some put system text first, or render only
    the last one.
    """
    before, after = ({"role": role, "content": f"as {role}"} for role in ("assistant", "user"))
    for system in (True, False):
        last, *said = (
            _rendered(template, talk, tools=tools, system=system)
            for talk in (
                [_LATE],
                *([before, {**_LATE, "role": r}, after] for r in ("system", "user", "assistant")),
            )
        )
        words = [before["content"], _LATE["content"], after["content"]]
        places = [said[0].find(word) for word in words]
        if -1 in places or places != sorted(places) or said[0].count(words[1]) > 1:
            return False
        if said[0] in said[1:] or words[1] not in last or (system and _SYSTEM not in said[0]):
            return False
    return True


def _calling(arguments: list[dict[str, Any]], form: CallForm) -> dict[str, Any]:
    """Return an assistant message of ``form`` with one call of the test tool for each of
    ``arguments``.
    """
    given = [json.dumps(each) if form.as_text else each for each in arguments]
    calls = [
        {"id": id, "type": "function", "function": {"name": _NAME, "arguments": each}}
        for id, each in zip(form.ids, given, strict=False)
    ]
    return {"role": "assistant", "content": None if form.none else "", "tool_calls": calls}


def _result(form: CallForm, content: Any) -> dict[str, Any]:
    """Return a tool message with ``content`` as the result of the first test call."""
    return {"role": "tool", "tool_call_id": form.ids[0], "name": _NAME, "content": content}


def _rendered(
    template: ChatTemplate,
    more: list[dict[str, Any]],
    *,
    tools: bool = True,
    system: bool = False,
    user: bool = True,
    asks: bool = False,
    properties: Mapping[str, Any] | None = None,
) -> str:
    """Render the test conversation and the messages ``more``; "" if the template raises.

    ``tools``: with the test tool, whose ``properties`` may be replaced; ``system``, ``user``:
    whether the conversation begins with messages of these roles; ``asks``: with a generation
    prompt.
    """
    first = [{"role": "system", "content": _SYSTEM}] if system else []
    first += [_USER] if user else []
    tool = _TOOL if properties is None else _tool(properties)
    try:
        return template.render(
            [*first, *more], add_generation_prompt=asks, tools=[tool] if tools else None
        )
    except (TemplateError, UnsupportedError):
        return ""

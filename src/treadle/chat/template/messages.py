"""Messages of a conversation, in the form that a chat template reads.

``content`` is a string, or OpenAI's list of parts: ``[{"type": "text", "text": "hello"}]``. Some
templates read strings, some read parts, some both; each gets the form it reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from treadle.errors import TemplateError, UnsupportedError

Message = Mapping[str, Any]

REASONING = ("reasoning_content", "thinking", "reasoning", "tool_plan")  # Command R7B has a plan
SPEAKERS = ("system", "developer", "user", "assistant")
_TRIED = ("user", "assistant", "user")  # roles of the test conversation in ``form_of``
_MARKS = ("treadleone", "treadletwo", "treadlethree")  # its contents: no template has these words


class ContentForm(Enum):
    """The form of ``content`` that a template reads."""

    TEXT = "a text"
    PARTS = "a list of parts"
    ONE_PART = "a list, of which the first part is read"
    BOTH = "either"

    def shape(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its content in this form."""
        content = message.get("content")
        if self is ContentForm.PARTS and content is None:
            return {**message, "content": []}
        if self is ContentForm.ONE_PART and (content is None or is_parts(content)):
            content = joined(content)
        if self in (ContentForm.PARTS, ContentForm.ONE_PART) and isinstance(content, str):
            return {**message, "content": [_part(content)]}
        # A template that reads both may still read only the first part of a system message.
        kept = self is ContentForm.PARTS or (self is ContentForm.BOTH and message["role"] in _TRIED)
        if is_parts(content) and not kept:
            return {**message, "content": joined(content)}
        return message


def form_of(source: str, render: Callable[[list[dict[str, Any]]], str | None]) -> ContentForm:
    """Detect the content form of a template: render a test conversation in both forms.

    ``render`` returns the rendered text, or None where the template fails. A template whose source
    lacks the word ``text`` reads strings and is not tried.
    """
    if not re.search(r"\btext\b", source):
        return ContentForm.TEXT
    spoken = [{"role": r, "content": mark} for r, mark in zip(_TRIED, _MARKS, strict=True)]
    text, parts = (
        render([form.shape(message) for message in spoken])
        for form in (ContentForm.TEXT, ContentForm.PARTS)
    )
    if _all_said(text) and parts != text:
        return ContentForm.TEXT
    # A template that prints the list itself prints its keys too.
    if not _all_said(parts) or "'type'" in str(parts):
        return ContentForm.TEXT
    second = [{**m, "content": [_part("-"), _part(m["content"])]} for m in spoken]
    if _all_said(render(second)):
        return ContentForm.BOTH if _all_said(text) else ContentForm.PARTS
    return ContentForm.TEXT if _all_said(text) else ContentForm.ONE_PART


def _all_said(text: str | None) -> bool:
    """Whether a rendering contains every mark of the test conversation."""
    return text is not None and all(mark in text for mark in _MARKS)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return checked copies of JSON types, with reasoning under each name that templates read.

    Raises TemplateError for invalid messages, UnsupportedError for parts that are not text.
    """
    return [_read(i, message) for i, message in enumerate(plain(messages))]


def _read(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise TemplateError(f"message {i} is {message!r:.80}: expected a dict with a role")
    content = message.get("content")
    if message["role"] in SPEAKERS and not isinstance(content, str | list | None):
        kind = type(content).__name__
        raise TemplateError(f"message {i}: content is {kind}: expected a string or a list of parts")
    if isinstance(content, list) and (is_parts(content) or message["role"] in SPEAKERS):
        for part in content:
            _check_part(f"message {i}", part, thinks=message["role"] == "assistant")
    found = [message[name] for name in REASONING if message.get(name) is not None]
    if not found:
        return message
    return {**message, **dict.fromkeys(REASONING, found[0])}


def _check_part(where: str, part: Any, *, thinks: bool) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise TemplateError(f"{where}: part {part!r:.80}: expected a dict with a type")
    if thinks and kind == "thinking" and isinstance(part.get("thinking"), str):
        return
    if kind != "text":
        raise UnsupportedError(f"{where}: parts of type {kind!r:.40} are not supported, only text")
    if not isinstance(part.get("text"), str):
        raise TemplateError(f"{where} has a text part without a text string")


def is_parts(content: Any) -> bool:
    """Whether a content is a list of parts; a tool result may be a list of anything."""
    return isinstance(content, list) and all(isinstance(p, dict) and "type" in p for p in content)


def joined(content: Any) -> str:
    """Return the text of a content: its text parts joined by newlines, without reasoning; "" for
    None.
    """
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") != "thinking")
    return content or ""


GoOn = Callable[[str, Message], str]


def render_prompt(
    render: Callable[..., str],
    messages: Sequence[Message],
    go_on: GoOn | None = None,
    **given: Any,
) -> str:
    """Render the prompt: for a new answer to ``messages``, or to continue their last message if it
    is the assistant's. ``go_on`` appends that last message to the prompt rendered from those before
    it.
    """
    if not goes_on(messages):
        return render(list(messages), add_generation_prompt=True, **given)
    asked = render(list(messages[:-1]), add_generation_prompt=True, **given)
    last = read_messages(messages)[-1]
    return go_on(asked, last) if go_on else f"{asked}{joined(last.get('content'))}"


def goes_on(messages: Sequence[Message]) -> bool:
    """Whether the last message is an assistant message to continue; one with tool calls is
    complete.
    """
    last = messages[-1]
    return len(messages) > 1 and last["role"] == "assistant" and not last.get("tool_calls")


def plain(value: Any) -> Any:
    """Return a copy in JSON types only, so that templates get no other Python objects.

    Raises TemplateError for other types, and for values nested too deeply.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise TemplateError("messages, tools or variables are too deeply nested") from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TemplateError(
        f"messages, tools and variables must be JSON types; found {type(value).__name__}"
    )


def check_messages(messages: Any) -> None:
    """Raise TemplateError unless ``messages`` is a non-empty list of messages with role and
    content.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        found = type(messages).__name__
        raise TemplateError(f"messages is {found}: expected a list of dicts with role and content")
    if not messages:
        raise TemplateError("messages is empty: expected at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = type(message).__name__
            raise TemplateError(f"message {i} is {found}: expected a dict with role and content")
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"message {i} has no role, such as 'user'")
        if "content" not in message and "tool_calls" not in message:
            raise TemplateError(f"message {i} has no content")

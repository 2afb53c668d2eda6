"""A conversation's messages, in the form that its template reads.

``content`` is a text, or OpenAI's list of parts: ``[{"type": "text", "text": "hello"}]``. Some
templates read texts, some read parts, some both; each is given what it reads.
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
_TRIED = ("user", "assistant", "user")  # in ``form_of``
_MARKS = ("treadleone", "treadletwo", "treadlethree")  # no template says these


class ContentForm(Enum):
    """What a template takes for ``content``."""

    TEXT = "a text"
    PARTS = "a list of parts"
    ONE_PART = "a list, of which the first part is read"
    BOTH = "either"

    def shape(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message, its content in this form."""
        content = message.get("content")
        if self is ContentForm.PARTS and content is None:
            return {**message, "content": []}
        if self is ContentForm.ONE_PART and (content is None or is_parts(content)):
            content = joined(content)
        if self in (ContentForm.PARTS, ContentForm.ONE_PART) and isinstance(content, str):
            return {**message, "content": [_part(content)]}
        # A template that reads both may still read no more than a system message's first part.
        kept = self is ContentForm.PARTS or (self is ContentForm.BOTH and message["role"] in _TRIED)
        if is_parts(content) and not kept:
            return {**message, "content": joined(content)}
        return message


def form_of(source: str, render: Callable[[list[dict[str, Any]]], str | None]) -> ContentForm:
    """Find out what a template takes, by a conversation in both forms.

    ``render`` makes its text, None where the template fails. One that has no word of parts is
    not tried.
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
    # A list that is printed as it is has its keys in it too.
    if not _all_said(parts) or "'type'" in str(parts):
        return ContentForm.TEXT
    second = [{**m, "content": [_part("-"), _part(m["content"])]} for m in spoken]
    if _all_said(render(second)):
        return ContentForm.BOTH if _all_said(text) else ContentForm.PARTS
    return ContentForm.TEXT if _all_said(text) else ContentForm.ONE_PART


def _all_said(text: str | None) -> bool:
    """Whether a template's text has all that ``form_of`` says in it."""
    return text is not None and all(mark in text for mark in _MARKS)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Copies in JSON's types alone, looked at, with reasoning under each name that templates read.

    Raises TemplateError for what is no message, UnsupportedError for parts that are no text.
    """
    return [_read(i, message) for i, message in enumerate(plain(messages))]


def _read(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise TemplateError(f"a message is a dict with a role, not {message!r:.80}")
    content = message.get("content")
    if message["role"] in SPEAKERS and not isinstance(content, str | list | None):
        kind = type(content).__name__
        raise TemplateError(f"message {i}: its content is {kind}: expected a text or a list")
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
        raise TemplateError(f"{where}: a part is a dict with a type, not {part!r:.80}")
    if thinks and kind == "thinking" and isinstance(part.get("thinking"), str):
        return
    if kind != "text":
        raise UnsupportedError(f"{where} has a part of type {kind!r:.40}: treadle reads text alone")
    if not isinstance(part.get("text"), str):
        raise TemplateError(f"{where} has a part without a text")


def is_parts(content: Any) -> bool:
    """Whether a content is a list of parts; a tool's answer may be a list of anything."""
    return isinstance(content, list) and all(isinstance(p, dict) and "type" in p for p in content)


def joined(content: Any) -> str:
    """The text of a content: parts with a line break between them, without reasoning; nothing for
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
    """The text to be gone on with: of an answer to ``messages``, or of their last one where that
    is the assistant's. ``go_on`` puts what that says behind the prompt before it.
    """
    if not goes_on(messages):
        return render(list(messages), add_generation_prompt=True, **given)
    asked = render(list(messages[:-1]), add_generation_prompt=True, **given)
    last = read_messages(messages)[-1]
    return go_on(asked, last) if go_on else f"{asked}{joined(last.get('content'))}"


def goes_on(messages: Sequence[Message]) -> bool:
    """Whether the last of some messages is to be gone on with: a call is whole."""
    last = messages[-1]
    return len(messages) > 1 and last["role"] == "assistant" and not last.get("tool_calls")


def plain(value: Any) -> Any:
    """A copy in JSON's types alone: what else an object can do is no template's business.

    Raises TemplateError for other types, and for what is nested too deep.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise TemplateError("messages, tools or variables are nested too deep") from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TemplateError(
        f"messages, tools and variables are of JSON's types; this is a {type(value).__name__}"
    )


def check_messages(messages: Any) -> None:
    """A conversation has messages, and each tells whose it is and what it says."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        found = type(messages).__name__
        raise TemplateError(f"the messages are {found}: expected a list of role and content")
    if not messages:
        raise TemplateError("a conversation without a message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = type(message).__name__
            raise TemplateError(f"message {i} is {found}: expected a dict of role and content")
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"message {i} has no role, such as 'user'")
        if "content" not in message and "tool_calls" not in message:
            raise TemplateError(f"message {i} has no content")

"""The form of ``content`` that a chat template reads.

``content`` is a string, or OpenAI's list of parts: ``[{"type": "text", "text": "hello"}]``. Some
templates read strings, some read parts, some both. Contents are converted to the form that the
template reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from enum import Enum
from typing import Any

from treadle.chat.messages import has_media, is_media, is_parts, joined, text_part

_TRIED = ("user", "assistant", "user")  # roles of the test conversation in ``form_of``
_MARKS = ("treadleone", "treadletwo", "treadlethree")  # its contents: no template has these words


class ContentForm(Enum):
    """The form of ``content`` that a template reads."""

    TEXT = "a text"
    PARTS = "a list of parts"
    ONE_PART = "a list, of which the first part is read"
    BOTH = "either"

    def shape(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its content converted to this form."""
        content = message.get("content")
        if self is ContentForm.PARTS and content is None:
            return {**message, "content": []}
        if self is ContentForm.ONE_PART and (content is None or is_parts(content)):
            content = joined(content)
        if self in (ContentForm.PARTS, ContentForm.ONE_PART) and isinstance(content, str):
            return {**message, "content": [text_part(content)]}
        if is_parts(content) and not self.keeps_parts(message):
            return {**message, "content": joined(content)}
        return message

    def keeps_parts(self, message: Mapping[str, Any]) -> bool:
        """Whether a list of parts in this message is passed to the template as a list. Templates
        that read both forms are given it only for users and assistants: of a system message they
        may read only the first part.
        """
        if self is ContentForm.PARTS:
            return True
        return self is ContentForm.BOTH and message["role"] in _TRIED

    def place_media(
        self,
        message: dict[str, Any],
        placeholders: Mapping[str, Sequence[str]],
        written: Container[str],
    ) -> dict[str, Any]:
        """Return the message with placeholder texts in place of the pictures and sounds that the
        template would leave out.

        ``placeholders``: texts by type of part, of which the first is used. ``written``: the types
        for which the template itself writes a placeholder; their parts stay in user messages that
        keep parts.
        """
        content: Any = message.get("content")
        if not has_media(content):
            return message
        own = written if message["role"] == "user" and self.keeps_parts(message) else ()
        parts = [
            text_part(placeholders[part["type"]][0])
            if is_media(part) and part["type"] not in own
            else part
            for part in content
        ]
        return {**message, "content": parts}


def form_of(source: str, render: Callable[[list[dict[str, Any]]], str | None]) -> ContentForm:
    """Detect the content form of a template by rendering a test conversation in both forms.

    ``render`` returns the rendered text, or None if the template raises. A template whose source
    lacks the word ``text`` is taken to read strings, without a rendering.
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
    second = [{**m, "content": [text_part("-"), text_part(m["content"])]} for m in spoken]
    if _all_said(render(second)):
        return ContentForm.BOTH if _all_said(text) else ContentForm.PARTS
    return ContentForm.TEXT if _all_said(text) else ContentForm.ONE_PART


def _all_said(text: str | None) -> bool:
    """Whether a rendering contains every content of the test conversation."""
    return text is not None and all(mark in text for mark in _MARKS)

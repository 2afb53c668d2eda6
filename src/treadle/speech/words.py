"""Cuts ids into words, each with the punctuation that belongs to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from treadle.base.fast_classes import dataclass
from treadle.speech.languages import SPACELESS

if TYPE_CHECKING:
    from treadle.tokenizer.tokenizer import Tokenizer

OPENING = frozenset("\"'“¿([{-«„‘")
"""Punctuation that belongs to the word behind it."""
CLOSING = frozenset("\"'.。,，!！?？:：”)]}、»…;’")
"""Punctuation that belongs to the word before it."""


@dataclass(frozen=True)
class WordSpan:
    """A word's text, and the range of its ids: ``first`` to ``last`` (exclusive) among the ids that
    were cut.
    """

    text: str
    first: int
    last: int


def cut_words(ids: Sequence[int], tokenizer: Tokenizer, language: str) -> list[WordSpan]:
    """Cut ids of text into words, with the punctuation that belongs to them: at spaces, or at every
    character for languages in SPACELESS. ``language``: a code.
    """
    spans = _characters(ids, tokenizer)
    if language not in SPACELESS:
        spans = _joined_at_spaces(spans)
    return _with_punctuation(spans)


def _characters(ids: Sequence[int], tokenizer: Tokenizer) -> list[WordSpan]:
    """Return the smallest groups of consecutive ids that end at the end of a UTF-8 character."""
    spans: list[WordSpan] = []
    data = b""
    first = 0
    for i, id in enumerate(ids):
        data += tokenizer.token_bytes(id)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and i + 1 < len(ids):
                continue
            text = data.decode("utf-8", "replace")
        if text:
            spans.append(WordSpan(text, first, i + 1))
        data = b""
        first = i + 1
    return spans


def _joined_at_spaces(spans: Sequence[WordSpan]) -> list[WordSpan]:
    words: list[WordSpan] = []
    for span in spans:
        before = words[-1].text if words else ""
        if not before or (span.text[:1].isspace() and not before.isspace()):
            words.append(span)
        else:
            words[-1] = WordSpan(before + span.text, words[-1].first, span.last)
    return words


def _with_punctuation(words: Sequence[WordSpan]) -> list[WordSpan]:
    """Join closing punctuation to the word before it and opening punctuation to the word after
    it.
    """
    joined: list[WordSpan] = []
    for word in words:
        before = joined[-1] if joined else None
        mark = word.text.strip()
        closes = bool(mark) and {*mark} <= CLOSING and not word.text[:1].isspace()
        opens = before is not None and bool(before.text.strip()) and _opens(before.text)
        if before is not None and (closes or opens or not mark):
            joined[-1] = WordSpan(before.text + word.text, before.first, word.last)
        else:
            joined.append(word)
    return joined


def _opens(text: str) -> bool:
    """Return whether a text is white space followed only by opening punctuation, or by nothing."""
    mark = text.strip()
    return {*mark} <= OPENING and text[:1].isspace()

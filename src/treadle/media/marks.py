"""Marks of pictures and sounds in rendered prompts, and the layouts that replace them.

A chat template writes a mark for a picture, such as ``<|image_pad|>``. A user's own text may spell
the same characters. ``HiddenMarks`` replaces these while the template renders, so that each mark in
a rendered prompt is the template's, and puts them back as text that is tokenized without special
tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.errors import TemplateError
from treadle.media.kinds import NOUNS, plural

if TYPE_CHECKING:
    from treadle.tokenizer.tokenizer import Tokenizer

Layout = Sequence[str | range]


@dataclass(frozen=True)
class MediaMarks:
    """Marks of one kind of media, "image" or "audio", in a family's prompts.

    ``placeholders``: the texts of a rendered prompt that stand for one picture or sound, the
    longest first. ``reserved``: further special tokens of its media, which a user's text must not
    spell either.
    """

    kind: str
    placeholders: tuple[str, ...]
    reserved: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextPiece:
    """Text of a prompt. ``special``: whether the names of control tokens in it become those tokens;
    else they are tokenized as plain text.
    """

    text: str
    special: bool = True


@dataclass(frozen=True)
class MediaRows:
    """Media rows in a prompt. ``index``: number of the picture or sound, in order of appearance in
    the conversation, from 0; ``rows``: the range of its rows.
    """

    index: int
    rows: range


Piece = TextPiece | MediaRows


class HiddenMarks:
    """Replaces marks in users' texts by random numbers, and back. Make one for each request, so
    that no text can contain its numbers on purpose.
    """

    def __init__(self, marks: Iterable[MediaMarks]) -> None:
        spelt = {text for each in marks for text in (*each.placeholders, *each.reserved)}
        self._texts = sorted(spelt, key=lambda text: (-len(text), text))
        # Digits alone: no filter of a template, such as upper or trim, changes them.
        self._word = f"{secrets.randbelow(10**24):024}"
        self._spelt = re.compile("|".join(map(re.escape, self._texts)) or r"(?!)")
        self._hidden = re.compile(rf"{self._word}(\d{{4}})")

    def hide(self, value: Any) -> Any:
        """Return a copy of a JSON value with all marks replaced by numbers, in its strings and in
        the keys of its objects.
        """
        if isinstance(value, str):
            return self._spelt.sub(self._word_of, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def _word_of(self, match: re.Match[str]) -> str:
        return f"{self._word}{self._texts.index(match[0]):04}"

    def show(self, text: str) -> str:
        """Return a text with the marks that ``hide`` has replaced put back."""
        return self._hidden.sub(lambda match: self._texts[int(match[1])], text)

    def pieces(self, text: str) -> list[TextPiece]:
        """Split a text at the numbers that ``hide`` has put in place of marks. Each number becomes
        a piece with the mark's text and ``special=False``, so that it is tokenized as plain text.
        """
        made = []
        at = 0
        for match in self._hidden.finditer(text):
            made += [TextPiece(text[at : match.start()])] if match.start() > at else []
            made.append(TextPiece(self._texts[int(match[1])], special=False))
            at = match.end()
        return [*made, TextPiece(text[at:])] if at < len(text) else made


def split_prompt(
    text: str,
    marks: Sequence[MediaMarks],
    kinds: Sequence[str],
    layouts: Sequence[Layout],
    hidden: HiddenMarks,
) -> list[Piece]:
    """Return a rendered prompt in pieces, with each mark replaced by the layout of its picture or
    sound.

    marks: the marks of each kind of media. kinds, layouts: of each picture and sound, in order of
        appearance in the conversation; a layout lists texts of special tokens and ranges of media
        rows. hidden: has hidden the marks in users' texts.

    A template may write all sounds before the pictures, but must keep the order within each kind.
    Raises TemplateError unless it wrote one mark for each picture and sound.
    """
    kind_of = {spelt: each.kind for each in marks for spelt in each.placeholders}
    spellings = sorted(kind_of, key=lambda spelt: (-len(spelt), spelt))
    found = list(re.finditer("|".join(map(re.escape, spellings)) or r"(?!)", text))
    waiting = {
        each.kind: [i for i, kind in enumerate(kinds) if kind == each.kind] for each in marks
    }
    for kind, indices in waiting.items():
        n = sum(kind_of[match[0]] == kind for match in found)
        if n != len(indices):
            raise TemplateError(
                f"the chat template wrote {n} {NOUNS[kind]} marks for {len(indices)} "
                f"{plural(kind)} of the conversation: expected as many"
            )
    made: list[Piece] = []
    at = 0
    for match in found:
        made += hidden.pieces(text[at : match.start()])
        index = waiting[kind_of[match[0]]].pop(0)
        for part in layouts[index]:
            made.append(TextPiece(part) if isinstance(part, str) else MediaRows(index, part))
        at = match.end()
    made += hidden.pieces(text[at:])
    return _merged(made)


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return pieces with adjacent texts joined: a layout may begin with line breaks, which the
    tokenizer merges with line breaks before them.
    """
    made: list[Piece] = []
    for piece in pieces:
        last = made[-1] if made else None
        both = isinstance(piece, TextPiece) and isinstance(last, TextPiece)
        if both and piece.special and last.special:  # type: ignore[union-attr]
            made[-1] = TextPiece(last.text + piece.text)  # type: ignore[union-attr]
        elif not isinstance(piece, TextPiece) or piece.text:
            made.append(piece)
    return made


def encode_pieces(pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[int | MediaRows]:
    """Tokenize a prompt's text pieces; return token ids, and each ``MediaRows`` unchanged in its
    place.
    """
    given = [(p.text, p.special) if isinstance(p, TextPiece) else p for p in pieces]
    return tokenizer.encode_prompt_pieces(given)

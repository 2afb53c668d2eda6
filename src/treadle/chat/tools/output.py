"""Parsed output of a model: pieces as they stream in, and a whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treadle.base.fast_classes import dataclass

KINDS = ("reasoning", "content")


class ToolCall(NamedTuple):
    """A tool call. ``arguments``: a JSON object, as text."""

    id: str
    name: str
    arguments: str


class OutputPiece(NamedTuple):
    """A piece of a streamed answer, by ``kind``: "reasoning" or "content" with ``text``; "call",
    the beginning of call ``number``; "arguments", a part of the JSON arguments of call ``number``.
    """

    kind: str
    text: str = ""
    call: ToolCall | None = None
    number: int = 0


def merged(parts: Iterable[OutputPiece]) -> list[OutputPiece]:
    """Return the pieces with adjacent ones of one kind joined and empty ones left out."""
    out: list[OutputPiece] = []
    for part in parts:
        if part.call is None and not part.text:
            continue
        last = out[-1] if out else None
        if last and not part.call and (last.kind, last.number) == (part.kind, part.number):
            out[-1] = out[-1]._replace(text=out[-1].text + part.text)
        else:
            out.append(part)
    return out


@dataclass
class ParsedOutput:
    """A parsed answer, whole or cut short. ``first``: number of the first of ``calls``, which are
    numbered as in ``OutputPiece``.
    """

    reasoning: str
    content: str
    calls: list[ToolCall]
    first: int = 0

    @classmethod
    def of(cls, parts: Sequence[OutputPiece]) -> ParsedOutput:
        """Join the pieces of an answer."""
        texts = {kind: "".join(p.text for p in parts if p.kind == kind) for kind in KINDS}
        calls: list[ToolCall] = []
        for part in parts:
            if part.call is not None:
                calls.append(part.call)
            elif part.kind == "arguments":
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + part.text)
        first = next((part.number for part in parts if part.call is not None), 0)
        return cls(texts["reasoning"], texts["content"], calls, first)

"""What a model says, told apart while it comes: reasoning, content, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from treadle.answer import overlap
from treadle.record import dataclass
from treadle.speech.rows import Row, ToolCall, Walk, read_call

THINK, THOUGHT = "<think>", "</think>"


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
        self._walk = Walk()
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
        self._walk = Walk()
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

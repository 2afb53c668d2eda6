"""Restricts stop strings to content: they do not apply to reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.chat.tools.stream_parser import AnswerMarks


class StopFilter:
    """Streaming filter of one answer's text for the search for ``stop`` strings: every character of
    reasoning and calls is replaced by a character that no stop string contains.
    """

    def __init__(self, marks: AnswerMarks, stop: Iterable[str]) -> None:
        self._scanner = marks.scanner()
        letters = set().union(*stop)
        self._mask = next(char for char in map(chr, range(0x110000)) if char not in letters)
        self._open = ""  # text not yet known to be content or not

    def feed(self, text: str, *, last: bool = False) -> str:
        """Read ``text``; return the filtered text that became certain since the last call, or with
        ``last`` all the rest.
        """
        out = ""
        for char in text:
            n_calls = self._scanner.n_calls
            self._scanner.feed(char)
            if self._scanner.n_calls > n_calls:
                out = out + self._mask * len(self._open)
                self._open = ""
            self._open += char
            says, n_open = self._scanner.content_state
            n = len(self._open) if n_open is None else n_open
            known = self._open[: len(self._open) - n]
            self._open = self._open[len(self._open) - n :]
            out += known if says else self._mask * len(known)
        if last:
            out = out + self._open
            self._open = ""
        return out

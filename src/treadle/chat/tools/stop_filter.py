"""Where stop strings are looked for: in what an answer says, and not in its reasoning or calls."""

from __future__ import annotations

from collections.abc import Iterable

from treadle.chat.tools.stream_parser import AnswerMarks


class StopFilter:
    """The text of one answer, as it is looked for ``stop`` strings: what is not said is a character
    that none of them has.
    """

    def __init__(self, speech: AnswerMarks, stop: Iterable[str]) -> None:
        self._scanner = speech.scanner()
        letters = set().union(*stop)
        self._mask = next(char for char in map(chr, range(0x110000)) if char not in letters)
        self._open = ""  # of which it is not known yet whether it is said

    def feed(self, text: str, *, last: bool = False) -> str:
        """What is known of all that was fed and was not given yet; all, where it is the last."""
        out = ""
        for char in text:
            n_calls = self._scanner.n_calls
            self._scanner.feed(char)
            if self._scanner.n_calls > n_calls:
                out, self._open = out + self._mask * len(self._open), ""
            self._open += char
            says, n_open = self._scanner.says
            n = len(self._open) if n_open is None else n_open
            known, self._open = self._open[: len(self._open) - n], self._open[len(self._open) - n :]
            out += known if says else self._mask * len(known)
        if last:
            out, self._open = out + self._open, ""
        return out

"""What one request writes: ids are pushed, pieces of text come out.

An answer knows no engine and no lock. One thread pushes, another may take.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import field
from typing import TYPE_CHECKING, Any, Protocol

from treadle.base.fast_dataclass import dataclass
from treadle.base.validate import listed
from treadle.errors import TreadleError
from treadle.kvcache.prefix_hit import PrefixHit

if TYPE_CHECKING:
    from treadle.sampling.logprobs import TokenLogprob
    from treadle.tokenizer.tokenizer import StreamDecoder, Tokenizer


@dataclass
class Timings:
    """Where the time of one generation went."""

    n_prompt: int = 0  # tokens of the prompt
    n_cached: int = 0  # of them, found in the cache
    prefill_s: float = 0.0
    n_generated: int = 0
    decode_s: float = 0.0
    load_s: float = 0.0
    compile_s: float = 0.0  # compiling kernels, or finding them in the cache; in no other number
    n_drafted: int = 0  # tokens that were looked up and checked
    n_accepted: int = 0  # of them, those that were right
    n_drafts: int = 0  # runs that checked some
    accepted_at: list[int] = field(default_factory=list)  # drafts that were right up to each place
    cache: PrefixHit = field(default_factory=PrefixHit)  # where the prompt left the cache, and why

    def note_draft(self, n_drafted: int, n_accepted: int) -> None:
        """A draft was checked: so many of its tokens were right, from the first on."""
        self.n_drafts += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.accepted_at += [0] * (n_accepted - len(self.accepted_at))
        for at in range(n_accepted):
            self.accepted_at[at] += 1

    @property
    def prefill_tok_s(self) -> float:
        return (self.n_prompt - self.n_cached) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first, which comes out of the prefill; sampling included."""
        return (
            (self.n_generated - 1) / self.decode_s
            if self.decode_s and self.n_generated > 1
            else 0.0
        )


class RequestOutput:
    """The text of one request, as it grows.

    ``push`` takes each id; ``take`` gives the pieces, whole characters each, with what may be the
    beginning of a stop string held back. ``max_tokens`` ends it with "length", ``n_ctx`` tokens of
    prompt and text with "context"; an id that ends a text, or a stop string, with "stop".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        n_ctx: int,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of each id, where they are pushed with it
        self.starts: list[int] = []  # where each id's text begins, in characters
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.timings = Timings(n_prompt=len(prompt_ids))
        self.pieces: deque[tuple[str, int]] = deque()  # to be taken; and the ids up to there
        self.n_taken = 0  # ids whose text was taken, at least a part of it
        self._n_given = 0  # characters of all pieces
        self.tokenizer, self._prompt_ids = tokenizer, prompt_ids
        self._decoder: StreamDecoder | None = None
        self.stop = stop_strings(stop)
        self._held = self._heard = ""  # text that is held back; and as stop strings are looked for
        self.stopped_by = ""  # the stop string that ended the text, if one did
        self.shown: Container[int] = ()  # control tokens that the text spells
        self.ear: StopMatcher | None = None  # for what stop strings are looked for in; else all
        self.lines: IndentStop | None = None  # where its lines end it
        self.ends: frozenset[int] = frozenset()  # tokens that end it, beside the vocabulary's own
        self.keeps_stop = False  # whether the stop string that ends it is shown
        room = n_ctx - len(prompt_ids)
        self._most, self._at_most = room, "context"
        if max_tokens is not None and max_tokens <= room:
            self._most, self._at_most = max_tokens, "length"
        if self._most <= 0 <= room:
            self.finish_reason = self._at_most

    @property
    def n_left(self) -> int:
        """Ids that it may still have."""
        return self._most - len(self.ids)

    @property
    def done(self) -> bool:
        """Whether nothing more is to be pushed."""
        return self.finish_reason is not None or self.error is not None

    def push(self, token: int | None, logprob: TokenLogprob | None = None) -> None:
        """The next id; None where none may follow, as at the end of a grammar's text."""
        if self._decoder is None:
            self._decoder = self._decode()
        if token is None or self.is_end(token):
            return self._end(self._decoder, "stop")
        new = self._decoder.push(token)
        self.starts.append(self._decoder.at)
        self.ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.timings.n_generated = len(self.ids)
        cut = self.lines.end(new) if self.lines is not None else None
        if cut is not None:
            self.finish_reason = "stop" if self._give(new[:cut], last=True) else "length"
        elif self._give(new):
            self.finish_reason = "stop"
        elif len(self.ids) >= self._most:
            self._end(self._decoder, self._at_most)

    def is_end(self, token: int) -> bool:
        """Whether a token ends the text, and is no part of it."""
        return token in self.tokenizer.eog or token in self.ends

    def fail(self, error: BaseException) -> None:
        """End without a reason: what was pushed is still given, then the error."""
        self.error = error

    def take(self) -> str | None:
        """The next piece; None where there is none, for now or for good (``over``)."""
        if self.pieces:
            piece, self.n_taken = self.pieces.popleft()
            return piece
        if self.over:
            self.n_taken = len(self.ids)
        return None

    def has_news(self) -> bool:
        """Whether there is a piece to take, or an end to see."""
        return bool(self.pieces) or self.finish_reason is not None or self.error is not None

    @property
    def over(self) -> bool:
        """Whether everything was taken. The last piece is there before ``done`` is true."""
        return self.done and not self.pieces

    @property
    def n_shown(self) -> int:
        """Of an answer that is done, ids up to the stop string that ended it."""
        return self._n_begun() if self.stopped_by else len(self.ids)

    def _n_begun(self) -> int:
        """Ids whose text begins within what was given."""
        return bisect_left(self.starts, self._n_given)

    def _decode(self) -> StreamDecoder:
        from treadle.tokenizer.tokenizer import StreamDecoder

        begins = all(map(self.tokenizer.is_control, self._prompt_ids))  # nothing but a <bos>
        return StreamDecoder(self.tokenizer, shown=self.shown, start=begins)

    def _end(self, decoder: StreamDecoder, reason: str) -> None:
        """What is held back comes out, unless it completes a stop string. Bytes of a character that
        a limit has cut are left out; those that the model ended with become U+FFFD.
        """
        rest = decoder.flush() if reason == "stop" else ""
        stopped = self._give(rest, last=True)
        self.finish_reason = "stop" if stopped else reason

    def _give(self, new: str, *, last: bool = False) -> bool:
        """Show what of the held and new text may be shown; whether a stop string ended it."""
        text, stopped, keep = self._held + new, False, 0
        heard = self._heard + (new if self.ear is None else self.ear.feed(new, last=last))
        found = [(at, stop) for stop in self.stop if (at := heard.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            at += len(self.stopped_by) if self.keeps_stop else 0
            text, stopped = text[:at], True
        elif not last:
            keep = max((overlap(heard, stop) for stop in self.stop), default=0)
            keep += len(text) - len(heard)
        self._held, self._heard = text[len(text) - keep :], heard[len(text) - keep :]
        if piece := text[: len(text) - keep]:
            self._n_given += len(piece)
            self.pieces.append((piece, self._n_begun()))
        return stopped


class StopMatcher(Protocol):
    """Knows what of a text is said."""

    def feed(self, text: str, *, last: bool) -> str:
        """As many characters as are known of, those that are not said as others."""


class IndentStop:
    """Where a text's lines end it: at one behind the first that has fewer than ``n_indent`` blanks
    before it, and at the end of one that comes more than ``most_ms`` after the first token, where
    that is above 0.
    """

    def __init__(
        self, n_indent: int, most_ms: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._n_indent, self._clock = n_indent, clock
        self._most_s = most_ms / 1e3 if most_ms > 0 else math.inf
        self._began: float | None = None
        self._blanks: int | None = None  # of the line so far; None behind its first letter

    def end(self, new: str) -> int | None:
        """Of a text's next piece, where the text ends; None where it goes on."""
        now = self._clock()
        began = self._began = now if self._began is None else self._began
        for at, letter in enumerate(new):
            if self._blanks is not None:
                if letter in " \t":
                    self._blanks += 1
                elif self._blanks < self._n_indent:
                    return at
                else:
                    self._blanks = None
            if letter == "\n":
                if now - began > self._most_s:
                    return at + 1
                self._blanks = 0
        return None


class TextModel(Protocol):
    """What is asked of a model here."""

    gguf: Any
    config: Any

    @property
    def tokenizer(self) -> Tokenizer: ...


def speller(model: TextModel, stop: list[str]) -> Tokenizer:
    """What gives ids their text: the file's tokenizer, or, of a file without a vocabulary and where
    nothing but ids is wanted, what gives them none.
    """
    from treadle.tokenizer.ids_only import NoVocabulary, has_vocabulary

    if stop or has_vocabulary(model.gguf):
        return model.tokenizer
    return NoVocabulary(model.config.n_vocab)


def stop_strings(stop: str | Iterable[str] | None) -> list[str]:
    """What a caller gave as ``stop``: one text, several, or none."""
    stop = () if stop is None else stop
    expected = "a str or a list of them"
    given = [stop] if isinstance(stop, str) else listed("stop", stop, expected)
    for text in given:
        if not isinstance(text, str):
            raise TreadleError(f"stop: expected {expected}, found {text!r:.40}")
    return [text for text in given if text]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)

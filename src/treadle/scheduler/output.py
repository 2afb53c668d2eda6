"""Output of one request: the scheduler pushes token ids, the caller takes pieces of text.

An output knows no engine and has no lock. One thread pushes; another may take.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Protocol

from treadle.base.fast_classes import dataclass
from treadle.base.validate import listed
from treadle.errors import TreadleError
from treadle.kvcache.prefix_tree import PrefixHit

if TYPE_CHECKING:
    from treadle.sampling.logprobs import TokenLogprob
    from treadle.scheduler.request import MediaUsage
    from treadle.tokenizer.tokenizer import StreamDecoder, Tokenizer


@dataclass
class Timings:
    """Times, in seconds, and token counts of one generation."""

    n_prompt: int = 0  # tokens of the prompt
    n_cached: int = 0  # of these, found in the KV cache
    prefill_s: float = 0.0  # runs of the prompt, and waiting for them
    n_generated: int = 0  # tokens of the output
    decode_s: float = 0.0  # runs and sampling of all tokens after the first
    load_s: float = 0.0  # opening the model
    compile_s: float = 0.0  # loading or compiling kernels; in no other field
    n_drafted: int = 0  # draft tokens that were checked
    n_accepted: int = 0  # of these, accepted
    n_drafts: int = 0  # runs that checked a draft
    accepted_at: list[int] = field(default_factory=list)  # [i]: drafts that accepted more than i
    cache: PrefixHit = field(default_factory=PrefixHit)  # where and why prefix reuse stopped
    media_s: float = 0.0  # encoding its pictures and sounds; in no other field

    def note_draft(self, n_drafted: int, n_accepted: int) -> None:
        """Count one checked draft of ``n_drafted`` tokens, of which the first ``n_accepted`` were
        accepted.
        """
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
        """Tokens per second of decoding, sampling included, without the first token, which prefill
        yields; 0 if there are no others.
        """
        return (
            (self.n_generated - 1) / self.decode_s
            if self.decode_s and self.n_generated > 1
            else 0.0
        )


class RequestOutput:
    """The growing output of one request.

    ``push`` takes each token id; ``take`` returns pieces of whole characters. Text that may begin a
    stop string is held back. Finish reasons: "stop" at an end-of-generation token or a stop string,
    "length" at ``max_tokens`` or where ``lines`` ends it, "context" at ``n_ctx`` tokens of prompt
    and output.

    ``stop_filter``: selects the text that stop strings match, None for all of it; ``keeps_stop``:
    whether the final stop string is part of the output; ``shown``: control tokens that are spelled
    out in the text; ``ends``: end tokens in addition to the vocabulary's; ``lines``: ends the
    output by indentation or time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        *,
        n_ctx: int,
        max_tokens: int | None = None,
        stop: str | Iterable[str] | None = None,
        stop_filter: StopMatcher | None = None,
        keeps_stop: bool = False,
        shown: Container[int] = (),
        ends: frozenset[int] = frozenset(),
        lines: IndentStop | None = None,
    ) -> None:
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # of each id, if ``push`` was given them
        self.starts: list[int] = []  # offset of each id's text, in characters
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.timings = Timings(n_prompt=len(prompt_ids))
        self.media: Sequence[MediaUsage] = ()  # pictures and sounds of the prompt
        self.pieces: deque[tuple[str, int]] = deque()  # not taken: text, ids up to its end
        self.n_taken = 0  # ids whose text was taken, at least in part
        self._n_given = 0  # characters in all pieces so far
        self.tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._decoder: StreamDecoder | None = None
        self.stop = stop_strings(stop)
        self._pending = ""  # text held back
        self._matchable = ""  # its part that stop strings may match
        self.stopped_by = ""  # the stop string that ended the output, if any
        self._stop_filter = stop_filter
        self.keeps_stop = keeps_stop
        self.shown = shown
        self.ends = ends
        self.lines = lines
        room = n_ctx - len(prompt_ids)
        self._limit = room
        self._limit_reason = "context"
        if max_tokens is not None and max_tokens <= room:
            self._limit = max_tokens
            self._limit_reason = "length"
        if self._limit <= 0 <= room:
            self.finish_reason = self._limit_reason

    @property
    def n_left(self) -> int:
        """Number of tokens that may still be generated."""
        return self._limit - len(self.ids)

    @property
    def done(self) -> bool:
        """Whether the output is complete: no more tokens are accepted."""
        return self.finish_reason is not None or self.error is not None

    def push(self, token: int | None, logprob: TokenLogprob | None = None) -> None:
        """Append the next token, with its log-probability if requested. The output ends with None
        (no token is possible), an end token, a stop string, or at its limit; ``finish_reason`` then
        says why.
        """
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
            self.finish_reason = "stop" if self._emit(new[:cut], last=True) else "length"
        elif self._emit(new):
            self.finish_reason = "stop"
        elif len(self.ids) >= self._limit:
            self._end(self._decoder, self._limit_reason)

    def is_end(self, token: int) -> bool:
        """Return whether a token ends the output; it is then not part of the output."""
        return token in self.tokenizer.eog or token in self.ends

    def fail(self, error: BaseException) -> None:
        """End the output with an error and no finish reason. Pieces pushed before can still be
        taken.
        """
        self.error = error

    def take(self) -> str | None:
        """Return the next piece of text. None means: no piece now or, if ``is_drained``, no more
        pieces.
        """
        if self.pieces:
            piece, self.n_taken = self.pieces.popleft()
            return piece
        if self.is_drained:
            self.n_taken = len(self.ids)
        return None

    def has_news(self) -> bool:
        """Return whether a piece can be taken, or the output has ended."""
        return bool(self.pieces) or self.finish_reason is not None or self.error is not None

    @property
    def is_drained(self) -> bool:
        """Whether the output is complete and every piece was taken. The last piece is appended
        before ``done`` becomes true.
        """
        return self.done and not self.pieces

    @property
    def n_shown(self) -> int:
        """Number of tokens of a finished output, up to the stop string that ended it."""
        return self._n_begun() if self.stopped_by else len(self.ids)

    def _n_begun(self) -> int:
        """Return the number of tokens whose text starts before the end of the pieces emitted so
        far.
        """
        return bisect_left(self.starts, self._n_given)

    def _decode(self) -> StreamDecoder:
        from treadle.tokenizer.tokenizer import StreamDecoder

        # at most a <bos>
        begins = not self.media and all(map(self.tokenizer.is_control, self._prompt_ids))
        return StreamDecoder(self.tokenizer, shown=self.shown, start=begins)

    def _end(self, decoder: StreamDecoder, reason: str) -> None:
        """Finish with ``reason``: emit the text that is held back and what ``decoder`` still has,
        unless that completes a stop string. An incomplete character is dropped if a limit cut it;
        if the model ended with it, it becomes U+FFFD.
        """
        rest = decoder.flush() if reason == "stop" else ""
        stopped = self._emit(rest, last=True)
        self.finish_reason = "stop" if stopped else reason

    def _matched(self, new: str, *, last: bool) -> str:
        """Return the text in which stop strings are searched next: ``new``, the text that the
        output has gained, or what ``stop_filter`` returns for it. ``last``: no text follows.
        """
        return new if self._stop_filter is None else self._stop_filter.feed(new, last=last)

    def _emit(self, new: str, *, last: bool = False) -> bool:
        """Emit the part of the held-back text and of ``new`` that can begin no stop string. Return
        whether a stop string ended the output. ``last``: no text follows, so nothing is held back.
        """
        text = self._pending + new
        stopped = False
        keep = 0
        matchable = self._matchable + self._matched(new, last=last)
        found = [(at, stop) for stop in self.stop if (at := matchable.find(stop)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            at += len(self.stopped_by) if self.keeps_stop else 0
            text = text[:at]
            stopped = True
        elif not last:
            keep = len(text) - len(matchable)
            if self.stop:
                from treadle.base.text_overlap import overlap  # few requests have stop strings

                keep += max(overlap(matchable, stop) for stop in self.stop)
        self._pending = text[len(text) - keep :]
        self._matchable = matchable[len(text) - keep :]
        if piece := text[: len(text) - keep]:
            self._n_given += len(piece)
            self.pieces.append((piece, self._n_begun()))
        return stopped


class StopMatcher(Protocol):
    """Protocol: selects the text that stop strings may match."""

    def feed(self, text: str, *, last: bool) -> str:
        """Take ``text``, the next piece of the output. Return the characters of the text so far
        that are decided by now, and were not returned before; those that must not match are
        replaced. ``last``: no text follows.
        """


class IndentStop:
    """Ends an output by indentation, for code completion: at the first later line, an empty one
    included, that is indented by fewer than ``n_indent`` blanks.

    If ``most_ms`` is above 0, also at the end of the first line that ends more than ``most_ms``
    after the first piece of text.
    """

    def __init__(
        self, n_indent: int, most_ms: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._n_indent = n_indent
        self._clock = clock
        self._most_s = most_ms / 1e3 if most_ms > 0 else math.inf
        self._began: float | None = None
        self._blanks: int | None = None  # indentation so far; None after it

    def end(self, new: str) -> int | None:
        """Return the index in ``new``, the next piece of text, at which the output ends; None if it
        goes on.
        """
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


def stop_strings(stop: str | Iterable[str] | None) -> list[str]:
    """Return the caller's ``stop`` as a list without empty strings; [] for None. Raises
    TreadleError for other types.
    """
    stop = () if stop is None else stop
    expected = "a str or a list of them"
    given = [stop] if isinstance(stop, str) else listed("stop", stop, expected)
    for text in given:
        if not isinstance(text, str):
            raise TreadleError(f"stop: expected {expected}, found {text!r:.40}")
    return [text for text in given if text]

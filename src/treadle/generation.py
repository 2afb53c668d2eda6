"""Text out of an engine: sampling, stop strings, streaming, timings."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.errors import SamplingError, TreadleError

if TYPE_CHECKING:
    import numpy as np

    from treadle.logprobs import TokenLogprob
    from treadle.sampling import Sampler
    from treadle.session import Session
    from treadle.text.tokenizer import Tokenizer


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


class Generation:
    """An iterator over pieces of text, whole characters each; so far they make ``text``, of
    ``ids``.

    ``finish_reason`` is "stop" (end of text, or a stop string), "length" (``max_tokens``) or
    "context" (the context is full) once the iterator has ended, None before. ``logprobs``, where
    asked for, has an entry for each of ``ids``: its logarithm of probability and the likeliest
    others, by the model's own logits before any sampling setting or grammar.

    ``async for`` works too: each step runs in a thread. Cancelling it ends the text: the step in
    hand is waited for, at most a token or one batch of the prompt, and the session is whole then.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        sampler: Sampler,
        prompt_ids: list[int],
        *,
        max_tokens: int | None,
        stop: str | Iterable[str] | None,
        logprobs: int | None = None,
        load_s: float = 0.0,
    ) -> None:
        self.prompt_ids: list[int] = list(prompt_ids)
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprob] | None = None if logprobs is None else []
        self.timings = Timings(n_prompt=len(prompt_ids), load_s=load_s)
        self._session, self._tokenizer, self._sampler = session, tokenizer, sampler
        self._max_tokens, self._stop = max_tokens, stop_strings(stop)
        self._n_top = logprobs
        self._held = ""  # text that may be the beginning of a stop string
        self._all_ids = list(prompt_ids)  # and those of the text
        self._left = 0  # the session's count of changes, as we left it
        session.engine.cache.check_context(len(prompt_ids))
        self._pieces = self._run()
        self._step = threading.RLock()  # one thread at a time
        self._closed = False

    def __repr__(self) -> str:
        end = f"finish_reason {self.finish_reason!r}" if self.finish_reason else "not finished"
        text = repr(self.text) if len(self.text) <= 60 else f"{self.text[:59]!r}..."
        return f"Generation({text}, {len(self.ids)} tokens, {end})"

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        with self._step:
            if self._closed:
                raise StopIteration
            try:
                piece = next(self._pieces)
            except _Closed:
                raise StopIteration from None
            self.text += piece
            return piece

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        import asyncio  # takes 30 ms, and few need it

        step = asyncio.ensure_future(asyncio.to_thread(next, self, None))
        try:
            piece = await asyncio.shield(step)
        except asyncio.CancelledError:
            self.close()
            step.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait([step])
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def close(self) -> None:
        """End the text here: the iterator gives no more. A prompt that another thread is reading
        for it is left after the batch in hand.
        """
        self._closed = True

    def finish(self) -> str:
        """Generate to the end; the whole text."""
        for _ in self:
            pass
        return self.text

    def _run(self) -> Iterator[str]:
        from treadle.text.stream import StreamDecoder

        limit = self._max_tokens
        if limit is not None and limit <= 0:
            self.finish_reason = "length"
            return
        logits = self._prefill()
        begins = all(map(self._tokenizer.is_control, self.prompt_ids))  # nothing but a <bos>
        decoder = StreamDecoder(self._tokenizer, start=begins)
        while True:
            began = time.perf_counter()
            token = self._sample(logits)
            if self.ids:
                self.timings.decode_s += time.perf_counter() - began
            if token is None or token in self._tokenizer.eog:
                self.finish_reason = "stop"
                break
            self.ids.append(token)
            self._all_ids.append(token)
            if self.logprobs is not None:
                self._measure(logits, token)
            self.timings.n_generated = len(self.ids)
            piece, stopped = self._until_stop(decoder.push(token))
            if stopped:
                self.finish_reason = "stop"
            if piece:
                yield piece
            if stopped:
                return
            if limit is not None and len(self.ids) >= limit:
                self.finish_reason = "length"
                break
            if len(self._all_ids) > self._session.engine.n_ctx:
                self.finish_reason = "context"
                break
            logits = self._next(token)
        piece, stopped = self._until_stop(decoder.flush())
        if stopped:
            self.finish_reason = "stop"
        piece += self._held
        if piece:
            yield piece

    def _sample(self, logits: np.ndarray) -> int | None:
        """The next token; None where a grammar's text is whole, and its end is ruled out."""
        try:
            return self._sampler.sample(logits, self._all_ids)
        except SamplingError:
            if self._sampler.ended:
                return None
            raise

    def _measure(self, logits: np.ndarray, token: int) -> None:
        from treadle.logprobs import token_logprob

        assert self.logprobs is not None
        assert self._n_top is not None
        self.logprobs.append(token_logprob(logits, token, self._n_top, self._tokenizer))

    def _prefill(self) -> np.ndarray:
        began, engine = time.perf_counter(), self._session.engine
        with engine.lock:
            before = engine.kernels.seconds
            kept = self.timings.n_cached = self._session.match(self.prompt_ids)
            logits = self._session.feed(self.prompt_ids[kept:], between=self._check_open)
            self._left = self._session.seq.n_changes
            made = engine.kernels.seconds - before
        self.timings.compile_s += made
        self.timings.prefill_s = time.perf_counter() - began - made
        return logits

    def _check_open(self) -> None:
        if self._closed:
            raise _Closed

    def _next(self, token: int) -> np.ndarray:
        began, engine = time.perf_counter(), self._session.engine
        with engine.lock:
            before = engine.kernels.seconds
            if self._session.seq.n_changes == self._left:
                logits = self._session.feed([token])
            else:  # someone else has used the session since
                logits = self._session.prefill(self._all_ids)
            self._left = self._session.seq.n_changes
            made = engine.kernels.seconds - before
        self.timings.compile_s += made
        self.timings.decode_s += time.perf_counter() - began - made
        return logits

    def _until_stop(self, new: str) -> tuple[str, bool]:
        """What of the held and new text may be shown, and whether a stop string ended it."""
        if not self._stop:
            return new, False
        text = self._held + new
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False


class _Closed(Exception):
    """The text was closed while its prompt was read."""


def stop_strings(stop: str | Iterable[str] | None) -> list[str]:
    """What a caller gave as ``stop``: one text, several, or none."""
    given = [stop] if isinstance(stop, str) else list(stop or ())
    for text in given:
        if not isinstance(text, str):
            raise TreadleError(f"stop: expected a str or a list of them, found {text!r:.40}")
    return [text for text in given if text]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)

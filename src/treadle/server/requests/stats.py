"""Counters and histograms of a server since its start."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.server.requests.request_stream import OutputStream

EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
EDGES_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Histogram:
    """Counts of values by upper ``edges`` (ascending), and the sum of all values."""

    def __init__(self, edges: tuple[float, ...] = EDGES_S) -> None:
        self.edges, self.counts = edges, [0] * (len(edges) + 1)
        self.sum = 0.0

    def note(self, value: float) -> None:
        """Add one value."""
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """The counts in Prometheus' form: for each edge, as text, how many values are at most
        that.
        """
        edges = [*map(str, self.edges), "+Inf"]
        return [*zip(edges, map(float, accumulate(self.counts)), strict=True)]


class ServerStats:
    """Counters since the start of the server: names with ``n_`` are counts, with ``_s`` seconds.

    The engine thread alone writes those of steps and generation; the event loop's thread writes
    ``n_cancelled``, ``n_embedded`` and ``embed_s``.
    """

    def __init__(self) -> None:
        self.n_steps = self.n_fed = self.n_cancelled = self.n_embedded = 0
        self.n_prompt = self.n_cached = self.n_from_files = self.n_written = 0
        self.prefill_s = self.decode_s = self.step_s = self.embed_s = 0.0
        self.n_most = 0  # tokens of the longest sequence, prompt included
        self.n_drafts = self.n_drafted = self.n_accepted = 0
        self.accepted_at: list[int] = []  # drafts accepted at each position
        self.ended: dict[str, int] = {"stop": 0, "length": 0, "error": 0}
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.request_latency = Histogram()
        self.queue_time = Histogram()
        self.prefill_time = Histogram()
        self.decode_time = Histogram()
        self.step_tokens = Histogram(EDGES_TOKENS)

    def note_step(self, n_fed: int, n_tokens: int, seconds: float) -> None:
        """Count one scheduler step, which ran ``n_tokens`` in ``seconds`` and gave ``n_fed``
        requests new output.
        """
        if n_tokens:
            self.step_tokens.note(n_tokens)
        self.n_steps += 1
        self.n_fed += n_fed
        self.step_s += seconds

    def note_embedded(self, n_tokens: int, seconds: float) -> None:
        """Count tokens that were processed for embeddings or scores, and their seconds."""
        self.n_embedded += n_tokens
        self.embed_s += seconds

    def note_news(self, output: OutputStream, now: float) -> None:
        """Count the part of ``output`` that is new at time ``now``, in seconds of ``perf_counter``:
        its prompt when its first token comes, tokens as they come, its end.
        """
        answer = output.answer
        t = output.answer.timings
        done = output.answer.done
        n_new = t.n_generated - output.n_counted
        if output.counted or not (n_new or done):
            return
        output.counted = done
        if output.first_s:
            self.inter_token_latency.note(now - output.last_s)
        elif n_new or answer.finish_reason:  # its prefill is done
            self.n_prompt += t.n_prompt
            self.n_cached += t.n_cached
            self.n_from_files += t.cache.files
            self.prefill_s += t.prefill_s
        if n_new and not output.first_s:
            output.first_s = now
            started = output.request.started or now
            self.time_to_first_token.note(now - output.arrival_s)
            self.queue_time.note(max(0.0, started - output.arrival_s))
            self.prefill_time.note(now - started)
        output.last_s = now
        self.n_most = max(self.n_most, t.n_prompt + t.n_generated)
        if t.n_drafts:
            self._note_drafts(output)
        self.n_written += n_new
        self.decode_s += t.decode_s - output.counted_s
        output.n_counted = output.n_counted + n_new
        output.counted_s = t.decode_s
        if done:
            self.request_latency.note(now - output.arrival_s)
            if output.first_s:
                self.decode_time.note(now - output.first_s)
            reason = "length" if answer.finish_reason == "context" else answer.finish_reason
            self.ended[reason or "error"] += 1

    def _note_drafts(self, output: OutputStream) -> None:
        """Count the draft tokens of an output that were verified since the last call."""
        t = output.answer.timings
        (n_drafts, n_drafted, at) = output.drafts_counted
        if t.n_drafts == n_drafts:
            return
        now = list(t.accepted_at)
        self.n_drafts += t.n_drafts - n_drafts
        self.n_drafted += t.n_drafted - n_drafted
        self.n_accepted += sum(now) - sum(at)
        self.accepted_at += [0] * (len(now) - len(self.accepted_at))
        for i, n in enumerate(now):
            self.accepted_at[i] += n - (at[i] if i < len(at) else 0)
        output.drafts_counted = t.n_drafts, t.n_drafted, now

"""What a server has done since it was started, in plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.server.call import Text

EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """How many values lie up to each edge, in seconds, and their sum."""

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES_S) + 1)
        self.sum = 0.0

    def note(self, seconds: float) -> None:
        """One value."""
        self.counts[bisect_left(EDGES_S, seconds)] += 1
        self.sum += seconds

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Prometheus' form: how many up to each edge."""
        edges = [*map(str, EDGES_S), "+Inf"]
        return [*zip(edges, map(float, accumulate(self.counts)), strict=True)]


class Tally:
    """What has happened since the start. ``n_`` are counts, ``_s`` seconds.

    Numbers of steps and tokens are written by the engine's thread alone, the others by the event
    loop's.
    """

    def __init__(self) -> None:
        self.n_steps = self.n_fed = self.n_cancelled = self.n_embedded = 0
        self.n_prompt = self.n_cached = self.n_written = 0
        self.prefill_s = self.decode_s = self.step_s = 0.0
        self.ended: dict[str, int] = {"stop": 0, "length": 0, "error": 0}
        self.first, self.between, self.whole = Histogram(), Histogram(), Histogram()
        self.waited = Histogram()

    def note_step(self, n_fed: int, seconds: float) -> None:
        """One step of the scheduler, that gave ``n_fed`` texts an id."""
        self.n_steps += 1
        self.n_fed += n_fed
        self.step_s += seconds

    def note_news(self, text: Text, now: float) -> None:
        """A text has an id more, or has ended; it ends once."""
        answer = text.answer
        if text.counted:
            return
        text.counted = answer.done
        if not text.first_s:
            text.first_s = now
            self.first.note(now - text.came_s)
            self.waited.note(max(0.0, now - text.came_s - answer.timings.prefill_s))
        else:
            self.between.note(now - text.last_s)
        text.last_s = now
        if answer.done:
            t = answer.timings
            self.whole.note(now - text.came_s)
            self.n_prompt += t.n_prompt
            self.n_cached += t.n_cached
            self.n_written += t.n_generated
            self.prefill_s += t.prefill_s
            self.decode_s += t.decode_s
            reason = "length" if answer.finish_reason == "context" else answer.finish_reason
            self.ended[reason or "error"] += 1

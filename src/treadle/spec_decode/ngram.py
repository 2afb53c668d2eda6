"""N-gram drafts, and the estimate of whether checking a draft pays.

A draft is run after a request's last id, and each of its ids is compared with the one that the
sampler chooses there. So the output is the same as without drafts; they only save steps.

Acceptance can be estimated without running a draft: an ``AcceptanceTracker`` compares guesses with
the tokens sampled afterwards. A step checks drafts if the accepted ids are expected to save more
time than the checks cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from treadle.base.fast_classes import NamedTuple
from treadle.engine.batch import MOST_DRAFTED

WIDTH = 3  # length of the n-grams that are looked up
FIRST = 3
LOSS = 0.02  # share of recent step time that drafts may cost
GUESS = 0.15  # cost of each further token, as a share of a step, before it is measured
AVERAGE_WEIGHT = 0.25  # weight of the newest measurement
RECENT = 64  # steps of the moving sums; older ones decay exponentially
STALE_STEPS = 512  # steps after which a measured time is dropped
N_TIMES = 5  # times per step size; their median ignores pauses of the system


class AcceptanceTracker:
    """Acceptance rate of one source's guesses, for one request."""

    def __init__(self) -> None:
        # Probability that one more id is right; None: not measured.
        self.acceptance: float | None = None
        self.length = FIRST  # ids of the next guess; grows while guesses are right
        self._at = 0
        self._ids: list[int] = []

    def note_guess(self, at: int, ids: list[int]) -> None:
        """Record the guess that ``ids`` follow the first ``at`` ids of the request, unless another
        guess has not been compared yet.
        """
        if not self._ids:
            self._at = at
            self._ids = ids

    def compare_guess(self, ids: Seq[int]) -> float | None:
        """Compare the recorded guess with the request's ``ids``, up to the first wrong id, and
        update ``acceptance`` and ``length``. Return the share of compared ids that were right; None
        without a guess, or if the request has too few ids yet.
        """
        said = self._ids
        came = ids[self._at : self._at + len(self._ids)]
        if not said:
            return None
        pairs = enumerate(zip(said, came, strict=False))
        right = next((i for i, (a, b) in pairs if a != b), len(came))
        if right == len(came) < len(said):
            return None
        share = right / min(right + 1, len(said))
        self._ids = []
        self.acceptance = moving_average(self.acceptance, share)
        if right == len(said):
            self.length = min(2 * self.length + 1, MOST_DRAFTED)
        elif not right:
            self.length = max(self.length // 2, 1)
        return share


def moving_average(old: float | None, new: float) -> float:
    """Return the exponential moving average ``old``, updated by the measurement ``new``; ``new`` if
    ``old`` is None, for nothing measured.
    """
    return new if old is None else old + AVERAGE_WEIGHT * (new - old)


class Draft(NamedTuple):
    """Draft token ids that may come next, the name of their ``source``, and its tracker."""

    ids: list[int]
    source: str
    track: AcceptanceTracker


class Lookup:
    """Index of the n-grams of one request's ids."""

    def __init__(self) -> None:
        # n-gram of WIDTH ids: end of its last occurrence
        self._next: dict[tuple[int, ...], int] = {}
        self._n = WIDTH

    def guess(self, ids: Seq[int], most: int) -> list[int]:
        """Return up to ``most`` ids that followed the last occurrence in ``ids`` of the n-gram at
        its end; [] if it occurs only there.
        """
        for end in range(self._n, len(ids)):
            self._next[tuple(ids[end - WIDTH : end])] = end
        self._n = max(self._n, len(ids))
        at = self._next.get(tuple(ids[-WIDTH:]))
        return [] if at is None else list(ids[at : at + most])


class StepTimes:
    """Step times in seconds by step size (a number of tokens or of requests): measured, or
    extrapolated from the nearest measured size.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}  # of recent steps
        self._noted: dict[int, int] = {}  # number of the last step of each size
        self._n_steps = 0

    def __contains__(self, n: int) -> bool:
        return n in self._seconds

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def note(self, n: int, seconds: float) -> None:
        """Record that a step of size ``n`` took ``seconds``."""
        self._seconds.setdefault(n, deque(maxlen=N_TIMES)).append(seconds)
        self._n_steps += 1
        self._noted[n] = self._n_steps
        if not self._n_steps % STALE_STEPS:
            for old in [of for of, at in self._noted.items() if at + STALE_STEPS <= self._n_steps]:
                del self._seconds[old], self._noted[old]

    def predicted(self, n: int) -> float:
        """Return the predicted seconds of a step of size ``n``; needs at least one measurement."""
        near = min(self._seconds, key=lambda known: abs(known - n))
        times = sorted(self._seconds[near])
        return times[(len(times) - 1) // 2] * max(1 + GUESS * (n - near), GUESS)


class DraftController:
    """Decides whether drafts pay, by recent acceptance and measured step times. Limits the loss to
    LOSS of the time of recent steps.
    """

    def __init__(self) -> None:
        self.times = StepTimes()  # by tokens per step
        self._total = self._lost = 0.0  # seconds of recent steps; net seconds lost to drafts
        self._acceptance: dict[str, float] = {}  # by source, over all requests

    # -- acceptance --------------------------------------------------------------------------------

    def note_share(self, source: str, share: float | None) -> None:
        """Record ``share``, a result of ``AcceptanceTracker.compare_guess`` for a guess of
        ``source``.
        """
        if share is not None:
            self._acceptance[source] = moving_average(self._acceptance.get(source), share)

    def has_measured(self, source: str) -> bool:
        """Return whether any guess of a source has been compared with the text that followed."""
        return source in self._acceptance

    def expected_of_draft(self, guess: Draft) -> float:
        """Return the expected number of ids of a guess that will be accepted."""
        return self.expected_of_source(guess.source, guess.track, len(guess.ids))

    def expected_of_source(self, source: str, track: AcceptanceTracker, n: int) -> float:
        """Return how many ids of a draft of ``n`` ids from ``source`` are expected to be accepted.
        An id is accepted if it and all before it are right; each is right with the acceptance rate
        of ``track``, the request's tracker for that source, or until that is measured with the
        source's rate over all requests.
        """
        p = self._acceptance.get(source, 0.5) if track.acceptance is None else track.acceptance
        return sum(p**i for i in range(1, n + 1))

    # -- costs -------------------------------------------------------------------------------------

    def choose(self, n: int, guesses: Seq[Draft], most: int) -> int:
        """Return how many of ``guesses``, best first, to check in a step of ``n`` requests and at
        most ``most`` tokens.
        """
        best = 0
        n_drafted = 0
        right = 0.0
        top = 0.0
        for i, guess in enumerate(guesses, 1):
            n_drafted += len(guess.ids)
            if n + n_drafted > most:
                break
            right += self.expected_of_draft(guess)
            gain = self.gain(n, n_drafted, right)
            if gain > top:
                best = i
                top = gain
        if guesses and not best:
            best = int(n + len(guesses[0].ids) not in self.times)  # try one, to measure it
        chosen = guesses[:best]
        n_drafted = sum(len(guess.ids) for guess in chosen)
        right = sum(map(self.expected_of_draft, chosen))
        fits = best and n + n_drafted <= most
        return best if fits and self.allows(n, n_drafted, right) else 0

    def gain(self, n: int, n_drafted: int, right: float, cost: float = 0.0) -> float:
        """Return the seconds that a draft of ``n_drafted`` ids saves in a step of ``n`` requests if
        ``right`` of its ids are accepted and making it took ``cost`` seconds; 0 if no step has been
        measured.
        """
        if not self.times:
            return 0.0
        alone = self.times.predicted(n)
        return alone * (1 + right / n) - self.times.predicted(n + n_drafted) - cost

    @property
    def loss_left_s(self) -> float:
        """Seconds that drafts may still lose; negative if they have lost too many."""
        return LOSS * self._total - self._lost

    def allows(self, n: int, n_drafted: int, right: float = 0.0, cost: float = 0.0) -> bool:
        """Return whether a step of ``n`` requests may check ``n_drafted`` ids, of which ``right``
        are expected to be accepted. ``cost``: seconds that making them took.
        """
        lost = max(-self.gain(n, n_drafted, right, cost), 0.0)
        return bool(self.times) and lost <= self.loss_left_s

    def read(self, seconds: float) -> None:
        """Record a step that took ``seconds`` and also ran prompt tokens."""
        self._fade()
        self._total += seconds

    def note(
        self, n: int, n_drafted: int, n_accepted: int, seconds: float, cost: float = 0.0
    ) -> None:
        """Record a step of ``n`` requests without prompt tokens, which checked ``n_drafted`` ids,
        accepted ``n_accepted`` of them, and took ``seconds``, after ``cost`` seconds of drafting.
        """
        size = n + n_drafted
        times = self.times
        self._fade()
        if (n_drafted or cost) and times:
            saved = times.predicted(n) * (1 + n_accepted / n)
            # do not charge a pause of the system to the draft
            took = min(seconds, 2 * times.predicted(size)) if size in times else seconds
            self._lost += took + cost - saved
        self._total += seconds + cost
        # cap on the credit that gains may build up
        self._lost = max(self._lost, -LOSS * self._total)
        self.times.note(size, seconds)

    def _fade(self) -> None:
        self._total *= 1 - 1 / RECENT
        self._lost *= 1 - 1 / RECENT

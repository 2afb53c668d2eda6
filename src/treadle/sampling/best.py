"""Sampling from the N_TOP largest logits of a row; the others are only known to be no larger.

A chain usually drops all but a few tokens in its first stages. While the remaining tokens are
certain to be among the largest, the result is bit-identical to the whole row's. If that is not
certain (``None``), the chain runs on the whole row instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.logits import N_TOP, TOTAL_ERROR
from treadle.sampling.candidates import Candidates, Floats, Ints, largest, temperature
from treadle.sampling.settings import Sampling
from treadle.sampling.truncation import min_p

if TYPE_CHECKING:
    from treadle.engine.logits import LogitsRow, TopLogits


class BestCandidates:
    """Candidates sorted by token id. All other tokens have a logit of at most ``floor``."""

    __slots__ = ("c", "exact", "floor", "peak", "rest", "slack")

    def __init__(
        self, c: Candidates, floor: np.float32, peak: float, rest: float, *, exact: bool
    ) -> None:
        self.c = c
        self.floor = floor
        self.exact = exact  # no other token precedes one of these, even with equal logits
        self.peak = peak  # the row's sum is relative to this logit
        self.rest = rest  # sum of exp(logit - peak) over the other tokens; NaN if unknown
        self.slack = 0.0  # maximum amount by which ``rest`` is too large

    @property
    def n_sure(self) -> int:
        """Number of these candidates that are certainly the row's largest, counted from the
        highest.
        """
        return len(self.c.logits) if self.exact else int((self.c.logits > self.floor).sum())

    def with_candidates(self, c: Candidates, n_lower: int) -> BestCandidates:
        """Return a copy with the candidates ``c``, whose logits a stage has changed. The stage also
        lowered up to ``n_lower`` tokens that are not among them.
        """
        result = BestCandidates(c, self.floor, self.peak, self.rest, exact=False)
        result.slack = self.slack + n_lower * math.exp(self.floor - self.peak)
        return result

    def biased(self, tokens: Ints, amounts: Floats) -> BestCandidates:
        """Return a copy with ``amounts`` added to the logits of the token ids ``tokens``,
        ascending.
        """
        c = self.c
        assert c.ids is not None
        at = np.flatnonzero(np.isin(c.ids, tokens))
        logits = c.logits.copy()
        logits[at] += amounts[np.searchsorted(tokens, c.ids[at])]
        return self.with_candidates(Candidates(logits, c.ids), len(tokens) - len(at))


def best_of(row: LogitsRow, top: TopLogits, raised: Ints) -> BestCandidates:
    """Return a row's largest candidates ``top``, together with the tokens ``raised`` by a bias,
    whose logits are read from ``row``.
    """
    values = top.values
    ids = top.ids.astype(np.intp)
    peak = float(values[0])
    floor = values[-1]
    exact = True
    other = np.setdiff1d(raised, ids) if len(raised) else raised
    if len(other):
        values = np.concatenate([values, row.take(other)])
        ids = np.concatenate([ids, other])
        exact = False
    rest = top.total - float(np.exp(values.astype(np.float64) - peak).sum())
    order = np.argsort(ids)
    return BestCandidates(Candidates(values[order], ids[order]), floor, peak, rest, exact=exact)


# --- stages on the largest candidates: BestCandidates if other tokens may still matter, else
# Candidates

Stage = Callable[..., Candidates]
TopStage = Callable[[BestCandidates, Stage, Sequence[int]], "BestCandidates | Candidates | None"]


def _lower(n_back: int) -> TopStage:
    """Build a stage for penalties, which lower only logits of the last ``n_back`` tokens, or of all
    if negative.
    """

    def run(best: BestCandidates, stage: Stage, ids: Sequence[int]) -> BestCandidates:
        return best.with_candidates(stage(best.c, ids, None), len(ids) if n_back < 0 else n_back)

    return run


def _top_k(k: int) -> TopStage:
    def run(best: BestCandidates, stage: Stage, ids: Sequence[int]) -> Candidates | None:
        if best.n_sure < k and best.floor > -np.inf:
            return None
        return best.c.take(largest(best.c.logits, k), descending=True)

    return run


def _top_p(p: float, min_keep: int) -> TopStage:
    def run(best: BestCandidates, stage: Stage, ids: Sequence[int]) -> Candidates | None:
        # After large edits of the peak, the error of the sum is useless.
        if math.isnan(best.rest) or not abs(best.c.peak - best.peak) < 80:
            return None
        order = largest(best.c.logits, len(best.c.logits))
        cumulated = np.cumsum(np.exp(best.c.logits[order].astype(np.float64) - best.peak))
        # The row's sum is approximate: if its error decides the result, use the whole row.
        error = TOTAL_ERROR * (cumulated[-1] + max(best.rest, 0.0) + 1)
        low, high = (
            int(np.searchsorted(cumulated, p * (cumulated[-1] + best.rest + by)))
            for by in (-error - best.slack, error)
        )
        n = max(low + 1, min_keep)
        return best.c.take(order[:n]) if low == high and n <= best.n_sure else None

    return run


def _min_p(p: float, min_keep: int) -> TopStage:
    def run(best: BestCandidates, stage: Stage, ids: Sequence[int]) -> Candidates | None:
        if not best.floor < np.float32(best.c.peak + math.log(p)):
            return None
        if best.n_sure < min_keep and best.floor > -np.inf:
            return None
        return min_p(best.c, p, min_keep)

    return run


def _temperature(t: float) -> TopStage:
    def run(
        best: BestCandidates, stage: Stage, ids: Sequence[int]
    ) -> BestCandidates | Candidates | None:
        c = temperature(best.c, t)
        if len(c.logits) < len(best.c.logits):
            return c if best.n_sure else None
        with np.errstate(over="ignore"):
            return BestCandidates(c, best.floor / np.float32(t), best.peak, math.nan, exact=False)

    return run


_TOP_STAGES: dict[str, Callable[[Sampling], TopStage | None]] = {
    "penalties": lambda s: (
        _lower(s.repeat_last_n)
        if s.repeat_penalty >= 1 and s.frequency_penalty >= 0 and s.presence_penalty >= 0
        else None
    ),
    "dry": lambda s: _lower(s.dry_penalty_last_n),
    "top_k": lambda s: _top_k(s.top_k) if s.top_k <= N_TOP else None,
    "top_p": lambda s: _top_p(s.top_p, s.min_keep),
    "min_p": lambda s: _min_p(s.min_p, s.min_keep),
    "temperature": lambda s: _temperature(s.temperature) if s.dynatemp_range <= 0 else None,
}
_LAST = {"top_k", "top_p", "min_p"}


def top_stages(s: Sampling, names: Sequence[str], n_vocab: int) -> list[TopStage] | None:
    """Return functions that run a chain's first stages, called ``names``, on BestCandidates (see
    TopStage), up to the first one that drops most tokens (top-k, top-p, min-p); None if the chain
    needs the whole row.
    """
    if n_vocab <= N_TOP or (s.custom and "custom" not in s.samplers):
        return None
    found: list[TopStage] = []
    for name in names:
        row = _TOP_STAGES.get(name)
        opening = None if row is None else row(s)
        if opening is None:
            return None
        found.append(opening)
        if name in _LAST:
            return found
    return found if s.greedy else None

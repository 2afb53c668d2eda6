"""Candidate tokens; the exact selection of the k largest, which keeps sampling cheap; and
temperature, fixed or steered by entropy, which scales how sharp their distribution is.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.errors import SamplingError

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

_MOST = float(np.finfo(np.float32).max)
_LEAST = float(np.finfo(np.float32).tiny)
_STACK = 64  # rows of the grid in `largest`: makes both of its passes short


class Candidates:
    """Tokens and their logits; a stage of the chain takes one and returns another.

    A logit of -inf rules its token out: it is ignored (in entropies and among the k best) and
    removed by the first stage that drops any token.
    """

    __slots__ = ("descending", "ids", "logits")

    def __init__(self, logits: Floats, ids: Ints | None = None, descending: bool = False) -> None:
        self.logits = logits  # [n]
        self.ids = ids  # [n] token ids; None: the whole vocabulary, logits[i] is token i's
        self.descending = descending  # logits sorted, highest first

    @property
    def peak(self) -> float:
        """The highest logit."""
        return float(self.logits[0] if self.descending else np.maximum.reduce(self.logits))

    def take(self, at: Ints, *, descending: bool = False) -> Candidates:
        """Return the candidates at positions ``at``, in that order."""
        return Candidates(self.logits[at], at if self.ids is None else self.ids[at], descending)

    def head(self, n: int) -> Candidates:
        """Return the first ``n`` candidates."""
        ids = np.arange(n) if self.ids is None else self.ids[:n]
        return Candidates(self.logits[:n], ids, self.descending)

    def token(self, at: int) -> int:
        """Return the token id at position ``at``."""
        return int(at if self.ids is None else self.ids[at])

    def alive(self) -> Candidates:
        """Return the candidates with a logit above -inf."""
        if self.logits.min() > -np.inf:
            return self
        return self.take(np.flatnonzero(self.logits > -np.inf), descending=self.descending)


def largest(keys: npt.NDArray[Any], k: int) -> Ints:
    """Return the positions of the k largest of ``keys`` [n], descending; of equals, the first comes
    first.

    Exact; fewer than k if -inf keys leave fewer. The keys are viewed as a grid of 64 rows. The k-th
    largest of the column maxima is a floor that at least k keys reach, and only columns whose
    maximum reaches it can hold one of the k. Only those are sorted.
    """
    n = len(keys)
    k = min(k, n)
    lowest = np.finfo(keys.dtype).min  # a floor of -inf would admit tokens that are ruled out
    n_columns = n // _STACK
    if k <= 0:
        return np.empty(0, np.intp)
    if n <= 1024:
        at = np.flatnonzero(keys >= lowest)
    elif 2 * k <= n_columns:
        body = _STACK * n_columns
        grid = keys[:body].reshape(_STACK, n_columns)
        maxima = grid.max(axis=0)
        floor = max(np.partition(maxima, n_columns - k)[n_columns - k], lowest)
        columns = np.flatnonzero(maxima >= floor)
        rows, among = np.nonzero(grid[:, columns] >= floor)
        rest = np.flatnonzero(keys[body:] >= floor) + body
        at = np.concatenate([rows * n_columns + columns[among], rest])
    else:
        at = np.flatnonzero(keys >= max(np.partition(keys, n - k)[n - k], lowest))
    order: Ints = at[np.argsort(-keys[at], kind="stable")[:k]]
    return order


def weights(c: Candidates) -> Doubles:
    """Return ``exp(logit - highest)``, f64 ``[n]``: unnormalised probabilities. Raises
    SamplingError if there are no candidates, or the highest logit is not finite.
    """
    peak = c.peak if len(c.logits) else -math.inf
    if not math.isfinite(peak):
        raise SamplingError("the samplers ruled out every token")
    w = c.logits.astype(np.float64)
    w -= peak
    return np.exp(w, out=w)


def probabilities(c: Candidates) -> Doubles:
    """Return the softmax of the logits, f64 ``[n]``. Raises SamplingError if there are no
    candidates, or the highest logit is not finite.
    """
    p = weights(c)
    p /= np.add.reduce(p)  # the method sum() is a Python function around it
    return p


def temperature(c: Candidates, t: float) -> Candidates:
    """Divide logits by t. For t <= 0, or so small that a logit overflows, keep only the largest."""
    if t == 1:
        return c
    if t <= max(abs(c.peak) / _MOST, _LEAST):
        return c.take(np.array([int(c.logits.argmax())]), descending=True)
    # Usually the least logit shows that none overflows. numpy's state costs more than the division.
    if c.descending and abs(float(c.logits[-1])) < t * _MOST:
        return Candidates(c.logits / np.float32(t), c.ids, True)
    with np.errstate(over="ignore"):  # -inf is intended far below the peak
        return Candidates(c.logits / np.float32(t), c.ids, c.descending)


def dynamic_temperature(c: Candidates, t: float, spread: float, exponent: float) -> Candidates:
    """Divide logits by a temperature between ``t - spread``, if one candidate is certain, and
    ``t + spread``, if all are equally likely.

    It is ``low + (high - low) * (H / H_max) ** exponent``, where ``low`` (at least 0) and ``high``
    are these bounds, H is the entropy, and H_max that of equal probabilities.
    """
    c = c.alive()
    n = len(c.logits)
    if n <= 1:
        return c
    p = probabilities(c)
    p = p[p > 0]
    share = min(max(-float((p * np.log(p)).sum()) / math.log(n), 0.0), 1.0)
    low = max(0.0, t - spread)
    high = t + spread
    return temperature(c, low + (high - low) * share**exponent)

"""Temperature: scales the distribution's sharpness, fixed or steered by entropy."""

from __future__ import annotations

import math

import numpy as np

from treadle.sampling.candidates import Candidates, probabilities

_MOST = float(np.finfo(np.float32).max)
_LEAST = float(np.finfo(np.float32).tiny)


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

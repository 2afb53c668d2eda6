"""Temperature: scales the distribution's sharpness, fixed or steered by entropy."""

from __future__ import annotations

import math

import numpy as np

from treadle.sampling.candidates import Candidates, probabilities

_FLOAT32 = np.finfo(np.float32)


def temperature(c: Candidates, t: float) -> Candidates:
    """Divide logits by t. For t <= 0, or so small that a logit overflows, keep only the largest."""
    if t == 1:
        return c
    if t <= max(abs(c.peak) / float(_FLOAT32.max), float(_FLOAT32.tiny)):
        return c.take(np.array([int(c.logits.argmax())]), descending=True)
    with np.errstate(over="ignore"):  # -inf is intended far below the peak
        return Candidates(c.logits / np.float32(t), c.ids, c.descending)


def dynamic_temperature(c: Candidates, t: float, spread: float, exponent: float) -> Candidates:
    """Temperature between t - spread (certain) and t + spread (all candidates equally likely).

    ``low + (high - low) * (H / H_max) ** exponent``, with H the entropy, H_max that of equal
    probabilities.
    """
    c = c.alive()
    n = len(c.logits)
    if n <= 1:
        return c
    p = probabilities(c.logits)
    p = p[p > 0]
    share = min(max(-float((p * np.log(p)).sum()) / math.log(n), 0.0), 1.0)
    low = max(0.0, t - spread)
    high = t + spread
    return temperature(c, low + (high - low) * share**exponent)

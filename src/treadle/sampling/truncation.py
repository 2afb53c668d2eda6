"""Truncation samplers: top-n-sigma, top-k, typical, top-p, min-p, XTC and infill."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Literal

import numpy as np
import numpy.typing as npt

from treadle.sampling.candidates import (
    Candidates,
    Doubles,
    Ints,
    largest,
    probabilities,
    weights,
)


def top_k(c: Candidates, k: int) -> Candidates:
    """Return the k candidates with the highest logits, sorted. If k is 0 or less, or there are no
    more than k, return all of them as they are.
    """
    if k <= 0 or k >= len(c.logits):
        return c
    return c.head(k) if c.descending else c.take(largest(c.logits, k), descending=True)


def top_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Return the fewest most likely candidates, at least ``min_keep``, whose probabilities sum to
    at least p (nucleus sampling).

    Holtzman et al., The Curious Case of Neural Text Degeneration, 2019.
    """
    if p >= 1:
        return c
    mass = probabilities(c)
    if c.descending:
        reached = int(mass.cumsum().searchsorted(p)) + 1
        return c.head(min(max(reached, min_keep), len(mass)))
    return c.take(_leaders(c.logits, mass, p, min_keep, above=False))


def typical(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Return the candidates whose surprise is nearest to the entropy: the fewest, at least
    ``min_keep``, whose probabilities sum to more than p.

    Meister et al., Locally Typical Sampling, 2022.
    """
    if p >= 1:
        return c
    c = c.alive()
    w = weights(c)
    log_p = c.logits.astype(np.float64) - (c.peak + math.log(w.sum()))
    mass = np.exp(log_p)
    entropy = -float((mass * log_p).sum())
    return c.take(_leaders(-np.abs(-log_p - entropy), mass, p, min_keep, above=True))


_FEW = 256  # usually fewer tokens reach p; sorting them is cheap
# beyond 32 nats below the best key, less than 1e-13 of the probability is left
_BINS = 4096
_NATS = 32


def _leaders(
    keys: npt.NDArray[np.float32] | Doubles, mass: Doubles, p: float, min_keep: int, *, above: bool
) -> Ints:
    """Return positions by descending ``keys``, the fewest whose ``mass`` sums to at least ``p``, or
    exceeds it if ``above``; at least ``min_keep`` of them.

    If the first few do not suffice, a histogram of the mass finds the bin of keys with the limit.
    Positions in better bins stay unsorted; only those of that bin are sorted.
    """
    side: Literal["left", "right"] = "right" if above else "left"
    order = largest(keys, max(_FEW, min_keep))
    reached = int(np.searchsorted(np.cumsum(mass[order]), p, side))
    if reached < len(order) or len(order) == len(keys):
        return order[: max(reached + 1, min_keep)]
    with np.errstate(over="ignore"):
        bins = np.minimum((keys.max() - keys) * (_BINS / _NATS), _BINS - 1).astype(np.intp)
    cumulated = np.cumsum(np.bincount(bins, mass, _BINS))
    last = min(int(np.searchsorted(cumulated, p, side)), _BINS - 1)
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(-keys[edge], kind="stable")]
    missing = p - (cumulated[last - 1] if last else 0.0)
    reached = int(np.searchsorted(np.cumsum(mass[edge]), missing, side))
    return np.concatenate([np.flatnonzero(bins < last), edge[: reached + 1]])


def min_p(c: Candidates, p: float, min_keep: int = 0) -> Candidates:
    """Return the candidates at least p times as likely as the likeliest. If these are fewer than
    ``min_keep`` (at least 1), return that many of the likeliest instead.
    """
    if p <= 0:
        return c
    likely = c.logits >= c.peak + math.log(p)
    least = max(min_keep, 1)
    if c.descending and (n := int(np.count_nonzero(likely))) >= least:
        return c.head(n)
    at = np.flatnonzero(likely)
    if len(at) < least:
        return c.take(largest(c.logits, least), descending=True)
    return c.take(at, descending=c.descending)


def top_n_sigma(c: Candidates, n: float) -> Candidates:
    """Return the candidates whose logit is within n standard deviations of the highest.

    Tang et al., Top-nσ: Not All Logits Are You Need, 2024.
    """
    if n <= 0 or len(c.logits) <= 1:
        return c
    c = c.alive()
    sigma = float(np.std(c.logits, dtype=np.float64))
    return c.take(np.flatnonzero(c.logits >= c.peak - n * sigma), descending=c.descending)


def xtc(c: Candidates, threshold: float, min_keep: int = 0) -> Candidates:
    """Exclude top choices: of the candidates with a probability of at least ``threshold``, drop all
    but the least likely.

    If there are fewer than two, or fewer than ``min_keep`` candidates would stay, nothing changes.
    The chain runs this stage with the probability ``xtc_probability``.
    """
    p = probabilities(c)
    top = np.flatnonzero(p >= threshold)
    if len(top) < 2 or len(p) - (len(top) - 1) < min_keep:
        return c
    stays = np.ones(len(p), bool)
    stays[top[largest(c.logits[top], len(top))[:-1]]] = False
    return c.take(np.flatnonzero(stays), descending=c.descending)


# candidates that infill considers, and the probability that one of them must have
_MAX_CANDIDATES = 256
_LIKELY = 0.2


def infill(
    c: Candidates, spelt: Callable[[int], bytes], eog: Collection[int], end: int | None
) -> Candidates:
    """Keep tokens likely enough to fill a gap between two texts, as llama.cpp's infill sampler.

    ``spelt`` returns a token's bytes. If ``eog`` tokens are likely, only they stay. Of two tokens
    of which one begins with the other, the likelier stays and gets the other's probability; then
    tokens below a probability limit are dropped. If no text token is left, only ``end`` remains,
    or the likeliest token if ``end`` is None.
    """
    c = c.take(largest(c.logits, _MAX_CANDIDATES), descending=True)
    p = probabilities(c)
    n = len(p)
    ids = [c.token(i) for i in range(n)]
    ends = np.array([id in eog for id in ids])
    if 3 * n * p[ends].sum() > p[~ends].sum():
        return c.take(np.flatnonzero(ends), descending=True)
    spellings = [b"" if end else spelt(id) for id, end in zip(ids, ends.tolist(), strict=True)]
    gone = np.zeros(n, bool)
    for i, short in enumerate(spellings):
        for j, long in enumerate(spellings):
            if gone[i]:
                break
            if i == j or gone[j] or not short or not long.startswith(short):
                continue
            kept, other = (j, i) if p[j] > p[i] else (i, j)
            p[kept] += p[other]
            p[other] = 0
            gone[other] = True
    stays = (p >= _LIKELY) | ends
    n_text = int((stays & ~ends).sum())
    if not n_text and end is None:
        return c.head(1)
    if not n_text:
        return Candidates(np.ones(1, np.float32), np.array([end], np.intp))
    total = p[stays].sum()
    stays &= (p >= total / (n_text + 1)) | ends
    return c.take(np.flatnonzero(stays), descending=True)

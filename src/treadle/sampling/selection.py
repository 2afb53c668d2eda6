"""Selection of one token from the candidates, and the random numbers for it."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from treadle.errors import SamplingError
from treadle.sampling.candidates import Candidates, Doubles, largest, probabilities, weights

WORD = (1 << 64) - 1


def any_seed() -> int:
    """Return a random seed of 32 bits."""
    return int.from_bytes(os.urandom(4), "little")


class Uniforms:
    """Random numbers in [0, 1) from a seed, the same on every machine and with every numpy.

    ``seed``: 0 to 2**64 - 1, None: any. The words are those of ``numpy.random.Philox(key=seed)``,
    whose package takes longer to import than a thousand words to compute.
    """

    def __init__(self, seed: int | None) -> None:
        self.seed = any_seed() if seed is None else seed
        self._n_blocks = 0
        self._words: list[int] = []  # of the last block, the next one at the end

    def next(self) -> float:
        """Return the next number, with 53 random bits."""
        if not self._words:
            self._n_blocks += 1
            self._words = philox(self._n_blocks, self.seed)[::-1]
        return float(self._words.pop() >> 11) * 2.0**-53


def philox(counter: int, key: int) -> list[int]:
    """Return four random words of 64 bits, block number ``counter`` of the sequence of ``key``:
    Philox 4x64 with ten rounds.

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, 2011.
    """
    left, right = key & WORD, key >> 64
    a, b, c, d = (counter >> 64 * i & WORD for i in range(4))
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b = (second >> 64) ^ b ^ left, second & WORD
        c, d = (first >> 64) ^ d ^ right, first & WORD
        left, right = left + 0x9E3779B97F4A7C15 & WORD, right + 0xBB67AE8584CAA73B & WORD
    return [a, b, c, d]


class Selector(Protocol):
    """Selects the token at the end of the chain; may keep state."""

    def __call__(self, c: Candidates, ids: Sequence[int], uniforms: Uniforms) -> int:
        """Return the id of the selected candidate. ``ids``: the tokens so far; ``uniforms``: random
        numbers.
        """


def draw(w: Doubles, u: float) -> int:
    """Draw a position of ``w`` [n], each with a probability proportional to its weight; ``u`` is
    random in [0, 1). Raises SamplingError if the weights' sum is 0 or not finite.
    """
    cumulated = w.cumsum()
    total = float(cumulated[-1])
    if not 0 < total < math.inf:
        raise SamplingError("the samplers ruled out every token")
    at = int(cumulated.searchsorted(u * total, side="right"))
    return at if at < len(w) else int(np.flatnonzero(w)[-1])  # u * sum may round up to the sum


class Greedy:
    """Selects the most likely token; of equals, the first."""

    def __call__(self, c: Candidates, ids: Sequence[int], uniforms: Uniforms) -> int:
        """Return the id of the largest logit."""
        return c.token(int(c.logits.argmax()))


class Dist:
    """Draws a token at random by its probability."""

    def __call__(self, c: Candidates, ids: Sequence[int], uniforms: Uniforms) -> int:
        """Return the id of a token drawn with its softmax probability."""
        return c.token(draw(weights(c), uniforms.next()))


class Mirostat:
    """Draws tokens so that their surprise stays near ``tau`` bits. Only tokens that fit a surprise
    mu are kept; mu is initially twice ``tau``, and after each token falls by ``eta`` times the
    excess of its surprise over ``tau``.

    Basu et al., Mirostat, 2020. Version 1 estimates the Zipf exponent from the best 100 tokens and
    keeps as many as should give surprise mu; version 2 keeps the tokens with a surprise up to mu.
    """

    def __init__(self, version: int, tau: float, eta: float, n_vocab: int) -> None:
        self._keep = self._keep_1 if version == 1 else self._keep_2
        self._tau = tau
        self._eta = eta
        self._n_vocab = n_vocab
        self.mu = 2 * tau

    def __call__(self, c: Candidates, ids: Sequence[int], uniforms: Uniforms) -> int:
        """Return the id of a token drawn among those kept, and adapt ``mu`` to its surprise."""
        c = self._keep(c.alive())
        p = probabilities(c)
        at = draw(p, uniforms.next())
        self.mu -= self._eta * (-math.log2(p[at]) - self._tau)
        return c.token(at)

    def _keep_1(self, c: Candidates) -> Candidates:
        best = c.logits[largest(c.logits, 100)].astype(np.float64)
        ranks = np.arange(1, len(best))
        t = np.log((ranks + 1) / ranks)
        s = float((t * -np.diff(best)).sum() / (t * t).sum()) if len(t) else 0.0
        k = _zipf_count(s, self.mu, self._n_vocab)
        return c.take(largest(c.logits, min(k, len(c.logits))), descending=True)

    def _keep_2(self, c: Candidates) -> Candidates:
        p = probabilities(c)
        at = np.flatnonzero(p >= 2.0 ** min(-self.mu, 0.0))
        return c.take(at if len(at) else largest(c.logits, 1))


def _zipf_count(s: float, mu: float, n_vocab: int) -> int:
    """Return the number of tokens to keep for surprise ``mu``, if the r-th likeliest has
    probability ~ r**-s.

    ``((s - 1) * 2**mu / (1 - n_vocab**(1 - s))) ** (1 / s)``, computed by logarithms; at s = 1 its
    limit.
    """
    e = s - 1
    log_n = math.log(max(n_vocab, 2))
    if s <= 1e-6:  # nearly flat: the base is below or above 1, and its power 0 or infinite
        return n_vocab if 2.0 ** min(mu, 64.0) > n_vocab - 1 else 1
    ratio = 1 / log_n if abs(e) < 1e-9 else e / -math.expm1(-e * log_n)
    log_k = (math.log(ratio) + mu * math.log(2)) / s
    return max(1, int(math.exp(min(log_k, log_n))))


class AdaptiveP:
    """Draws tokens near the probability ``target``, correcting for the average of recent tokens.

    llama.cpp's adaptive-p. With p a token's probability and a = 2 * target - (the average of the
    selected tokens' p, each weighing ``decay`` times the next one), clipped to [0, 1], the new
    logit is 5 - 10 d² / (1 + d), d = |p - a| / 0.3. A negative target: a plain draw.
    """

    def __init__(self, target: float, decay: float) -> None:
        self._target = target
        self._decay = decay
        self._sum = target / (1 - decay)  # start as if past tokens had been on target
        self._weight = 1 / (1 - decay)
        self._pending: tuple[int, float] | None = None

    def __call__(self, c: Candidates, ids: Sequence[int], uniforms: Uniforms) -> int:
        """Return the id of a token drawn with the new logits' probabilities."""
        p = probabilities(c)
        if self._target < 0:
            return c.token(draw(p, uniforms.next()))
        self._learn(ids)
        aim = min(max(2 * self._target - self._sum / self._weight, 0.0), 1.0)
        d = np.abs(p - aim) / 0.3
        w = np.exp(-10 * d * d / (1 + d))  # the constant 5 cancels
        w[c.logits == -np.inf] = 0
        at = draw(w, uniforms.next())
        self._pending = (c.token(at), float(p[at]))
        return c.token(at)

    def _learn(self, ids: Sequence[int]) -> None:
        """Add the last drawn token's probability to the average, if ``ids``, the tokens so far, end
        with that token.
        """
        if self._pending and ids and ids[-1] == self._pending[0]:
            self._sum = self._pending[1] + self._decay * self._sum
            self._weight = 1 + self._decay * self._weight
        self._pending = None

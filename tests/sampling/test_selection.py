"""The last step: draws, mirostat, adaptive-p, and the random numbers beneath them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import SamplingError
from treadle.sampling.candidates import Candidates
from treadle.sampling.selection import AdaptiveP, Dist, Greedy, Mirostat, Uniforms, draw, philox

GOLDEN = [0.8201981478608876, 0.18924562408645496, 0.8676608148821462]


class Fixed(Uniforms):
    """A random number of one's own choice."""

    def __init__(self, u: float) -> None:
        self.u = u

    def next(self) -> float:
        return self.u


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - float(x.max()))
    p: np.ndarray = e / e.sum()
    return p


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    expected = counts.sum() * p
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_same_seed_gives_these_numbers_on_every_machine() -> None:
    got = Uniforms(42)
    assert [got.next() for _ in range(3)] == GOLDEN
    other = Uniforms(43)
    assert other.next() != GOLDEN[0]


@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1])
def test_the_numbers_are_those_of_numpys_philox(seed: int) -> None:
    got = Uniforms(seed)
    words = np.random.Philox(key=seed).random_raw(10)
    assert [got.next() for _ in range(10)] == ((words >> 11) * 2.0**-53).tolist()
    wide = np.random.Philox(counter=2**64 - 1, key=2**100 + 5)  # both of two words
    assert philox(2**64, 2**100 + 5) == wide.random_raw(4).tolist()


def test_without_a_seed_one_is_made_and_told() -> None:
    one = Uniforms(None)
    two = Uniforms(one.seed)
    assert [one.next() for _ in range(5)] == [two.next() for _ in range(5)]
    assert len({Uniforms(None).seed for _ in range(4)}) > 1


def test_uniforms_are_uniform() -> None:
    u = Uniforms(1)
    numbers = np.array([u.next() for _ in range(20_000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.bincount((numbers * 50).astype(int), minlength=50)
    assert chi_square(counts, np.full(50, 1 / 50)) < 100  # 49 degrees: 1 in 30,000


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.floats(0, 1, exclude_max=True))
def test_draw_inverts_the_cumulated_weights(w: list[float], u: float) -> None:
    if sum(w) < 1e-300:
        return
    at = draw(np.array(w), u)
    assert w[at] > 0
    cumulated = np.cumsum(w)
    low = cumulated[at - 1] if at else 0.0
    assert low <= u * cumulated[-1] <= cumulated[at] or at == np.flatnonzero(w)[-1]


def test_draw_of_the_largest_number_below_one_takes_no_weightless_token() -> None:
    assert draw(np.array([0.1, 0.2, 0.0]), 1 - 2.0**-53) == 1
    assert draw(np.array([0.0, 0.3, 0.2]), 0.0) == 1


@pytest.mark.parametrize("w", [[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_draw_refuses_weights_without_meaning(w: list[float]) -> None:
    with pytest.raises(SamplingError, match="ruled out"):
        draw(np.array(w), 0.5)


def test_dist_follows_the_distribution() -> None:
    x = np.array([0, 1, 2, -1, -np.inf, 0.5], np.float32)
    u = Uniforms(7)
    picks = [Dist()(Candidates(x), [], u) for _ in range(20_000)]
    counts = np.bincount(picks, minlength=6)
    assert counts[4] == 0
    live = [0, 1, 2, 3, 5]
    assert chi_square(counts[live], softmax(x)[live]) < 26  # 4 degrees: 1 in 30,000


def test_greedy_takes_the_first_of_equals() -> None:
    c = Candidates(np.array([1, 3, 3, 2], np.float32))
    assert Greedy()(c, [], Fixed(0.9)) == 1
    assert Greedy()(c.take(np.array([3, 2, 1])), [], Fixed(0.9)) == 2


def mirostat_1_count(x: np.ndarray, mu: float, n_vocab: int) -> int:
    """The formula of the paper as llama.cpp writes it."""
    p = np.sort(softmax(x))[::-1]
    s_tb = s_tt = 0.0
    for i in range(min(99, len(p) - 1)):
        t = math.log((i + 2) / (i + 1))
        b = math.log(p[i] / p[i + 1])
        s_tb += t * b
        s_tt += t * t
    s = s_tb / s_tt
    e = s - 1
    return max(1, int(((e * 2**mu) / (1 - n_vocab**-e)) ** (1 / s)))


@pytest.mark.parametrize("seed", range(8))
def test_mirostat_1(seed: int) -> None:
    x = np.random.default_rng(seed).normal(0, 2.5, 500).astype(np.float32)
    m = Mirostat(1, 3.0, 0.1, 500)
    order = np.argsort(-x, kind="stable")
    mu = 6.0
    for u in (0.01, 0.5, 0.99):
        kept = order[: mirostat_1_count(x, mu, 500)]
        p = softmax(x[kept])
        at = int(np.searchsorted(np.cumsum(p), u, side="right"))
        assert m(Candidates(x), [], Fixed(u)) == kept[at]
        mu -= 0.1 * (-math.log2(p[at]) - 3.0)
        assert m.mu == pytest.approx(mu)


@pytest.mark.parametrize("seed", range(8))
def test_mirostat_2(seed: int) -> None:
    x = np.random.default_rng(seed).normal(0, 2.5, 500).astype(np.float32)
    x[::5] = -np.inf
    m = Mirostat(2, 2.0, 0.5, 500)
    mu = 4.0
    for u in (0.01, 0.5, 0.99, 0.3):
        p = softmax(x)
        kept = np.array([i for i in range(500) if p[i] > 0 and -math.log2(p[i]) <= mu])
        if not len(kept):
            kept = np.array([int(x.argmax())])
        q = softmax(x[kept])
        at = int(np.searchsorted(np.cumsum(q), u, side="right"))
        assert m(Candidates(x), [], Fixed(u)) == kept[at]
        mu -= 0.5 * (-math.log2(q[at]) - 2.0)
        assert m.mu == pytest.approx(mu)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_brings_the_surprise_to_its_target(version: int) -> None:
    x = (-1.1 * np.log(np.arange(1, 5001))).astype(np.float32)  # Zipf
    m = Mirostat(version, 4.0, 0.1, 5000)
    u = Uniforms(5)
    p = softmax(x)
    surprises = [-math.log2(p[m(Candidates(x), [], u)]) for _ in range(600)]
    # The surprise is measured among the kept tokens, so the whole distribution's is a little above.
    assert 3.5 < np.mean(surprises[200:]) < 6


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    "x",
    [[0.0], [1.0, 1.0, 1.0], [0.0, -np.inf], [1000.0, 0.0], [0.0, -np.log(2), -np.log(3)]],
    ids=["one", "flat", "one alive", "sure", "s = 1"],
)
def test_mirostat_of_degenerate_distributions(version: int, x: list[float]) -> None:
    m = Mirostat(version, 5.0, 0.1, len(x))
    u = Uniforms(5)
    for _ in range(200):
        token = m(Candidates(np.array(x, np.float32)), [], u)
        assert x[token] > -np.inf
        assert math.isfinite(m.mu)


def test_adaptive_p() -> None:
    # llama.cpp's formula, with its logits and its average, over a fixed sequence of draws
    target = 0.4
    decay = 0.8
    x = np.array([2, 1.5, 1, 0.2, -1, -np.inf], np.float32)
    p = softmax(x)
    total = target / (1 - decay)
    weight = 1 / (1 - decay)
    sampler = AdaptiveP(target, decay)
    ids = [9]
    for step, u in enumerate((0.1, 0.6, 0.95, 0.4, 0.7, 0.2)):
        aim = min(max(2 * target - total / weight, 0), 1)
        d = np.abs((p - aim) / 0.3)
        q = softmax(np.where(x > -np.inf, 5 - 10 * d * d / (1 + d), -np.inf))
        expected = int(np.searchsorted(np.cumsum(q), u, side="right"))
        assert sampler(Candidates(x), ids, Fixed(u)) == expected
        if step == 2:
            ids = [*ids, 17]  # the caller put something else there: not counted
            continue
        ids = [*ids, expected]
        total = p[expected] + decay * total
        weight = 1 + decay * weight


def test_adaptive_p_holds_the_average_near_its_target() -> None:
    rng = np.random.default_rng(0)
    u = Uniforms(3)
    sampler = AdaptiveP(0.3, 0.9)
    ids = [0]
    chosen = []
    for _ in range(600):
        x = rng.normal(0, 2, 50).astype(np.float32)
        ids.append(sampler(Candidates(x), ids, u))
        chosen.append(softmax(x)[ids[-1]])
    assert 0.2 < np.mean(chosen) < 0.4


def test_adaptive_p_with_a_negative_target_is_a_plain_draw() -> None:
    c = Candidates(np.array([0, 1, 2], np.float32))
    for u in (0.05, 0.2, 0.7):
        assert AdaptiveP(-1, 0.9)(c, [], Fixed(u)) == Dist()(c, [], Fixed(u))

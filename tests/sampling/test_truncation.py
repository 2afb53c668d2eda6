"""Each truncating sampler against llama.cpp's published tables and a plain reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.sampling.candidates import (
    Candidates,
    dynamic_temperature,
    largest,
    probabilities,
    temperature,
)
from treadle.sampling.truncation import infill, min_p, top_k, top_n_sigma, top_p, typical, xtc

Stage = Callable[[Candidates], Candidates]


def of_probabilities(p: list[float]) -> Candidates:
    with np.errstate(divide="ignore"):
        return Candidates(np.log(np.array(p, np.float32)))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - float(x.max()))
    p: np.ndarray = e / e.sum()
    return p


def as_dict(c: Candidates) -> dict[int, float]:
    p = probabilities(c)
    return {c.token(i): float(p[i]) for i in range(len(p))}


RISING = [0.1, 0.2, 0.3, 0.4]
FALLING = [0.4, 0.3, 0.2, 0.1]

# Inputs and outputs of llama.cpp's tests/test-sampling.cpp; here by token, as the order is not
# part of the meaning. A token that is absent has left.
VECTORS: list[tuple[str, list[float], Stage, dict[int, float]]] = [
    ("temp 1", RISING, lambda c: temperature(c, 1), dict(enumerate(RISING))),
    ("temp 0", RISING, lambda c: temperature(c, 0), {3: 1.0}),
    ("temp-ext 1", RISING, lambda c: dynamic_temperature(c, 1, 0, 1), dict(enumerate(RISING))),
    ("temp-ext 0", RISING, lambda c: dynamic_temperature(c, 0, 0, 1), {3: 1.0}),
    ("top-k 1", RISING, lambda c: top_k(c, 1), {3: 1.0}),
    ("top-k 3", RISING, lambda c: top_k(c, 3), {3: 0.44444, 2: 0.33333, 1: 0.22222}),
    ("top-k 4", RISING, lambda c: top_k(c, 4), dict(enumerate(RISING))),
    ("top-k 0", RISING, lambda c: top_k(c, 0), dict(enumerate(RISING))),
    ("top-p 0", RISING, lambda c: top_p(c, 0), {3: 1.0}),
    ("top-p .7", RISING, lambda c: top_p(c, 0.7), {3: 0.571429, 2: 0.428571}),
    ("top-p .8", RISING, lambda c: top_p(c, 0.8), {3: 0.44444, 2: 0.33333, 1: 0.22222}),
    ("top-p 1", RISING, lambda c: top_p(c, 1), dict(enumerate(RISING))),
    ("min-p 0", RISING, lambda c: min_p(c, 0), dict(enumerate(RISING))),
    ("min-p .24", RISING, lambda c: min_p(c, 0.24), dict(enumerate(RISING))),
    ("min-p .26", RISING, lambda c: min_p(c, 0.26), {1: 2 / 9, 2: 3 / 9, 3: 4 / 9}),
    ("min-p .49", RISING, lambda c: min_p(c, 0.49), {1: 2 / 9, 2: 3 / 9, 3: 4 / 9}),
    ("min-p .51", RISING, lambda c: min_p(c, 0.51), {2: 3 / 7, 3: 4 / 7}),
    ("min-p .74", RISING, lambda c: min_p(c, 0.74), {2: 3 / 7, 3: 4 / 7}),
    ("min-p .76", RISING, lambda c: min_p(c, 0.76), {3: 1.0}),
    ("min-p 1", RISING, lambda c: min_p(c, 1.0), {3: 1.0}),
    ("min-p 1.05", RISING, lambda c: min_p(c, 1.05), {3: 1.0}),
    ("xtc .09", FALLING, lambda c: xtc(c, 0.09), {3: 1.0}),
    ("xtc .19", FALLING, lambda c: xtc(c, 0.19), {2: 2 / 3, 3: 1 / 3}),
    ("xtc .29", FALLING, lambda c: xtc(c, 0.29), {1: 3 / 6, 2: 2 / 6, 3: 1 / 6}),
    ("xtc .39", FALLING, lambda c: xtc(c, 0.39), dict(enumerate(FALLING))),
    ("typical sure", [0.97, 0.01, 0.01, 0.01], lambda c: typical(c, 0.5), {0: 1.0}),
    (
        "typical flat",
        [0.4, 0.2, 0.2, 0.2],
        lambda c: typical(c, 0.5),
        dict.fromkeys((1, 2, 3), 1 / 3),
    ),
    ("top-n-sigma 1", RISING, lambda c: top_n_sigma(c, 1), {2: 0.428571, 3: 0.571429}),
    ("top-n-sigma 0", RISING, lambda c: top_n_sigma(c, 0), dict(enumerate(RISING))),
    ("top-n-sigma 3", RISING, lambda c: top_n_sigma(c, 3), dict(enumerate(RISING))),
]


@pytest.mark.parametrize(
    ("p", "stage", "expected"), [pytest.param(*v[1:], id=v[0]) for v in VECTORS]
)
def test_llama_cpp_vectors(p: list[float], stage: Stage, expected: dict[int, float]) -> None:
    assert as_dict(stage(of_probabilities(p))) == pytest.approx(expected, abs=1e-5)


SPELT = [b"def", b"de", b"x", b"", b"y", b"z", b"w", b"v"]


@pytest.mark.parametrize(
    ("p", "end", "expected"),
    [
        ([0.5, 0.3, 0.15, 0.05], 3, {0: 50 / 55, 3: 5 / 55}),  # "def" has "de"'s, "x" is unlikely
        ([0.3, 0.5, 0.15, 0.05], 3, {1: 50 / 55, 3: 5 / 55}),  # "de" has "def"'s
        ([0.3, 0.1, 0.6, 0.0], 3, {0: 30 / 90, 2: 60 / 90}),  # 0.4 of 1 is more than a third
        ([0.25, 0.04, 0.71, 0.0], 3, {2: 1.0}),  # 0.29 is less
        ([0.4, 0.3, 0.1, 0.2], 3, {3: 1.0}),  # the end is likely
        ([0.1, 0.08, 0.17, 0.0, 0.17, 0.17, 0.17, 0.14], 3, {3: 1.0}),  # nothing is sure
        ([0.1, 0.08, 0.17, 0.0, 0.17, 0.17, 0.17, 0.14], None, {2: 1.0}),
    ],
)
def test_infill(p: list[float], end: int | None, expected: dict[int, float]) -> None:
    made = infill(of_probabilities(p), SPELT.__getitem__, {3}, end)
    assert as_dict(made) == pytest.approx(expected, abs=1e-5)


QUEUES = [
    "k",
    "p",
    "m",
    "kp",
    "km",
    "pk",
    "pm",
    "mk",
    "mp",
    "kpm",
    "kmp",
    "pkm",
    "pmk",
    "mkp",
    "mpk",
]


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("min_p_at", [0.1, 9997.9 / 9999])
def test_queues_of_stages_over_probabilities_that_rise_with_the_id(
    queue: str, min_p_at: float
) -> None:
    # llama.cpp's queue test: token i has probability i / sum; every stage leaves the last tokens.
    n = 10_000
    first = 0
    c = of_probabilities([float(i) for i in range(n)])
    for stage in queue:
        if stage == "k":
            c = top_k(c, 100)
            first = max(first, n - 100)
        elif stage == "p":
            c = top_p(c, 0.8)
            total = sum(range(first, n))
            reached = 0
            first = n
            while reached < 0.8 * total:
                first -= 1
                reached += first
        else:
            c = min_p(c, min_p_at)
            first = max(first, math.ceil(min_p_at * (n - 1)))
        assert sorted(c.token(i) for i in range(len(c.logits))) == list(range(first, n))


floats = st.floats(-30, 30, width=32)
logits = st.lists(floats | st.just(-math.inf), min_size=1, max_size=60).filter(
    lambda x: max(x) > -math.inf
)


def sorted_ids(x: list[float]) -> list[int]:
    return sorted((i for i, v in enumerate(x) if v > -math.inf), key=lambda i: (-x[i], i))


@given(logits, st.integers(1, 70))
def test_largest_is_what_sorting_everything_gives(x: list[float], k: int) -> None:
    assert largest(np.array(x, np.float32), k).tolist() == sorted_ids(x)[:k]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1023, 1024, 1025, 4096, 4159, 20_011]),
    st.integers(1, 3000),
    st.sampled_from(["normal", "rounded", "mostly out", "all equal", "rising", "falling"]),
)
def test_largest_of_many(seed: int, n: int, k: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, n).astype(np.float32)
    x = {
        "normal": x,
        "rounded": np.round(x),  # many ties: of equals, the first
        "mostly out": np.where(rng.random(n) < 0.999, np.float32(-np.inf), x),
        "all equal": np.zeros(n, np.float32),
        "rising": np.sort(x),
        "falling": -np.sort(x),
    }[kind]
    order = np.argsort(-x, kind="stable")[:k]
    assert largest(x, k).tolist() == order[x[order] > -np.inf].tolist()


@given(logits, st.integers(1, 70))
def test_top_k(x: list[float], k: int) -> None:
    kept = top_k(Candidates(np.array(x, np.float32)), k)
    finite = [kept.token(i) for i in range(len(kept.logits)) if kept.logits[i] > -np.inf]
    assert sorted(finite) == sorted(sorted_ids(x)[:k])
    assert [x[kept.token(i)] for i in range(len(kept.logits))] == kept.logits.tolist()


def check_prefix(
    kept: Candidates, order: list[int], mass: np.ndarray, p: float, least: int
) -> None:
    """The kept tokens are the shortest prefix of ``order`` that reaches ``p``, to rounding."""
    n = len(kept.logits)
    assert sorted(kept.token(i) for i in range(n)) == sorted(order[:n])
    assert n == len(order) or n >= least
    assert mass[order[:n]].sum() >= p - 1e-12
    assert n <= max(least, 1) or mass[order[: n - 1]].sum() <= p + 1e-12


@given(logits, st.floats(0, 0.999), st.integers(0, 5))
def test_top_p(x: list[float], p: float, least: int) -> None:
    a = np.array(x, np.float32)
    order = sorted_ids(x)
    check_prefix(top_p(Candidates(a), p, least), order, softmax(a), p, least)
    sorted_first = top_p(Candidates(a[order], np.array(order), descending=True), p, least)
    check_prefix(sorted_first, order, softmax(a), p, least)


def typical_scores(x: np.ndarray) -> np.ndarray:
    p = softmax(x)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(p > 0, -np.log(p), np.inf)
        entropy = np.where(p > 0, p * surprise, 0).sum()
    scores: np.ndarray = np.abs(surprise - entropy)
    return scores


@given(logits, st.floats(0.01, 0.99), st.integers(0, 5))
def test_typical(x: list[float], p: float, least: int) -> None:
    a = np.array(x, np.float32)
    mass = softmax(a)
    scores = typical_scores(a)
    kept = typical(Candidates(a), p, least)
    ids = [kept.token(i) for i in range(len(kept.logits))]
    others = [i for i in range(len(x)) if i not in ids and x[i] > -math.inf]
    assert max(scores[ids]) <= min(scores[others], default=math.inf) + 1e-9
    assert mass[ids].sum() > p - 1e-12
    worst = ids[int(np.argmax(scores[ids]))]
    assert len(ids) <= max(least, 1) or mass[ids].sum() - mass[worst] <= p + 1e-9


@pytest.mark.parametrize("p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.001, 1, 8])
def test_top_p_and_typical_of_a_large_vocabulary(p: float, spread: float) -> None:
    x = np.random.default_rng(3).normal(0, spread, 30_000).astype(np.float32)
    x[::7] = -np.inf
    c = Candidates(x)
    mass = softmax(x)
    by_logit = np.argsort(-x, kind="stable").tolist()
    check_prefix(top_p(c, p), by_logit, mass, p, 0)
    kept = typical(c, p)
    by_score = np.argsort(typical_scores(x), kind="stable")
    n = len(kept.logits)
    # Two ways to compute a score agree to rounding, so tokens may change places at the edge.
    assert (
        set(by_score[: max(n - 3, 0)])
        <= {kept.token(i) for i in range(n)}
        <= set(by_score[: n + 3])
    )
    assert mass[by_score[: max(n - 3, 0)]].sum() <= p < mass[by_score[: n + 3]].sum()


@given(logits, st.floats(0.001, 1), st.integers(0, 5))
def test_min_p(x: list[float], p: float, least: int) -> None:
    a = np.array(x, np.float32)
    kept = min_p(Candidates(a), p, least)
    ids = {kept.token(i) for i in range(len(kept.logits))}
    ratio = np.exp(a.astype(np.float64) - a.max())
    clearly = {i for i in range(len(x)) if ratio[i] >= p * 1.0001}
    nearly = {i for i in range(len(x)) if ratio[i] >= p * 0.9999}
    if len(nearly) < least:
        assert ids == set(sorted_ids(x)[:least])
    elif len(clearly) >= least:
        assert clearly <= ids <= nearly
    assert sorted_ids(x)[0] in ids


@given(logits, st.floats(0.01, 4))
def test_top_n_sigma(x: list[float], n: float) -> None:
    alive = [v for v in x if v > -math.inf]
    mean = sum(alive) / len(alive)
    sigma = math.sqrt(sum((v - mean) ** 2 for v in alive) / len(alive))
    kept = top_n_sigma(Candidates(np.array(x, np.float32)), n)
    edge = max(alive) - n * sigma
    for i, v in enumerate(x):
        if len(x) > 1 and abs(v - edge) > 1e-4:
            there = i in {kept.token(j) for j in range(len(kept.logits))}
            assert there == (v > edge)


@given(logits, st.floats(0.02, 0.5), st.integers(0, 5))
def test_xtc(x: list[float], threshold: float, least: int) -> None:
    a = np.array(x, np.float32)
    p = softmax(a)
    order = sorted_ids(x)
    top = [i for i in order if p[i] >= threshold]
    gone = set(top[:-1]) if len(x) - len(top[:-1]) >= least else set()
    if any(abs(q - threshold) < 1e-12 for q in p):
        return
    kept = xtc(Candidates(a), threshold, least)
    assert {kept.token(i) for i in range(len(kept.logits))} == set(range(len(x))) - gone


@given(logits, st.floats(0.01, 3))
def test_temperature(x: list[float], t: float) -> None:
    a = np.array(x, np.float32)
    kept = temperature(Candidates(a), t)
    expected = {i: v for i, v in enumerate(softmax(a.astype(np.float64) / t))}
    assert as_dict(kept) == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("t", [0.0, -1.0, 1e-44, 1e-300])
def test_no_temperature_is_too_low(t: float) -> None:
    assert as_dict(temperature(Candidates(np.array([3, 9, -2], np.float32)), t)) == {1: 1.0}


@given(logits, st.floats(0.1, 2), st.floats(0.01, 3), st.floats(0, 3))
def test_dynamic_temperature(x: list[float], t: float, spread: float, exponent: float) -> None:
    a = np.array([v for v in x if v > -math.inf], np.float32)
    p = softmax(a)
    entropy = -sum(q * math.log(q) for q in p if q > 0)
    share = entropy / math.log(len(a)) if len(a) > 1 else 0
    low = max(0.0, t - spread)
    high = t + spread
    dynamic = low + (high - low) * min(max(share, 0), 1) ** exponent
    got = as_dict(dynamic_temperature(Candidates(np.array(x, np.float32)), t, spread, exponent))
    if dynamic > 1e-3 and len(a) > 1:
        alive = [i for i, v in enumerate(x) if v > -math.inf]
        expected = dict(zip(alive, softmax(a.astype(np.float64) / dynamic), strict=True))
        assert got == pytest.approx(expected, rel=1e-2, abs=1e-5)


def test_dynamic_temperature_ends_at_both_limits() -> None:
    flat = dynamic_temperature(Candidates(np.zeros(8, np.float32) + 2), 1.0, 0.5, 1.0)
    np.testing.assert_allclose(flat.logits, 2 / 1.5)
    sure = dynamic_temperature(Candidates(np.array([200, 1, 1], np.float32)), 1.0, 0.5, 1.0)
    np.testing.assert_allclose(sure.logits, np.array([200, 1, 1]) / 0.5)

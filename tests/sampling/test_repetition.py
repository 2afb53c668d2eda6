"""Penalties and DRY against llama.cpp's published tables and plain references."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.sampling import repetition
from treadle.sampling.candidates import Candidates, probabilities
from treadle.sampling.repetition import Breakers, dry, find_breakers, penalties

Floats = list[float]

FIFTH = [0.2] * 5

# probabilities, tokens so far, expected probabilities, (repeat, frequency, presence)
PENALTIES = [
    (FIFTH, [0], [0, 0.25, 0.25, 0.25, 0.25], (50, 0, 0)),
    (FIFTH, [0, 1, 2], [0, 0, 0, 0.5, 0.5], (50, 0, 0)),
    (FIFTH, [0, 1, 2, 0, 0], [0, 0, 0, 0.5, 0.5], (50, 0, 0)),
    (FIFTH, [0], [0.000011, 0.249997, 0.249997, 0.249997, 0.249997], (1, 5, 5)),
    (FIFTH, [0, 1, 2], [0.000023, 0.000023, 0.000023, 0.499966, 0.499966], (1, 5, 5)),
    (FIFTH, [0, 1, 2, 0, 0], [0, 0.000023, 0.000023, 0.499977, 0.499977], (1, 5, 5)),
]

# probabilities, tokens so far, expected, (multiplier, base, allowed_length), breakers
DRY = [
    ([0.25] * 4, [0, 1], [0.25] * 4, (1, 1.1, 2), {}),
    ([0.25] * 4, [0, 1, 2, 0, 1], [0.296923, 0.296923, 0.109232, 0.296923], (1, 1.1, 2), {}),
    (FIFTH, [0, 1, 3, 4, 0, 1], FIFTH, (1, 1.1, 2), {3: [()]}),
    (FIFTH, [0, 1, 2, 0, 1], [0.241818, 0.241818, 0.032727, 0.241818, 0.241818], (2, 1.1, 2), {}),
    (FIFTH, [0, 1, 2, 3, 4, 0, 1], FIFTH, (1, 1.1, 4), {}),
]


def of_probabilities(p: list[float]) -> Candidates:
    return Candidates(np.log(np.array(p, np.float32)))


@pytest.mark.parametrize(("p", "ids", "expected", "knobs"), PENALTIES)
def test_llama_cpp_penalty_vectors(
    p: Floats, ids: list[int], expected: Floats, knobs: tuple[float, float, float]
) -> None:
    got = probabilities(penalties(of_probabilities(p), ids, *knobs))
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(("p", "ids", "expected", "knobs", "breakers"), DRY)
def test_llama_cpp_dry_vectors(
    p: Floats,
    ids: list[int],
    expected: Floats,
    knobs: tuple[float, float, int],
    breakers: Breakers,
) -> None:
    got = probabilities(dry(of_probabilities(p), ids, *knobs, breakers))
    np.testing.assert_allclose(got, expected, atol=1e-5)


tokens = st.lists(st.integers(0, 5), max_size=40)
logits = st.lists(st.floats(-20, 20, width=32), min_size=6, max_size=6)


@given(logits, tokens, st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2))
def test_penalties(
    x: Floats, ids: list[int], repeat: float, frequency: float, presence: float
) -> None:
    expected = []
    for token, logit in enumerate(x):
        count = ids.count(token)
        if count:
            logit = logit * repeat if logit <= 0 else logit / repeat
            logit -= count * frequency + presence
        expected.append(logit)
    c = Candidates(np.array(x, np.float32))
    whole = penalties(c, ids, repeat, frequency, presence)
    np.testing.assert_allclose(whole.logits, expected, rtol=1e-6, atol=1e-6)
    some = np.array([4, 1, 3])  # the same where only some candidates are left, in any order
    part = penalties(c.take(some), ids, repeat, frequency, presence)
    np.testing.assert_array_equal(part.logits, whole.logits[some])
    assert not part.descending


def dry_reference(
    x: Floats, ids: list[int], multiplier: float, base: float, allowed: int, breakers: Breakers
) -> Floats:
    """Every earlier place, every length: compare token by token."""
    limit = len(ids)
    for back in range(len(ids)):
        at = len(ids) - 1 - back
        tails = [t for t in breakers.get(ids[at], []) if list(t) == ids[at + 1 : at + 1 + len(t)]]
        if tails:
            limit = back - max(map(len, tails))
            break
    longest: dict[int, int] = {}
    if len(ids) > allowed and limit >= allowed:
        for end in range(len(ids) - 1):
            n = 0
            while n <= end and n < limit and ids[end - n] == ids[len(ids) - 1 - n]:
                n += 1
            if n >= allowed:
                longest[ids[end + 1]] = max(n, longest.get(ids[end + 1], 0))
    return [
        v - multiplier * base ** (longest[i] - allowed)
        if i in longest and () not in breakers.get(i, [])
        else v
        for i, v in enumerate(x)
    ]


@given(
    logits,
    tokens,
    st.floats(0.1, 2),
    st.floats(1, 2),
    st.integers(0, 5),
    st.dictionaries(
        st.integers(0, 5),
        st.lists(st.lists(st.integers(0, 5), max_size=2).map(tuple), min_size=1, max_size=2),
        max_size=2,
    ),
)
def test_dry(
    x: Floats, ids: list[int], multiplier: float, base: float, allowed: int, breakers: Breakers
) -> None:
    expected = np.array(dry_reference(x, ids, multiplier, base, allowed, breakers))
    c = Candidates(np.array(x, np.float32))
    whole = dry(c, ids, multiplier, base, allowed, breakers)
    np.testing.assert_allclose(whole.logits, expected, rtol=1e-5, atol=1e-4)
    some = np.array([5, 0, 2])
    part = dry(c.take(some), ids, multiplier, base, allowed, breakers)
    np.testing.assert_array_equal(part.logits, whole.logits[some])


def test_dry_penalty_never_overflows() -> None:
    c = Candidates(np.zeros(3, np.float32))
    got = dry(c, [1] * 3000, 5.0, 1.75, 2, {})
    assert got.logits[1] < -1e37
    assert np.isfinite(got.logits).all()
    assert probabilities(got).tolist() == [0.5, 0, 0.5]


def test_neither_changes_the_logits_it_was_given() -> None:
    x = np.zeros(6, np.float32)
    x.flags.writeable = False
    penalties(Candidates(x), [1, 2], 2.0, 1.0, 1.0)
    dry(Candidates(x), [1, 2, 1, 2, 1], 1.0, 1.5, 1, {})
    assert not x.any()


def test_ids_outside_the_vocabulary_are_nobodys() -> None:
    # placeholders for images and the like
    got = penalties(Candidates(np.zeros(3, np.float32)), [-1, 7, 1], 1.0, 0.0, 1.0)
    assert got.logits.tolist() == [0, -1, 0]


class Letters:
    """A tokenizer of a few pieces, greedy from the left."""

    pieces = (
        b"a",
        b"b",
        b"c",
        b"x\n",
        b"\n",
        b"ab",
        b"ca",
        b"bc",
        b"xabcx",
        b"caa",
        "é".encode()[:1],
    )

    n_vocab = len(pieces)

    def __init__(self) -> None:
        self.n_asked = 0

    def token_bytes(self, id: int) -> bytes:
        self.n_asked += 1
        return self.pieces[id]

    def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
        assert bos is False
        ids = []
        rest = text.encode()
        while rest:
            best = max(
                (i for i, p in enumerate(self.pieces) if rest.startswith(p)),
                key=lambda i: len(self.pieces[i]),
            )
            ids.append(best)
            rest = rest[len(self.pieces[best]) :]
        return ids


def test_breakers_are_whole_in_a_token_or_begin_in_one() -> None:
    got = find_breakers(Letters(), ["\n", "abc"])
    assert {k: set(v) for k, v in got.items()} == {
        3: {()},
        4: {()},
        8: {()},
        0: {(7,)},  # a|bc
        6: {(7,)},  # ca|bc
        9: {(7,)},  # caa|bc
        5: {(2,)},  # ab|c
    }


def test_breakers_are_found_once_for_a_vocabulary() -> None:
    letters = Letters()
    first = find_breakers(letters, ["\n"])
    asked = letters.n_asked
    assert find_breakers(letters, ["\n"]) == first
    assert letters.n_asked == asked


def test_a_breaker_is_not_cut_within_a_character() -> None:
    assert dict(find_breakers(Letters(), ["é"])) == {}


def test_breakers_that_nobody_names_any_more_are_forgotten() -> None:
    """Clients of a server make up any number of them."""
    letters = Letters()
    for i in range(300):
        find_breakers(letters, [f"{i}", "\n"])
    kept = repetition._FOUND[letters]
    assert "299" in kept
    assert len(kept) <= repetition._MOST_FOUND

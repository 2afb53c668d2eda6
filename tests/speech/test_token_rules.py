"""Masks of logits: what may stand at each place of a text."""

from __future__ import annotations

import numpy as np
import pytest

from tests.speech.scripted import ENGLISH, N_VOCAB, SPECIAL, at, config_of
from treadle.speech.config import SpecialIds
from treadle.speech.token_rules import TimestampRules, largest_places, log_softmax

BEGIN = SPECIAL.timestamp_begin


def allowed(*ids: int, timestamps: bool = True, special: SpecialIds = SPECIAL) -> set[int]:
    """The ids that may follow a text, where text and timestamps are equally probable."""
    logits = np.zeros((1, N_VOCAB), np.float32)
    logits[:, BEGIN:] = -9  # so that their sum is below any text token
    TimestampRules(config_of(special), timestamps=timestamps).apply(logits, [ids])
    return set(np.flatnonzero(np.isfinite(logits[0])).tolist())


def test_the_first_is_a_timestamp_of_at_most_one_second() -> None:
    assert allowed() == {*range(at(0.0), at(1.0) + 1)}


def test_text_or_an_end_follows_a_timestamp() -> None:
    assert allowed(at(0.0)) == {*range(256)} - {1, 2} | {SPECIAL.eot}
    # after text: text, its end, or a later time
    behind = allowed(at(0.4), 65)
    assert behind == {*range(257)} - {1, 2} | {*range(at(0.42), N_VOCAB)}
    # after a segment's end: the same time again or a later one, or the end of all
    assert allowed(at(0.4), 65, at(1.0)) == {SPECIAL.eot, *range(at(1.0), N_VOCAB)}
    assert allowed(at(0.4), 65, at(1.0), at(1.0)) == {*range(257)} - {1, 2}


def test_timestamps_that_are_together_more_probable_than_text() -> None:
    logits = np.zeros((2, N_VOCAB), np.float32)
    logits[:, BEGIN:] = -7  # 1,501 of them are e^0.3
    logits[1, 65] = 1.0
    rules = TimestampRules(config_of(), timestamps=True)
    rules.apply(logits, [[at(0.0), 65]] * 2)
    assert np.isfinite(logits[0]).nonzero()[0].min() == at(0.02)
    assert logits[1].argmax() == 65


def test_without_timestamps() -> None:
    assert allowed(timestamps=False) == {*range(256)} - {1, 2, 3}
    assert allowed(65, timestamps=False) == {*range(257)} - {1, 2}
    assert allowed(65, timestamps=False, special=ENGLISH) >= {SPECIAL.eot, 66}
    none = SpecialIds(**{**vars(SPECIAL), "timestamp_begin": -1, "no_speech": -1})
    assert 65 in allowed(65, special=none)


def test_log_softmax() -> None:
    found = log_softmax(np.array([[0, np.log(3), -np.inf]], np.float32))
    np.testing.assert_allclose(np.exp(found), [[0.25, 0.75, 0]], atol=1e-7)


@pytest.mark.parametrize("width", [7, 64, 130, 1000])
def test_largest_places(width: int) -> None:
    rng = np.random.default_rng(width)
    rows = rng.permutation(3 * width).reshape(3, width).astype(np.float32)
    rows[1, width // 2 :] = -np.inf  # forbidden
    for n in (1, 3):
        found = largest_places(rows, n)
        assert np.array_equal(np.sort(found), np.sort(np.argsort(rows)[:, -n:]))

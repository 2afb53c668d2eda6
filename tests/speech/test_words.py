"""Words: where ids are cut, and when they are spoken."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.speech.scripted import ByteTokenizer, ScriptedModel, said
from treadle.speech.transcript import TranscriptWord
from treadle.speech.word_times import (
    _longest,
    _shortened,
    alignment_matrix,
    start_steps,
    word_times,
)
from treadle.speech.words import cut_words

TOKENIZER: Any = ByteTokenizer()


def words(text: str, language: str = "en") -> list[str]:
    found = cut_words([*text.encode()], TOKENIZER, language)
    assert "".join(word.text for word in found) == text
    assert [word.first for word in found[1:]] == [word.last for word in found[:-1]]
    return [word.text for word in found]


def test_words_of_languages_with_spaces() -> None:
    assert words(" ask not, what") == [" ask", " not,", " what"]
    assert words(' he said "go home." ') == [" he", " said", ' "go', ' home." ']
    assert words(" it's 12:30, isn't it?") == [" it's", " 12:30,", " isn't", " it?"]
    assert words(" grün ¿qué?") == [" grün", " ¿qué?"]
    assert words("") == []


def test_words_of_languages_without_spaces() -> None:
    assert words("我想，你好", "zh") == ["我", "想，", "你", "好"]


def test_invalid_utf8_is_a_word_too() -> None:
    ids = [0xE6, 0x41, 0xFF, 0xE6]
    assert "".join(word.text for word in cut_words(ids, TOKENIZER, "zh")).count("\ufffd") == 3


def test_the_path_follows_the_largest_values() -> None:
    matrix = np.full((3, 8), -1.0)
    matrix[0, :2] = matrix[1, 2:5] = matrix[2, 5:] = 1.0
    assert start_steps(matrix) == [0, 2, 5]
    assert start_steps(np.zeros((1, 1))) == [0]
    # more rows than columns: several begin at once
    assert start_steps(np.eye(4)[:, :2])[0] == 0


def test_heads_are_normalised_and_smoothed() -> None:
    weights = np.random.default_rng(0).random((3, 5, 20)).astype(np.float32)
    matrix = alignment_matrix(weights)
    assert matrix.shape == (5, 20)
    np.testing.assert_allclose(alignment_matrix(7 * weights), matrix, atol=1e-5)
    assert alignment_matrix(weights[:, :, :2]).shape == (5, 2)
    assert np.isfinite(alignment_matrix(np.zeros((1, 2, 4), np.float32))).all()


def test_times_of_words() -> None:
    model: Any = ScriptedModel([])
    window: Any = None
    groups = [said(" one two."), [], said(" three")]
    n = sum(map(len, groups))
    logprobs = [np.log(0.5)] * 4 + [np.log(0.8)] * (n - 4)
    prompt = [257, 258, 261]
    found = word_times(model, window, prompt, groups, logprobs, "en", 3.0)
    assert [[word.text for word in each] for each in found] == [[" one", " two."], [], [" three"]]
    one, two = found[0]
    assert abs(one.probability - 0.5) < 1e-6
    assert abs(two.probability - 0.8) < 1e-6
    # 80 ms an id; smoothing moves an edge by a step or two
    assert abs(one.start) < 0.05
    assert abs(two.start - 4 * 0.08) < 0.1
    assert abs(found[2][0].start - 9 * 0.08) < 0.1
    assert word_times(model, window, prompt, [[], []], [], "en", 3.0) == [[], []]


def test_words_beside_pauses_are_shortened() -> None:
    spoken = [
        TranscriptWord(" a", 0.0, 2.0, 1.0),
        TranscriptWord(" b", 2.0, 2.2, 1.0),
        TranscriptWord(" c.", 2.2, 6.0, 1.0),
        TranscriptWord(" D", 6.0, 6.2, 1.0),
        TranscriptWord(" e", 6.2, 6.4, 1.0),
    ]
    most = _longest(spoken)
    assert abs(most - 0.4) < 1e-9
    found = _shortened(spoken, most)
    assert [(round(w.start, 1), round(w.end, 1)) for w in found[:3]] == [
        (1.6, 2.0),
        (2.0, 2.2),
        (2.2, 2.6),
    ]
    assert _longest([]) == np.inf

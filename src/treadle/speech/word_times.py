"""Times of words, from the weights with which the decoder attended to the sound.

Some cross-attention heads attend to the place in the sound where the next word is spoken. Their
weights, normalised and smoothed, are a matrix of ids by time; dynamic time warping (Sakoe and
Chiba, 1978) finds the path through it. Source of the heads: the model's file, or
``alignment_heads``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from treadle.speech.token_rules import STEP_S
from treadle.speech.transcript import TranscriptWord
from treadle.speech.words import cut_words

if TYPE_CHECKING:
    from treadle.speech.model import EncodedWindow, SpeechModel

MEDIAN_WIDTH = 7  # of the smoothing along time, in steps of 20 ms
LONGEST_S = 0.7  # bound of the words' median length
SENTENCE_ENDS = frozenset(".。!！?？")


def word_times(
    model: SpeechModel,
    window: EncodedWindow,
    prompt: Sequence[int],
    groups: Sequence[Sequence[int]],
    logprobs: Sequence[float],
    language: str,
    seconds: float,
) -> list[list[TranscriptWord]]:
    """Return the words of each group of ids, with times in seconds from the window's beginning.

    prompt: ids of ``sot``, language and task.
    groups: consecutive parts of the window's text, without timestamps.
    logprobs: the log-probability of each id of all groups.
    language: code; it decides whether words are separated by spaces.
    seconds: length of the window's sound.
    """
    ids = [id for group in groups for id in group]
    if not ids:
        return [[] for _ in groups]
    times = id_times(model, window, prompt, ids, seconds)
    made: list[list[TranscriptWord]] = []
    at = 0
    for group in groups:
        words: list[TranscriptWord] = []
        for span in cut_words(group, model.tokenizer, language):
            first = at + span.first
            last = at + span.last
            odds = float(np.exp(logprobs[first:last]).mean())
            words.append(TranscriptWord(span.text, times[first], times[last], odds))
        made.append(words)
        at += len(group)
    most = _longest([word for words in made for word in words])
    return [_shortened(words, most) for words in made]


def id_times(
    model: SpeechModel,
    window: EncodedWindow,
    prompt: Sequence[int],
    ids: Sequence[int],
    seconds: float,
) -> list[float]:
    """Return the seconds, from the window's beginning, at which each of ``ids`` begins and, as one
    more item, at which the last one ends. ``prompt``, ``seconds``: as in ``word_times``.
    """
    special = model.config.special
    begin = [*prompt, special.no_timestamps]
    weights = model.alignment(window, [*begin, *ids, special.eot])
    n_steps = max(1, min(round(seconds / STEP_S), weights.shape[2]))
    # Row i has the weights from which id i + 1 was predicted.
    matrix = alignment_matrix(weights[:, :, :n_steps])[len(begin) - 1 : -1]
    return [step * STEP_S for step in start_steps(matrix)]


def alignment_matrix(weights: np.ndarray) -> np.ndarray:
    """Return the mean of several heads' weights, f32 ``[n_heads, n_ids, n_steps]``, each normalised
    over the ids and smoothed over time: f64 ``[n_ids, n_steps]``.
    """
    totals = weights.sum(axis=2, keepdims=True, dtype=np.float64)
    shares = weights / np.maximum(totals, 1e-30)
    # If all ids have equal weights, the deviation is only rounding: keep it from being amplified.
    deviation = np.maximum(shares.std(axis=1, keepdims=True), 1e-8)
    normal = (shares - shares.mean(axis=1, keepdims=True)) / deviation
    half = MEDIAN_WIDTH // 2
    if normal.shape[2] > half:
        padded = np.pad(normal, ((0, 0), (0, 0), (half, half)), mode="reflect")
        around = np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_WIDTH, axis=2)
        normal = np.median(around, axis=3)
    mean: np.ndarray = normal.mean(axis=0)
    return mean


def start_steps(matrix: np.ndarray) -> list[int]:
    """Return for each row the first column of the path through ``matrix`` ``[n, n_steps]`` with the
    largest sum. A path goes from the first to the last corner, by steps to the next row, to the
    next column, or to both.
    """
    n_rows, n_columns = matrix.shape
    # By diagonals: the cells of one depend only on the two diagonals before it.
    total = np.full((n_rows + 1, n_columns + 1), -np.inf)
    total[0, 0] = 0.0
    came = np.zeros((n_rows + 1, n_columns + 1), np.int8)  # 0: both, 1: row, 2: column
    for d in range(2, n_rows + n_columns + 1):
        i = np.arange(max(1, d - n_columns), min(n_rows, d - 1) + 1)
        j = d - i
        choices = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        best = choices.argmax(axis=0)
        came[i, j] = best
        total[i, j] = matrix[i - 1, j - 1] + choices[best, np.arange(len(i))]
    starts = [0] * n_rows
    row, column = n_rows, n_columns
    while row > 0 and column > 0:
        starts[row - 1] = int(column) - 1
        move = came[row, column]
        row -= move != 2
        column -= move != 1
    return starts


def _longest(words: Sequence[TranscriptWord]) -> float:
    """Return the most seconds that a word may take: twice the median length of ``words``, or twice
    LONGEST_S if that is less; infinity if no word has a length.
    """
    lengths = [word.end - word.start for word in words if word.end > word.start]
    return 2 * min(LONGEST_S, float(np.median(lengths))) if lengths else np.inf


def _shortened(words: Sequence[TranscriptWord], most: float) -> list[TranscriptWord]:
    """Return ``words`` with those of more than ``most`` seconds cut to that length if they begin or
    end a sentence or the list: an aligned word includes the adjacent pause. At a sentence's end the
    pause is after the word, at its beginning before it.
    """
    made: list[TranscriptWord] = []
    for i, word in enumerate(words):
        start = word.start
        end = word.end
        if end - start > most:
            if word.text.strip()[-1:] in SENTENCE_ENDS or i + 1 == len(words):
                end = start + most
            elif i == 0 or words[i - 1].text.strip()[-1:] in SENTENCE_ENDS:
                start = end - most
        made.append(TranscriptWord(word.text, start, end, word.probability))
    return made

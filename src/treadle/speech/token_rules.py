"""Rules of the next token: suppressed tokens, and the order of timestamps.

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), section
4.5, and the behaviour of its published decoder. Timestamps come in pairs, the end of a segment and
the beginning of the next one; they never decrease; the first one is at most ``MAX_INITIAL_S``. If
all timestamps together are more probable than any text token, a timestamp must be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.speech.config import SpeechConfig

STEP_S = 0.02
"""Seconds from one timestamp token to the next."""
MAX_INITIAL_S = 1.0
GROUP = 64  # values in one group of ``largest_places``


class TimestampRules:
    """Masks the logits of tokens that may not come next. ``timestamps``: whether texts have
    timestamps; otherwise these are all forbidden.
    """

    def __init__(self, config: SpeechConfig, *, timestamps: bool) -> None:
        special = config.special
        # An id of -1 is of a token that the vocabulary lacks.
        self._eot = special.eot
        self._begin = special.timestamp_begin
        self._timestamps = timestamps and 0 <= self._begin < config.n_vocab
        self._max_initial = round(MAX_INITIAL_S / STEP_S)
        never = {*config.suppress, special.sot, special.sot_prev, special.sot_lm}
        never |= {special.no_speech, special.no_timestamps, special.translate, special.transcribe}
        never |= {*special.languages.values()}
        never.discard(special.eot)
        self._never = self._ids(never, config.n_vocab)
        self._not_first = self._ids(config.begin_suppress, config.n_vocab)

    @staticmethod
    def _ids(ids: set[int] | Sequence[int], n_vocab: int) -> np.ndarray:
        return np.array(sorted(id for id in ids if 0 <= id < n_vocab), np.intp)

    def apply(self, logits: np.ndarray, texts: Sequence[Sequence[int]]) -> None:
        """Set the logits of forbidden tokens, f32 ``[n_rows, n_vocab]``, to -inf, in place.
        ``texts``: the ids that each row has written after its prompt.
        """
        logits[:, self._never] = -np.inf
        if not self._timestamps and self._begin >= 0:
            logits[:, self._begin :] = -np.inf
        for row, ids in zip(logits, texts, strict=True):
            if not ids:
                row[self._not_first] = -np.inf
            if self._timestamps:
                self._order(row, ids)

    def _order(self, row: np.ndarray, ids: Sequence[int]) -> None:
        """Set the logits of tokens that would violate the order of timestamps to -inf, in place.
        ``row``: the logits ``[n_vocab]`` of one row; ``ids``: its text so far.
        """
        begin = self._begin
        if not ids:
            row[:begin] = -np.inf
            row[begin + self._max_initial + 1 :] = -np.inf
            return
        ends_with = ids[-1] >= begin
        has_pair = ends_with and (len(ids) < 2 or ids[-2] >= begin)
        if has_pair:
            row[begin:] = -np.inf  # after a pair, text must follow
            return
        if ends_with:
            row[: self._eot] = -np.inf  # the pair's second timestamp, or the end token
        last = max((id for id in ids if id >= begin), default=begin - 1)
        row[begin : last + (not ends_with)] = -np.inf
        if _sum_of_logs(row[begin:]) > row[:begin].max():
            row[:begin] = -np.inf


def _sum_of_logs(logits: np.ndarray) -> float:
    """Return the logarithm of the sum of exponentials of the logits ``[n]``; -inf if there are
    none, or all are -inf.
    """
    most = logits.max(initial=-np.inf)
    if most == -np.inf:
        return -np.inf
    return float(most + np.log(np.exp(logits - most).sum()))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of each row of logits: f32 ``[n_rows, n_vocab]``, as given."""
    return np.asarray(logits - log_sums(logits)[:, None])


def log_sums(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of the sum of exponentials of each row of f32 ``[n_rows, n_vocab]``: f32
    ``[n_rows]``. A logit minus its row's result is a log-probability.
    """
    most = logits.max(axis=1)
    shifted = logits - most[:, None]
    return np.asarray(most + np.log(np.exp(shifted, out=shifted).sum(axis=1)))


def largest_places(rows: np.ndarray, n: int) -> np.ndarray:
    """Return the indices of the ``n`` largest values of each row, in any order: ``[n_rows, n]``
    from ``[n_rows, width]``.

    Faster than ``argpartition`` of whole rows: it first finds the n groups of values with the
    largest maxima, which contain the n largest values.
    """
    width = rows.shape[1]
    n_groups = width // GROUP
    if n_groups < n:
        return np.argpartition(rows, -n)[:, -n:]
    whole = n_groups * GROUP  # a group is every n_groups-th value
    tops = rows[:, :whole].reshape(len(rows), GROUP, n_groups).max(axis=1)
    groups = np.argpartition(tops, -n)[:, -n:, None]
    inside = np.arange(0, whole, n_groups)
    near = (groups + inside).reshape(len(rows), -1)
    tail = np.broadcast_to(np.arange(whole, width), (len(rows), width - whole))
    near = np.concatenate([near, tail], axis=1)
    found = np.argpartition(np.take_along_axis(rows, near, 1), -n)[:, -n:]
    return np.take_along_axis(near, found, 1)

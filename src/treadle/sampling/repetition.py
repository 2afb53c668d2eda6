"""Repetition samplers: repeat, frequency and presence penalties; DRY and its sequence breakers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from treadle.sampling.candidates import Candidates, Doubles, Ints

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""A token that begins a sequence breaker, and the tokens that may follow to complete it."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_LONGEST_TAIL = 20  # tokens of a breaker after its first; more would be compared at every token


class Vocabulary(Protocol):
    """The tokenizer methods that DRY needs to find its sequence breakers."""

    @property
    def n_vocab(self) -> int:
        """Number of tokens."""

    def token_bytes(self, id: int, /) -> bytes:
        """Return the text of one token, as bytes."""

    def encode(self, text: str, /, *, bos: bool | None = None) -> list[int]:
        """Return the tokens of a text. ``bos``: whether to begin with the BOS token; None: as the
        model's file says.
        """


def penalties(
    c: Candidates, window: Sequence[int], repeat: float, frequency: float, presence: float
) -> Candidates:
    """Lower the logits of the tokens in ``window``, the last ones of the text.

    A positive logit is divided by ``repeat``, any other multiplied by it (dividing all, as in
    Keskar et al. 2019, would favour tokens with negative logits). Then
    ``count * frequency + presence`` is subtracted, where ``count`` is how often the token occurs in
    ``window``.
    """
    tokens, counts = np.unique(np.asarray(window, np.intp), return_counts=True)
    at, which = _find(c, tokens)
    old = c.logits[at].astype(np.float64)
    new = np.where(old <= 0, old * repeat, old / repeat) - (counts[which] * frequency + presence)
    return _replace(c, at, new)


def dry(
    c: Candidates,
    window: Sequence[int],
    multiplier: float,
    base: float,
    allowed_length: int,
    breakers: Breakers,
) -> Candidates:
    """Subtract ``multiplier * base ** (L - allowed_length)`` from the logits of tokens that would
    repeat a sequence of ``window``, the last tokens of the text.

    L is the length of the longest sequence, at least ``allowed_length``, that ends ``window``,
    occurs in it before, and was followed there by the token; it does not cross one of ``breakers``
    (``find_breakers``).
    """
    n = len(window)
    limit = _since_breaker(window, breakers)
    if n <= allowed_length or limit < allowed_length:
        return c
    # Cap on the exponent, so that base ** exponent stays below float32's maximum.
    exponent_max = int(math.log(_FLOAT32_MAX) / math.log(base)) if base > 1.000001 else 0
    history = np.asarray(window, np.intp)
    lengths = _repeats(history, min(limit, allowed_length + exponent_max))
    at = np.flatnonzero(lengths >= allowed_length)
    longest: dict[int, int] = {}
    for token, length in zip(history[at + 1].tolist(), lengths[at].tolist(), strict=True):
        if () not in breakers.get(token, ()):  # a breaker itself may always be repeated
            longest[token] = max(length, longest.get(token, 0))
    tokens = np.array(sorted(longest), np.intp)
    exponents = np.array([longest[token] - allowed_length for token in tokens.tolist()])
    at, which = _find(c, tokens)
    taken = np.minimum(multiplier * float(base) ** exponents[which], _FLOAT32_MAX)
    return _replace(c, at, c.logits[at] - taken)


def _repeats(history: Ints, cap: int) -> Ints:
    """Return, for each position of ``history`` but the last, how many tokens up to it equal as many
    at the history's end, at most ``cap``.

    All positions advance together, and drop out at their first difference.
    """
    n = len(history)
    lengths = np.zeros(n - 1, np.intp)
    at = np.arange(n - 1)
    for length in range(cap):
        at = at[at >= length]
        at = at[history[at - length] == history[n - 1 - length]]
        if not len(at):
            break
        lengths[at] = length + 1
    return lengths


def _since_breaker(window: Sequence[int], breakers: Breakers) -> int:
    """Return the number of tokens after the last breaker in ``window``; all of them without one."""
    n = len(window)
    for back in range(n) if breakers else ():
        tails = breakers.get(window[n - 1 - back], ())
        following = tuple(window[n - back : n - back + _LONGEST_TAIL])
        matched = [len(t) for t in tails if t == following[: len(t)]]
        if matched:
            return back - max(matched)
    return n


def _find(c: Candidates, tokens: Ints) -> tuple[Ints, Ints]:
    """Find ``tokens`` (sorted) among the candidates. Return the positions of those found in ``c``,
    and for each its index in ``tokens``.
    """
    if c.ids is None:
        which = np.flatnonzero((tokens >= 0) & (tokens < len(c.logits)))
        return tokens[which], which
    at = np.flatnonzero(np.isin(c.ids, tokens))
    return at, np.searchsorted(tokens, c.ids[at])


def _replace(c: Candidates, at: Ints, new: Doubles | npt.NDArray[np.float32]) -> Candidates:
    logits = c.logits.copy()
    with np.errstate(over="ignore"):  # a penalty beyond float32 rules the token out
        logits[at] = new
    return Candidates(logits, c.ids)


_Heads = dict[int, Set[tuple[int, ...]]]
_FOUND: WeakKeyDictionary[Vocabulary, dict[str, _Heads]] = WeakKeyDictionary()
_MOST_FOUND = 128  # texts; limited, because clients of a server choose them
_WHOLE: Set[tuple[int, ...]] = frozenset([()])


def find_breakers(vocabulary: Vocabulary, texts: Sequence[str]) -> Breakers:
    """Return the token sequences that contain one of ``texts``: for the first token of each, the
    token tuples that may follow it to complete one.

    A token that contains the text is followed by the empty tuple; one that ends with the text's
    beginning by the tokens of the remainder. This takes about 2 us per token, once per vocabulary
    and text.
    """
    kept = _FOUND.setdefault(vocabulary, {})
    found = {text: kept[text] for text in texts if text in kept}
    missing = [text for text in texts if text not in found]
    if missing:
        pieces = [vocabulary.token_bytes(token) for token in range(vocabulary.n_vocab)]
        for text in missing:
            found[text] = _heads(vocabulary, pieces, text.encode())
        _FOUND[vocabulary] = dict(list((kept | found).items())[-_MOST_FOUND:])
    merged: dict[int, set[tuple[int, ...]]] = {}
    for text in texts:
        for token, tails in found[text].items():
            merged.setdefault(token, set()).update(tails)
    return {token: tuple(tails) for token, tails in merged.items()}


def _heads(vocabulary: Vocabulary, pieces: Sequence[bytes], text: bytes) -> _Heads:
    heads: _Heads = {token: _WHOLE for token, piece in enumerate(pieces) if text in piece}
    for n in range(1, len(text)):
        rest = text[n:].decode(errors="ignore")
        if rest.encode() != text[n:]:
            continue  # within a character: the rest cannot be tokenized
        tail: tuple[int, ...] | None = None
        for token, piece in enumerate(pieces):
            if piece.endswith(text[:n]) and text not in piece:
                if tail is None:
                    tail = tuple(vocabulary.encode(rest, bos=False)[:_LONGEST_TAIL])
                heads[token] = heads.get(token, frozenset()) | {tail}
    return heads

"""How likely the model itself found each token of a text, and what else it might have been."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from treadle.text.tokenizer import Tokenizer

Octets = bytes  # a field below has the name of the type


@dataclass(frozen=True)
class Logprob:
    """A token, and the natural logarithm of its probability. Names are those of OpenAI's API."""

    id: int
    token: str  # its text; U+FFFD for bytes that are only part of a character
    bytes: Octets
    logprob: float

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI's API writes it in JSON: ``bytes`` as a list of numbers; ``id`` is added."""
        return {
            "id": self.id,
            "token": self.token,
            "bytes": list(self.bytes),
            "logprob": self.logprob,
        }


@dataclass(frozen=True)
class TokenLogprob(Logprob):
    """A token of a text, with the likeliest tokens in its place, the most likely first: its own
    among them if it is one of those.
    """

    top_logprobs: tuple[Logprob, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """See ``Logprob.as_dict``."""
        return super().as_dict() | {"top_logprobs": [top.as_dict() for top in self.top_logprobs]}


def token_logprob(logits: np.ndarray, token: int, n_top: int, tokenizer: Tokenizer) -> TokenLogprob:
    """``token`` and its ``n_top`` alternatives under the softmax of ``logits`` ``[n_vocab]``."""
    x = logits.astype(np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())

    def fields(token: int) -> tuple[int, str, bytes, float]:
        raw = tokenizer.token_bytes(token)
        return token, raw.decode("utf-8", "replace"), raw, float(x[token])

    top = tuple(Logprob(*fields(int(i))) for i in likeliest(x, n_top))
    return TokenLogprob(*fields(token), top)


def likeliest(x: np.ndarray, n: int) -> np.ndarray:
    """Indices of the ``n`` largest values, the largest first; of equal ones the lower index."""
    if not n:
        return np.zeros(0, np.int64)
    least = np.partition(x, len(x) - n)[len(x) - n]
    found = np.flatnonzero(x >= least)
    return found[np.argsort(-x[found], kind="stable")][:n]

"""Log-probabilities of output tokens and of their alternatives, by the model's own logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.engine.logits import N_TOP, LogitsBatch
from treadle.errors import NotFiniteError
from treadle.sampling.candidates import largest

if TYPE_CHECKING:
    from treadle.engine.logits import LogitsRow
    from treadle.tokenizer.tokenizer import Tokenizer

Octets = bytes  # a field below shadows the type's name


@dataclass(frozen=True)
class Logprob:
    """A token and its log-probability (natural). Names are those of OpenAI's API."""

    id: int
    token: str  # its text; U+FFFD for bytes that are only part of a character
    bytes: Octets
    logprob: float

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of OpenAI's API, with ``bytes`` as a list of numbers, plus ``id``."""
        return {
            "id": self.id,
            "token": self.token,
            "bytes": list(self.bytes),
            "logprob": self.logprob,
        }


@dataclass(frozen=True)
class TokenLogprob(Logprob):
    """An output token with the likeliest tokens at its position, best first. It is itself one of
    them if likely enough.
    """

    top_logprobs: tuple[Logprob, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of OpenAI's API, with the alternatives as ``top_logprobs``."""
        return super().as_dict() | {"top_logprobs": [top.as_dict() for top in self.top_logprobs]}


def token_logprob(row: LogitsRow, token: int, n_top: int, tokenizer: Tokenizer) -> TokenLogprob:
    """Return the log-probability of ``token`` under the softmax of a row of logits, with the
    ``n_top`` likeliest tokens there, without tokens that are ruled out. Raises NotFiniteError.
    """
    found, log_total = _likeliest(row, n_top)
    own = found[token] if token in found else float(row.take([token])[0])

    def fields(token: int, logit: float) -> tuple[int, str, bytes, float]:
        raw = tokenizer.token_bytes(token)
        return token, raw.decode("utf-8", "replace"), raw, logit - log_total

    top = tuple(Logprob(*fields(*pair)) for pair in islice(found.items(), n_top))
    return TokenLogprob(*fields(token, own), top)


def row_logprobs(
    logits: np.ndarray, ids: Sequence[int], n_top: int, tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """Return the log-probability of each of ``ids``, by its row of ``logits`` [n, n_vocab], with
    the ``n_top`` likeliest tokens there. Raises NotFiniteError.
    """
    rows = LogitsBatch(lambda: logits, b"", [()] * len(ids), nullcontext())
    pairs = zip(rows, ids, strict=True)
    return [token_logprob(row, id, n_top, tokenizer) for row, id in pairs]


def _likeliest(row: LogitsRow, n: int) -> tuple[dict[int, float], float]:
    """Return the logits of the ``n`` likeliest tokens or more, by id, likeliest first (none of
    -inf); and the log of the sum of all exponentials, to an absolute error of TOTAL_ERROR
    (``kernels/run_state.py``), 4e-6. Raises NotFiniteError.
    """
    if row.raw is not None and n <= N_TOP:
        ids = row.raw.ids.tolist()
        x = row.raw.values.tolist()
        total = row.raw.total
        peak = x[0]
    else:
        whole = row.logits().astype(np.float64)
        at = largest(whole, n)
        ids = at.tolist()
        x = whole[at].tolist()
        peak = float(whole.max())
        total = float(np.exp(whole - peak).sum()) if math.isfinite(peak) else 0.0
    if not math.isfinite(peak):
        raise NotFiniteError("the model's logits are not finite numbers")
    return {i: v for i, v in zip(ids, x, strict=True) if v > -math.inf}, peak + math.log(total)

"""vLLM's token rules: allowed tokens, forbidden words, and a least number of tokens. They run as a
custom sampler, before all other samplers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.server.http.body_fields import Table, read_fields, texts, whole, wrong

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.sampling import Sampling

MAX_WORDS = 1024
MAX_MIN = 2**31 - 1


def token_ids(name: str, value: Any) -> list[int]:
    """Return ``value``, the field ``name``, which must be a list of token ids. Raises ApiError for
    other values.
    """
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise wrong(name, value, "token ids")
    return value


def _words(name: str, value: Any) -> list[str]:
    found = texts(name, value)
    if len(found) > MAX_WORDS:
        raise wrong(name, len(found), f"at most {MAX_WORDS} words")
    return [word for word in found if word]


FIELDS: Table = {
    "allowed_token_ids": token_ids,
    "bad_words": _words,
    "min_tokens": whole(0, MAX_MIN),
    "stop_token_ids": token_ids,
}


@dataclass(frozen=True)
class TokenRules:
    """Rules for the tokens of an output, by token id. ``allowed``: the only tokens that may come,
    None for all; ``bad``: sequences of tokens that must not come; ``n_least``: number of tokens
    that must come before one of ``ends``.

    ``stop``: tokens named by the caller that end the output, as the model's own end tokens do;
    ``mask`` does not use them. ``ends``: all tokens that end the output, of both kinds,
    for ``n_least``.
    """

    allowed: tuple[int, ...] | None = None
    bad: tuple[tuple[int, ...], ...] = ()
    n_least: int = 0
    ends: frozenset[int] = frozenset()
    stop: frozenset[int] = frozenset()

    def applied(self, sampling: Sampling, n_prompt: int) -> Sampling:
        """Return sampling settings with a custom sampler that applies the rules; ``n_prompt``:
        tokens of the prompt, to which they do not apply.
        """
        if self.allowed is None and not self.bad and not self.n_least:
            return sampling
        custom = sampling.custom or ()
        others = custom if isinstance(custom, Sequence) else (custom,)

        def rule(logits: np.ndarray, ids: list[int]) -> np.ndarray:
            return self.mask(logits, ids[n_prompt:])

        return replace(sampling, custom=(rule, *others))

    def mask(self, logits: np.ndarray, written: list[int]) -> np.ndarray:
        """Set forbidden next tokens to -inf in ``logits``, f32 ``[n_vocab]``, in place, and return
        it. ``written``: ids of the output so far.
        """
        if self.allowed is not None:
            kept = logits[list(self.allowed)]
            logits[:] = -np.inf
            logits[list(self.allowed)] = kept
        if len(written) < self.n_least:
            logits[list(self.ends)] = -np.inf
        for *before, last in self.bad:
            if written[len(written) - len(before) :] == before:
                logits[last] = -np.inf
        return logits


def read_rules(body: Any, model: Model) -> TokenRules:
    """Return the token rules in a body's fields. Raises ApiError for invalid fields, TreadleError
    for a text that cannot be tokenized.
    """
    given = read_fields(body, FIELDS)
    for name in ("allowed_token_ids", "stop_token_ids"):
        ids = given.get(name, [])
        n_vocab = model.config.n_vocab
        if ids and not (min(ids) >= 0 and max(ids) < n_vocab):
            raise wrong(name, ids, f"token ids from 0 to {n_vocab - 1}")
    if given.get("allowed_token_ids") == []:
        raise wrong("allowed_token_ids", [], "at least one token id")
    allowed = given.get("allowed_token_ids")
    stop = frozenset(given.get("stop_token_ids", []))
    if not given.keys() - {"stop_token_ids"}:
        return TokenRules(stop=stop)
    return TokenRules(
        None if allowed is None else tuple(allowed),
        tuple(dict.fromkeys(_runs(given.get("bad_words", []), model))),
        given.get("min_tokens", 0),
        model.tokenizer.eog | stop,
        stop,
    )


def _runs(words: Iterable[str], model: Model) -> Iterable[tuple[int, ...]]:
    """Yield the token ids of each of ``words`` twice: as it is tokenized at the beginning of a
    text, and after a blank.
    """
    for word in words:
        for spelt in (word, f" {word.lstrip()}"):
            if ids := model.tokenize(spelt, bos=False, special=False):
                yield tuple(ids)

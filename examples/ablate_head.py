"""The attention heads that an answer needs: `python examples/ablate_head.py "PROMPT" [MODEL]`.

Each head's output is set to zero in turn, and the answer's log-probability is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

import treadle


def without(head: int) -> Callable[[np.ndarray], None]:
    """A patch that sets a head's output to zero: values are [token, head, dim]."""

    def zero(values: np.ndarray) -> None:
        values[:, head] = 0

    return zero


def log_probability(logits: np.ndarray, token: int) -> float:
    top = float(logits.max())
    return float(logits[token]) - top - float(np.log(np.exp(logits - top).sum()))


def losses(model: treadle.Model, ids: list[int]) -> tuple[int, list[tuple[float, int, int]]]:
    """The answer, and what it loses without each head (loss, layer, head), the largest first."""
    logits = model.logits(ids)[-1]
    answer = int(logits.argmax())
    whole = log_probability(logits, answer)
    found = []
    for layer, kind in enumerate(model.config.layers):
        for head in range(kind.n_head if kind.n_head_kv else 0):
            with model.patch({f"L{layer}.attn": without(head)}):
                loss = whole - log_probability(model.logits(ids)[-1], answer)
            found.append((loss, layer, head))
    return answer, sorted(found, reverse=True)


if __name__ == "__main__":
    with treadle.load(*sys.argv[2:3]) as model:
        answer, found = losses(model, model.tokenize(sys.argv[1]))
        print(f"answer: {model.detokenize([answer])!r}")
        for loss, layer, head in found[:8]:
            print(f"layer {layer:2} head {head:2}: {loss:+.3f} without it")

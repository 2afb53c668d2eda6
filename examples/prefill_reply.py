"""Words put into the model's mouth: `python examples/prefill_reply.py [MODEL]`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import treadle


def put_words(words: list[int]) -> Any:
    """A sampler whose first tokens are ``words``, whatever the model thinks; then it is free."""
    n_prompt: int | None = None

    def say_first(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        nonlocal n_prompt
        n_prompt = len(ids) if n_prompt is None else n_prompt
        said = len(ids) - n_prompt
        if said >= len(words):
            return logits
        forced = np.full_like(logits, -np.inf)
        forced[words[said]] = 0
        return forced

    return say_first


if __name__ == "__main__":
    model = treadle.load(*sys.argv[1:2])
    words = model.tokenize("Certainly not! The true capital of France is", bos=False)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    sampling = treadle.Sampling(custom=put_words(words))
    for piece in model.chat(messages, max_tokens=60, sampling=sampling):
        print(piece, end="", flush=True)
    print()

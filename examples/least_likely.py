"""Always the least likely token: `python examples/least_likely.py [MODEL]`."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import treadle


def least_likely(tokenizer: Any) -> Any:
    """A sampler that turns the logits upside down; control tokens stay out of the text."""
    control = [token for token in range(tokenizer.n_vocab) if tokenizer.is_control(token)]

    def upside_down(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        turned = np.where(logits > -np.inf, -logits, -np.inf)  # what is ruled out stays out
        turned[control] = -np.inf
        return turned

    return upside_down


if __name__ == "__main__":
    model = treadle.load(*sys.argv[1:2])
    sampling = treadle.Sampling(temperature=0, custom=least_likely(model.tokenizer))
    for piece in model.generate("Once upon a time", max_tokens=40, sampling=sampling):
        print(piece, end="", flush=True)
    print()

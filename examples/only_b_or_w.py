"""Only words that start with B or W: `python examples/only_b_or_w.py [MODEL]`."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

import treadle


def words_starting_with(letters: str, tokenizer: Any) -> Any:
    """A sampler that rules out every token with a word that starts with another letter."""
    at_start = np.zeros(tokenizer.n_vocab, bool)  # may follow where a word can start
    within = np.zeros(tokenizer.n_vocab, bool)  # may follow where a word goes on
    for token in range(tokenizer.n_vocab):
        text = tokenizer.token_bytes(token).decode(errors="replace")
        words = list(re.finditer(r"[\w']+", text))
        good = [word[0][0].lower() in letters for word in words]
        if tokenizer.is_control(token):
            at_start[token] = within[token] = token in tokenizer.eog
        elif "�" not in text:  # half a character may turn out to be any letter
            at_start[token] = all(good)
            within[token] = all(
                ok or word.start() == 0 for ok, word in zip(good, words, strict=True)
            )

    def only_those(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        last = tokenizer.token_bytes(ids[-1]).decode(errors="replace") if ids else ""
        return np.where(within if re.search(r"[\w']$", last) else at_start, logits, -np.inf)

    return only_those


if __name__ == "__main__":
    model = treadle.load(*sys.argv[1:2])
    sampling = treadle.Sampling(custom=words_starting_with("bw", model.tokenizer))
    for piece in model.generate("Once upon a time, Bob", max_tokens=80, sampling=sampling):
        print(piece, end="", flush=True)
    print()

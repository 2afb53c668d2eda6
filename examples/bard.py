"""Every word contains "bard": `python examples/bard.py [MODEL]`."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np

import treadle


def every_word_contains(part: str, tokenizer: Any, longest: int = 12) -> Any:
    """A sampler that spells ``part`` into each word before it lets the word end."""
    pieces = [
        "" if tokenizer.is_control(token) else tokenizer.token_bytes(token).decode(errors="replace")
        for token in range(tokenizer.n_vocab)
    ]

    def tokens_like(pattern: str) -> np.ndarray:
        # half a character (�) may turn out to be any letter
        return np.array(["�" not in p and bool(re.fullmatch(pattern, p)) for p in pieces])

    # No token may both begin a word and end it: the word would be over before we see it.
    goes_on = tokens_like(r"\w+")
    begins = tokens_like(r"\W*\w*")
    ends_and_begins = tokens_like(r"\w*\W*\w*")
    spells = [
        np.array([piece != "" and part[done:].startswith(piece) for piece in pieces])
        for done in range(len(part))
    ]

    def spell_it(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        text = "".join(pieces[token] for token in ids[-2 * longest :])
        word = re.findall(r"\w*$", text)[0]
        if not word:
            allowed = begins
        elif part in word:
            allowed = ends_and_begins
        elif len(word) < longest and goes_on[logits.argmax()]:
            allowed = goes_on
        else:  # the model would end the word here
            done = next(n for n in range(len(part) - 1, -1, -1) if word.endswith(part[:n]))
            allowed = spells[done]
        return np.where(allowed, logits, -np.inf)

    return spell_it


if __name__ == "__main__":
    model = treadle.load(*sys.argv[1:2])
    sampling = treadle.Sampling(custom=every_word_contains("bard", model.tokenizer))
    for piece in model.generate("Once upon a time", max_tokens=120, sampling=sampling):
        print(piece, end="", flush=True)
    print()

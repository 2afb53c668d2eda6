"""The layer where an answer is decided: `python examples/lens.py "PROMPT" [MODEL]`.

A logit lens reads the states after each layer as if they were the last ones. The answer is decided
where its token becomes the likeliest and stays so.
"""

from __future__ import annotations

import sys

import treadle


def decided(found: treadle.LensLogits, token: int) -> int:
    """The number of the first state from which on the token is the likeliest."""
    ranks = found.ranks(token)[:, -1].tolist()
    return max((i + 1 for i, rank in enumerate(ranks) if rank), default=0)


if __name__ == "__main__":
    with treadle.load(*sys.argv[2:3]) as model:
        found = model.lens(model.tokenize(sys.argv[1]), positions=[-1])
        answer = int(found.best[-1, -1])
        shares = found.probabilities(answer)[:, -1]
        print(f"answer: {found.piece_of(answer)!r}")
        for number, share in zip(found.layers, shares, strict=True):
            best = found.piece_of(int(found.best[number, -1]))
            name = f"after layer {number - 1}" if number else "embeddings"
            print(f"{name:15}  {share:6.1%} the answer, likeliest {best!r}")
        print(f"decided after layer {decided(found, answer) - 1}")

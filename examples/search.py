"""The lines of a file that are nearest in meaning to some words, the nearest first:

python examples/search.py "words" FILE [MODEL]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import treadle


def nearest(words: str, lines: list[str], model: treadle.Model) -> list[tuple[float, str]]:
    """Each line with the cosine of its angle to ``words``: vectors have length 1."""
    vectors = model.embed([words, *lines])
    scores = vectors[1:] @ vectors[0]
    return [(float(scores[i]), lines[i]) for i in np.argsort(-scores)]


if __name__ == "__main__":
    lines = [line for line in Path(sys.argv[2]).read_text("utf-8").splitlines() if line.strip()]
    with treadle.load(*sys.argv[3:4]) as model:
        for score, line in nearest(sys.argv[1], lines, model)[:5]:
            print(f"{score:.3f}  {line}")

"""Speeds of the treadle that this process imports: the part of ``bench/gate.py`` that runs as a
child of it, once for each commit. It uses the public library only, so that older commits run it.

    python bench/gate_speeds.py MODEL --threads 2 --repeats 3 --figures prompt,text,eight

Prompts are pieces of the repository's licence. No two of them begin alike, so that no cached prefix
is reused. Texts are greedy and run to their length. One line of JSON is printed: tokens per second
of each figure (the median of the repeats), or the error as text where this treadle cannot do it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import treadle

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
N_PROMPT = 512
N_BEFORE = 16  # prompt tokens before a text
N_TEXT = 64
N_TOGETHER = 8
CONTEXT = 768
STRIDE = 29  # tokens between the beginnings of two prompts
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


class Speeds:
    """A loaded model, and prompts for it."""

    def __init__(self, model: treadle.Model) -> None:
        self.model = model
        self._ids = model.tokenize(TEXT.read_text("utf-8"))
        self._starts = count(0, STRIDE)

    def next_prompt(self, n: int) -> list[int]:
        """``n`` tokens of the text; each call begins elsewhere, and goes on at the text's start."""
        start = next(self._starts)
        return [self._ids[(start + i) % len(self._ids)] for i in range(n)]

    def prompt(self) -> float:
        """Tokens per second of one prompt, up to its first token."""
        ids = self.next_prompt(N_PROMPT)
        began = time.perf_counter()
        self.model.generate(ids, max_tokens=1, **GREEDY).finish()
        return N_PROMPT / (time.perf_counter() - began)

    def text(self) -> float:
        """Tokens per second of one text, from its first piece to its end."""
        ids = self.next_prompt(N_BEFORE)
        pieces = self.model.generate(ids, max_tokens=N_TEXT, **GREEDY)
        next(pieces)
        began = time.perf_counter()
        n_first = len(pieces.ids)
        pieces.finish()
        return (N_TEXT - n_first) / (time.perf_counter() - began)

    def eight(self) -> float:
        """Tokens per second of eight texts at once, their short prompts included."""
        prompts = [self.next_prompt(N_BEFORE) for _ in range(N_TOGETHER)]
        began = time.perf_counter()
        n_texts = len(list(self.model.generate_many(prompts, max_tokens=N_TEXT, **GREEDY)))
        return n_texts * N_TEXT / (time.perf_counter() - began)


def measure(model: treadle.Model, figures: list[str], repeats: int) -> dict[str, float | str]:
    """Return each figure, after one run that is not counted, or what prevented it."""
    speeds = Speeds(model)
    ways: dict[str, Callable[[], float]] = {
        "prompt": speeds.prompt,
        "text": speeds.text,
        "eight": speeds.eight,
    }
    found: dict[str, float | str] = {}
    for figure in figures:
        try:
            ways[figure]()  # compiles kernels, reads pages of the file
            found[figure] = median(ways[figure]() for _ in range(repeats))
        except Exception as error:  # an older commit's own: the others are measured all the same
            found[figure] = f"{type(error).__name__}: {error}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--figures", required=True)
    given = parser.parse_args()
    with treadle.load(
        given.model, threads=given.threads, context=CONTEXT, n_sequences=N_TOGETHER
    ) as model:
        print(json.dumps(measure(model, given.figures.split(","), given.repeats)))


if __name__ == "__main__":
    main()

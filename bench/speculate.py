"""Drafts from the text itself: an edited copy of the prompt, and a text that repeats nothing.

    python bench/speculate.py MODEL [--tokens 300] [--repeat 3] [--threads 2] [--sequences 1]

What is written is given: a sampler of our own names each id, so a model of random weights does the
work of a real answer. The first task writes the prompt again with every 20th id changed; the second
writes ids whose beginnings were there and went on otherwise, so that every draft is wrong. With and
without drafts in turns. The figures to watch: 1.6 and above for the first, 0.97 for the second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

import treadle

N_PROMPT = 400


def edited(n: int, n_vocab: int, seed: int) -> tuple[list[int], list[int]]:
    """A prompt, and what is to be written behind it."""
    ids = [int(i) for i in np.random.default_rng(seed).integers(3, n_vocab, N_PROMPT)]
    text = [(i + 1) % n_vocab if at % 20 == 19 else i for at, i in enumerate(ids)]
    return ids, (text * (1 + n // N_PROMPT))[:n]


def misleading(n: int, n_vocab: int, seed: int) -> tuple[list[int], list[int]]:
    """The same, where three ids return again and again and are never followed by the same."""
    ids = [int(i) for i in np.random.default_rng(seed).permutation(n_vocab - 10)[: N_PROMPT + n]]
    for at in range(len(ids)):
        if at % 4:
            ids[at] = n_vocab - 1 - at % 4
    return ids[:N_PROMPT], ids[N_PROMPT:]


def writer(text: list[int]) -> Callable[[np.ndarray, list[int]], np.ndarray]:
    """A sampler that writes ``text`` behind the prompt."""

    def choose(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        logits[:] = 0
        logits[text[len(ids) - N_PROMPT]] = 100
        return logits

    return choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sequences", type=int, default=1)
    given = parser.parse_args()
    tasks = {"edited copy": edited, "no repeats": misleading}
    took: dict[tuple[str, bool], list[float]] = {}
    counts: dict[str, tuple[int, int]] = {}
    with treadle.load(
        given.model,
        threads=given.threads,
        context=N_PROMPT + given.tokens + 8,
        n_sequences=given.sequences,
        speculate=True,
    ) as model:
        for repetition in range(given.repeat + 1):  # the first one compiles
            for name, task in tasks.items():
                for drafts in (False, True):
                    model.speculate = drafts
                    texts = []
                    for seed in range(given.sequences):
                        ids, wanted = task(given.tokens, model.config.n_vocab, seed)
                        custom = [writer(wanted)]
                        made = model.generate(
                            ids, max_tokens=given.tokens, temperature=0, custom=custom
                        )
                        texts.append(made)
                    for output in texts:
                        output.begin(look_ahead=float("inf"))
                    began = time.perf_counter()
                    for output in texts:
                        output.finish()
                    seconds = time.perf_counter() - began
                    seconds -= max(output.timings.prefill_s for output in texts)
                    if repetition:
                        took.setdefault((name, drafts), []).append(seconds)
                    if drafts:
                        timings = [output.timings for output in texts]
                        counts[name] = (
                            sum(t.n_drafted for t in timings),
                            sum(t.n_accepted for t in timings),
                        )
    for name in tasks:
        without, with_ = (statistics.median(took[name, drafts]) for drafts in (False, True))
        drafted, accepted = counts[name]
        print(
            f"{name:12} {without:7.2f} s without, {with_:7.2f} s with: "
            f"{without / with_:5.2f} times; {drafted} drafted, {accepted} right"
        )


if __name__ == "__main__":
    main()

"""How far a model's predictions are from float32, by how many tokens a run has, and how far the
first token's log-probabilities move when most of the prompt comes from the cache.

    treadle quantize model.gguf f32.gguf F32 --allow-requantize
    python bench/paths.py model.gguf f32.gguf text.txt [--windows 3] [--runs 512,16,8,4,2,1]

The text is cut into windows of 512 tokens. *KL* is the mean divergence of the predictions at all
positions but each window's first, *top* the share of positions with float32's top token. *Moved*
is the largest change of the log-probability of a token with a probability of 1 % or more, between
a prompt that is read at once and the same prompt whose whole pages were read before.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

import treadle
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS

WINDOW = 512
PAGE = 32
PROBABLE = 0.01
ROWS = 16


def predictions(model: treadle.Model, ids: list[int], run: int) -> np.ndarray:
    """Logits ``[n, n_vocab]`` of a window that is read ``run`` tokens at a time."""
    seq = model.engine.cache.sequence()
    rows = []
    for at in range(0, len(ids), run):
        some = ids[at : at + run]
        rows.append(model.engine.run([BatchItem(seq, some, len(some))]))
    seq.close()
    return np.concatenate(rows)


def divergence(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """KL of each row of logits; few rows at a time, for vocabularies are large."""
    made = []
    for at in range(0, len(want), ROWS):
        p = log_softmax(want[at : at + ROWS])
        q = log_softmax(got[at : at + ROWS])
        made.append((np.exp(p) * (p - q)).sum(-1))
    return np.concatenate(made)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of each row."""
    rows = logits.astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    made: np.ndarray = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    return made


def last(model: treadle.Model, ids: list[int], cached: int) -> np.ndarray:
    """Log-probabilities after ``ids``, of which the first ``cached`` were read before."""
    seq = model.engine.cache.sequence()
    if cached:
        model.engine.run([BatchItem(seq, ids[:cached], 0)])
    row = model.engine.run([BatchItem(seq, ids[cached:], 1)])
    seq.close()
    made: np.ndarray = log_softmax(row)[0]
    return made


def moves(model: treadle.Model, windows: list[list[int]]) -> Iterator[tuple[int, float]]:
    """For prompts of several lengths: tokens behind the whole pages, and how far the
    log-probability of a probable token moves.
    """
    for ids in windows:
        for n in (65, 98, 132, 200, 271, 300, 350, 415):
            cached = (n - 1) // PAGE * PAGE
            fresh = last(model, ids[:n], 0)
            again = last(model, ids[:n], cached)
            probable = fresh > np.log(PROBABLE)
            yield n - cached, float(np.abs(fresh - again)[probable].max())


def main() -> None:
    """Print a line for each size of runs, then how far first tokens move."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("reference")
    parser.add_argument("text")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--runs", default="128,16,8,4,2,1")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--isa", default=None)
    parser.add_argument("--no-moves", action="store_true")
    given = parser.parse_args()
    settings: dict[str, Any] = {"context": WINDOW, "threads": 2}
    reference = treadle.load(given.reference, **settings)
    model = treadle.load(given.model, deterministic=given.deterministic, isa=given.isa, **settings)
    with open(given.text, encoding="utf-8") as file:
        ids = model.tokenize(file.read(), special=False)
    step = max(WINDOW, len(ids) // given.windows)
    tokenizer = model.tokenizer
    first = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    windows = [(first + ids[i * step :])[:WINDOW] for i in range(given.windows)]
    windows = [window for window in windows if len(window) == WINDOW]
    standard = [predictions(reference, window, OUTPUTS) for window in windows]
    reference.close()
    print(f"{given.model}: {len(windows)} windows")
    for run in map(int, given.runs.split(",")):
        kl: list[np.ndarray] = []
        same: list[np.ndarray] = []
        for window, want in zip(windows, standard, strict=True):
            got = predictions(model, window, run)
            kl.append(divergence(want, got)[1:])
            same.append(want.argmax(-1) == got.argmax(-1))
        every = np.concatenate(kl)
        error = every.std() / len(every) ** 0.5
        top = 100 * np.concatenate(same).mean()
        print(f"  {run:3} tokens a run: KL {every.mean():.5f} ± {error:.5f}, top {top:.1f} %")
    if given.no_moves:
        return
    moved = [*moves(model, windows)]
    sizes = [value for _, value in moved]
    print(f"  moved: median {np.median(sizes):.4f}, largest {max(sizes):.4f}, of {len(moved)}")


if __name__ == "__main__":
    main()

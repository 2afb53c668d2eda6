"""One token of several texts together, of a mixture of experts: milliseconds a step.

    python bench/experts_together.py [SHAPE] [FORMAT] [--layers 2] [--texts 1,8,16,32] [--keep FILE]

With tokens of their own the texts choose different experts; with the same ones the same, which the
batch then reads once. A model of random weights is written as ``bench/experts.py`` does; ``--keep``
writes it there, or takes it from there: so two versions of treadle are compared, in turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from experts import N_VOCAB, SHAPES, write

import treadle
from treadle.engine.batch import BatchItem

HELD = 16  # tokens that each text has before


def step(model: treadle.Model, ids: list[list[int]]) -> float:
    """Seconds of a token of each, the median of as many as there are behind those held."""
    engine = model.engine
    seqs = []
    times = []
    for mine in ids:
        seqs.append(engine.cache.sequence())
        engine.run([BatchItem(seqs[-1], mine[:HELD], 1)])
    for at in range(HELD, len(ids[0])):
        begin = time.perf_counter()
        engine.run([BatchItem(seq, [mine[at]], 1) for seq, mine in zip(seqs, ids, strict=True)])
        times.append(time.perf_counter() - begin)
    for seq in seqs:
        seq.close()
    engine.cache.forget()
    return median(times)


def main() -> None:
    """Write, run, tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("format", nargs="?", default="Q4_K")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--texts", default="1,8,16,32")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    counts = [int(n) for n in given.texts.split(",")]
    rng = np.random.default_rng(1)
    ids = rng.integers(300, N_VOCAB, (max(counts), HELD + given.tokens))
    with tempfile.TemporaryDirectory() as folder:
        path = given.keep or Path(folder) / "experts.gguf"
        if not path.exists():
            write(path, given.shape, given.format, given.layers)
        with treadle.load(
            path, threads=given.threads, context=HELD + given.tokens, n_sequences=max(counts)
        ) as model:
            for n in counts:
                own = step(model, ids[:n].tolist())
                same = step(model, np.repeat(ids[:1], n, 0).tolist())
                print(f"{n:3} texts: {own * 1e3:7.1f} ms, the same tokens {same * 1e3:7.1f} ms")


if __name__ == "__main__":
    main()

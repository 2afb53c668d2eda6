"""Many texts at once: threads that each call ``generate``, against the bare engine.

    python bench/many.py [MODEL] [--sequences 32] [--tokens 64] [--prompt 16] [--repeat 3]

Each repetition times, in turns, four ways to write the same number of tokens per sequence: the
engine alone with tokens already known (what ``treadle bench -s`` times; its prompts share batches
too), threads that call ``generate(...).finish()``, threads that read pieces, and ``generate_many``.
Greedy, end of text ruled out. The figure to watch is the share of the engine's own speed: 0.9 and
above.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable

import treadle
from treadle.cli.bench_engines import streams
from treadle.engine.batch import BatchItem


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    n = given.sequences
    context = given.prompt + given.tokens + 1
    with treadle.load(
        given.model, threads=given.threads, context=context, n_sequences=n + 1
    ) as model:
        ids = streams(n, context, model.config.n_vocab)
        prompts = [stream[: given.prompt] for stream in ids]
        settings = {"max_tokens": given.tokens, "temperature": 0, "ignore_eos": True}

        def bare() -> None:
            seqs = [model.engine.cache.sequence() for _ in ids]
            fit = max(model.engine.max_tokens // given.prompt, 1)  # prompts that one run reads
            for at in range(0, n, fit):
                read = zip(seqs[at : at + fit], prompts[at : at + fit], strict=True)
                model.engine.run([BatchItem(seq, prompt) for seq, prompt in read])
            for at in range(given.prompt, given.prompt + given.tokens - 1):
                write = zip(seqs, ids, strict=True)
                model.engine.run([BatchItem(seq, [stream[at]]) for seq, stream in write])
            for seq in seqs:
                seq.close()

        def finish(prompt: list[int]) -> None:
            model.generate(prompt, **settings).finish()

        def read(prompt: list[int]) -> None:
            for _ in model.generate(prompt, **settings):
                pass

        def in_threads(write: Callable[[list[int]], None]) -> None:
            threads = [threading.Thread(target=write, args=(prompt,)) for prompt in prompts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        ways: dict[str, Callable[[], object]] = {
            "the engine alone": bare,
            "threads, finish": lambda: in_threads(finish),
            "threads, pieces": lambda: in_threads(read),
            "generate_many": lambda: list(model.generate_many(prompts, **settings)),
        }
        took: dict[str, list[float]] = {name: [] for name in ways}
        for repetition in range(given.repeat + 1):  # the first one compiles
            for name, way in ways.items():
                model.engine.cache.forget()
                began = time.perf_counter()
                way()
                if repetition:
                    took[name].append(time.perf_counter() - began)
        alone = statistics.median(took["the engine alone"])
        for name, seconds in took.items():
            median = statistics.median(seconds)
            print(f"{name:18} {n * given.tokens / median:8.1f} tok/s  {alone / median:5.2f}")


if __name__ == "__main__":
    main()

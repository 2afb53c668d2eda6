"""Cost of attention for a token that is being written, beside a chunk of somebody's prompt.

    python bench/mixed.py [MODEL] [--depth 16384] [--chunk 511] [--repeats 25] [--threads 2]

Without MODEL, the small one inside the package. Three batches take turns: the chunk alone, the
token alone, far into its text, and both. The token's sequence holds pages that were never written:
what lies in them has no say in how long it takes. Milliseconds of all layers' attention steps, by
the clock and of the processor: medians, and least to most.
"""

from __future__ import annotations

import argparse
import statistics
import time

import treadle
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine

WAYS = "chunk alone", "token alone", "together"


def parts_of(engine: Engine, depth: int, chunk: int) -> dict[str, list[BatchItem]]:
    """The batch of each way."""
    deep = engine.cache.sequence()
    fresh = engine.cache.sequence()
    for at in range(0, depth, engine.max_tokens):
        engine.cache.extend(deep, [5] * min(engine.max_tokens, depth - at))
        engine.cache.commit(deep)
    both = [BatchItem(fresh, [7] * chunk, 0), BatchItem(deep, [7])]
    return dict(zip(WAYS, (both[:1], both[1:], both), strict=True))


def attention_s(engine: Engine, parts: list[BatchItem]) -> tuple[float, float]:
    """Seconds of one run's attention steps, and of the processor's; its tokens are forgotten."""
    held = [len(part.seq) for part in parts]
    spent = 0.0
    worked = 0.0
    ready = engine._plan_of(parts)
    engine._prepare(ready, parts)
    for i, step in enumerate(ready.plan):
        if step.label.rpartition(".attn")[2] in ("", ".few", ".merge") and ".attn" in step.label:
            began = time.perf_counter()
            before = time.process_time()
            engine.device.run(ready.program, range(i, i + 1))
            spent += time.perf_counter() - began
            worked += time.process_time() - before
    for part, n in zip(parts, held, strict=True):
        engine.truncate(part.seq, n)
    return spent, worked


def told(seconds: list[float]) -> str:
    low = min(seconds)
    middle = statistics.median(seconds)
    high = max(seconds)
    return f"{middle * 1e3:8.2f} ({low * 1e3:.2f} to {high * 1e3:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--depth", type=int, default=16384)
    parser.add_argument("--chunk", type=int, default=511)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    context = given.depth + given.chunk + 1
    with treadle.load(given.model, threads=given.threads, context=context, n_sequences=2) as model:
        batches = parts_of(model.engine, given.depth, given.chunk)
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for i in range(given.repeats + 1):
            for way, parts in batches.items():
                seconds = attention_s(model.engine, parts)
                if i:  # the first compiles
                    taken[way].append(seconds)
        for which, what in enumerate(("by the clock", "of the processor")):
            print(what)
            for way, times in taken.items():
                print(f"  {way:12} {told([one[which] for one in times])}")
            turns = list(zip(*taken.values(), strict=True))
            share = statistics.median((b[which] - c[which]) / t[which] for c, t, b in turns)
            print(f"  the token beside the chunk costs {share:.2f} of the token alone")


if __name__ == "__main__":
    main()

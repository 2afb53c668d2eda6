"""Tokens read and seconds of questions under one system prompt, for models whose layers keep a
state: a state can be reused only where it was kept.

    nice python bench/hybrid_prefix.py [MODEL] [--system 2000] [--questions 10] [--threads 2]

Without MODEL: Qwen 3.5's layer shapes cut to 8 layers, with random weights. The rows: nothing is
reused; nobody says where the system prompt ends (raw prompts: the second shows where they part);
the end of the system prompt is known, as it is in chats.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
from hybrids import write

import treadle

N_QUESTION = 24
WAYS: dict[str, dict[str, Any]] = {
    "nothing reused": {"cache_prompt": False},
    "where prompts part": {},
    "end of the system prompt": {"system_end": True},
}


def measure(model: treadle.Model, system: list[int], n: int, way: dict[str, Any]) -> None:
    """Print the tokens read and the median seconds to the first token."""
    settings = {**way, **({"system_end": len(system)} if "system_end" in way else {})}
    rng = np.random.default_rng(2)
    reads = []
    seconds = []
    with model.engine.lock:
        model.engine.cache.forget()
    for _ in range(n):
        question = rng.integers(3, model.config.n_vocab, N_QUESTION).tolist()
        began = perf_counter()
        made = model.generate([*system, *question], max_tokens=1, **settings)
        made.finish()
        seconds.append(perf_counter() - began)
        reads.append(made.timings.n_prompt - made.timings.n_cached)
    told = " ".join(map(str, reads[:3]))
    print(
        f"  read {sum(reads):7} tokens ({told} ...), {sum(seconds):7.2f} s in all, "
        f"{np.median(seconds[1:]):.3f} s a question after the first"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt")
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        path = Path(given.model or Path(folder) / "qwen35.gguf")
        if not given.model:
            write("qwen35", "Q8_0", path)
        context = given.system + 64
        with treadle.load(path, threads=given.threads, context=context) as model:
            if not model.engine.cache.states:
                parser.error(f"{path}: no layer keeps a state")
            ids = np.random.default_rng(1).integers(3, model.config.n_vocab, given.system).tolist()
            model.generate(ids, max_tokens=1).finish()  # compiles
            for name, way in WAYS.items():
                print(name)
                measure(model, ids, given.questions, way)


if __name__ == "__main__":
    main()

"""Real models: speed beside llama-cpp-python's, and distance from float32.

::

    python bench/real.py --rival PYTHON                # tables for docs/performance.md and README
    python bench/real.py --rival PYTHON --only kl      # or: speed

PYTHON is the interpreter of an environment with llama-cpp-python. The models are those of
tools/fetch_models.py, and others that are named: ``--model NAME=FILE``.

Speed: a prompt of 512 tokens of real text, and 128 tokens behind it, greedily given. treadle and
llama-cpp-python take turns with the same number of threads; medians of all rounds, and the median
of the rounds' ratios. KL: over the windows of tests/real/texts.txt, each read as one prompt, and
token by token; float32 is transformers on the dequantised weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rival import Rival
from speeds import Mine, Theirs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import treadle  # noqa: E402
from tests.real.truth import (  # noqa: E402
    N_WINDOW,
    compare,
    float32_logits,
    float32_model,
    texts,
)
from tools.fetch_models import fetch  # noqa: E402
from tools.real_values import LLAMA_CPP  # noqa: E402
from treadle.engine.batch import BatchItem  # noqa: E402

N_PROMPT = 512
N_TEXT = 128
KINDS = {"smollm2": "SmolLM2 135M Instruct, Q4_1", "gemma3": "Gemma 3 270M, Q4_K_M"}


def speed(models: dict[str, Path], python: str, threads: int, rounds: int) -> None:
    """Print a table: tokens per second of each, and treadle's as a multiple of llama.cpp's."""
    print(f"\n{threads} threads, medians of {rounds} rounds in turns, tokens per second\n")
    print("| model | prompt: treadle | llama-cpp-python | ratio ", end="")
    print("| text: treadle | llama-cpp-python | ratio |\n|---|---|---|---|---|---|---|")
    for name, path in models.items():
        mine = Mine(path, threads)
        theirs = Theirs(python, path, threads)
        ids = mine.model.tokenize("\n".join(texts().values()))[:N_PROMPT]
        both = {"mine": mine, "theirs": theirs}
        for engine in both.values():
            engine.run(ids, 4)  # kernels, pages of the file
        found: dict[str, list[list[float]]] = {"mine": [], "theirs": []}
        for turn in range(rounds):
            for engine in sorted(both, reverse=bool(turn % 2)):
                prompt_s, token_s = both[engine].run(ids, N_TEXT)
                found[engine].append([N_PROMPT / prompt_s, 1 / token_s])
                print(f"{name} {engine} {found[engine][-1]}", file=sys.stderr)
        cells = []
        for which in range(2):
            pairs = [
                (a[which], b[which]) for a, b in zip(found["mine"], found["theirs"], strict=True)
            ]
            ours, others = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            cells += [f"**{ours:.0f}**", f"{others:.0f}", f"{ratio:.2f}"]
        print(f"| {KINDS.get(name, name)} | {' | '.join(cells)} |", flush=True)
        mine.model.close()
        theirs.program.process.kill()


def one_by_one(model: treadle.Model, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits after each token, read alone."""
    with closing(model.engine.cache.sequence()) as sequence:
        return np.stack([model.engine.run([BatchItem(sequence, [token])])[0] for token in ids])


def kl(models: dict[str, Path], python: str) -> None:
    """Print a table: KL from float32 in nats, and how often the likeliest token is float32's."""
    print("\nKL from float32 in nats (share of positions with float32's likeliest token)\n")
    print("| model | positions | prompt: treadle | llama-cpp-python ", end="")
    print("| token by token: treadle | llama-cpp-python |\n|---|---|---|---|---|---|")
    for name, path in models.items():
        truth = float32_model(path)
        found: dict[str, list[tuple[float, float]]] = {}
        with (
            treadle.load(path, threads=2, context=512) as model,
            tempfile.TemporaryDirectory() as to,
        ):
            rival = Rival(python, LLAMA_CPP, path, Path(to) / "logits.npy")
            n = 0
            for output in texts().values():
                ids = model.tokenize(output)[:N_WINDOW]
                n += len(ids)
                expected = float32_logits(truth, ids)
                for kind, logits in (
                    ("prompt", model.logits(ids)),
                    ("prompt llama", np.load(rival.ask(ids, False))),
                    ("text", one_by_one(model, ids)),
                    ("text llama", np.load(rival.ask(ids, True))),
                ):
                    found.setdefault(kind, []).append(compare(expected, logits))
            rival.process.kill()
        cells = [
            "{:.4f} ({:.1%})".format(*np.mean(found[kind], axis=0))
            for kind in ("prompt", "prompt llama", "text", "text llama")
        ]
        print(f"| {KINDS.get(name, name)} | {n} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rival", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--only", choices=("speed", "kl"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    models = {name: fetch(name) for name in KINDS}
    models |= {name: Path(path) for name, _, path in (m.partition("=") for m in options.model)}
    if options.only != "kl":
        speed(models, options.rival, options.threads, options.rounds)
    if options.only != "speed":
        kl(models, options.rival)


if __name__ == "__main__":
    main()

"""Cost of adapters: a batch of texts, each with one of several adapters, against the same batch
without, in turns.

    nice python bench/lora.py MODEL [--adapters 3] [--rank 16] [--sequences 8] [--rounds 9]

Random adapters of every matrix of attention, FFN and experts, in F16, are written to a temporary
folder. Each round times the writing of one token a text, and a prompt of 512 tokens with one
adapter. The figures to watch: 15 % more for a batch of eight texts with three adapters of rank 16,
and nothing for a batch without, in a model that has some. The machine must be quiet.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import treadle
from treadle.api.model import Model
from treadle.engine.batch import BatchItem
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.kvcache.prefix_tree import Lora

PROMPT = 512
TOKENS = 24
MATRICES = re.compile(
    r"blk\.\d+\.(attn_(q|k|v|qkv|output)|ffn_(gate|up|down|gate_up)(_exps)?)\.weight"
)


def write_adapter(model: str, path: Path, rank: int, seed: int) -> Path:
    """As llama.cpp writes them; what is added is about a tenth of each product."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path)
    with open_gguf(model) as gguf:
        writer.add("general.architecture", gguf.metadata["general.architecture"])
        said = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.1 * rank}
        for key, value in said.items():
            writer.add(key, value)
        for name, tensor in gguf.tensors.items():
            if MATRICES.fullmatch(name):
                *experts, m, k = tensor.shape
                for side, shape in (("a", (*experts, rank, k)), ("b", (*experts, m, rank))):
                    data = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
                    writer.add_tensor(f"{name}.lora_{side}", shape, "F16", data.astype(np.float16))
    writer.write()
    return path


def seconds(model: Model, loras: list[Lora]) -> tuple[float, float]:
    """Of one token of each text, the median; and of a prompt with the last one's adapters."""
    engine = model.engine
    times = []
    ids = [i % model.config.n_vocab for i in range(PROMPT)]
    seqs = [engine.cache.sequence((), lora) for lora in loras]
    # Each text has other tokens, as others would choose the same experts.
    engine.run([BatchItem(seq, ids[16 * i : 16 * (i + 1)]) for i, seq in enumerate(seqs)])
    for at in range(TOKENS):
        began = time.perf_counter()
        engine.run([BatchItem(seq, [ids[16 * i + at]]) for i, seq in enumerate(seqs)])
        times.append(time.perf_counter() - began)
    for seq in seqs:
        seq.close()
    engine.cache.forget()
    alone = engine.cache.sequence((), loras[-1])
    began = time.perf_counter()
    engine.run([BatchItem(alone, ids)])
    prompt = time.perf_counter() - began
    alone.close()
    engine.cache.forget()
    return statistics.median(times), prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        files = [
            write_adapter(given.model, Path(folder, f"{i}.gguf"), given.rank, i)
            for i in range(given.adapters)
        ]
        n_bytes = sum(file.stat().st_size for file in files)
        settings = {"context": 1024, "n_sequences": given.sequences + 1}
        with treadle.load(given.model, lora=files, threads=given.threads, **settings) as model:
            each: list[Lora] = [((i % given.adapters, 1.0),) for i in range(given.sequences)]
            ways = {"without": [()] * given.sequences, "with": each}
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
            for i in range(given.rounds + 1):
                for name, loras in ways.items():
                    took = seconds(model, loras)
                    if i:  # the first compiles
                        found[name].append(took)
    print(f"{given.adapters} adapters of rank {given.rank}, {n_bytes >> 20} MiB in all")
    for which, what in enumerate((f"a token of {given.sequences} texts", f"{PROMPT} tokens")):
        without, with_ = (
            statistics.median(one[which] for one in found[name]) for name in ("without", "with")
        )
        more = with_ / without - 1
        print(f"{what}: {1e3 * without:.2f} ms, with {1e3 * with_:.2f} ms ({more:+.1%})")


if __name__ == "__main__":
    main()

"""Cost of recurrent layers: the share of each kind of step, of a prompt of 512 tokens and of a
token written, in real layer shapes cut to 8 layers, with random weights.

    nice python bench/hybrids.py [--models mamba2,granitehybrid] [--format Q8_0] [--threads 2]
                                 [--rival PYTHON]

``--rival``: an interpreter that has llama_cpp; then both read the prompt and write in turns. The
machine must be quiet: shares hold on a busy one, speeds do not.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from random_model import QWEN35_STATES, random_rows, tensors_of
from speeds import Mine, Theirs

import treadle
from treadle.engine.batch import BatchItem
from treadle.files.gguf import GGUFWriter
from treadle.formats import by_name
from treadle.models.archs import ARCHS

N_LAYER = 8
N_VOCAB = 32000
PROMPT = 512
ROUNDS = 7
COMMON = {
    "block_count": N_LAYER,
    "context_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "vocab_size": N_VOCAB,
}
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {  # 1.2B
        "embedding_length": 2048,
        "feed_forward_length": 8192,
        "attention.head_count": 32,
        "attention.head_count_kv": [0, 0, 8, 0, 0, 8, 0, 0],
        "shortconv.l_cache": 3,
    },
    "mamba": {  # 2.8B
        "embedding_length": 2560,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 5120,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 160,
    },
    "jamba": {  # 3B; an eighth of its layers attend
        "embedding_length": 2560,
        "feed_forward_length": 8192,
        "attention.head_count": 20,
        "attention.head_count_kv": [0, 0, 0, 0, 1, 0, 0, 0],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 5120,
        "ssm.state_size": 16,
        "ssm.time_step_rank": 160,
        "expert_count": 0,
    },
    "mamba2": {  # 2.7B
        "embedding_length": 2560,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 5120,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 80,
        "ssm.group_count": 1,
    },
    "granitehybrid": {  # 4.0 H micro, 3B; an eighth of its layers attend
        "embedding_length": 2048,
        "feed_forward_length": 8192,
        "attention.head_count": 32,
        "attention.head_count_kv": [0, 0, 0, 0, 0, 8, 0, 0],
        "rope.dimension_count": 64,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 4096,
        "ssm.state_size": 128,
        "ssm.time_step_rank": 64,
        "ssm.group_count": 1,
    },
    "qwen35": {  # 4B
        "embedding_length": 2560,
        "feed_forward_length": 9216,
        "attention.head_count": 16,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        **QWEN35_STATES,
    },
}


def write(name: str, fmt: str, path: Path) -> None:
    """A file of random weights; matrices whose rows fit are in ``fmt``."""
    row = ARCHS[name]
    writer = GGUFWriter(path)
    given = COMMON | MODELS[name]
    writer.add("general.architecture", name)
    for key, value in given.items():
        writer.add(f"{name}.{key}", value)
    writer.add("tokenizer.ggml.model", "no_vocab")
    rng = np.random.default_rng(0)
    wanted = {"ssm_conv1d.bias", "ssm_norm.weight"} if "mamba" in name else set()  # by llama.cpp
    theirs = {ours: theirs for theirs, ours in row.names}
    for tensor, places in tensors_of(name, given, path):
        spare = tensor.optional and tensor.name not in {*row.needs, *wanted}
        if spare or tensor.name in row.lacks:
            continue
        for seed, (place, shape) in enumerate(places.items()):
            place = theirs.get(place, place)
            if len(shape) == 2 and shape[1] % 256 == 0 and "norm" not in place:
                of = by_name(fmt)
                writer.add_tensor(
                    place, shape, of, lambda of=of, shape=shape, s=seed: random_rows(of, *shape, s)
                )
                continue
            values = 0.3 * rng.standard_normal(shape).astype(np.float32)
            values = -np.exp(values) if place.endswith("ssm_a") else values
            values = 1.0 + values if "norm" in place else values
            writer.add_tensor(place, shape, "F32", values)
    writer.write()


def kind(label: str) -> str:
    """A step's label without its layer; norms, packs and products apart from what is new here."""
    return re.sub(r"^L\d+\.", "", label)


def measure(model: treadle.Model, ids: list[int], before: int) -> dict[str, float]:
    """Seconds by kind of step, the median of ROUNDS."""
    engine = model.engine
    rounds: dict[str, list[float]] = defaultdict(list)
    # Memory that is written for the first time costs more than what is measured here.
    for states in engine.cache.states:
        states.const.array[:] = 0
    with closing(engine.cache.sequence()) as seq:
        if before:
            engine.run([BatchItem(seq, [5] * before, 0)])
        for _ in range(ROUNDS):
            times: dict[str, float] = defaultdict(float)
            for label, seconds in engine.run_timed([BatchItem(seq, ids, 1)]):
                times[kind(label)] += seconds
            for step, seconds in times.items():
                rounds[step].append(seconds)
    return {step: float(np.median(each)) for step, each in rounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--format", default="Q8_0")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rival", help="an interpreter that has llama_cpp")
    given = parser.parse_args()
    for name in given.models.split(","):
        with TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.gguf"
            write(name, given.format, path)
            if given.rival:
                compare(name, path, given.threads, given.rival)
            with treadle.load(path, threads=given.threads, context=4096) as model:
                for what, ids, before in (("prompt", [7] * PROMPT, 0), ("token", [7], 64)):
                    times = measure(model, ids, before)
                    total = sum(times.values())
                    state = sum(s for step, s in times.items() if STATE.search(step))
                    speed = len(ids) / total
                    print(f"{name} {what}: {speed:.1f} tokens/s, states {state / total:.1%}")
                    for step, seconds in sorted(times.items(), key=lambda at: -at[1])[:9]:
                        print(f"    {step:24} {seconds / total:6.1%}")


def compare(name: str, path: Path, threads: int, python: str) -> None:
    """A prompt and 16 tokens written, in turns: medians."""
    programs = {"treadle": Mine(path, threads), "llama.cpp": Theirs(python, path, threads)}
    ids: list[int] = np.random.default_rng(1).integers(300, N_VOCAB, PROMPT).tolist()
    times: dict[str, list[list[float]]] = {who: [] for who in programs}
    for at in range(-1, ROUNDS):
        for who, program in programs.items():
            found = program.run(ids, 16)
            if at >= 0:  # the first compiles, and fills the page cache
                times[who].append(found)
    for who, each in times.items():
        prefill, decode = np.median(each, axis=0)
        print(f"{name} {who:10} pp{PROMPT} {PROMPT / prefill:8.1f} tokens/s", end="   ")
        print(f"decode {1 / decode:7.2f} tokens/s")


STATE = re.compile(r"\.(conv|dt|rates|scan|gate|halves|ba)\b(?!\.pack)")

if __name__ == "__main__":
    main()

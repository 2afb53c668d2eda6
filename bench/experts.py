"""Mixtures of experts beside llama-cpp-python, in turns: prefill and decode of real layer shapes.

    python bench/experts.py [SHAPE] [FORMAT] [--layers 4] [--threads 2] [--rival PYTHON]

A model of random weights is written to a temporary folder, in the shape of a published one and cut
to a few layers; qwen3-1.7b has no experts, for comparison. ``--rival``: an interpreter that has
llama_cpp; without it treadle is alone. Also told: operations per second of the prefill, how much of
it the steps around the experts' products take, and what decoding reads.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from contextlib import closing
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from random_model import QWEN35_STATES, random_rows, tensors_of
from speeds import Mine, Theirs

from treadle.engine.batch import BatchItem
from treadle.files.gguf import GGUFWriter, ValueType
from treadle.formats import by_name
from treadle.models.archs import ARCHS

N_VOCAB = 32000
COMMON = {"context_length": 8192, "attention.layer_norm_rms_epsilon": 1e-6}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3moe",
        {
            "embedding_length": 2048,
            "feed_forward_length": 6144,
            "attention.head_count": 32,
            "attention.head_count_kv": 4,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "rope.freq_base": 1e6,
            "expert_count": 128,
            "expert_used_count": 8,
            "expert_feed_forward_length": 768,
        },
    ),
    "gpt-oss-20b": (
        "gpt-oss",
        {
            "embedding_length": 2880,
            "feed_forward_length": 2880,
            "attention.head_count": 64,
            "attention.head_count_kv": 8,
            "attention.key_length": 64,
            "attention.value_length": 64,
            "attention.sliding_window": 128,
            "rope.freq_base": 150000.0,
            "expert_count": 32,
            "expert_used_count": 4,
            "expert_feed_forward_length": 2880,
        },
    ),
    "qwen3.5-35b-a3b": (
        "qwen35moe",
        {
            "embedding_length": 2048,
            "feed_forward_length": 512,
            "attention.head_count": 16,
            "attention.head_count_kv": 2,
            "attention.key_length": 256,
            "attention.value_length": 256,
            "rope.dimension_count": 64,
            "rope.dimension_sections": [11, 11, 10, 0],
            "rope.freq_base": 1e7,
            **QWEN35_STATES,
            "expert_count": 256,
            "expert_used_count": 8,
            "expert_feed_forward_length": 512,
            "expert_shared_feed_forward_length": 512,
        },
    ),
    "qwen3-1.7b": (
        "qwen3",
        {
            "embedding_length": 2048,
            "feed_forward_length": 6144,
            "attention.head_count": 16,
            "attention.head_count_kv": 8,
            "attention.key_length": 128,
            "attention.value_length": 128,
            "rope.freq_base": 1e6,
        },
    ),
    "mixtral-8x7b": (
        "llama",
        {
            "embedding_length": 4096,
            "feed_forward_length": 14336,
            "attention.head_count": 32,
            "attention.head_count_kv": 8,
            "rope.dimension_count": 128,
            "rope.freq_base": 1e6,
            "expert_count": 8,
            "expert_used_count": 2,
        },
    ),
}


def write(path: Path, shape: str, fmt: str, n_layer: int) -> None:
    """The tensors that the architecture's graph asks for; those of one dimension are F32."""
    arch, own = SHAPES[shape]
    keys = {"block_count": n_layer, "vocab_size": N_VOCAB, **COMMON, **own}
    w = GGUFWriter(path)
    w.add("general.architecture", arch)
    for key, value in keys.items():
        w.add(f"{arch}.{key}", value)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += [f"\u2581w{i}" for i in range(N_VOCAB - len(words))]
    w.add("tokenizer.ggml.model", "llama")
    w.add("tokenizer.ggml.tokens", words)
    w.add("tokenizer.ggml.scores", np.arange(0, -N_VOCAB, -1, dtype=np.float32))
    kinds = [2, 3, 3] + [6] * 256 + [1] * (N_VOCAB - 259)
    w.add("tokenizer.ggml.token_type", kinds, ValueType.INT32)
    w.add("tokenizer.ggml.bos_token_id", 1)
    w.add("tokenizer.ggml.eos_token_id", 2)
    row = ARCHS[arch]
    rng = np.random.default_rng(0)
    seed = 0
    for tensor, places in tensors_of(arch, keys, path):
        asked = tensor.name in (*row.needs, "output.weight") or not tensor.optional
        shared = "shexp" in tensor.name
        bias = tensor.name.endswith("bias")
        asked = asked or (shared and not bias and "expert_shared_feed_forward_length" in own)
        # gpt-oss has a bias beside all its matrices but the output's.
        foreign = shared or tensor.name.startswith("output.")
        asked = asked or (arch == "gpt-oss" and bias and not foreign)
        norms = "norm" in tensor.name and tensor.name.endswith("bias")
        asked = asked and "probs" not in tensor.name and not norms
        if not asked or tensor.name in row.lacks:
            continue
        for name, dims in places.items():
            seed += 1
            small = len(dims) == 1 or dims[-1] % 32  # a convolution's taps
            if small or "gate_inp" in name or name.endswith("bias"):
                values = np.ones(dims) if "norm" in name else rng.standard_normal(dims) * 0.05
                values = -np.exp(values) if name.endswith("ssm_a") else values
                w.add_tensor(name, dims, "F32", values.astype(np.float32))
                continue
            experts = "_exps" in name or fmt != "MXFP4"
            kind = by_name(fmt if experts else "Q8_0")
            m = prod(dims[:-1])
            k = dims[-1]
            kind = kind if k % kind.block == 0 else by_name("Q8_0")
            w.add_tensor(
                name, dims, kind, lambda kind=kind, m=m, k=k, s=seed: random_rows(kind, m, k, s)
            )
    w.write()


AROUND = re.compile(r"^ffn\.(few\.)?(router|route|sort|gather|combine|fetch)")


class Shared(Mine):
    """treadle, which also tells where the time goes."""

    def shares(self, ids: list[int]) -> dict[str, float]:
        """The share of a batch's time that each kind of step takes."""
        engine = self.model.engine
        found = dict[str, float]()
        with closing(engine.cache.sequence()) as seq:
            times = engine.run_timed([BatchItem(seq, ids[: engine.max_tokens], 1)])
        for label, seconds in times:
            kind = label.partition(".")[2] if label[1:2].isdigit() else label
            found[kind] = found.get(kind, 0.0) + seconds
        total = sum(found.values())
        return {kind: seconds / total for kind, seconds in found.items()}


def main() -> None:
    """Write, run in turns, tell."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", nargs="?", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("format", nargs="?", default="Q4_K")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rival", help="an interpreter that has llama_cpp")
    given = parser.parse_args()
    ids: list[int] = np.random.default_rng(1).integers(300, N_VOCAB, given.prompt).tolist()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts.gguf"
        write(path, given.shape, given.format, given.layers)
        mine = Shared(path, given.threads)
        programs: dict[str, Any] = {"treadle": mine}
        if given.rival:
            programs["llama.cpp"] = Theirs(given.rival, path, given.threads)
        times: dict[str, list[list[float]]] = {name: [] for name in programs}
        for name, program in programs.items():
            program.run(ids, 2)  # compiled, and in the page cache
            del name
        for _ in range(given.rounds):
            for name, program in programs.items():
                times[name].append(program.run(ids, given.tokens))
        shown = f"{given.shape} {given.format}, {given.layers} layers, {given.threads} threads"
        print(f"{shown}: medians of {given.rounds}, in turns")
        for name, found in times.items():
            prefill, decode = (median(each) for each in zip(*found, strict=True))
            print(
                f"{name:10} pp{given.prompt} {given.prompt / prefill:8.1f} tokens/s"
                f"   decode {1 / decode:7.2f} tokens/s"
            )
        prefill, decode = (median(each) for each in zip(*times["treadle"], strict=True))
        if given.rival:
            theirs = [median(each) for each in zip(*times["llama.cpp"], strict=True)]
            print(f"times: prompt {theirs[0] / prefill:.2f}, text {theirs[1] / decode:.2f}")
        plan = mine.model.plan(min(given.prompt, mine.model.engine.max_tokens))
        n_ops = sum(step.cost([(0, given.prompt)])[1] for step in plan)
        shares = mine.shares(ids)
        around = sum(share for kind, share in shares.items() if AROUND.search(kind))
        print(f"prefill {n_ops / prefill / 1e9:.0f} GFLOP/s, around experts {around:.1%}")
        n_bytes = sum(step.cost([(given.prompt, 1)])[0] for step in mine.model.plan(1))
        print(f"decoding reads {n_bytes / 1e6:.0f} MB a token, {n_bytes / decode / 1e9:.1f} GB/s")
        for kind, share in sorted(shares.items(), key=lambda item: -item[1])[:12]:
            print(f"  {share:6.1%} {kind}", file=sys.stderr)


if __name__ == "__main__":
    main()

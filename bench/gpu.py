"""An NVIDIA GPU in ten minutes: what it copies and multiplies at best, treadle's products by weight
format beside that, and Llama 3 8B's shape whole.

    python bench/gpu.py [--formats Q4_0,Q8_0,Q4_K] [--model Q4_K] [--minutes 9] [--folder /tmp]
    python bench/gpu.py --rehearse          the same on the emulated card, with a tiny shape

For a machine that can reach nothing: bring the wheels of treadle's dependencies along
(``pip download -d wheels .``, ``pip install --no-index --find-links wheels .``). PyTorch, where it
is there, gives cuBLAS' speed in bf16. Every part is told as soon as it is known, and none is begun
that would not end in time: what was not measured is named.

Figures to watch: a gemv at 60 % of what a copy reads and writes, a product of 512 tokens at 30 % of
cuBLAS. Weights are random, never zeros. Before anything is timed, the logits of a small model on
the card are compared with the CPU's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from random_model import SHAPES, Shape, write

import treadle
from treadle.devices.cuda.facts import told
from treadle.engine.batch import BatchItem
from treadle.formats import by_name

ROUNDS, TINY = 9, Shape("llama", 2, 256, 512, 4, 2, 64, 320, 512, False)
PRODUCTS = ("attn.qkv", "attn.output", "ffn.gate_up", "ffn.gate_up_silu", "ffn.down")


class Clock:
    """Remaining time of the whole measurement."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    def has(self, seconds: float, what: str) -> bool:
        """Whether ``what``, which takes so long, may begin; else says that it was left out."""
        left = self._end - time.monotonic()
        if left < seconds:
            print(f"{what}: not measured, {left:.0f} s are left", flush=True)
        return left >= seconds


@contextmanager
def on_card(path: Path, n_ctx: int, device: str = "cuda") -> Iterator[Any]:
    with treadle.load(path, device=device, context=n_ctx, n_sequences=2) as model:
        yield model


def check(folder: Path, fmt: str) -> None:
    """The card's logits beside the CPU's, of a tiny model."""
    path = folder / "tiny.gguf"
    ids = list(range(3, 43))
    made = []
    write(TINY, by_name(fmt), str(path))
    for device in ("cuda", "cpu"):
        with on_card(path, 256, device) as model, closing(model.engine.cache.sequence()) as seq:
            made.append(
                np.concatenate(
                    [
                        model.engine.run([BatchItem(seq, ids, len(ids))]),
                        model.engine.run([BatchItem(seq, [7])]),
                    ]
                )
            )
    error = float(np.sqrt(np.mean((made[0] - made[1]) ** 2) / np.mean(made[1] ** 2)))
    print(f"{fmt}: logits {error:.2%} from the CPU's (rms)", flush=True)
    if not error < 0.05:
        sys.exit("that is wrong: nothing is timed")


def cublas(n: int = 4096) -> float:
    """Operations a second of PyTorch's product of two bf16 matrices; 0 without PyTorch."""
    try:
        import torch
    except ImportError:
        return 0.0
    if not torch.cuda.is_available():
        return 0.0
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            a @ a
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / 10)
    return 2 * n**3 / median(times[2:])


def steps(engine: Any, n: int, before: int = 0) -> dict[str, list[float]]:
    """Seconds of each step of a run of ``n`` tokens, of ROUNDS runs, by label."""
    rounds: dict[str, list[float]] = defaultdict(list)
    with closing(engine.cache.sequence()) as seq:
        if before:
            engine.run([BatchItem(seq, [5] * before, 0)])
        for _ in range(ROUNDS):
            start = len(seq)
            for label, seconds in engine.run_timed([BatchItem(seq, [7] * n, 1)]):
                rounds[label].append(seconds)
            engine.cache.truncate(seq, start)
    return rounds


def products(path: Path, shape: Shape, fmt: str, n: int, copy: float, blas: float) -> None:
    """Each product of one layer, for one token and for ``n``."""
    write(replace(shape, n_layer=1, n_vocab=min(shape.n_vocab, 4096)), by_name(fmt), str(path))
    with on_card(path, n + 32) as model:
        for tokens in (1, n):
            rounds = steps(model.engine, tokens)
            plan = model.engine.plan(tokens)
            for step in plan:
                if step.label.removeprefix("L0.") not in PRODUCTS:
                    continue
                n_bytes, n_ops = step.cost([(0, tokens)])
                seconds = max(median(rounds[step.label]), 1e-9)
                of = f"{n_bytes / seconds / 1e9:.0f} GB/s, {n_bytes / seconds / copy:.0%} of copy"
                if tokens > 1:
                    of = f"{n_ops / seconds / 1e12:.1f} TFLOP/s"
                    of += f", {n_ops / seconds / blas:.0%} of cuBLAS" if blas else ""
                print(f"{fmt:6} {tokens:4} tokens {step.label:18} {1e6 * seconds:8.1f} us  {of}")
        sys.stdout.flush()


def whole(path: Path, prompts: tuple[int, ...], n_text: int) -> None:
    """Prompts of these sizes, text behind the last, and where a token's time goes."""
    with on_card(path, prompts[-1] + n_text + 32) as model:
        engine = model.engine
        for n in prompts:
            rounds = []
            for _ in range(3):
                with closing(engine.cache.sequence()) as seq:
                    began = time.perf_counter()
                    for at in range(0, n, engine.max_tokens):
                        ids = [7] * min(engine.max_tokens, n - at)
                        engine.run([BatchItem(seq, ids, int(at + len(ids) == n))])
                    rounds.append(time.perf_counter() - began)
            print(f"prompt of {n}: {n / median(rounds):.0f} tokens/s", flush=True)
        with closing(engine.cache.sequence()) as seq:
            engine.run([BatchItem(seq, [7], 1)])
            began = time.perf_counter()
            for _ in range(n_text):
                engine.sample([BatchItem(seq, [7])])
            print(f"text: {n_text / (time.perf_counter() - began):.1f} tokens/s", flush=True)
        by_kind: dict[str, float] = defaultdict(float)
        for label, each in steps(engine, 1, prompts[0]).items():
            by_kind[label.partition(".")[2] if label.startswith("L") else label] += median(each)
        total = sum(by_kind.values()) or 1.0
        for label, seconds in sorted(by_kind.items(), key=lambda at: -at[1])[:12]:
            print(f"  {label:20} {1e6 * seconds:8.1f} us  {seconds / total:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", default="Q4_0,Q8_0,Q4_K")
    parser.add_argument("--model", default="Q4_K", help="the format of the whole model")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--folder", help="where the models are written: 6 GB")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    shape = SHAPES["llama3-8b"]
    many = 512
    prompts = (512, 2048)
    n_text = 128
    copy = 1.0
    blas = 0.0
    if given.rehearse:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from tests.devices.cuda.emulated import EmulatedDriver
        from treadle.devices.cuda import libcuda

        libcuda.CudaDriver = lambda ordinal: EmulatedDriver()  # type: ignore[assignment, misc]
        shape = TINY
        many = 20
        prompts = (16, 24)
        n_text = 3
        print("a rehearsal on an emulated card: every time is made up")
    else:
        facts = told()
        print("\n".join(f"{key}: {value}" for key, value in facts.items()))
        copy = facts.get("copy_bytes_s", 0.0)
        if not copy:
            sys.exit("no card: see --rehearse")
        blas = cublas()
        print(f"cuBLAS, bf16: {blas / 1e12:.0f} TFLOP/s" if blas else "cuBLAS: no PyTorch here")
    clock = Clock(given.minutes)
    with TemporaryDirectory(dir=given.folder) as folder:
        path = Path(folder) / "model.gguf"
        for fmt in given.formats.split(","):
            if clock.has(40, fmt):
                check(Path(folder), fmt)
                products(path, shape, fmt, many, copy, blas)
        if clock.has(180, "the whole model"):
            write(shape, by_name(given.model), str(path))
            print(f"{given.model}, {path.stat().st_size / 1e9:.1f} GB", flush=True)
            whole(path, prompts, n_text)


if __name__ == "__main__":
    main()

"""Architectures against transformers' own logits, of the shared files that llama.cpp's converter
wrote: in one go, in chunks, by decode, and the same bits for every number of threads.

Both sides compute in float32, each within ``rounding`` of the exact logits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.reference import forward
from tests.tiny import rounding

NAMES = (
    "gemma2",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "seedoss",
    "arcee",
    "phi3",
    "phi4mini-partial",
    "glm4",
    "ernie45",
    "hunyuan",
    "cohere",
    "cohere2",
    "stablelm",
    "starcoder2",
    "nemotron",
)
CHUNKS = (1, 3, 64)


def ids_of(n: int = 40) -> list[int]:
    ids: list[int] = np.random.default_rng(7).integers(3, 300, n).tolist()
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_transformers(name: str, data: Path) -> None:
    path, ids = data / "arch" / f"{name}.gguf", ids_of()
    truth = np.load(data / "arch" / f"{name}.npy")
    found: dict[str, np.ndarray] = {}
    for threads in (1, 2, 3):
        with treadle.load(path, threads=threads, kv="f32") as model:
            assert model.config.ignored == ()
            for n in (1, 512):
                model.plan(n).check()
            allowed = rounding(model.config)
            exact = forward(model.gguf, model.config, ids)
            error = np.abs(exact - truth).max() / np.abs(truth).max()
            assert error <= allowed, ("the reference in float64", error / allowed)
            ways = {"one go": model.logits(ids)}
            for chunk in CHUNKS:
                model.engine.cache.forget()
                session = model.session()
                rows = [session.logits(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
                ways[f"chunks of {chunk}"] = np.concatenate(rows)
                session.close()
        for way, logits in ways.items():
            error = np.abs(logits - truth).max() / np.abs(truth).max()
            assert error <= 2 * allowed, (way, threads, error / allowed)
            assert np.array_equal(found.setdefault(way, logits), logits), (way, threads)

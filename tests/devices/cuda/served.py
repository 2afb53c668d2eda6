"""A model to serve on an emulated card: small, with the name and the words of the packaged one,
which the server's tests know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import treadle
from tests.tiny import write_model
from treadle.api.options import packaged_model
from treadle.files.gguf import open_gguf

N_CTX = 512
WORDS = "tokenizer.ggml."


def write_demo(folder: Path) -> Path:
    """The model's file, of random F32 weights."""
    with open_gguf(packaged_model()) as demo:
        told: Any = demo.metadata
        own = {k.removeprefix(WORDS): v for k, v in told.items() if k.startswith(WORDS)}
    path = folder / packaged_model().name
    n_vocab = len(own["tokens"])
    write_model(path, "llama", "F32", vocabulary=own, n_layer=2, n_vocab=n_vocab)
    return path


@contextmanager
def served_on(device: str, path: Path) -> Iterator[treadle.Model]:
    settings: dict[str, Any] = {"threads": 1, "context": N_CTX, "n_sequences": 4, "kv": "f32"}
    with treadle.load(path, device=device, deterministic=True, **settings) as model:
        yield model

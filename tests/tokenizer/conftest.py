"""Tokenizers that several tests share; the large ones are built once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tokenizer.vocabularies import write_llama3, write_qwen2
from treadle.files.gguf import open_gguf
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

Load = Callable[[str], Tokenizer]


@pytest.fixture(scope="session")
def load(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Load a vocabulary by its name in the folder ``vocab`` of the shared data."""
    folder = tmp_path_factory.mktemp("vocab")
    loaded: dict[str, Tokenizer] = {}
    writers = {"qwen2": write_qwen2, "llama-bpe": write_llama3}

    def load(name: str) -> Tokenizer:
        if name not in loaded:
            path = data / "vocab" / f"ggml-vocab-{name}.gguf"
            if name in writers:
                path = writers[name](data, folder / f"{name}.gguf")
            loaded[name] = load_tokenizer(open_gguf(path))
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def bytes_tokenizer(data: Path) -> Tokenizer:
    """A vocabulary of nothing but bytes: byte ``b`` is token ``b + 3``."""
    return load_tokenizer(open_gguf(data / "models/other/gridcore_test.gguf"))

"""MiniLM's vectors are those of sentence-transformers, from its folder and from a GGUF of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.real.conftest import Fetched
from tests.real.truth import values


def vectors(path: Path) -> np.ndarray:
    with treadle.load(path, threads=2) as model:
        return model.embed([case["text"] for case in values()["vectors"]])


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_minilm(kind: str, fetched: Fetched, tmp_path: Path) -> None:
    path = fetched("minilm")
    if kind == "gguf":
        path = convert(path, tmp_path / "minilm.gguf")
    expected = np.array([case["vector"] for case in values()["vectors"]])
    found = vectors(path)
    cosines = np.sum(expected * found, axis=1)
    assert found.shape == expected.shape == (len(expected), 384)
    assert cosines.min() > 0.99999, cosines  # vectors are stored with 5 digits
    assert np.argmax(found[0] @ found[1:].T) == 0  # the cat, and the kitten

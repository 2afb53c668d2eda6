"""Distance from float32 is at most llama.cpp's, whose values ``tools/real_values.py`` measured.

KL is over whole windows of text in several languages and code. All of it is the rounding of
activations to 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.real.conftest import Fetched
from tests.real.truth import N_WINDOW, compare, float32_logits, float32_model, texts, values
from treadle.batch import Part

SOME = ("english", "python", "spanish")  # in the default run
QUICK = [pytest.param("smollm2", SOME), pytest.param("gemma3", SOME[:2])]
ALL = [pytest.param(name, tuple(texts()), marks=pytest.mark.whole_real) for name in values()["kl"]]
NOISE = 1.1  # of a mean over some hundred positions, for instruction sets that round otherwise


@contextmanager
def pair(path: Path, **settings: Any) -> Iterator[tuple[treadle.Model, Any]]:
    """The model, and its float32."""
    truth = float32_model(path)
    with treadle.load(path, threads=2, context=512, **settings) as model:
        yield model, truth


def one_by_one(model: treadle.Model, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits after each token, read alone."""
    engine = model.engine
    sequence = engine.cache.sequence()
    rows = [engine.run([Part(sequence, [token])])[0].copy() for token in ids]
    sequence.close()
    return np.stack(rows)


@pytest.mark.parametrize(("name", "windows"), [*QUICK, *ALL])
def test_a_prompt_is_as_near_to_float32_as_llama_cpp(
    name: str, windows: tuple[str, ...], fetched: Fetched
) -> None:
    theirs = np.array([values()["kl"][name]["prompt"][window] for window in windows])
    with pair(fetched(name)) as (model, truth):
        found = []
        for window in windows:
            ids = model.tokenize(texts()[window])[:N_WINDOW]
            found.append(compare(float32_logits(truth, ids), model.logits(ids)))
    kl, same = np.mean(found, axis=0)
    assert kl <= theirs[:, 0].mean() * NOISE, f"{kl:.5f}, llama.cpp {theirs[:, 0].mean():.5f}"
    assert same >= theirs[:, 1].mean() - 0.01

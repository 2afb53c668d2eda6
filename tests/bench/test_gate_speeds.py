"""``bench/gate_speeds.py``, which every commit must be able to run: on a tiny model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import treadle
from bench import gate_speeds
from tests.conftest import WriteTiny


def test_prompts_begin_unlike_each_other() -> None:
    model: Any = SimpleNamespace(tokenize=lambda text: list(range(1000)))
    speeds = gate_speeds.Speeds(model)
    prompts = [speeds.next_prompt(512) for _ in range(50)]
    assert len({tuple(prompt[:1]) for prompt in prompts}) == 50
    assert all(len(prompt) == 512 for prompt in prompts)


def test_what_a_treadle_lacks_is_said_and_the_others_are_measured() -> None:
    class Writing:
        ids = (1,)

        def __next__(self) -> str:
            return "a"

        def finish(self) -> str:
            return "ab"

    old: Any = SimpleNamespace(
        tokenize=lambda text: [1, 2, 3], generate=lambda ids, **settings: Writing()
    )
    found = gate_speeds.measure(old, ["eight", "prompt", "text"], 1)
    assert "generate_many" in str(found["eight"])
    assert isinstance(found["prompt"], float)
    assert isinstance(found["text"], float)


@pytest.mark.slow
def test_all_figures_of_a_tiny_model(tiny: WriteTiny) -> None:
    path = tiny("llama", "F32", n_layer=1)
    with treadle.load(path, threads=1, context=gate_speeds.CONTEXT, n_sequences=8) as model:
        found = gate_speeds.measure(model, ["prompt", "text", "eight"], 1)
    assert list(found) == ["prompt", "text", "eight"]
    assert all(isinstance(value, float) and value > 0 for value in found.values()), found

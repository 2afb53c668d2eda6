"""Log-probabilities of what was written, against the model's own logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from treadle.errors import TreadleError


@pytest.fixture(scope="module")
def model(tiny: WriteTiny) -> Iterator[treadle.Model]:
    with treadle.load(tiny("llama", tied=0), threads=1, context=128, deterministic=True) as model:
        yield model


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    log_sum = np.logaddexp.reduce(x, axis=-1, keepdims=True)
    out: np.ndarray = x - log_sum
    return out


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0},
        {"temperature": 1.5, "top_k": 3, "repeat_penalty": 2.0, "seed": 4},
        {"grammar": "root ::= [a-z]+", "seed": 1, "logit_bias": {5: 3.0}},
    ],
)
def test_as_the_models_own_logits(settings: dict[str, Any], model: treadle.Model) -> None:
    """Whatever the sampler and the grammar make of them."""
    made = model.generate("some words", max_tokens=12, logprobs=4, **settings)
    made.finish()
    assert made.logprobs is not None
    assert [entry.id for entry in made.logprobs] == made.ids
    n = len(made.prompt_ids)
    rows = log_softmax(model.logits(made.prompt_ids + made.ids))[n - 1 : -1]
    for entry, row in zip(made.logprobs, rows, strict=True):
        assert entry.logprob == pytest.approx(row[entry.id], abs=1e-6)
        best = np.argsort(-row, kind="stable")[:4]
        assert [top.id for top in entry.top_logprobs] == best.tolist()
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row[best], abs=1e-6)
        assert entry.bytes == model.tokenizer.token_bytes(entry.id)
        assert entry.token == entry.bytes.decode("utf-8", "replace")


def test_an_entry_for_each_token_as_it_comes(model: treadle.Model) -> None:
    made = model.generate("abc", max_tokens=5, logprobs=0, temperature=0)
    assert made.logprobs == []
    for _ in made:
        assert made.logprobs is not None
        assert len(made.logprobs) == len(made.ids)
        assert made.logprobs[-1].top_logprobs == ()
    assert model.generate("abc", max_tokens=1).logprobs is None
    chatted = model.chat([{"role": "user", "content": "hi"}], max_tokens=2, logprobs=1)
    chatted.finish()
    assert chatted.logprobs is not None
    assert len(chatted.logprobs) == len(chatted.ids)


def test_as_json(model: treadle.Model) -> None:
    """OpenAI's fields, and the id."""
    made = model.generate("abc", max_tokens=1, logprobs=2, temperature=0)
    made.finish()
    assert made.logprobs is not None
    (entry,) = json.loads(json.dumps([entry.as_dict() for entry in made.logprobs]))
    assert entry.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
    assert bytes(entry["bytes"]) == made.logprobs[0].bytes
    assert entry["top_logprobs"][0] == {k: v for k, v in entry.items() if k != "top_logprobs"}
    assert len(entry["top_logprobs"]) == 2


@pytest.mark.parametrize("wrong", [-1, 321, True, 1.5, "5"])
def test_numbers_that_are_none(wrong: Any, model: treadle.Model) -> None:
    with pytest.raises(TreadleError, match="logprobs="):
        model.generate("abc", logprobs=wrong)

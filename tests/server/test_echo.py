"""Prompts that are shown with their log-probabilities; texts before and behind a gap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.test_openai import post, stream

PATH = "/v1/completions"
PROMPT = "def f(x):\n    return " + "x + 1, " * 40  # more than one batch of outputs


def expected(model: treadle.Model, ids: list[int]) -> list[float]:
    """Of each token but the first."""
    logits = model.logits(ids[:-1]).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits).sum(-1))
    return [float(row[id] - t) for row, id, t in zip(logits, ids[1:], total, strict=True)]


def test_log_probabilities_of_a_prompt(client: TestClient, model: treadle.Model) -> None:
    ids = model.tokenize(PROMPT)
    assert len(ids) > 130
    body: dict[str, Any] = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 3}
    choice = post(client, PATH, **body, temperature=0)["choices"][0]
    told = choice["logprobs"]
    assert choice["text"].startswith(PROMPT)
    assert len(told["tokens"]) == len(ids) + 3
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(expected(model, ids), abs=1e-4)
    assert all(len(tops) == 2 for tops in told["top_logprobs"][1:])
    # Without anything written: what a program asks that rates texts.
    rated = post(client, PATH, **{**body, "max_tokens": 0})["choices"][0]
    assert rated["finish_reason"] == "length"
    assert rated["text"] == PROMPT
    assert rated["logprobs"]["token_logprobs"] == told["token_logprobs"][: len(ids)]


def told_at(choices: list[Any]) -> list[tuple[str, int]]:
    """Tokens and their places in the text, of one choice or of a stream's."""
    found = [choice["logprobs"] for choice in choices]
    return [pair for one in found for pair in zip(one["tokens"], one["text_offset"], strict=True)]


@pytest.mark.parametrize("prompt", ["def f(", "é🙂x", "é🙂 = "])
def test_where_tokens_stand_in_the_text(
    prompt: str, client: TestClient, model: treadle.Model
) -> None:
    """A special token has no place of its own; the tokens of one character share one."""
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 9}
    choice = post(client, PATH, **body, temperature=0)["choices"][0]
    *chunks, _ = stream(client, PATH, **body, temperature=0)
    found = told_at([choice])
    assert told_at([chunk["choices"][0] for chunk in chunks]) == found
    ids = model.tokenize(prompt)
    raw = [model.tokenizer.token_bytes(id) for id in ids]
    assert found[0][1] == found[1][1] == 0
    assert raw[0].decode() not in choice["text"]  # <|begin|>
    for i in range(1, len(ids)):
        assert found[i][1] == len(b"".join(raw[1:i]).decode("utf-8", "ignore"))
    for token, at in found[len(ids) :]:
        assert at >= len(prompt)
        assert choice["text"][at:].startswith(token)


def test_in_a_stream_it_comes_once(client: TestClient, model: treadle.Model) -> None:
    body: dict[str, Any] = {"prompt": "def f(", "echo": True, "logprobs": 0, "max_tokens": 4}
    whole = post(client, PATH, **body, temperature=0)["choices"][0]
    *chunks, _ = stream(client, PATH, **body, temperature=0)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    assert tokens == whole["logprobs"]["tokens"]


def test_echo_alone(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "def f(", "echo": True, "max_tokens": 0}
    assert post(client, PATH, **body)["choices"][0]["text"] == "def f("


def test_a_model_without_tokens_for_a_gap(client: TestClient) -> None:
    assert "suffix" in post(client, PATH, 400, prompt="a", suffix="b")["error"]["message"]
    error = post(client, "/infill", 501, input_prefix="a", input_suffix="b")["error"]
    assert "no tokens for filling in" in error["message"]
    assert "suffix" in post(client, "/api/generate", 400, prompt="a", suffix="b")["error"]


def test_a_gap(client: TestClient, model: treadle.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = model.tokenizer.vocab
    gap = {"fim_pre": 11, "fim_suf": 12, "fim_mid": 13}
    monkeypatch.setattr(vocab, "specials", {**vocab.specials, **gap})
    a, b = (model.tokenizer.encode_plain(text, start=False) for text in ("a = ", "\nprint(a)"))
    prompt = [11, *a, 12, *b, 13]
    if model.tokenizer.add_bos and model.tokenizer.bos is not None:
        prompt.insert(0, model.tokenizer.bos)
    want = model.generate(prompt, max_tokens=6, temperature=0).finish()
    own = {"temperature": 0, "max_tokens": 6}
    made = post(client, PATH, prompt="a = ", suffix="\nprint(a)", **own)
    assert made["choices"][0]["text"] == want
    filled = post(client, "/infill", input_prefix="a = ", input_suffix="\nprint(a)", **own)
    assert filled["content"] == want
    begun = post(client, "/infill", input_prefix="a", prompt=" = ", input_suffix="b", **own)
    assert begun["tokens_evaluated"] > 3
    raw: dict[str, Any] = {"prompt": "a = ", "suffix": "\nprint(a)", "stream": False}
    told = post(client, "/api/generate", **raw, options={"temperature": 0, "num_predict": 6})
    assert told["response"] == want


def test_how_many_tokens(client: TestClient, model: treadle.Model) -> None:
    n = len(model.tokenize("def f("))
    assert post(client, "/v1/completions/input_tokens", prompt="def f(")["input_tokens"] == n
    talk = [{"role": "user", "content": "hi"}]
    told = post(client, "/v1/chat/completions/input_tokens", messages=talk)["input_tokens"]
    used = post(client, "/v1/chat/completions", messages=talk, max_tokens=1)["usage"]
    assert told == used["prompt_tokens"]

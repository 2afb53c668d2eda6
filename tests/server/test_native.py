"""llama.cpp's own endpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import N_CTX, events
from tests.server.test_openai import CHAT, post, stream
from treadle.server.http.http_io import MAX_BODY


def test_a_completion(client: TestClient, model: treadle.Model) -> None:
    made = model.generate("def f(", temperature=0, max_tokens=6)
    made.finish()
    asked: dict[str, Any] = {"prompt": "def f(", "temperature": 0, "n_predict": 6, "n_probs": 2}
    found = post(client, "/completion", **asked, return_tokens=True)
    assert found["content"] == made.text
    assert found["tokens"] == made.ids
    for return_tokens in (False, None):
        assert post(client, "/completion", **asked, return_tokens=return_tokens)["tokens"] == []
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert (found["tokens_predicted"], found["truncated"]) == (6, False)
    assert found["tokens_evaluated"] == len(made.prompt_ids)
    assert found["generation_settings"]["temperature"] == 0
    assert found["generation_settings"]["n_predict"] == 6
    probabilities = found["completion_probabilities"]
    assert [entry["id"] for entry in probabilities] == made.ids
    assert all(len(entry["top_logprobs"]) == 2 for entry in probabilities)


@pytest.mark.parametrize(
    ("path", "begun"),
    [
        ("/completion", {"prompt": "def f(x):\n    return x\n" * 20}),
        ("/v1/completions", {"prompt": "def g(x):\n    return x\n" * 20}),
        (CHAT, {"messages": [{"role": "user", "content": "def h(x):\n    return x\n" * 20}]}),
    ],
)
def test_a_prompt_that_is_to_be_read_anew(
    path: str, begun: dict[str, Any], client: TestClient
) -> None:
    body: dict[str, Any] = {**begun, "max_tokens": 2, "temperature": 0}
    for cache_prompt in (True, False, False):
        told = post(client, path, **body, cache_prompt=cache_prompt)["timings"]
    assert told["cache_n"] == told["cache"]["left_at"] == 0
    assert told["prompt_n"] > 64
    assert told["cache"]["why"] == "off"
    found = post(client, path, **body)["timings"]  # which has left its pages
    assert found["cache_n"] > 64
    assert found["cache"]["why"] == "end"
    error = post(client, path, 400, **body, cache_prompt="x")["error"]
    assert error["param"] == "cache_prompt"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_fills_the_context_is_truncated(stream: bool, client: TestClient) -> None:
    """llama.cpp: prompt and text are n_ctx tokens, not one more."""
    for n, limit, truncated in ((8, -1, True), (8, 4, False), (N_CTX - 4, 4, True)):
        body = {"prompt": [5] * n, "n_predict": limit, "ignore_eos": True, "stream": stream}
        text = client.post("/completion", json=body).text
        last = events(text)[-1] if stream else json.loads(text)
        written = N_CTX - n if limit < 0 else limit
        assert last["timings"]["predicted_n"] == last["tokens_predicted"] == written
        assert (last["truncated"], last["stop_type"]) == (truncated, "limit")


def test_a_stream_says_when_it_stops(client: TestClient) -> None:
    body: dict[str, Any] = {
        "prompt": "def f(",
        "temperature": 0,
        "n_predict": 6,
        "stream": True,
    }
    whole = post(client, "/completion", **{**body, "stream": False, "return_tokens": True})
    parts = events(client.post("/completion", json=body).text)
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert parts[-1]["timings"]["predicted_n"] == 6


def test_several_prompts_have_an_answer_each(client: TestClient, model: treadle.Model) -> None:
    prompts = ["def f(", "import "]
    own: dict[str, Any] = {"temperature": 0, "n_predict": 4}
    alone = [post(client, "/completion", prompt=one, **own)["content"] for one in prompts]
    ids = [model.tokenize(prompt) for prompt in prompts]
    for given in (prompts, ids, [prompts[0], ids[1]]):
        found = post(client, "/completion", prompt=given, **own)
        assert [(one["index"], one["content"]) for one in found] == list(enumerate(alone))
        told = ["", ""]
        for part in events(
            client.post("/completion", json={"prompt": given, "stream": True, **own}).text
        ):
            told[part["index"]] += part["content"]
        assert told == alone
    twice = post(client, "/completion", prompt=prompts, n_cmpl=2, **own)
    assert [one["content"] for one in twice] == [alone[0], alone[0], alone[1], alone[1]]
    joined = [*ids[0], *model.tokenize("x", bos=False)]
    for mixed in ([*ids[0], "x"], joined):
        assert post(client, "/completion", prompt=mixed, **own)["tokens_evaluated"] == len(joined)


@pytest.mark.parametrize(
    ("body", "kind", "word"),
    [
        ({"stop": ["zzz", "("]}, "word", "("),
        ({"n_predict": 2}, "limit", ""),
        ({"grammar": 'root ::= "a"'}, "eos", ""),
    ],
)
def test_why_it_stopped(body: dict[str, Any], kind: str, word: str, client: TestClient) -> None:
    settings = {"prompt": "def", "temperature": 0, "n_predict": 100, **body}
    found = post(client, "/completion", **settings)
    assert (found["stop_type"], found["stopping_word"]) == (kind, word)


def test_a_seed_that_was_drawn_is_told(client: TestClient) -> None:
    first = post(client, "/completion", prompt="def f(", n_predict=8)
    seed = first["generation_settings"]["seed"]
    again = post(client, "/completion", prompt="def f(", n_predict=8, seed=seed)
    assert again["content"] == first["content"]


def test_tokens(client: TestClient, model: treadle.Model) -> None:
    ids = model.tokenize("héllo", bos=False)
    assert post(client, "/tokenize", content="héllo") == {"tokens": ids}
    with_bos = post(client, "/tokenize", content="héllo", add_special=True)["tokens"]
    assert with_bos == model.tokenize("héllo")
    pieces = post(client, "/tokenize", content="héllo", with_pieces=True)["tokens"]
    raw = b"".join(
        p.encode() if isinstance(p := piece["piece"], str) else bytes(p) for piece in pieces
    )
    assert raw.decode() == "héllo"
    assert any(isinstance(piece["piece"], list) for piece in pieces)  # é is two tokens
    assert post(client, "/detokenize", tokens=ids) == {"content": "héllo"}
    mixed = post(client, "/tokenize", content=["hé", 5, "llo"], add_special=True)["tokens"]
    assert mixed == [*model.tokenize("hé"), 5, *model.tokenize("llo", bos=False)]
    assert post(client, "/tokenize", content=[]) == {"tokens": []}


def test_control_tokens_are_text_where_asked(client: TestClient, model: treadle.Model) -> None:
    assert model.tokenizer.bos is not None
    name = model.tokenizer.piece(model.tokenizer.bos)
    assert post(client, "/tokenize", content=name)["tokens"] == [model.tokenizer.bos]
    plain = post(client, "/tokenize", content=name, parse_special=False)["tokens"]
    assert len(plain) > 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"content": 5}),
        ("/tokenize", {"content": ["x", True]}),
        ("/tokenize", {"content": ["x", 10**6]}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/completion", {}),
        ("/completion", {"prompt": ["x"] * 257}),
        ("/completion", {"prompt": ["x", ["y", [5]]]}),
        ("/completion", {"prompt": "x", "response_fields": [5]}),
        ("/completion", {"prompt": "x", "n_indent": -1}),
        ("/embedding", {}),
        ("/apply-template", {}),
    ],
)
def test_refused(path: str, body: dict[str, Any], client: TestClient) -> None:
    assert post(client, path, 400, **body)["error"]["message"]


def test_values_that_ask_for_nothing(client: TestClient) -> None:
    """llama.cpp's own defaults, which clients send along."""
    body: dict[str, Any] = {"t_max_predict_ms": -1, "n_indent": 0, "response_fields": []}
    assert post(client, "/completion", prompt="x", n_predict=1, **body)["stop"]


def test_fields_that_were_asked_for(client: TestClient) -> None:
    """As llama.vim asks."""
    body: dict[str, Any] = {"prompt": "x", "n_predict": 2, "temperature": 0}
    names = ["content", "timings/prompt_n", "timings/none", "content/x", "truncated", "stop"]
    whole = post(client, "/completion", **body)
    found = post(client, "/completion", response_fields=names, **body)
    assert found.keys() == {"content", "timings/prompt_n", "truncated", "stop"}
    assert found["content"] == whole["content"]
    last = stream(client, "/completion", response_fields=names, **body)[-1]
    assert last.keys() == found.keys()
    assert "prompt" not in whole
    (prompt,) = post(client, "/completion", response_fields=["prompt"], **body).values()
    assert prompt.endswith("x")


def test_lines_that_end_a_text(client: TestClient) -> None:
    """One with too few blanks before it, and the first that ends too late."""
    body: dict[str, Any] = {"prompt": "x", "grammar": r'root ::= "a\n  b\n c\n  d\n"'}
    for asked, said in (
        ({"n_indent": 2}, "a\n  b\n "),
        ({"n_indent": 1}, "a\n  b\n c\n  d\n"),
        ({"t_max_predict_ms": 60_000}, "a\n  b\n c\n  d\n"),
    ):
        found = post(client, "/completion", **body, **asked)
        assert found["content"] == said
        assert found["stop_type"] == ("limit" if asked == {"n_indent": 2} else "eos")
        parts = stream(client, "/completion", **body, **asked)
        assert "".join(part["content"] for part in parts) == said


def test_as_llama_vim_calls(client: TestClient) -> None:
    samplers = ["top_k", "top_p", "infill"]
    body: dict[str, Any] = {
        "prompt": "def f(",
        "n_predict": 16,
        "n_indent": 4,
        "top_k": 40,
        "top_p": 0.99,
        "samplers": samplers,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000,
        "response_fields": ["content", "generation_settings/samplers"],
    }
    found = post(client, "/completion", **body)
    assert found["generation_settings/samplers"] == samplers


def test_props(client: TestClient, model: treadle.Model) -> None:
    found = client.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == N_CTX
    assert found["chat_template"] == model.template.source
    assert found["modalities"] == {"vision": False, "audio": False}
    assert found["treadle"]["max_body_bytes"] == MAX_BODY


def test_slots_are_free_when_nothing_runs(client: TestClient, model: treadle.Model) -> None:
    slots = client.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(model.engine.cache.n_sequences))
    assert not any(slot["is_processing"] for slot in slots)

"""Ollama's ``/api``."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import N_CTX
from tests.server.test_openai import post
from treadle.api.embedding import Embedder
from treadle.server.protocols.embeddings import _ids as texts_ids
from treadle.server.protocols.ollama import _thinking

HI = [{"role": "user", "content": "hi"}]
OPTIONS = {"temperature": 0, "num_predict": 8}
NO_LOGPROBS: dict[str, Any] = {"logprobs": False, "top_logprobs": None}


def lines(client: TestClient, path: str, **body: Any) -> list[Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.text.endswith("\n")
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize(
    ("path", "body"), [("/api/chat", {"messages": HI}), ("/api/generate", {"prompt": "hi"})]
)
def test_a_stream_of_lines_is_the_default(
    path: str, body: dict[str, Any], client: TestClient, model: treadle.Model
) -> None:
    made = model.chat(HI, temperature=0, max_tokens=8)
    text = made.finish()

    def said(part: Any) -> str:
        word: str = part["message"]["content"] if "message" in part else part["response"]
        return word

    *parts, last = lines(client, path, options=OPTIONS, **body)
    assert "".join(map(said, parts)) == text
    assert [part["done"] for part in parts] == [False] * len(parts)
    assert (said(last), last["done"], last["done_reason"]) == ("", True, "length")
    assert (last["prompt_eval_count"], last["eval_count"]) == (len(made.prompt_ids), 8)
    assert 0 < last["eval_duration"] <= last["total_duration"] < 600e9  # nanoseconds
    whole = post(client, path, options=OPTIONS, stream=False, **body)
    assert said(whole) == text


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029"])
def test_ends_of_lines_within_a_text_end_no_line(end: str, client: TestClient) -> None:
    """Ollama's client reads by httpx's ``iter_lines``, which ends a line at each of them."""
    body = {"messages": HI, "options": {"grammar": f'root ::= "a{end}é"'}}
    with client.stream("POST", "/api/chat", json=body) as answer:
        parts = [json.loads(line) for line in answer.iter_lines()]
    assert "".join(part["message"]["content"] for part in parts) == f"a{end}é"


def test_a_raw_prompt_is_gone_on_with(client: TestClient, model: treadle.Model) -> None:
    expected = model.generate("def f(", temperature=0, max_tokens=8).finish()
    body: dict[str, Any] = {"prompt": "def f(", "raw": True, "stream": False, "options": OPTIONS}
    assert post(client, "/api/generate", **body)["response"] == expected


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {"messages": HI}),
        ("/api/generate", {"prompt": "hi"}),
        ("/api/generate", {"prompt": "hi", "raw": True}),
    ],
)
def test_logprobs(
    path: str, body: dict[str, Any], client: TestClient, model: treadle.Model
) -> None:
    make: Any = model.generate if "raw" in body else model.chat
    made = make("hi" if "raw" in body else HI, temperature=0, max_tokens=8, logprobs=2)
    made.finish()
    expected = [entry.as_dict() for entry in made.logprobs]
    body = {**body, "options": OPTIONS, "logprobs": True, "top_logprobs": 2}
    assert post(client, path, stream=False, **body)["logprobs"] == expected
    parts = lines(client, path, **body)
    assert [entry for part in parts for entry in part.get("logprobs", [])] == expected
    alone = post(client, path, stream=False, **{**body, "top_logprobs": 0})["logprobs"]
    assert [entry["top_logprobs"] for entry in alone] == [[]] * 8
    assert "logprobs" not in post(client, path, stream=False, **{**body, **NO_LOGPROBS})


@pytest.mark.usefixtures("each_piece")
def test_logprobs_of_text_that_is_held_back(client: TestClient, model: treadle.Model) -> None:
    """What may be the beginning of a stop text is told at the end, and so are its tokens."""
    text = model.chat(HI, temperature=0, max_tokens=8).finish()
    body: dict[str, Any] = {"messages": HI, "options": {**OPTIONS, "stop": [text[1:] + "never"]}}
    parts = lines(client, "/api/chat", **body, logprobs=True)
    assert sum(len(part.get("logprobs", [])) for part in parts) == 8


def test_formats(client: TestClient) -> None:
    schema: Any = {
        "type": "object",
        "properties": {"a": {"const": 1}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body: dict[str, Any] = {
        "messages": HI,
        "stream": False,
        "options": {"temperature": 0, "num_predict": -2},
    }
    found = post(client, "/api/chat", format=schema, **body)
    assert json.loads(found["message"]["content"]) == {"a": 1}
    assert found["done_reason"] == "stop"
    assert post(client, "/api/chat", format="json", **body)["message"]["content"].startswith("{")


@pytest.mark.parametrize("no_limit", [0, -1, -2])
def test_no_limit(no_limit: int, client: TestClient) -> None:
    """Ollama's runner looks at limits above 0 alone."""
    options = {"grammar": 'root ::= "abc"', "num_predict": no_limit}
    body: dict[str, Any] = {"messages": HI, "stream": False, "options": options}
    found = post(client, "/api/chat", **body)
    assert (found["message"]["content"], found["done_reason"]) == ("abc", "stop")


@pytest.mark.parametrize(
    ("think", "on", "effort"),
    [
        (True, True, None),
        (False, False, None),
        ("true", True, None),
        ("false", False, None),
        ("high", True, "high"),
    ],
)
def test_think(think: Any, on: bool, effort: str | None, client: TestClient) -> None:
    own = {} if effort is None else {"reasoning_effort": effort}
    variables = {"enable_thinking": on}
    assert _thinking({"think": think}) == {"chat_template_kwargs": variables, **own}
    assert _thinking({"think": None}) == _thinking({"think": ""}) == {}
    for wrong in (5, "much", [True]):
        error = post(client, "/api/chat", 400, messages=HI, think=wrong)["error"]
        assert error.startswith("think: expected one of true, false, low")


def test_nothing_to_say_loads_the_model(client: TestClient) -> None:
    assert post(client, "/api/generate", model="x")["done_reason"] == "load"
    assert post(client, "/api/chat", model="x", messages=[])["done_reason"] == "load"
    assert post(client, "/api/chat", model="x")["done_reason"] == "load"


def test_embeddings(client: TestClient, model: treadle.Model) -> None:
    expected = model.embed(["a", "b c"])
    found = post(client, "/api/embed", input=["a", "b c"])
    assert np.array_equal(np.array(found["embeddings"], np.float32), expected)
    old = post(client, "/api/embeddings", prompt="a")
    assert np.array_equal(np.array(old["embedding"], np.float32), expected[0])
    assert post(client, "/api/embed", input=[])["embeddings"] == []
    cut = post(client, "/api/embed", input=["a"], dimensions=5)
    assert np.allclose(cut["embeddings"], model.embed("a", dimensions=5), atol=1e-6)


def test_texts_that_are_too_long_are_cut(client: TestClient, model: treadle.Model) -> None:
    """Unless the call says ``truncate: false``: then it is told which one that is."""
    long = "x = 1\n" * 4 * N_CTX
    ids = model.tokenize(long)[:N_CTX]
    found = post(client, "/api/embed", input=["a", long])
    assert found["prompt_eval_count"] == len(model.tokenize("a")) + N_CTX
    (expected,) = model.engine.embed([ids])
    assert np.array_equal(np.array(found["embeddings"][1], np.float32), expected)
    assert post(client, "/api/embed", input=long * 300)["prompt_eval_count"] == N_CTX
    refused = post(client, "/api/embed", 400, input=["a", long], truncate=False)["error"]
    assert refused.startswith("input[1]: prompt is too long: ")


def test_a_cut_text_still_ends_as_the_model_wants() -> None:
    def tokenize(text: str) -> list[int]:
        return [1, *map(ord, text), 2]

    tokenizer = SimpleNamespace(add_eos=False, add_sep=True)
    model: Any = SimpleNamespace(n_ctx=6, tokenize=tokenize, tokenizer=tokenizer)
    embedder: Any = SimpleNamespace(prompt="", _model=model)
    embedder.cut = partial(Embedder.cut, embedder)
    assert texts_ids("abcdefgh", model, embedder, 6) == [1, *b"abcd", 2]
    assert texts_ids("abcd", model, embedder, 6) == [1, *b"abcd", 2]
    assert texts_ids([7] * 9, model, embedder, 6) == [7] * 6
    model.tokenizer.add_sep = False
    assert texts_ids("abcdefgh", model, embedder, 6) == [1, *b"abcde"]


def test_what_is_served(client: TestClient) -> None:
    assert client.get("/").text == "Ollama is running"
    assert client.head("/").status_code == 200
    found = client.get("/api/version").json()
    assert found["treadle"] == treadle.__version__
    version = tuple(map(int, found["version"].split(".")))
    assert version >= (0, 6, 4)  # VS Code's Copilot refuses older ones
    (tag,) = client.get("/api/tags").json()["models"]
    assert tag["name"] == "demo"
    assert tag["details"]["quantization_level"] == "Q4_K"
    (loaded,) = client.get("/api/ps").json()["models"]
    assert loaded["digest"] == tag["digest"]
    shown = post(client, "/api/show", model="anything")
    assert shown["model_info"]["llama.embedding_length"] == 256
    # What the server has room for, not what the model was trained with: clients send so much.
    assert shown["model_info"]["llama.context_length"] == N_CTX
    assert shown["parameters"].split() == ["num_ctx", str(N_CTX)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", {"prompt": "x", "images": ["x"], "raw": True}),
        ("/api/generate", {"prompt": "x", "suffix": "y"}),
        ("/api/generate", {"prompt": "x", "options": {"temperature": "hot"}}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": "x"}]}),
        ("/api/chat", {"messages": HI, "tools": [{"type": "function"}]}),
        ("/api/chat", {"messages": HI, "format": 5}),
        ("/api/chat", {"messages": HI, "logprobs": 2}),
        ("/api/chat", {"messages": HI, "top_logprobs": 2}),
        ("/api/generate", {"prompt": "x", "logprobs": True, "top_logprobs": 65}),
        ("/api/chat", {"messages": 5}),
        ("/api/embed", {"input": "x", "dimensions": 257}),
        ("/api/embeddings", {}),
    ],
)
def test_refused(path: str, body: dict[str, Any], client: TestClient) -> None:
    assert isinstance(post(client, path, 400, **body)["error"], str)


def test_fields_have_their_own_names(client: TestClient) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    for own, said in (
        ({"options": {"num_predict": -9}}, "num_predict: expected a whole number"),
        ({"options": {"top_p": 2}}, "top_p = 2"),
        ({"format": 5}, "format: expected"),
    ):
        answer = client.post("/api/chat", json={**body, **own})
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(said)

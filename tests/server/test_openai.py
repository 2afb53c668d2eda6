"""OpenAI's endpoints: fields of answers, the order of streams, what is refused."""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import N_CTX, events
from tests.server.direct import DirectClient
from treadle.kvcache.prefix_tree import WHY

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 8}


def post(client: TestClient | DirectClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def stream(client: TestClient | DirectClient, path: str, **body: Any) -> list[Any]:
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


# -- chat -----------------------------------------------------------------------------------------


def test_a_chat_is_the_librarys(client: TestClient, model: treadle.Model) -> None:
    made = model.chat(HI, temperature=0, max_tokens=8)
    text = made.finish()
    found = post(client, CHAT, messages=HI, **GREEDY)
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert choice["finish_reason"] == made.finish_reason == "length"
    n = len(made.prompt_ids)
    assert found["usage"]["prompt_tokens"] == n
    assert found["usage"]["completion_tokens"] == 8
    assert found["usage"]["total_tokens"] == n + 8
    assert 0 <= found["usage"]["prompt_tokens_details"]["cached_tokens"] < n
    assert found["timings"]["predicted_n"] == 8
    assert found["timings"]["cache_n"] + found["timings"]["prompt_n"] == n
    cache = found["timings"]["cache"]
    assert cache["memory"] + cache["files"] == cache["left_at"] == found["timings"]["cache_n"]
    assert cache["piece"] == model.tokenizer.piece(made.prompt_ids[cache["left_at"]])
    assert cache["why"] in WHY


def test_the_order_of_a_streams_events(client: TestClient, model: treadle.Model) -> None:
    text = model.chat(HI, temperature=0, max_tokens=8).finish()
    *chunks, done = stream(client, CHAT, messages=HI, **GREEDY)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[-1] == {}
    assert all(list(delta) == ["content"] and delta["content"] for delta in deltas[1:-1])
    assert "".join(delta["content"] for delta in deltas[1:-1]) == text
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_usage_comes_last_and_only_if_asked_for(client: TestClient) -> None:
    options = {"include_usage": True}
    *_, end, used, done = stream(client, CHAT, messages=HI, stream_options=options, **GREEDY)
    assert end["choices"][0]["finish_reason"] == "length"
    assert used["choices"] == []
    assert used["usage"]["completion_tokens"] == 8
    assert done == "[DONE]"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("wanted", ["yes", 1])
def test_an_option_of_a_wrong_type_is_named(path: str, wanted: object, client: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "prompt": "x", "stream": True}
    error = post(client, path, 400, **body, stream_options={"include_usage": wanted})["error"]
    assert error["param"] == "stream_options.include_usage"


def test_several_texts_have_seeds_of_their_own(client: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "n": 3, "seed": 5, "max_tokens": 12}
    found = [choice["message"]["content"] for choice in post(client, CHAT, **body)["choices"]]
    assert len(set(found)) == 3
    assert [
        choice["message"]["content"] for choice in post(client, CHAT, **body)["choices"]
    ] == found
    second = post(client, CHAT, **{**body, "n": 1, "seed": 6})
    assert second["choices"][0]["message"]["content"] == found[1]
    *chunks, _ = stream(client, CHAT, **body)
    told = ["", "", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        told[choice["index"]] += choice["delta"].get("content") or ""
    assert told == found


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs(streamed: bool, client: TestClient, model: treadle.Model) -> None:
    made = model.chat(HI, temperature=0, max_tokens=8, logprobs=2)
    made.finish()
    assert made.logprobs is not None
    expected = [entry.as_dict() for entry in made.logprobs]
    body: dict[str, Any] = {"messages": HI, "logprobs": True, "top_logprobs": 2, **GREEDY}
    if streamed:
        chunks = stream(client, CHAT, **body)[:-1]
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        found = [entry for part in parts if part for entry in part["content"]]
    else:
        found = post(client, CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert found == expected


def test_a_stop_text_ends_it_and_is_not_told(client: TestClient) -> None:
    text = post(client, CHAT, messages=HI, **GREEDY)["choices"][0]["message"]["content"]
    stop = text[4:6]
    choice = post(client, CHAT, messages=HI, stop=stop, **GREEDY)["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    *chunks, _ = stream(client, CHAT, messages=HI, stop=["never", stop], **GREEDY)
    told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert told == text[: text.index(stop)]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion"])
def test_logprobs_end_where_a_stop_text_cuts(path: str, client: TestClient) -> None:
    """Of tokens that lie behind the cut nothing is told: not in streams either, which hold back."""
    body: dict[str, Any] = {
        CHAT: {"messages": HI, "logprobs": True},
        "/v1/completions": {"prompt": "def f(", "logprobs": 0},
        "/completion": {"prompt": "def f(", "n_probs": 1},
    }[path] | {"temperature": 0, "max_tokens": 12}

    def read(found: Any) -> tuple[str, list[str]]:
        if path == "/completion":
            entries = found["completion_probabilities"]
            return found["content"], [entry["token"] for entry in entries]
        (choice,) = found["choices"]
        said = choice.get("message") or choice.get("delta") or choice
        told = choice["logprobs"] or {}
        tokens = told.get("tokens") or [entry["token"] for entry in told.get("content", [])]
        return said.get("content", said.get("text")) or "", tokens

    text, tokens = read(post(client, path, **body))
    stop = "".join(tokens[5:9])
    assert text.index(stop) == len("".join(tokens[:5]))
    for word, kept in ((stop, 5), (tokens[4][-1] + stop, 5), (stop[1:], 6 if tokens[5][1:] else 5)):
        whole = read(post(client, path, **body, stop=word))
        assert whole == (text[: text.index(word)], tokens[:kept])
        chunks = [
            read(part) for part in stream(client, path, **body, stop=word) if part != "[DONE]"
        ]
        assert [token for _, each in chunks for token in each] == tokens[:kept]


def test_a_schema_is_kept(client: TestClient) -> None:
    schema = {
        "type": "object",
        "required": ["n"],
        "additionalProperties": False,
        "properties": {"n": {"enum": [1, 2]}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    for _ in range(2):  # compiled once, and kept
        choice = post(client, CHAT, messages=HI, response_format=form)["choices"][0]
        assert json.loads(choice["message"]["content"])["n"] in (1, 2)
        assert choice["finish_reason"] == "stop"


def test_a_schema_that_cannot_be_kept_names_the_keyword(client: TestClient) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "array", "uniqueItems": True}},
    }
    error = post(client, CHAT, 400, messages=HI, response_format=form)["error"]
    assert "uniqueItems" in error["message"]
    error = post(client, CHAT, 400, messages=HI, grammar="root ::= nothing")["error"]
    assert "nothing" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"regex": "(c{1000}){1000}"},
        {"json_schema": {"type": "string", "pattern": "^(d{1000}){900}$"}},
        {"grammar": 'root ::= ("e"{1000}){900}'},
    ],
)
def test_what_is_too_large_is_refused(client: TestClient, body: dict[str, Any]) -> None:
    error = post(client, "/v1/completions", 400, prompt="a", max_tokens=10, **body)["error"]
    assert "too large" in error["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"prediction": {"type": "content", "content": "x"}},  # Continue's: it may save time alone
        {"function_call": "auto", "functions": []},
        {"modalities": ["text"], "audio": None, "tools": [], "tool_choice": "auto"},
    ],
)
def test_what_asks_for_nothing_changes_nothing(more: dict[str, Any], client: TestClient) -> None:
    body: dict[str, Any] = {"messages": HI, "temperature": 0, "max_tokens": 4}
    plain, found = (post(client, CHAT, **body, **own) for own in ({}, more))
    assert found["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "video_url"}]}]}, "video_url"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls.function.name",
        ),
        (
            {"messages": [*HI, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[1].function_call: not supported: use tool_calls",
        ),
        ({"messages": HI, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HI, "modalities": ["audio"]}, "modalities"),
        ({"messages": HI, "functions": [{}]}, "functions"),
        ({"messages": HI, "temperature": -1e999}, "temperature"),
        ({"messages": HI, "stream": "yes"}, "stream"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], said: str, client: TestClient) -> None:
    raw = json.dumps(body).replace("-Infinity", "-1e999")
    answer = client.post(CHAT, content=raw)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


SCHEMA = {"type": "string", "pattern": "(?!x)"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_p": 2}, "top_p"),
        ({"min_p": 5}, "min_p"),
        ({"typ_p": 5}, "typ_p"),
        ({"mirostat": 3}, "mirostat"),
        ({"samplers": ["banana"]}, "samplers"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1e300}}, "logit_bias"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"n_predict": -5}, "n_predict"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"regex": "("}, "regex"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"guided_json": SCHEMA}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"messages": []}, "messages"),
    ],
)
def test_the_field_that_is_wrong_is_in_param(
    body: dict[str, Any], param: str, client: TestClient
) -> None:
    error = post(client, CHAT, 400, **{"messages": HI, **body})["error"]
    assert error["param"] == param
    if set(body) & {"typ_p", "n_predict", "max_completion_tokens"}:
        assert error["message"].startswith(param)


def test_how_many_messages_there_may_be(client: TestClient) -> None:
    error = post(client, CHAT, 400, messages=[])["error"]
    assert error["message"] == "messages: expected 1 to 10000, found 0"


def test_messages_as_clients_send_them(client: TestClient) -> None:
    """The system's first messages are one; a late one stays where the template writes it there."""
    messages = [
        {"role": "developer", "content": "one"},
        {"role": "system", "content": "more"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "c", "name": None},
    ]
    found = post(client, "/apply-template", messages=messages)["prompt"]
    plain = [
        {"role": "system", "content": "one\n\nmore"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "two"},
        {"role": "user", "content": "c"},
    ]
    assert found == post(client, "/apply-template", messages=plain)["prompt"]
    assert found.index("one") < found.index("more") < found.index("a\nb") < found.index("two")


def test_the_last_words_of_an_assistant_are_gone_on_with(client: TestClient) -> None:
    messages = [*HI, {"role": "assistant", "content": "def f("}]
    told = post(client, "/apply-template", messages=messages)["prompt"]
    assert told.endswith("def f(")
    begun = post(client, "/apply-template", messages=messages, continue_final_message=False)
    assert not begun["prompt"].endswith("def f(")


# -- completions --------------------------------------------------------------------------------


def test_completions_of_several_prompts(client: TestClient, model: treadle.Model) -> None:
    prompts = ["def f(", "import "]
    expected = [model.generate(p, temperature=0, max_tokens=5).finish() for p in prompts]
    ids = [model.tokenize(prompt) for prompt in prompts]
    for given in (prompts, ids, [prompts[0], ids[1]]):
        found = post(client, "/v1/completions", prompt=given, temperature=0, max_tokens=5)
        assert [choice["text"] for choice in found["choices"]] == expected
        assert [choice["index"] for choice in found["choices"]] == [0, 1]
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    one = post(client, "/v1/completions", prompt=ids[0], temperature=0, max_tokens=5)
    assert [choice["text"] for choice in one["choices"]] == expected[:1]


@pytest.mark.parametrize("streamed", [False, True])
def test_echo(streamed: bool, client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "def f(", "echo": True, "temperature": 0, "max_tokens": 4}
    plain = post(client, "/v1/completions", **{**body, "echo": False})["choices"][0]["text"]
    if streamed:
        *chunks, _ = stream(client, "/v1/completions", **body)
        found = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    else:
        found = post(client, "/v1/completions", **body)["choices"][0]["text"]
    assert found == "def f(" + plain


def test_old_logprobs(client: TestClient) -> None:
    body: dict[str, Any] = {"prompt": "def f(", "logprobs": 3, **GREEDY}
    choice = post(client, "/v1/completions", **body)["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert all(len(top) == 3 for top in found["top_logprobs"])
    for lp, token, top in zip(
        found["token_logprobs"], found["tokens"], found["top_logprobs"], strict=True
    ):
        assert top[token] == lp == max(top.values())
    *chunks, _ = stream(client, "/v1/completions", **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [o for part in parts for o in part["text_offset"]] == found["text_offset"]


def test_nothing_is_to_be_written(client: TestClient) -> None:
    found = post(client, "/v1/completions", prompt="x", max_tokens=0)
    assert found["choices"][0] == {
        "text": "",
        "index": 0,
        "logprobs": None,
        "finish_reason": "length",
    }
    *chunks, _ = stream(client, "/v1/completions", prompt="x", max_tokens=0)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_too_long_is_400_with_the_numbers(client: TestClient) -> None:
    for n, most in ((N_CTX + 1, N_CTX), (N_CTX, N_CTX - 1)):  # with N_CTX no token could follow
        error = post(client, "/v1/completions", 400, prompt=[5] * n)["error"]
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (n, N_CTX)
        # Claude Code, Cline and OpenCode know it by these words, whatever the protocol.
        assert error["message"].startswith(f"prompt is too long: {n} tokens > {most} maximum")
    whole = post(client, "/v1/completions", prompt=[5] * (N_CTX - 1), ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == 1
    assert whole["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 5},
        {"prompt": [[]]},
        {"prompt": ["x"] * 257},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "best_of": 3},
        {"prompt": "x", "top_p": 3},
        {"prompt": [10**9]},
    ],
)
def test_refused_completions(body: dict[str, Any], client: TestClient) -> None:
    assert post(client, "/v1/completions", 400, **body)["error"]["message"]


def test_seconds_are_bounded_where_asked(client: TestClient) -> None:
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    headers = {"x-request-timeout": "0.02"}
    answer = client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 504
    assert client.post("/v1/completions", json={**body, "timeout": 0.02}).status_code == 504
    wrong = client.post("/v1/completions", json=body, headers={"x-request-timeout": "soon"})
    assert wrong.status_code == 400


# -- embeddings and models ----------------------------------------------------------------------


def test_embeddings(client: TestClient, model: treadle.Model) -> None:
    texts = ["def f(", "import os"]
    expected = model.embed(texts)
    for given in (texts, [model.tokenize(output) for output in texts]):
        found = post(client, "/v1/embeddings", input=given)
        rows = np.array([row["embedding"] for row in found["data"]], np.float32)
        assert np.array_equal(rows, expected)
        n = sum(len(model.tokenize(output)) for output in texts)
        assert found["usage"] == {"prompt_tokens": n, "total_tokens": n}
    packed = post(client, "/v1/embeddings", input=texts[0], encoding_format="base64")
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), expected[0])
    for path in ("/embedding", "/embeddings", "/v1/embeddings"):  # llama.cpp's form, and answer
        native = post(client, path, content=texts[0])
        assert np.array_equal(np.array(native[0]["embedding"][0], np.float32), expected[0])
    both = post(client, "/embeddings", content="x", input=texts[0])
    assert both["data"][0]["embedding"] == native[0]["embedding"][0]
    asked: dict[str, Any] = {"input": texts[0], "encoding_format": "base64", "dimensions": 8}
    packed = post(client, "/v1/embeddings", **asked)
    raw = base64.b64decode(packed["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), model.embed(texts[0], dimensions=8)[0])


def test_vectors_that_are_cut_or_not_scaled(client: TestClient, model: treadle.Model) -> None:
    """``dimensions`` of OpenAI's, ``embd_normalize`` of llama.cpp's."""
    whole = model.embed("import os")[0]
    pooled = model.embed("import os", normalize=False)[0]
    (row,) = post(client, "/v1/embeddings", input="import os", dimensions=8)["data"]
    assert np.allclose(row["embedding"], whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)
    sizes = {
        -1: 1.0,
        0: np.abs(pooled).max() / 32760,
        1: np.abs(pooled).sum(),
        2: np.linalg.norm(pooled),
        3: (np.abs(pooled) ** 3).sum() ** (1 / 3),
    }
    for by, size in sizes.items():
        found = post(client, "/embedding", content="import os", embd_normalize=by)
        assert np.allclose(found[0]["embedding"][0], pooled / size, rtol=1e-5), by
    assert post(client, "/embedding", 400, content="x", embd_normalize=-2)["error"]["message"]


def test_what_vectors_are(client: TestClient, model: treadle.Model) -> None:
    """Their length, and the one pooling that the file has."""
    plain = model.embed("import os", normalize=False)[0]
    asked: dict[str, Any] = {"input": "import os", "normalize": False, "pooling": "mean"}
    (row,) = post(client, "/v1/embeddings", **asked)["data"]
    assert np.array_equal(np.array(row["embedding"], np.float32), plain)
    assert post(client, "/embedding", content="import os", pooling="mean")
    for path, name in (("/v1/embeddings", "input"), ("/embedding", "content")):
        error = post(client, path, 400, **{name: "x"}, pooling="cls")["error"]
        assert error["message"] == "pooling: cls is not supported: this model uses mean"
        assert error["param"] == "pooling"


def test_embeddings_of_many_texts_take_several_runs(
    client: TestClient, model: treadle.Model
) -> None:
    texts = [f"text number {i} " * 8 for i in range(40)]
    found = post(client, "/v1/embeddings", input=texts, dimensions=model.config.n_embd)
    rows = np.array([row["embedding"] for row in found["data"]], np.float32)
    assert np.array_equal(rows, model.embed(texts))


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": [[]]},
        {"input": [5.5]},
        {"input": ["x"] * 2049},
        {"input": "x", "dimensions": 257},
        {"input": "x", "encoding_format": "int8"},
        {"input": [5] * (N_CTX + 1)},
    ],
)
def test_refused_embeddings(body: dict[str, Any], client: TestClient) -> None:
    assert post(client, "/v1/embeddings", 400, **body)["error"]["message"]


def test_which_text_is_wrong_is_said(client: TestClient, model: treadle.Model) -> None:
    for given, where, what in (
        (["x", [10**6]], "input[1]", "a token id outside"),
        ([[5], []], "input[1]", "the prompt is empty"),
        (["x", "a b " * N_CTX], "input[1]", "prompt is too long"),
        ("a b " * N_CTX, "input", "prompt is too long"),
        ([], "input", "expected 1 to 2048 texts"),
    ):
        error = post(client, "/v1/embeddings", 400, input=given)["error"]
        assert error["message"].startswith(f"{where}: ")
        assert what in error["message"]
        assert error["param"] == where


def test_models(client: TestClient) -> None:
    found = client.get("/v1/models").json()
    assert [entry["id"] for entry in found["data"]] == ["demo"]
    assert found["data"][0]["meta"]["n_ctx"] == N_CTX
    (tagged,) = found["models"]  # llama.cpp's list: Ollama's entries with capabilities
    tags = client.get("/api/tags").json()["models"]
    assert tagged == {**tags[0], "capabilities": tagged["capabilities"]}
    assert tagged["capabilities"][:2] == ["completion", "embedding"]
    assert "multimodal" not in tagged["capabilities"]
    assert client.get("/v1/models/some/other").json()["id"] == "demo"
    assert client.get("/v1/models/").json() == found


def test_models_for_anthropics_clients(client: TestClient) -> None:
    """They read ``data`` page by page: ``has_more`` is asked for."""
    headers = {"anthropic-version": "2023-06-01"}
    found = client.get("/v1/models?limit=20", headers=headers).json()
    (entry,) = found.pop("data")
    assert found == {"first_id": "demo", "last_id": "demo", "has_more": False}
    assert datetime.fromisoformat(entry.pop("created_at").replace("Z", "+00:00"))
    told = {"type": "model", "id": "demo", "display_name": "demo"}
    assert entry == {**told, "lifecycle": "active", "max_input_tokens": N_CTX}
    assert client.get("/v1/models/demo", headers=headers).json()["type"] == "model"


def test_samplers_by_their_letters(client: TestClient) -> None:
    answer = post(client, "/completion", 200, prompt="a", n_predict=1, samplers="kt")
    assert answer["generation_settings"]["samplers"] == ["top_k", "temperature"]
    post(client, "/completion", 400, prompt="a", n_predict=1, samplers="kq")

"""Every field that a protocol has (``their_fields.py``) is done, told in ``warnings``, or refused
by its name: a field that comes new fails here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from tests.server.test_rerank import folder
from treadle.server.protocols import anthropic, embeddings, llamacpp, ollama, rerank
from treadle.server.protocols.openai import chat as openai_chat
from treadle.server.protocols.openai import completions, responses
from treadle.server.requests import chat_prompt, generation_request, token_rules
from treadle.server.requests import ignored_fields as ignored
from treadle.server.requests.ignored_fields import (
    ACCEPTED,
    ACCEPTED_OF_VECTORS,
    Fields,
    ignored_fields,
)

__all__ = ["folder"]
pytestmark = pytest.mark.slow  # the packages whose fields these are


BASE = {
    *generation_request.COMMON,
    *generation_request.SAMPLERS,
    *generation_request.SYNONYMS,
    *token_rules.FIELDS,
    "id_slot",
}
TALK = {*chat_prompt.FIELDS}
Known = tuple[set[str], Fields, frozenset[str]]
# By endpoint: the fields that are read, those that are told, and those that change nothing.
KNOWN: dict[str, Known] = {
    "/v1/chat/completions": (
        BASE | TALK | {*openai_chat.FIELDS, *openai_chat.LOGPROBS},
        ignored.CHAT,
        ACCEPTED,
    ),
    "/v1/completions": (
        BASE | {*completions.FIELDS, "prompt"},
        ignored.COMPLETIONS,
        ACCEPTED,
    ),
    "/v1/responses": (
        BASE
        | {*responses.FIELDS, "input", "tool_choice", "parallel_tool_calls"}
        | {"stream_options"},
        ignored.RESPONSES,
        ACCEPTED,
    ),
    "/v1/messages": (
        BASE | {*anthropic.FIELDS, "system"},
        ignored.ANTHROPIC,
        ACCEPTED,
    ),
    "/completion": (
        BASE | {*llamacpp.COMPLETION, "prompt"},
        ignored.NATIVE,
        ACCEPTED,
    ),
    "/api/chat": (
        {*ollama.FIELDS, *openai_chat.LOGPROBS, "think", "format"},
        ignored.OLLAMA,
        ACCEPTED,
    ),
    "/api/generate": (
        {*ollama.FIELDS, *openai_chat.LOGPROBS, "think", "format"},
        ignored.OLLAMA,
        ACCEPTED,
    ),
    "options": (
        BASE | {"num_ctx"},
        ignored.OLLAMA_OPTIONS,
        frozenset(),
    ),
    "/v1/embeddings": (
        {*embeddings.FIELDS, "input"},
        ignored.EMBEDDINGS,
        ACCEPTED_OF_VECTORS,
    ),
    "/embedding": (
        {*embeddings.NATIVE, "content", "input"},
        ignored.EMBEDDINGS,
        ACCEPTED_OF_VECTORS,
    ),
    "/api/embed": (
        {*embeddings.CUT, "truncate", "input", "options"},
        {},
        ACCEPTED,
    ),
    "/api/embeddings": (
        {"truncate", "prompt", "options"},
        {},
        ACCEPTED,
    ),
    "/v1/rerank": (
        {*rerank.FIELDS, "documents", "texts"},
        ignored.RERANK,
        ACCEPTED_OF_VECTORS,
    ),
    "stream_options": (
        {"include_usage"},
        ignored.STREAMED,
        frozenset(),
    ),
    "text": (
        {"format"},
        ignored.RESPONSES_TEXT,
        frozenset(),
    ),
    "reasoning": (
        {"effort", "summary", "generate_summary"},  # a summary: all of the reasoning is sent
        ignored.RESPONSES_REASONING,
        frozenset(),
    ),
    "thinking": (
        {"type", "budget_tokens"},
        ignored.ANTHROPIC_THINKING,
        frozenset(),
    ),
}


@pytest.mark.parametrize("where", KNOWN)
def test_every_field_is_done_or_told_or_refused(where: str) -> None:
    from tests.server.their_fields import THEIRS

    read, told, accepted = KNOWN[where]
    assert sorted(THEIRS[where] - read - told.keys() - accepted) == []
    assert sorted(read & told.keys()) == []


MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/completion": {"prompt": "x", "n_predict": 1},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 1}},
    "/v1/embeddings": {"input": "x"},
    "/api/embed": {"input": "x"},
    "/api/embeddings": {"prompt": "x"},
}
INNER = {  # fields that are objects, and the endpoints that have them
    "stream_options": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "text": ("/v1/responses",),
    "reasoning": ("/v1/responses",),
    "thinking": ("/v1/messages",),
    "options": ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
}


def warned(client: TestClient, path: str, body: dict[str, Any], stream: bool) -> list[str]:
    answer = client.post(path, json={**BODIES[path], **body, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream or "embed" in path:
        return list(answer.json().get("warnings", []))
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    found += [each["response"] for each in found if "response" in each and "type" in each]
    return [said for each in found for said in each.get("warnings", [])]


def with_tables(path: str) -> Iterator[tuple[str, Fields]]:
    """The names before the fields of an endpoint's tables, and these."""
    yield "", KNOWN[path][1]
    for name, paths in INNER.items():
        if path in paths:
            yield f"{name}.", KNOWN[name][1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_done_is_told(path: str, stream: bool, client: TestClient) -> None:
    """Of each field that was sent, unless its value asks for nothing."""
    body = dict[str, Any]()
    expected = set[str]()
    harmless = dict[str, Any]()
    for prefix, table in with_tables(path):
        inner = prefix.removesuffix(".")
        own, fine = (body, harmless) if not inner else ({}, {})
        own |= dict.fromkeys(table, "told")
        fine |= {name: row.harmless[0] for name, row in table.items() if row.harmless}
        if inner:
            more = {"type": "enabled", "budget_tokens": 64} if inner == "thinking" else {}
            body[inner] = {**BODIES[path].get(inner, {}), **own, **more}
            harmless[inner] = {**BODIES[path].get(inner, {}), **fine, **more}
        expected |= {prefix + name for name in table}
    found = warned(client, path, body, stream)
    assert {said.partition(": ")[0] for said in found} == expected
    assert len(found) == len(expected)
    assert all(len(said.partition(": ")[2]) > 5 for said in found)
    assert warned(client, path, harmless, stream) == []
    limits = {"options": BODIES[path]["options"]} if "options" in BODIES[path] else {}
    assert warned(client, path, {**dict.fromkeys(body), **limits}, stream) == []


def test_values_that_ask_for_nothing_have_their_own_type() -> None:
    table = {"a": ignored.IgnoredField("why", (0, False)), "b": ignored.IgnoredField("why", (1,))}
    assert ignored_fields({"a": 0.0, "b": 1.0, "c": 5}, table) == []
    assert ignored_fields({"a": 1, "b": True}, table, "x.") == ["x.a: why", "x.b: why"]


def test_a_context_of_ollamas(client: TestClient, model: treadle.Model) -> None:
    for path in INNER["options"]:
        for n_ctx, told in ((model.n_ctx, 0), (64, 0), (model.n_ctx + 1, 1)):
            body = {"options": {"num_ctx": n_ctx, "num_predict": 1}}
            found = warned(client, path, body, False)
            assert len(found) == told
            assert all(str(model.n_ctx) in said and "-c" in said for said in found)
        for stays, told in (("5m", 0), (-1, 0), (0, 1), ("0", 1)):
            assert len(warned(client, path, {"keep_alive": stays}, False)) == told


def test_what_a_response_cannot_include(client: TestClient) -> None:
    include = [
        "message.output_text.logprobs",
        "reasoning.encrypted_content",
        "file_search_call.results",
    ]
    (told,) = warned(client, "/v1/responses", {"include": include}, True)
    assert "file_search_call.results" in told


REFUSED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "audio": {},
        "chat_template": "x",
        "function_call": {"name": "f"},
        "functions": [{}],
        "modalities": ["audio"],
        "web_search_options": {},
        "suffix": "x",
    },
    "/v1/completions": {
        "add_special_tokens": False,
        "prompt_embeds": "x",
        "best_of": 2,
        "cache_salt": "x",
        "use_beam_search": True,
        "logits_processors": ["x"],
        "guided_grammar": "x",
        "post_sampling_probs": True,
        "grammar_lazy": True,
        "image_data": [1],
    },
    "/v1/responses": {
        "background": True,
        "conversation": "x",
        "prompt": {},
        "truncation": "x",
    },
    "/v1/messages": {"mcp_servers": [{}], "compaction": {}, "thread": {}},
    "/api/chat": {"_debug_render_only": True},
    "/api/generate": {"context": [1], "template": "x", "_debug_render_only": True},
    "/v1/embeddings": {
        "embed_dtype": "float16",
        "endianness": "big",
        "add_special_tokens": False,
        "messages": MESSAGES,
        "late_chunking": True,
        "encoding_format": "bytes",
    },
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_refused_is_named(path: str, client: TestClient) -> None:
    for name, value in REFUSED[path].items():
        answer = client.post(path, json={**BODIES[path], name: value})
        assert answer.status_code == 400, name
        assert answer.text.count(name) > 0, name


def test_scores_tell_it_too(folder: Any) -> None:
    model = treadle.load(folder, threads=2)
    with model, running(model, warm=False) as service, talking(service) as client:
        body: dict[str, Any] = {"query": "a", "documents": ["b"]}
        answer = client.post("/v1/rerank", json={**body, **dict.fromkeys(ignored.RERANK, "told")})
        told = answer.json()["warnings"]
        assert {said.partition(": ")[0] for said in told} == ignored.RERANK.keys()
        answer = client.post("/v2/rerank", json={**body, "priority": 5})
        assert answer.json()["meta"]["warnings"] == ["priority: ignored: not supported here"]
        assert "warnings" not in client.post("/v1/rerank", json=body).json()

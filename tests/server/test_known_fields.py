"""Every field that a protocol has is done, told in ``warnings``, or refused by its name. The lists
are those of OpenAI's, Anthropic's and Ollama's packages, of llama.cpp's ``server-schema.cpp`` and
README, and of vLLM's ``protocol.py``: a field that comes new fails here.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import ollama._types as ollama_types
import pytest
from anthropic.types import (
    ThinkingConfigParam,
    message_count_tokens_params,
    message_create_params,
)
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params, response_text_config_param
from openai.types.shared_params import reasoning
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


def hints(*types: Any) -> set[str]:
    return {name for each in types for name in typing.get_type_hints(each)}


# Read in November 2026: llama.cpp in the sdist of llama-cpp-python 0.3.36; vLLM in its documents.
LLAMA_CPP = set(
    [
        "verbose",
        "timings_per_token",
        "stream",
        "stream_options",
        "cache_prompt",
        "return_tokens",
        "return_progress",
        "sse_ping_interval",
        "n_predict",
        "max_completion_tokens",
        "max_tokens",
        "n_indent",
        "n_keep",
        "n_discard",
        "n_cmpl",
        "n",
        "n_cache_reuse",
        "t_max_prompt_ms",
        "t_max_predict_ms",
        "response_fields",
        "top_k",
        "top_p",
        "min_p",
        "top_n_sigma",
        "xtc_probability",
        "xtc_threshold",
        "typical_p",
        "temperature",
        "dynatemp_range",
        "dynatemp_exponent",
        "repeat_last_n",
        "repeat_penalty",
        "frequency_penalty",
        "presence_penalty",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "mirostat",
        "mirostat_tau",
        "mirostat_eta",
        "adaptive_target",
        "adaptive_decay",
        "seed",
        "n_probs",
        "logprobs",
        "min_keep",
        "backend_sampling",
        "post_sampling_probs",
        "speculative.n_max",
        "speculative.n_min",
        "speculative.p_min",
        "speculative.type",
        "speculative.ngram_size_n",
        "speculative.ngram_size_m",
        "speculative.ngram_min_hits",
        "lora",
        "json_schema",
        "grammar",
        "grammar_type",
        "grammar_lazy",
        "grammar_triggers",
        "preserved_tokens",
        "chat_format",
        "reasoning_format",
        "generation_prompt",
        "parse_tool_calls",
        "chat_parser",
        "reasoning_control",
        "reasoning_budget_tokens",
        "thinking_budget_tokens",
        "reasoning_budget_start_tag",
        "reasoning_budget_end_tags",
        "reasoning_budget_end_tag",
        "reasoning_budget_message",
        "logit_bias",
        "ignore_eos",
        "stop",
        "samplers",
        "id_slot",
        "message_delimiters",
    ]
)
LLAMA_CPP_CHAT = set(
    [
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "reasoning_effort",
        "response_format",
        "top_logprobs",
    ]
)
VLLM = set(
    [
        "use_beam_search",
        "top_k",
        "min_p",
        "repetition_penalty",
        "watermarking",
        "length_penalty",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
        "allowed_token_ids",
        "prompt_logprobs",
        "logprob_token_ids",
        "bad_words",
        "add_special_tokens",
        "response_format",
        "structured_outputs",
        "priority",
        "request_id",
        "session_id",
        "return_tokens_as_token_ids",
        "return_token_ids",
        "routed_experts_prompt_start",
        "return_token_offsets",
        "return_mm_kwargs",
        "cache_salt",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "repetition_detection",
        "thinking_token_budget",
        "stream_interval",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "logits_processors",
    ]
)
VLLM_CHAT = VLLM | set(
    [
        "include_reasoning",
        "echo",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "chat_template",
        "chat_template_kwargs",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "return_prompt_text",
    ]
)
VLLM_POOLING = set(
    [
        "model",
        "user",
        "truncate_prompt_tokens",
        "padding",
        "truncation_side",
        "request_id",
        "priority",
        "mm_processor_kwargs",
        "cache_salt",
        "use_activation",
    ]
)
VLLM_EMBEDDINGS = VLLM_POOLING | set(
    [
        "input",
        "add_special_tokens",
        "encoding_format",
        "embed_dtype",
        "endianness",
        "dimensions",
        "messages",
    ]
)
OLLAMA_CHAT = ollama_types.ChatRequest.model_fields.keys() | {
    "truncate",
    "shift",
    "_debug_render_only",
}
OLLAMA_GENERATE = ollama_types.GenerateRequest.model_fields.keys() | {
    "truncate",
    "shift",
    "_debug_render_only",
}
ANTHROPIC = hints(
    message_create_params.MessageCreateParamsBase,
    beta_create_params.MessageCreateParamsBase,
    message_count_tokens_params.MessageCountTokensParams,
) | {"stream", "temperature", "top_k", "top_p", "output_format"}

BASE = {
    *generation_request.COMMON,
    *generation_request.SAMPLERS,
    *generation_request.SYNONYMS,
    *token_rules.FIELDS,
    "id_slot",
}
TALK = {*chat_prompt.FIELDS}
Known = tuple[set[str], set[str], Fields, frozenset[str]]
# By endpoint: the fields that its protocols have, those that are read, and those that are told.
KNOWN: dict[str, Known] = {
    "/v1/chat/completions": (
        hints(chat.CompletionCreateParamsBase)
        | {"stream"}
        | LLAMA_CPP
        | LLAMA_CPP_CHAT
        | VLLM_CHAT,
        BASE | TALK | {*openai_chat.FIELDS, *openai_chat.LOGPROBS},
        ignored.CHAT,
        ACCEPTED,
    ),
    "/v1/completions": (
        hints(completion_create_params.CompletionCreateParamsBase)
        | {"stream", "prompt_embeds"}
        | (LLAMA_CPP - {"reasoning_format"})
        | VLLM,
        BASE | {*completions.FIELDS, "prompt"},
        ignored.COMPLETIONS,
        ACCEPTED,
    ),
    "/v1/responses": (
        hints(response_create_params.ResponseCreateParamsBase) | {"stream", "return_progress"},
        BASE
        | {*responses.FIELDS, "input", "tool_choice", "parallel_tool_calls"}
        | {"stream_options"},
        ignored.RESPONSES,
        ACCEPTED,
    ),
    "/v1/messages": (
        ANTHROPIC,
        BASE | {*anthropic.FIELDS, "system"},
        ignored.ANTHROPIC,
        ACCEPTED,
    ),
    "/completion": (
        {"prompt", *(LLAMA_CPP - {"reasoning_format"})},
        BASE | {*llamacpp.COMPLETION, "prompt"},
        ignored.NATIVE,
        ACCEPTED,
    ),
    "/api/chat": (
        OLLAMA_CHAT,
        {*ollama.FIELDS, *openai_chat.LOGPROBS, "think", "format"},
        ignored.OLLAMA,
        ACCEPTED,
    ),
    "/api/generate": (
        OLLAMA_GENERATE,
        {*ollama.FIELDS, *openai_chat.LOGPROBS, "think", "format"},
        ignored.OLLAMA,
        ACCEPTED,
    ),
    "options": (
        set(ollama_types.Options.model_fields),
        BASE | {"num_ctx"},
        ignored.OLLAMA_OPTIONS,
        frozenset(),
    ),
    "/v1/embeddings": (
        hints(embedding_create_params.EmbeddingCreateParams)
        | VLLM_EMBEDDINGS
        | {"embd_normalize", "input_type", "truncate", "task", "late_chunking", "prompt_name"},
        {*embeddings.FIELDS, "input"},
        ignored.EMBEDDINGS,
        ACCEPTED_OF_VECTORS,
    ),
    "/embedding": (
        {"content", "input", "embd_normalize"},
        {*embeddings.NATIVE, "content", "input"},
        ignored.EMBEDDINGS,
        ACCEPTED_OF_VECTORS,
    ),
    "/api/embed": (
        set(ollama_types.EmbedRequest.model_fields),
        {*embeddings.CUT, "truncate", "input", "options"},
        {},
        ACCEPTED,
    ),
    "/api/embeddings": (
        set(ollama_types.EmbeddingsRequest.model_fields),
        {"truncate", "prompt", "options"},
        {},
        ACCEPTED,
    ),
    "/v1/rerank": (
        VLLM_POOLING
        | {"query", "documents", "texts", "top_n", "return_documents", "return_text", "raw_scores"}
        | {"truncate", "truncation_direction", "max_tokens_per_doc", "max_chunks_per_doc"}
        | {"rank_fields", "lora"},
        {*rerank.FIELDS, "documents", "texts"},
        ignored.RERANK,
        ACCEPTED_OF_VECTORS,
    ),
    "stream_options": (
        hints(
            chat_completion_stream_options_param.ChatCompletionStreamOptionsParam,
            response_create_params.StreamOptions,
        )
        | {"continuous_usage_stats"},
        {"include_usage"},
        ignored.STREAMED,
        frozenset(),
    ),
    "text": (
        hints(response_text_config_param.ResponseTextConfigParam),
        {"format"},
        ignored.RESPONSES_TEXT,
        frozenset(),
    ),
    "reasoning": (
        hints(reasoning.Reasoning),
        {"effort", "summary", "generate_summary"},  # a summary: all of the reasoning is sent
        ignored.RESPONSES_REASONING,
        frozenset(),
    ),
    "thinking": (
        {
            name
            for each in typing.get_args(ThinkingConfigParam)
            for name in typing.get_type_hints(each)
        },
        {"type", "budget_tokens"},
        ignored.ANTHROPIC_THINKING,
        frozenset(),
    ),
}


@pytest.mark.parametrize("where", KNOWN)
def test_every_field_is_done_or_told_or_refused(where: str) -> None:
    theirs, read, told, accepted = KNOWN[where]
    assert sorted(theirs - read - told.keys() - accepted) == []
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
    yield "", KNOWN[path][2]
    for name, paths in INNER.items():
        if path in paths:
            yield f"{name}.", KNOWN[name][2]


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
    assert warned(client, path, dict.fromkeys(body), stream) == []


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
    with model, running(model) as service, talking(service) as client:
        body: dict[str, Any] = {"query": "a", "documents": ["b"]}
        answer = client.post("/v1/rerank", json={**body, **dict.fromkeys(ignored.RERANK, "told")})
        told = answer.json()["warnings"]
        assert {said.partition(": ")[0] for said in told} == ignored.RERANK.keys()
        answer = client.post("/v2/rerank", json={**body, "priority": 5})
        assert answer.json()["meta"]["warnings"] == ["priority: ignored: not supported here"]
        assert "warnings" not in client.post("/v1/rerank", json=body).json()

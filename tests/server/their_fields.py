"""The fields that protocols have, by endpoint: those of OpenAI's, Anthropic's and Ollama's
packages, of llama.cpp's ``server-schema.cpp`` and README, and of vLLM's ``protocol.py``. The
packages take seconds to import: tests import this file when they run.
"""

from __future__ import annotations

import typing
from typing import Any

import ollama._types as ollama_types
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

THEIRS: dict[str, set[str]] = {
    "/v1/chat/completions": hints(chat.CompletionCreateParamsBase)
    | {"stream"}
    | LLAMA_CPP
    | LLAMA_CPP_CHAT
    | VLLM_CHAT,
    "/v1/completions": hints(completion_create_params.CompletionCreateParamsBase)
    | {"stream", "prompt_embeds"}
    | (LLAMA_CPP - {"reasoning_format"})
    | VLLM,
    "/v1/responses": hints(response_create_params.ResponseCreateParamsBase)
    | {"stream", "return_progress"},
    "/v1/messages": ANTHROPIC,
    "/completion": {"prompt", *(LLAMA_CPP - {"reasoning_format"})},
    "/api/chat": OLLAMA_CHAT,
    "/api/generate": OLLAMA_GENERATE,
    "options": set(ollama_types.Options.model_fields),
    "/v1/embeddings": hints(embedding_create_params.EmbeddingCreateParams)
    | VLLM_EMBEDDINGS
    | {"embd_normalize", "input_type", "truncate", "task", "late_chunking", "prompt_name"},
    "/embedding": {"content", "input", "embd_normalize"},
    "/api/embed": set(ollama_types.EmbedRequest.model_fields),
    "/api/embeddings": set(ollama_types.EmbeddingsRequest.model_fields),
    "/v1/rerank": VLLM_POOLING
    | {"query", "documents", "texts", "top_n", "return_documents", "return_text", "raw_scores"}
    | {"truncate", "truncation_direction", "max_tokens_per_doc", "max_chunks_per_doc"}
    | {"rank_fields", "lora"},
    "stream_options": hints(
        chat_completion_stream_options_param.ChatCompletionStreamOptionsParam,
        response_create_params.StreamOptions,
    )
    | {"continuous_usage_stats"},
    "text": hints(response_text_config_param.ResponseTextConfigParam),
    "reasoning": hints(reasoning.Reasoning),
    "thinking": {
        name
        for each in typing.get_args(ThinkingConfigParam)
        for name in typing.get_type_hints(each)
    },
}

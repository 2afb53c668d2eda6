"""Fields that clients of other servers send and that have no effect here. An answer's ``warnings``
name each that was sent, unless its value asks for what happens anyway.

Each field is in one place: in a table of fields that are read (``generation_request.py`` and the
protocols' files), which may refuse it, or here. ``tests/server/test_known_fields.py`` compares all
of them with the protocols' own lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class IgnoredField(NamedTuple):
    """The reason ``why`` a field has no effect, and its ``harmless`` values, which need no warning
    because they ask for what happens anyway.
    """

    why: str
    harmless: tuple[Any, ...] = ()


Fields = dict[str, IgnoredField]

ACCEPTED = frozenset(
    {
        "model",  # any name means the one model
        "betas",  # Anthropic's SDKs send them as a header
        "keep_alive",  # the model stays loaded; see ``ignored_by_ollama``
        "cache_control",  # the prefix cache serves all prompts
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
"""Fields that need no warning: the server already does what they request."""
ACCEPTED_OF_VECTORS = ACCEPTED | {
    "user",
    "cache_salt",
}  # embeddings leave nothing in the cache


def ignored_fields(body: Mapping[str, Any], table: Fields, where: str = "") -> list[str]:
    """Return a warning for each field of ``body`` that is in ``table`` and whose value is not
    harmless. ``where``: a prefix of the fields' names.
    """
    return [
        f"{where}{name}: {row.why}"
        for name, row in table.items()
        if body.get(name) is not None and not _asks_nothing(body[name], row.harmless)
    ]


def _asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return whether ``value`` is one of the ``harmless`` values. Numbers compare as in JSON; true
    is not 1.
    """
    same = (
        isinstance(value, bool) == isinstance(each, bool) and value == each for each in harmless
    )
    return any(same)


def ignored_by_ollama(body: Mapping[str, Any], table: Fields, n_ctx: int) -> list[str]:
    """Return a warning for each field of an Ollama body, and of its ``options``, that has no
    effect. ``table``: ignored fields of the body. A ``num_ctx`` up to the server's ``n_ctx`` needs
    no warning.
    """
    told = ignored_fields(body, table)
    options = body.get("options")
    if body.get("keep_alive") in OLLAMA_UNLOAD:
        told.append("keep_alive: ignored: the model stays loaded")
    if not isinstance(options, dict):
        return told
    told += ignored_fields(options, OLLAMA_OPTIONS, "options.")
    asked = options.get("num_ctx")
    if isinstance(asked, int | float) and asked > n_ctx:
        told.append(
            f"options.num_ctx: ignored: the context has {n_ctx} tokens: start the server with a "
            "larger -c"
        )
    return told


_NO_SHIFT = "context shifting is not supported: generation stops when the context is full"
_PARSER = "ignored: the chat template determines it"
_AS_IN_FILE = "ignored: pictures are prepared as the model's file says; see detail"
_TEXT_ALONE = "ignored: treadle generates text only"
_NOT_RETURNED = "ignored: treadle does not return it"
_START = "ignored: it can only be set when the server starts"
_NOT_KEPT = "ignored: nothing is stored"
_LOCAL = "ignored: the server does not exchange KV caches with others"
_ONLY_ONE = "ignored: treadle has only one"

LLAMA_CPP: Fields = {
    "n_keep": IgnoredField(_NO_SHIFT, (0, -1)),
    "n_discard": IgnoredField(_NO_SHIFT, (0,)),
    "n_cache_reuse": IgnoredField("the cache reuses prefixes only", (0,)),
    "t_max_prompt_ms": IgnoredField("ignored: use timeout", (-1, 0)),
    "backend_sampling": IgnoredField("ignored: samplers run on the CPU", (False,)),
    "chat_format": IgnoredField(_PARSER),
    "chat_parser": IgnoredField(_PARSER),
    "generation_prompt": IgnoredField(_PARSER),
    "parse_tool_calls": IgnoredField(_PARSER, (True,)),
    "preserved_tokens": IgnoredField(_PARSER, ([],)),
    "grammar_triggers": IgnoredField("ignored: a grammar applies from the first token", ([],)),
    "grammar_type": IgnoredField(_PARSER),
    "message_delimiters": IgnoredField(_PARSER, ([],)),
    "reasoning_budget_start_tag": IgnoredField(_PARSER, ("",)),
    "reasoning_budget_end_tag": IgnoredField(_PARSER, ("",)),
    "reasoning_budget_end_tags": IgnoredField(_PARSER, ([],)),
    **{
        f"speculative.{name}": IgnoredField(_START)
        for name in (
            "n_max",
            "n_min",
            "p_min",
            "type",
            "ngram_size_n",
            "ngram_size_m",
            "ngram_min_hits",
        )
    },
}
"""llama.cpp's ``server-schema.cpp``."""

VLLM: Fields = {
    "length_penalty": IgnoredField("ignored: beam search is not supported", (1, 1.0)),
    "skip_special_tokens": IgnoredField("ignored: control tokens have no text", (True,)),
    "spaces_between_special_tokens": IgnoredField("ignored: control tokens have no text", (True,)),
    "truncate_prompt_tokens": IgnoredField(
        "ignored: prompts are never truncated; one that is too long is an error (400)"
    ),
    "truncation_side": IgnoredField("ignored: prompts are never truncated"),
    "prompt_logprobs": IgnoredField("ignored: use /v1/completions with echo and logprobs"),
    "logprob_token_ids": IgnoredField("ignored: top_logprobs returns the most likely tokens"),
    "watermarking": IgnoredField("ignored: not supported", (False,)),
    "guided_decoding_backend": IgnoredField(_ONLY_ONE),
    "guided_whitespace_pattern": IgnoredField("ignored: the model chooses the whitespace in JSON"),
    "media_io_kwargs": IgnoredField(_AS_IN_FILE),
    "mm_processor_kwargs": IgnoredField(_AS_IN_FILE),
    "request_id": IgnoredField("ignored: use the header X-Request-Id"),
    "session_id": IgnoredField("ignored: all requests share the prefix cache"),
    "return_tokens_as_token_ids": IgnoredField("ignored: entries of logprobs have an id", (False,)),
    "return_token_ids": IgnoredField("ignored: use return_tokens of /completion", (False,)),
    "return_token_offsets": IgnoredField(_NOT_RETURNED, (False,)),
    "return_prompt_text": IgnoredField("ignored: use /apply-template", (False,)),
    "return_mm_kwargs": IgnoredField(_NOT_RETURNED, (True, False)),
    "routed_experts_prompt_start": IgnoredField(_NOT_RETURNED, (0,)),
    "kv_transfer_params": IgnoredField(_LOCAL),
    "ec_transfer_params": IgnoredField(_LOCAL),
    "vllm_xargs": IgnoredField("ignored: treadle has no extensions", ({},)),
    "repetition_detection": IgnoredField("ignored: use dry_multiplier and repeat_penalty"),
    "stream_interval": IgnoredField("ignored: every token is sent at once", (1,)),
}
"""vLLM's extra parameters."""

_CONTEXT = IgnoredField("ignored: the server's option -c sets the context")
_THREADS = IgnoredField("ignored: the server's option -t sets the threads")
MISTAKEN: Fields = {
    "temp": IgnoredField("ignored: use temperature"),
    "max_new_tokens": IgnoredField("ignored: use max_tokens"),
    "do_sample": IgnoredField("ignored: temperature 0 is greedy", (True,)),
    "num_return_sequences": IgnoredField("ignored: use n", (1,)),
    "mirostat_mode": IgnoredField("ignored: use mirostat", (0,)),
    **dict.fromkeys(("n_ctx", "num_ctx", "ctx_size", "context_length", "max_model_len"), _CONTEXT),
    **dict.fromkeys(("threads", "n_threads", "num_thread", "num_threads"), _THREADS),
    **dict.fromkeys(("n_gpu_layers", "gpu_layers", "num_gpu"), IgnoredField(_START)),
}
"""Names of options, of libraries and of other protocols that users put into bodies."""

SHARED: Fields = LLAMA_CPP | VLLM | MISTAKEN
_TIER = IgnoredField(_ONLY_ONE, ("auto", "default", "standard_only"))
STREAMED: Fields = {
    "include_obfuscation": IgnoredField("ignored: events are not padded", (False,)),
    "continuous_usage_stats": IgnoredField("ignored: usage is in the last chunk", (False,)),
}
"""Fields of ``stream_options``."""

NATIVE: Fields = SHARED | {
    "stream_options": IgnoredField(
        "ignored: the last event has tokens_evaluated and tokens_predicted"
    ),
    "verbose": IgnoredField("ignored: answers always have all fields", (True, False)),
}
"""``/completion`` and ``/infill``."""

OPENAI: Fields = SHARED | {
    "response_fields": IgnoredField("ignored: only /completion supports it", ([],)),
    "return_tokens": IgnoredField("ignored: only /completion supports it", (False,)),
    "metadata": IgnoredField(_NOT_KEPT, ({},)),
    "store": IgnoredField(_NOT_KEPT, (False,)),
    "service_tier": _TIER,
}
COMPLETIONS: Fields = OPENAI
CHAT: Fields = OPENAI | {
    "add_special_tokens": IgnoredField("ignored: the chat template adds them", (False,)),
    "echo": IgnoredField("ignored: the answer does not include the prompt", (False,)),
    "moderation": IgnoredField("ignored: not supported"),
    "prediction": IgnoredField("ignored: drafts come from prompt lookup (--speculate)"),
    "verbosity": IgnoredField("ignored: the model does not see it", ("medium",)),
}
RESPONSES: Fields = {
    **{name: row for name, row in OPENAI.items() if name not in ("metadata", "store")},
    "access_programs": IgnoredField("ignored: not supported", ([],)),
    "background_options": IgnoredField("ignored: background responses are not supported"),
    "context_management": IgnoredField("ignored: conversations are never truncated", ([],)),
    "image": IgnoredField(_TEXT_ALONE),
    "max_tool_calls": IgnoredField("ignored: --mcp-rounds bounds the calls that the server makes"),
    "moderation": IgnoredField("ignored: not supported"),
}
RESPONSES_TEXT: Fields = {"verbosity": CHAT["verbosity"]}
RESPONSES_REASONING: Fields = {
    "context": IgnoredField(
        "ignored: all reasoning that is sent back is used", ("auto", "all_turns")
    ),
    "mode": IgnoredField(_ONLY_ONE, ("standard",)),
}
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

ANTHROPIC: Fields = SHARED | {
    "billing_policy": IgnoredField("ignored: treadle has no billing"),
    "container": IgnoredField("ignored: the server does not run code"),
    "context_management": IgnoredField("ignored: conversations are never truncated"),
    "diagnostics": IgnoredField(_NOT_RETURNED),
    "fallback_credit_token": IgnoredField("ignored: there is only one model"),
    "fallbacks": IgnoredField("ignored: there is only one model", ([],)),
    "inference_geo": IgnoredField("ignored: the model runs on this server"),
    "service_tier": _TIER,
    "speed": IgnoredField(_ONLY_ONE, ("standard",)),
    "user_profile_id": IgnoredField("ignored: use metadata.user_id"),
    "workspace_id": IgnoredField("ignored: not supported"),
}
ANTHROPIC_THINKING: Fields = {
    "display": IgnoredField("ignored: reasoning is always sent in full", ("summarized",))
}

_OF_OPTIONS = IgnoredField("ignored: put it into options")
OLLAMA: Fields = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "seed", "stop"), _OF_OPTIONS),
    **dict.fromkeys(("num_predict", "num_ctx", "repeat_penalty"), _OF_OPTIONS),
    "max_tokens": IgnoredField("ignored: put num_predict into options"),
    "truncate": IgnoredField(
        "ignored: prompts are never truncated; one that is too long is an error (400)", (False,)
    ),
    "shift": IgnoredField(_NO_SHIFT, (False,)),
    "width": IgnoredField("ignored: treadle generates text only", (0,)),
    "height": IgnoredField("ignored: treadle generates text only", (0,)),
    "steps": IgnoredField("ignored: treadle generates text only", (0,)),
}
"""``/api/chat`` and ``/api/generate``."""
OLLAMA_UNLOAD = (0, "0", "0s", "0m")  # of ``keep_alive``; for other times the model stays
OLLAMA_OPTIONS: Fields = {
    "temp": MISTAKEN["temp"],
    "max_new_tokens": IgnoredField("ignored: use num_predict"),
    **dict.fromkeys(("n_ctx", "ctx_size"), _CONTEXT),
    "num_keep": IgnoredField(_NO_SHIFT, (0, -1)),
    "penalize_newline": IgnoredField(
        "ignored: line breaks are penalized like other tokens", (True,)
    ),
    "tfs_z": IgnoredField("ignored: this sampler is not supported", (1, 1.0, 0)),
    "num_batch": IgnoredField(_START),
    "num_gpu": IgnoredField(_START),
    "main_gpu": IgnoredField(_START, (0,)),
    "num_thread": IgnoredField(_START, (0,)),
    "use_mmap": IgnoredField(_START, (True,)),
    "use_mlock": IgnoredField(_START, (False,)),
    "numa": IgnoredField(_START, (False,)),
    "low_vram": IgnoredField(_START, (False,)),
    "f16_kv": IgnoredField(_START, (True,)),
    "logits_all": IgnoredField(_NOT_RETURNED, (False,)),
    "vocab_only": IgnoredField(_START, (False,)),
    "embedding_only": IgnoredField(_START, (False,)),
}

_VECTORS: Fields = {
    "priority": IgnoredField("ignored: not supported here", (0,)),
    "request_id": VLLM["request_id"],
    "padding": IgnoredField("ignored: inputs are not padded", ("do_not_pad",)),
    "mm_processor_kwargs": IgnoredField("ignored: only texts are taken here"),
    "task": IgnoredField("ignored: put the prompt before each text"),
}
EMBEDDINGS: Fields = _VECTORS | {
    "input_type": IgnoredField("ignored: put the prompt before each text"),
    "prompt_name": IgnoredField("ignored: put the prompt before each text"),
}
SCORE: Fields = _VECTORS
RERANK: Fields = _VECTORS | {
    "use_activation": IgnoredField("ignored: scores are the model's raw output", (False,)),
    "raw_scores": IgnoredField("ignored: scores are the model's raw output", (True,)),
    "max_chunks_per_doc": IgnoredField("ignored: a document is not split into chunks", (1,)),
    "rank_fields": IgnoredField("ignored: only the text field is used", (["text"],)),
}

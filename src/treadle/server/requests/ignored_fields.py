"""Fields that clients of other servers send and that have no effect here. An answer's ``warnings``
name each that was sent, unless its value has no effect anyway.

Each field is in one place: in a table of fields that are read (``generation_request.py`` and the
protocols' files), which may refuse it, or here. ``tests/server/test_known_fields.py`` compares all
of them with the protocols' own lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class IgnoredField(NamedTuple):
    """The reason why a field has no effect, and its values that need no warning."""

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
"""Fields that need no warning: what they ask for is so."""
ACCEPTED_OF_VECTORS = ACCEPTED | {
    "user",
    "cache_salt",
}  # embeddings leave nothing in the cache


def ignored_fields(body: Mapping[str, Any], table: Fields, where: str = "") -> list[str]:
    """Return a warning for each field of ``body`` in the table. ``where``: a prefix of its name."""
    return [
        f"{where}{name}: {row.why}"
        for name, row in table.items()
        if body.get(name) is not None and not _asks_nothing(body[name], row.harmless)
    ]


def _asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Return whether the value is harmless. Numbers compare as in JSON; true is not 1."""
    same = (
        isinstance(value, bool) == isinstance(each, bool) and value == each for each in harmless
    )
    return any(same)


def ignored_by_ollama(body: Mapping[str, Any], table: Fields, n_ctx: int) -> list[str]:
    """Return warnings for an Ollama body and its ``options``. A ``num_ctx`` up to the server's
    ``n_ctx`` needs none.
    """
    told, options = ignored_fields(body, table), body.get("options")
    if body.get("keep_alive") in OLLAMA_UNLOAD:
        told.append("keep_alive: the model stays loaded")
    if not isinstance(options, dict):
        return told
    told += ignored_fields(options, OLLAMA_OPTIONS, "options.")
    asked = options.get("num_ctx")
    if isinstance(asked, int | float) and asked > n_ctx:
        told.append(f"options.num_ctx: the context has {n_ctx} tokens: start the server with -c")
    return told


_NO_SHIFT = "nothing is discarded from a full context: the text ends there"
_PARSER = "the chat template decides it"
_TEXT_ALONE = "treadle reads text alone"
_NOT_RETURNED = "it is not returned"
_START = "it is set when the server is started"
_NOT_KEPT = "nothing is kept"
_LOCAL = "the server is on its own"

LLAMA_CPP: Fields = {
    "n_keep": IgnoredField(_NO_SHIFT, (0, -1)),
    "n_discard": IgnoredField(_NO_SHIFT, (0,)),
    "n_cache_reuse": IgnoredField("the cache finds beginnings of prompts, and no parts", (0,)),
    "t_max_prompt_ms": IgnoredField("timeout bounds a call", (-1, 0)),
    "backend_sampling": IgnoredField("samplers run on the CPU", (False,)),
    "chat_format": IgnoredField(_PARSER),
    "chat_parser": IgnoredField(_PARSER),
    "generation_prompt": IgnoredField(_PARSER),
    "parse_tool_calls": IgnoredField(_PARSER, (True,)),
    "preserved_tokens": IgnoredField(_PARSER, ([],)),
    "grammar_triggers": IgnoredField("a grammar holds from the first token on", ([],)),
    "grammar_type": IgnoredField(_PARSER),
    "message_delimiters": IgnoredField(_PARSER, ([],)),
    "reasoning_control": IgnoredField("there is no /v1/chat/completions/control", (False,)),
    "reasoning_budget_message": IgnoredField("reasoning ends with its mark alone", ("",)),
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
    "length_penalty": IgnoredField("there is no beam search", (1, 1.0)),
    "skip_special_tokens": IgnoredField("control tokens have no text", (True,)),
    "spaces_between_special_tokens": IgnoredField("control tokens have no text", (True,)),
    "truncate_prompt_tokens": IgnoredField("a prompt is never cut: one that is too long is a 400"),
    "truncation_side": IgnoredField("a prompt is never cut"),
    "prompt_logprobs": IgnoredField("/v1/completions has them, with echo and logprobs"),
    "logprob_token_ids": IgnoredField("top_logprobs are the likeliest tokens"),
    "watermarking": IgnoredField("there is none", (False,)),
    "guided_decoding_backend": IgnoredField("there is one"),
    "guided_whitespace_pattern": IgnoredField("JSON has the white space that the model likes"),
    "media_io_kwargs": IgnoredField(_TEXT_ALONE),
    "mm_processor_kwargs": IgnoredField(_TEXT_ALONE),
    "request_id": IgnoredField("the header X-Request-Id names a call"),
    "session_id": IgnoredField("the cache finds the beginnings of all prompts"),
    "return_tokens_as_token_ids": IgnoredField("entries of logprobs have an id", (False,)),
    "return_token_ids": IgnoredField("/completion has return_tokens", (False,)),
    "return_token_offsets": IgnoredField(_NOT_RETURNED, (False,)),
    "return_prompt_text": IgnoredField("/apply-template returns it", (False,)),
    "return_mm_kwargs": IgnoredField(_NOT_RETURNED, (True, False)),
    "routed_experts_prompt_start": IgnoredField(_NOT_RETURNED, (0,)),
    "kv_transfer_params": IgnoredField(_LOCAL),
    "ec_transfer_params": IgnoredField(_LOCAL),
    "vllm_xargs": IgnoredField("there are no extensions", ({},)),
    "repetition_detection": IgnoredField(
        "dry_multiplier and repeat_penalty hold against repetition"
    ),
    "stream_interval": IgnoredField("pieces are sent as they come", (1,)),
}
"""Of vLLM's extra parameters."""

SHARED: Fields = LLAMA_CPP | VLLM
_TIER = IgnoredField("there is one", ("auto", "default", "standard_only"))
STREAMED: Fields = {
    "include_obfuscation": IgnoredField("events are not padded", (False,)),
    "continuous_usage_stats": IgnoredField("the last chunk has the usage", (False,)),
}
"""Of ``stream_options``."""

NATIVE: Fields = SHARED | {
    "stream_options": IgnoredField("the last event has tokens_evaluated and tokens_predicted"),
    "verbose": IgnoredField("an answer has all its fields", (True, False)),
}
"""``/completion`` and ``/infill``."""

OPENAI: Fields = SHARED | {
    "response_fields": IgnoredField("only /completion has it", ([],)),
    "return_tokens": IgnoredField("only /completion has it", (False,)),
    "metadata": IgnoredField(_NOT_KEPT, ({},)),
    "store": IgnoredField(_NOT_KEPT, (False,)),
    "service_tier": _TIER,
}
COMPLETIONS: Fields = OPENAI
CHAT: Fields = OPENAI | {
    "add_special_tokens": IgnoredField("the chat template has them", (False,)),
    "echo": IgnoredField("an answer has its own text alone", (False,)),
    "moderation": IgnoredField("there is none"),
    "prediction": IgnoredField("drafts come of the text itself (--speculate)"),
    "verbosity": IgnoredField("the model is not told", ("medium",)),
}
RESPONSES: Fields = {
    **{name: row for name, row in OPENAI.items() if name not in ("metadata", "store")},
    "access_programs": IgnoredField("there are none", ([],)),
    "background_options": IgnoredField("a response is written while its client waits"),
    "context_management": IgnoredField("nothing is ever cut from a conversation", ([],)),
    "image": IgnoredField(_TEXT_ALONE),
    "max_tool_calls": IgnoredField("the server calls no tools"),
    "moderation": IgnoredField("there is none"),
    "timings_per_token": IgnoredField("a response has its usage at its end", (False,)),
}
RESPONSES_TEXT: Fields = {"verbosity": CHAT["verbosity"]}
RESPONSES_REASONING: Fields = {
    "context": IgnoredField("the reasoning that is sent back is read", ("auto", "all_turns")),
    "mode": IgnoredField("there is one", ("standard",)),
}
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

ANTHROPIC: Fields = SHARED | {
    "billing_policy": IgnoredField("nothing is billed"),
    "container": IgnoredField("the server runs no code"),
    "context_management": IgnoredField("nothing is ever cut from a conversation"),
    "diagnostics": IgnoredField(_NOT_RETURNED),
    "fallback_credit_token": IgnoredField("there is one model"),
    "fallbacks": IgnoredField("there is one model", ([],)),
    "inference_geo": IgnoredField("the model runs on this server"),
    "service_tier": _TIER,
    "speed": IgnoredField("there is one", ("standard",)),
    "user_profile_id": IgnoredField("metadata.user_id says whose turn a prompt takes"),
    "workspace_id": IgnoredField("there are none"),
}
ANTHROPIC_THINKING: Fields = {
    "display": IgnoredField("reasoning is sent as it is", ("summarized",))
}

OLLAMA: Fields = {
    "truncate": IgnoredField("a prompt is never cut: one that is too long is a 400", (False,)),
    "shift": IgnoredField(_NO_SHIFT, (False,)),
    "width": IgnoredField("treadle writes text alone", (0,)),
    "height": IgnoredField("treadle writes text alone", (0,)),
    "steps": IgnoredField("treadle writes text alone", (0,)),
}
"""``/api/chat`` and ``/api/generate``."""
OLLAMA_UNLOAD = (0, "0", "0s", "0m")  # of ``keep_alive``; for other times the model stays
OLLAMA_OPTIONS: Fields = {
    "num_keep": IgnoredField(_NO_SHIFT, (0, -1)),
    "penalize_newline": IgnoredField("a line break is a token as others", (True,)),
    "tfs_z": IgnoredField("the sampler is not there", (1, 1.0, 0)),
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
    "priority": IgnoredField("vectors and scores have none", (0,)),
    "request_id": VLLM["request_id"],
    "padding": IgnoredField("texts are not padded", ("do_not_pad",)),
    "mm_processor_kwargs": IgnoredField(_TEXT_ALONE),
    "task": IgnoredField("put a prompt before the texts"),
}
EMBEDDINGS: Fields = _VECTORS | {
    "input_type": IgnoredField("put a prompt before the texts"),
    "prompt_name": IgnoredField("put a prompt before the texts"),
}
RERANK: Fields = _VECTORS | {
    "use_activation": IgnoredField("scores are the model's own numbers", (False,)),
    "raw_scores": IgnoredField("scores are the model's own numbers", (True,)),
    "max_chunks_per_doc": IgnoredField("a document is one text", (1,)),
    "rank_fields": IgnoredField("of a document its text is read", (["text"],)),
}

"""Fields that clients of other servers send and that change nothing here. An answer's ``warnings``
name each that was sent, unless its value asks for nothing.

A field is in one place: in a table of what is read (``generation_request.py`` and the protocols'
files), which may refuse it, or here. ``tests/server/test_known_fields.py`` compares all of them
with the protocols' own lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Ignored(NamedTuple):
    """Why a field changes nothing, and values of it that ask for nothing."""

    why: str
    harmless: tuple[Any, ...] = ()


Fields = dict[str, Ignored]

ACCEPTED = frozenset(
    {
        "model",  # any name is the one model's
        "betas",  # Anthropic's SDKs send them as a header
        "keep_alive",  # the model stays loaded; see ``ignored_by_ollama``
        "cache_control",  # the cache finds the beginnings of all prompts
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
"""Fields that need no warning: what they ask for is so."""
ACCEPTED_OF_VECTORS = ACCEPTED | {
    "user",
    "cache_salt",
}  # nothing is kept of texts that are embedded


def ignored_fields(body: Mapping[str, Any], table: Fields, where: str = "") -> list[str]:
    """A sentence for each field of ``body`` that a table has. ``where``: what its name begins
    with.
    """
    return [
        f"{where}{name}: {row.why}"
        for name, row in table.items()
        if body.get(name) is not None and not _asks_nothing(body[name], row.harmless)
    ]


def _asks_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Numbers compare as in JSON; true is not 1."""
    same = (
        isinstance(value, bool) == isinstance(each, bool) and value == each for each in harmless
    )
    return any(same)


def ignored_by_ollama(body: Mapping[str, Any], table: Fields, n_ctx: int) -> list[str]:
    """The same of a body of Ollama's, and its ``options``. A context that is smaller than the
    server's ``n_ctx`` has room in it.
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
    "n_keep": Ignored(_NO_SHIFT, (0, -1)),
    "n_discard": Ignored(_NO_SHIFT, (0,)),
    "n_cache_reuse": Ignored("the cache finds beginnings of prompts, and no parts", (0,)),
    "t_max_prompt_ms": Ignored("timeout bounds a call", (-1, 0)),
    "backend_sampling": Ignored("samplers run on the CPU", (False,)),
    "chat_format": Ignored(_PARSER),
    "chat_parser": Ignored(_PARSER),
    "generation_prompt": Ignored(_PARSER),
    "parse_tool_calls": Ignored(_PARSER, (True,)),
    "preserved_tokens": Ignored(_PARSER, ([],)),
    "grammar_triggers": Ignored("a grammar holds from the first token on", ([],)),
    "grammar_type": Ignored(_PARSER),
    "message_delimiters": Ignored(_PARSER, ([],)),
    "reasoning_control": Ignored("there is no /v1/chat/completions/control", (False,)),
    "reasoning_budget_message": Ignored("reasoning ends with its mark alone", ("",)),
    "reasoning_budget_start_tag": Ignored(_PARSER, ("",)),
    "reasoning_budget_end_tag": Ignored(_PARSER, ("",)),
    "reasoning_budget_end_tags": Ignored(_PARSER, ([],)),
    **{
        f"speculative.{name}": Ignored(_START)
        for name in (
            "n_max", "n_min", "p_min", "type", "ngram_size_n", "ngram_size_m", "ngram_min_hits",
        )
    },
}  # fmt: skip
"""llama.cpp's ``server-schema.cpp``."""

VLLM: Fields = {
    "length_penalty": Ignored("there is no beam search", (1, 1.0)),
    "skip_special_tokens": Ignored("control tokens have no text", (True,)),
    "spaces_between_special_tokens": Ignored("control tokens have no text", (True,)),
    "truncate_prompt_tokens": Ignored("a prompt is never cut: one that is too long is a 400"),
    "truncation_side": Ignored("a prompt is never cut"),
    "prompt_logprobs": Ignored("/v1/completions has them, with echo and logprobs"),
    "logprob_token_ids": Ignored("top_logprobs are the likeliest tokens"),
    "watermarking": Ignored("there is none", (False,)),
    "guided_decoding_backend": Ignored("there is one"),
    "guided_whitespace_pattern": Ignored("JSON has the white space that the model likes"),
    "media_io_kwargs": Ignored(_TEXT_ALONE),
    "mm_processor_kwargs": Ignored(_TEXT_ALONE),
    "request_id": Ignored("the header X-Request-Id names a call"),
    "session_id": Ignored("the cache finds the beginnings of all prompts"),
    "return_tokens_as_token_ids": Ignored("entries of logprobs have an id", (False,)),
    "return_token_ids": Ignored("/completion has return_tokens", (False,)),
    "return_token_offsets": Ignored(_NOT_RETURNED, (False,)),
    "return_prompt_text": Ignored("/apply-template returns it", (False,)),
    "return_mm_kwargs": Ignored(_NOT_RETURNED, (True, False)),
    "routed_experts_prompt_start": Ignored(_NOT_RETURNED, (0,)),
    "kv_transfer_params": Ignored(_LOCAL),
    "ec_transfer_params": Ignored(_LOCAL),
    "vllm_xargs": Ignored("there are no extensions", ({},)),
    "repetition_detection": Ignored("dry_multiplier and repeat_penalty hold against repetition"),
    "stream_interval": Ignored("pieces are sent as they come", (1,)),
}
"""Of vLLM's extra parameters."""

SHARED: Fields = LLAMA_CPP | VLLM
_TIER = Ignored("there is one", ("auto", "default", "standard_only"))
STREAMED: Fields = {
    "include_obfuscation": Ignored("events are not padded", (False,)),
    "continuous_usage_stats": Ignored("the last chunk has the usage", (False,)),
}
"""Of ``stream_options``."""

NATIVE: Fields = SHARED | {
    "stream_options": Ignored("the last event has tokens_evaluated and tokens_predicted"),
    "verbose": Ignored("an answer has all its fields", (True, False)),
}
"""``/completion`` and ``/infill``."""

OPENAI: Fields = SHARED | {
    "response_fields": Ignored("only /completion has it", ([],)),
    "return_tokens": Ignored("only /completion has it", (False,)),
    "metadata": Ignored(_NOT_KEPT, ({},)),
    "store": Ignored(_NOT_KEPT, (False,)),
    "service_tier": _TIER,
}
COMPLETIONS: Fields = OPENAI
CHAT: Fields = OPENAI | {
    "add_special_tokens": Ignored("the chat template has them", (False,)),
    "echo": Ignored("an answer has its own text alone", (False,)),
    "moderation": Ignored("there is none"),
    "prediction": Ignored("drafts come of the text itself (--speculate)"),
    "verbosity": Ignored("the model is not told", ("medium",)),
}
RESPONSES: Fields = {
    **{name: row for name, row in OPENAI.items() if name not in ("metadata", "store")},
    "access_programs": Ignored("there are none", ([],)),
    "background_options": Ignored("a response is written while its client waits"),
    "context_management": Ignored("nothing is ever cut from a conversation", ([],)),
    "image": Ignored(_TEXT_ALONE),
    "max_tool_calls": Ignored("the server calls no tools"),
    "moderation": Ignored("there is none"),
    "timings_per_token": Ignored("a response has its usage at its end", (False,)),
}
RESPONSES_TEXT: Fields = {"verbosity": CHAT["verbosity"]}
RESPONSES_REASONING: Fields = {
    "context": Ignored("the reasoning that is sent back is read", ("auto", "all_turns")),
    "mode": Ignored("there is one", ("standard",)),
}
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

ANTHROPIC: Fields = SHARED | {
    "billing_policy": Ignored("nothing is billed"),
    "container": Ignored("the server runs no code"),
    "context_management": Ignored("nothing is ever cut from a conversation"),
    "diagnostics": Ignored(_NOT_RETURNED),
    "fallback_credit_token": Ignored("there is one model"),
    "fallbacks": Ignored("there is one model", ([],)),
    "inference_geo": Ignored("the model runs on this server"),
    "service_tier": _TIER,
    "speed": Ignored("there is one", ("standard",)),
    "user_profile_id": Ignored("metadata.user_id says whose turn a prompt takes"),
    "workspace_id": Ignored("there are none"),
}
ANTHROPIC_THINKING: Fields = {"display": Ignored("reasoning is sent as it is", ("summarized",))}

OLLAMA: Fields = {
    "truncate": Ignored("a prompt is never cut: one that is too long is a 400", (False,)),
    "shift": Ignored(_NO_SHIFT, (False,)),
    "width": Ignored("treadle writes text alone", (0,)),
    "height": Ignored("treadle writes text alone", (0,)),
    "steps": Ignored("treadle writes text alone", (0,)),
}
"""``/api/chat`` and ``/api/generate``."""
OLLAMA_UNLOAD = (0, "0", "0s", "0m")  # of ``keep_alive``; for other times the model stays
OLLAMA_OPTIONS: Fields = {
    "num_keep": Ignored(_NO_SHIFT, (0, -1)),
    "penalize_newline": Ignored("a line break is a token as others", (True,)),
    "tfs_z": Ignored("the sampler is not there", (1, 1.0, 0)),
    "num_batch": Ignored(_START),
    "num_gpu": Ignored(_START),
    "main_gpu": Ignored(_START, (0,)),
    "num_thread": Ignored(_START, (0,)),
    "use_mmap": Ignored(_START, (True,)),
    "use_mlock": Ignored(_START, (False,)),
    "numa": Ignored(_START, (False,)),
    "low_vram": Ignored(_START, (False,)),
    "f16_kv": Ignored(_START, (True,)),
    "logits_all": Ignored(_NOT_RETURNED, (False,)),
    "vocab_only": Ignored(_START, (False,)),
    "embedding_only": Ignored(_START, (False,)),
}

_VECTORS: Fields = {
    "priority": Ignored("vectors and scores have none", (0,)),
    "request_id": VLLM["request_id"],
    "padding": Ignored("texts are not padded", ("do_not_pad",)),
    "mm_processor_kwargs": Ignored(_TEXT_ALONE),
    "task": Ignored("put a prompt before the texts"),
}
EMBEDDINGS: Fields = _VECTORS | {
    "input_type": Ignored("put a prompt before the texts"),
    "prompt_name": Ignored("put a prompt before the texts"),
}
RERANK: Fields = _VECTORS | {
    "use_activation": Ignored("scores are the model's own numbers", (False,)),
    "raw_scores": Ignored("scores are the model's own numbers", (True,)),
    "max_chunks_per_doc": Ignored("a document is one text", (1,)),
    "rank_fields": Ignored("of a document its text is read", (["text"],)),
}

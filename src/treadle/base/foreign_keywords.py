"""Keyword arguments that callers know from other programs, and treadle's in their place.

The names are those of llama.cpp, llama-cpp-python, transformers, vLLM, Ollama and OpenAI's clients.
The server's fields and the command line's options are looked up here too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

OF_LOAD = {
    "model_path": "path",
    "n_ctx": "context",
    "ctx_size": "context",
    "num_ctx": "context",
    "context_size": "context",
    "context_length": "context",
    "max_seq_len": "context",
    "max_model_len": "context",
    "n_threads": "threads",
    "num_thread": "threads",
    "num_threads": "threads",
    "n_threads_batch": "threads",
    "threads_batch": "threads",
    "n_parallel": "n_sequences",
    "max_num_seqs": "n_sequences",
    "n_seq_max": "n_sequences",
    "type_k": "kv",
    "type_v": "kv",
    "cache_type_k": "kv",
    "cache_type_v": "kv",
    "kv_cache_dtype": "kv",
    "device_map": "device",
    "draft_model": "draft",
    "model_draft": "draft",
    "assistant_model": "draft",
    "lora_path": "lora",
    "chat_format": "chat_template",
    "clip_model_path": "mmproj",
}
RENAMED = {
    **OF_LOAD,
    # of ``generate`` and ``chat``
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "images": "media",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "response_format": "json_schema",
    "thinking_budget": "reasoning_budget",
    "logits_processor": "custom",
    "logits_processors": "custom",
    "functions": "tools",
    # of ``Sampling``
    "temp": "temperature",
    "typ_p": "typical_p",
    "typical": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "mirostat_mode": "mirostat",
    "mirostat_lr": "mirostat_eta",
    "mirostat_ent": "mirostat_tau",
    "random_seed": "seed",
    # of ``tokenize`` and ``detokenize``
    "add_bos": "bos",
    "add_special_tokens": "bos",
    "parse_special": "special",
}
"""Treadle's name for a name of another program; ``OF_LOAD`` has those of ``load`` alone."""

# A test compares them with the functions, which stand above this package.
_LOAD = [
    "path",
    "threads",
    "context",
    "deterministic",
    "kv",
    "n_sequences",
    "kv_bytes",
    "kv_tokens",
    "cache_dir",
    "cache_bytes",
    "speculate",
    "draft",
    "lora",
    "control_vectors",
    "control_vector_layers",
    "mmproj",
    "image_max_tokens",
    "media_urls",
    "device",
    "isa",
    "chat_template",
    "chat_template_kwargs",
    "reasoning",
    "reasoning_budget",
    "reasoning_budget_message",
    "reasoning_preserve",
    "sampling",
    "seed",
    "max_tokens",
    "strict",
    "progress",
]
GENERATE_SETTINGS = [
    "max_tokens",
    "sampling",
    "stop",
    "grammar",
    "json_schema",
    "regex",
    "session",
    "logprobs",
    "constraint",
    "lora",
    "control_vectors",
    "cache_prompt",
    "media",
]
CHAT_SETTINGS = ("tools", "template", "reasoning", "reasoning_budget")
LOAD_SETTINGS = dict.fromkeys(_LOAD, "a setting of load()")

_NONE = "leave it out: treadle chooses"
_MAPPED = "leave it out: files are mapped"
_ON_CPU = "leave it out: models run on the CPU, unless load() is given device"
_AS_IN_FILE = "leave it out: weights are used as the file has them"
ADVICE = {
    "n_gpu_layers": _ON_CPU,
    "gpu_layers": _ON_CPU,
    "num_gpu": _ON_CPU,
    "main_gpu": _ON_CPU,
    "tensor_split": _ON_CPU,
    "gpu_memory_utilization": _ON_CPU,
    "tensor_parallel_size": "leave it out: treadle.cluster has models on several machines",
    "n_batch": _NONE,
    "n_ubatch": _NONE,
    "batch_size": _NONE,
    "flash_attn": _NONE,
    "use_mmap": _MAPPED,
    "use_mlock": _MAPPED,
    "dtype": _AS_IN_FILE,
    "torch_dtype": _AS_IN_FILE,
    "quantization": _AS_IN_FILE,
    "load_in_4bit": _AS_IN_FILE,
    "load_in_8bit": _AS_IN_FILE,
    "trust_remote_code": "leave it out: no code of a model is run",
    "verbose": "leave it out: nothing is printed",
    "embedding": "leave it out: every model has embed()",
    "logits_all": "leave it out: logits() returns those of all tokens",
    "do_sample": "leave it out: temperature=0 is greedy",
    "num_beams": "leave it out: beam search is not supported",
    "stream": "leave it out: the result is an iterator of pieces; finish() returns the whole text",
    "streamer": "leave it out: the result is an iterator of pieces",
    "echo": "leave it out: the caller has the prompt",
    "reset": "leave it out: each call begins a text of its own",
    "n": "leave it out: generate_many() completes several prompts",
    "best_of": "leave it out: generate_many() completes several prompts",
    "num_return_sequences": "leave it out: generate_many() completes several prompts",
    "tool_choice": "it is a setting of chat() with tools",
    "system": "give a message with the role system to chat()",
}
"""What to do in place of another program's name that has no counterpart."""


def hint(name: str, known: Collection[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """Return the end of an error message about an unexpected keyword ``name``: ``; did you mean
    'context'?``, or ""; ``known``: the keywords that are accepted; ``elsewhere``: for keywords of
    other functions, where they belong.
    """
    ours = RENAMED.get(name, name)
    if ours in known:
        return f"; did you mean {ours!r}?"
    if elsewhere and ours in elsewhere:
        named = "it" if ours == name else repr(ours)
        return f"; {named} is {elsewhere[ours]}"
    if name in ADVICE:
        return f"; {ADVICE[name]}"
    from difflib import get_close_matches  # needed for errors only

    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""

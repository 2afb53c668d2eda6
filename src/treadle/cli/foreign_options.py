"""Options of other programs that users type from habit, and treadle's options in their place."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_MEASURED = "leave it out: how many tokens are drafted is measured"
_DETECTED = "leave it out: the model's file says so"
_ALWAYS = "leave it out: this is always so"

# Of llama-server and llama-cli, and at the end those of vLLM that others lack.
ADVICE = {
    "-m": "give the file without an option, as MODEL",
    "--model": "give the file without an option, as MODEL",
    "-hf": "give hf:OWNER/REPO as MODEL",
    "--hf-repo": "give hf:OWNER/REPO as MODEL",
    "-hff": "give hf:OWNER/REPO/FILE as MODEL",
    "--hf-file": "give hf:OWNER/REPO/FILE as MODEL",
    "--ctx-size": "use -c",
    "--n-predict": "use -n",
    "--predict": "use -n",
    "-ngl": "leave it out: models run on the CPU (--device has others)",
    "--gpu-layers": "leave it out: models run on the CPU (--device has others)",
    "--n-gpu-layers": "leave it out: models run on the CPU (--device has others)",
    "-fa": _ALWAYS,
    "--flash-attn": _ALWAYS,
    "-ctk": "use --kv-k",
    "--cache-type-k": "use --kv-k",
    "-ctv": "use --kv-v",
    "--cache-type-v": "use --kv-v",
    "-np": "use --sequences",
    "--parallel": "use --sequences",
    "-tb": "use -t, which is for prompts and answers",
    "--threads-batch": "use -t, which is for prompts and answers",
    "-cb": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--mlock": "leave it out: files are mapped",
    "--no-mmap": "leave it out: files are mapped",
    "--models-preset": "use --presets, a TOML file",
    "--sleep-idle-seconds": "use --idle-unload",
    "-mm": "use --mmproj",
    "--mmproj-url": "use --mmproj hf:OWNER/REPO",
    "-md": "use --draft",
    "--model-draft": "use --draft",
    "--spec-draft-model": "use --draft",
    "--spec-type": "leave it out: the file of --draft says which kind of drafter it is",
    "--draft-max": _MEASURED,
    "--spec-draft-n-max": _MEASURED,
    "--lora-scaled": "use --lora FILE=SCALE",
    "--control-vector-scaled": "use --control-vector FILE:STRENGTH",
    "-rea": "use --reasoning",
    "--reasoning-effort": 'use --chat-template-kwargs \'{"reasoning_effort": "LEVEL"}\'',
    "--reasoning-format": "a request's field reasoning_format has it; by default reasoning is "
    "apart from the content",
    "--no-jinja": "leave it out: chat templates are always rendered by jinja2",
    "--skip-chat-parsing": "a request's field reasoning_format has it: none",
    "--no-prefill-assistant": "a request's field continue_final_message has it: false",
    "--context-shift": "leave it out: no prompt is cut",
    "--grammar-file": "use --grammar",
    "-j": "use --json-schema, with a file",
    "-jf": "use --json-schema",
    "--json-schema-file": "use --json-schema",
    "--sampler-seq": "use --samplers, with their names",
    "--sampling-seq": "use --samplers, with their names",
    "-a": "use --alias",
    "--embedding": _DETECTED,
    "--embeddings": _DETECTED,
    "--rerank": _DETECTED,
    "--reranking": _DETECTED,
    "--no-ui": "use --no-page",
    "--no-webui": "use --no-page",
    "--slots": _ALWAYS,
    "-sys": "use --system",
    "--system-prompt": "use --system",
    "--image-min-tokens": "use --image-max-tokens",
    "--max-model-len": "use -c",
    "--served-model-name": "use --alias",
    "--default-chat-template-kwargs": "use --chat-template-kwargs",
    "--ssl-keyfile": "use --ssl-key-file",
    "--ssl-certfile": "use --ssl-cert-file",
    "--root-path": "use --api-prefix",
    "--uds": "use --host unix:PATH",
    "--enable-tokenizer-info-endpoint": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--tool-call-parser": "leave it out: the chat template says how calls are written",
    "--reasoning-parser": "leave it out: the chat template says how reasoning is written",
}

# Of llama-cli, where a command has a prompt.
OF_PROMPTS = {
    "-p": "give the prompt without an option, behind MODEL",
    "--prompt": "give the prompt without an option, behind MODEL",
    "-f": "give the prompt on standard input: < FILE",
    "--file": "give the prompt on standard input: < FILE",
}
PROMPT = "words"  # the argument of ``treadle run`` that has the prompt


def advice(args: Sequence[str], known: Collection[str]) -> str | None:
    """Return a message about the first option in ``args`` that belongs to another program: what to
    use here. None if there is none. ``known``: options and arguments that this command has itself.
    """
    table = ADVICE | OF_PROMPTS if PROMPT in known else ADVICE
    for arg in args:
        name = arg.partition("=")[0]
        if name in table and name not in known:
            return f"{name} is no option of this command: {table[name]}"
    return None

"""Options and commands of other programs that users type from habit, and treadle's own in their
place. Names that keyword arguments of libraries have too are in ``base/foreign_keywords.py``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

_MEASURED = "leave it out: how many tokens are drafted is measured"
_DETECTED = "leave it out: the model's file says so"
_ALWAYS = "leave it out: this is always so"
_CHOSEN = "leave it out: treadle chooses"
_ON_CPU = "leave it out: models run on the CPU (--device has others)"
_ONE_ANSWER = "leave it out: `treadle run` writes one answer, `treadle chat` a conversation"
_TALKS = "use `treadle chat`"
_WHOLE_LOG = "leave it out: warnings and errors are always printed"
_AS_IN_FILE = "leave it out: weights are used as the file has them"

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
    **dict.fromkeys(("-b", "--batch-size", "-ub", "--ubatch-size"), _CHOSEN),
    **dict.fromkeys(("-ts", "--tensor-split", "-sm", "--split-mode", "-mg", "--main-gpu"), _ON_CPU),
    **dict.fromkeys(("-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe"), _ON_CPU),
    **dict.fromkeys(("--n-cpu-moe", "-nkvo", "--no-kv-offload", "--no-mmproj-offload"), _ON_CPU),
    **dict.fromkeys(("-ngld", "--gpu-layers-draft", "-devd", "--device-draft"), _ON_CPU),
    **dict.fromkeys(("--gpu", "--cpu"), _ON_CPU),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), _TALKS),
    **dict.fromkeys(("-no-cnv", "--no-conversation", "-st", "--single-turn"), _ONE_ANSWER),
    **dict.fromkeys(("-v", "--verbose", "-lv", "--verbosity", "--log-verbosity"), _WHOLE_LOG),
    **dict.fromkeys(("-kvu", "--kv-unified", "--swa-full", "--cache-reuse"), _ALWAYS),
    **dict.fromkeys(("--rope-scaling", "--rope-scale", "--rope-freq-base"), _DETECTED),
    **dict.fromkeys(("--rope-freq-scale", "--pooling"), _DETECTED),
    "-cram": "use --kv-mib",
    "--cache-ram": "use --kv-mib",
    "--log-file": "redirect standard error: 2> FILE",
    "--no-display-prompt": "leave it out: only the answer is printed",
    "--offline": "set the variable HF_HUB_OFFLINE=1",
    "--draft-min": _MEASURED,
    "--spec-draft-n-min": _MEASURED,
    "-to": "a request's field timeout has it",
    "--timeout": "a request's field timeout has it",
    "--tools": "use --mcp, with a file of servers",
    "--stream": _ALWAYS,
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
    "--kv-cache-dtype": "use --kv",
    "--dtype": _AS_IN_FILE,
    "--quantization": _AS_IN_FILE,
    "--enable-lora": "use --lora FILE alone",
    "--lora-modules": "use --lora FILE",
    "--speculative-config": "use --speculate or --draft",
    "--max-num-seqs": "use --sequences",
    "--max-num-batched-tokens": _CHOSEN,
    "--gpu-memory-utilization": _ON_CPU,
    "--enforce-eager": _ON_CPU,
    "--enable-prefix-caching": _ALWAYS,
    "--trust-remote-code": "leave it out: no code of a model is run",
    "--tensor-parallel-size": "leave it out: `treadle cluster serve` has several machines",
    "--download-dir": "set the variable HF_HOME",
    "--tokenizer": _DETECTED,
    "--disable-log-requests": "use --no-log",
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
        if not name.startswith("-") or name in known:
            continue
        said = table.get(name) or table.get(name.removeprefix("-")) or _renamed(name, known)
        use = re.match(r"use (-[\w-]+)", said or "")
        if said is not None and (use is None or use[1] in known or not known):
            return f"{name} is no option of this command: {said}"
    return None


def _renamed(name: str, known: Collection[str]) -> str | None:
    """Return which of the ``known`` options to use for one with underscores, or with a name that
    ``foreign_keywords`` has; None if there is none.
    """
    if not name.startswith("--"):
        return None
    from treadle.base.foreign_keywords import RENAMED

    word = name[2:].replace("-", "_")
    for each in (word, RENAMED.get(word, word)):
        if (own := f"--{each.replace('_', '-')}") in known:
            return f"use {own}"
    return None


COMMANDS = {
    "help": "try 'treadle --help', or 'treadle COMMAND --help'",
    "version": "try 'treadle --version'",
    **dict.fromkeys(("generate", "complete", "completion", "prompt", "ask"), "run"),
    **dict.fromkeys(("start", "up", "api", "server"), "serve"),
    **dict.fromkeys(("download", "fetch", "install", "get"), "pull"),
    **dict.fromkeys(("delete", "remove", "uninstall"), "rm"),
    **dict.fromkeys(("models", "ls"), "list"),
    **dict.fromkeys(("status", "top"), "ps"),
    "info": "show",
    "benchmark": "bench",
    "ppl": "perplexity",
    "test": "check",
    "quant": "quantize",
    "whisper": "transcribe",
    "embeddings": "embed",
    "stop": "a server ends with Ctrl-C, or when its process gets SIGTERM",
    "create": "a model is a file: options such as --system and --temp stand behind the command",
    "push": "models are not uploaded: 'hf upload' of huggingface_hub does that",
    "cp": "a model is a file, and may have any name: copy or link it",
    "login": "'hf auth login' of huggingface_hub opens private models",
}
"""Commands of other programs (Ollama, llama.cpp, vLLM): treadle's, or what to do."""

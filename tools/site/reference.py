"""Pages of the reference, made from the tables and signatures that the program itself uses."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click

import treadle
from treadle.cli.app import COMMANDS, SECTIONS
from treadle.cli.environment import commands_of, prefix_of

COMMAND_LINE = Path(__file__).resolve().parents[2] / "docs" / "command-line.md"
FUNCTIONS = (
    "load",
    "load_shared",
    "load_session",
    "load_speech",
    "run_tools",
    "make_control_vector",
)
CLASSES = (
    "Model",
    "Generation",
    "Reply",
    "Session",
    "Sampling",
    "ChatCompletions",
    "ControlVector",
    "Trace",
    "StepValues",
    "AttentionWeights",
    "LensLogits",
    "SpeechRecognizer",
    "Transcription",
    "Transcript",
    "TranscriptSegment",
    "TranscriptWord",
)
INTERNAL = {
    "Model": (
        "build_request",
        "grammars",
        "make_room",
        "media_marks",
        "prompt_ids",
        "read_conversation",
        "system_end",
    ),
    "Generation": ("begin", "wait"),
    "Session": ("retire",),
    "SpeechRecognizer": ("run",),
    "Transcription": ("step",),
    "Trace": ("begin", "calls", "end", "is_hooked", "truncated"),
}
# Modules of the server, and whose calls they answer.
PROTOCOLS = {
    "anthropic": "Anthropic",
    "audio": "OpenAI",
    "completions": "OpenAI",
    "chat": "OpenAI",
    "chat_endpoint": "OpenAI",
    "answer": "OpenAI",
    "end_reasoning": "llama.cpp",
    "control_vectors": "treadle",
    "embeddings": "OpenAI",
    "endpoints": "treadle",
    "kept_stream_actions": "llama.cpp",
    "llamacpp": "llama.cpp",
    "lora_adapters": "llama.cpp",
    "metrics": "Prometheus",
    "models": "OpenAI",
    "ollama": "Ollama",
    "rerank": "Jina, Cohere",
    "response_lookup": "OpenAI",
    "responses_endpoint": "OpenAI",
    "responses": "OpenAI",
    "score": "vLLM",
    "vllm": "vLLM",
    "slot_actions": "llama.cpp",
    "tool_servers": "treadle",
}


def pages() -> dict[str, str]:
    """Return the texts of all pages, by their paths from ``docs/`` on."""
    found = {
        "reference/python.md": python(),
        "reference/errors.md": errors(),
        "reference/http.md": http(),
    }
    for words, command in every_command():
        found[f"reference/commands/{words.replace(' ', '-')}.md"] = command_page(words, command)
    return found


def contents() -> str:
    """Return what the first page of the reference adds on the site: the pages of ``pages``."""
    lines = ["", "## Made from the sources", ""]
    lines += ["- [Every public name](python.md), [every exception](errors.md)"]
    lines += ["- [Every HTTP endpoint](http.md)", ""]
    for title, commands in SECTIONS.items():
        lines += [f"### {title}", ""]
        for words, command in every_command():
            if words.split()[0] in commands:
                file = f"commands/{words.replace(' ', '-')}.md"
                text = command.get_short_help_str(100)
                lines += [f"- [`treadle {words}`]({file}): {cell(text)}"]
        lines += [""]
    return "\n".join(lines)


# -- the library ------------------------------------------------------------------------------


def python() -> str:
    """Return the page of the public names; mkdocstrings puts signatures and docstrings in."""
    lines = ["# treadle in Python", ""]
    lines += ["All public names. [The library](../library.md) shows how they are used.", ""]
    for title, names in (("Functions", FUNCTIONS), ("Classes", CLASSES)):
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"::: {place(name)}"]
            if name in INTERNAL:  # for the server and the command line, not for users
                lines += ["    options:", "      filters:", "        - '!^_'"]
                lines += [f"        - '!^{method}$'" for method in INTERNAL[name]]
            lines += [""]
    return "\n".join(lines)


def errors() -> str:
    """Return the page of the exceptions: the tree, then each."""
    text = inspect.getdoc(treadle.errors) or ""
    head, tree, rest = text.split("\n\n", 2)
    del head, tree
    drawn, _, note = rest.partition("\n\n")
    names = [name for name in treadle.__all__ if name.endswith("Error")]
    lines = ["# Errors", ""]
    lines += ["All that treadle raises on purpose is a `treadle.TreadleError`.", ""]
    lines += ["```text", inspect.cleandoc(drawn), "```", "", note.replace("``", "`"), ""]
    lines += ["A command prints an error on one line, `treadle: error: ...`, and ends with code 1."]
    lines += ["[The server](../server.md#errors) has the status and the code of each.", ""]
    for name in names:
        lines += [f"::: treadle.errors.{name}", ""]
    return "\n".join(lines)


def place(name: str) -> str:
    """Return the dotted name of the object that a public name of the package is."""
    found = getattr(treadle, name)
    return f"{found.__module__}.{found.__qualname__}"


# -- commands ---------------------------------------------------------------------------------


def every_command() -> Iterator[tuple[str, click.Command]]:
    """Yield all commands with their words, in the order of ``treadle --help``."""
    for name in COMMANDS:
        module = importlib.import_module(f"treadle.cli.commands.{name.replace('-', '_')}")
        yield from commands_of(module.command, name)


def command_page(words: str, command: click.Command) -> str:
    """Return the page of one command: usage, help, and a table of its options."""
    context = click.Context(command, info_name=f"treadle {words}")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"# treadle {words}", "", *paragraphs(command.help or ""), ""]
    lines += ["```text", f"treadle {words} {usage}", "```", ""]
    section = words.split()[0]
    if section in sections():
        lines += [f"[The command line](../../command-line.md#{section}) says more.", ""]
    rows = list(option_rows(command, context))
    if rows:
        lines += ["| option | default | what it does |", "|---|---|---|", *rows, ""]
        lines += [
            f"Every option has a variable that sets it: `{prefix_of(words)}` and its long name"
        ]
        lines += ["([the rules](../../command-line.md#variables-of-options)).", ""]
    return "\n".join(lines)


@cache
def sections() -> set[str]:
    """Return the commands that docs/command-line.md has a section for."""
    return set(re.findall(r"^## ([\w-]+)$", COMMAND_LINE.read_text("utf-8"), re.MULTILINE))


def paragraphs(text: str) -> list[str]:
    """Return a help text as Markdown; click folds its lines, and ``\\b`` keeps those of a block."""
    lines = []
    for block in inspect.cleandoc(text).split("\n\n"):
        if block.startswith("\b"):
            lines += ["```text", block.removeprefix("\b").strip("\n"), "```", ""]
        else:
            lines += [cell(" ".join(block.split())), ""]
    return lines


def option_rows(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield a row for each option that ``--help`` shows."""
    for param in command.params:
        record = param.get_help_record(context)
        if record is None or not isinstance(param, click.Option):
            continue
        spelled, text = record
        default = re.search(r"\s*\[default: ([^\];]*)[^\]]*\]", text)
        text = re.sub(r"\s*\[default: [^\]]*\]", "", text)
        shown = default[1] if default else ""
        yield f"| `{code(spelled)}` | {cell(shown)} | {cell(text)} |"


def code(text: str) -> str:
    """Return a text for a span of code in a cell."""
    return text.replace("|", "\\|")


def cell(text: str) -> str:
    """Return a help text for a cell: no bars, no HTML."""
    text = re.sub(r"(?<!`)<(\S[^>`]*)>(?!`)", r"`<\1>`", " ".join(text.split()))
    return text.replace("|", "\\|").replace("*", "\\*")


# -- endpoints --------------------------------------------------------------------------------


def http() -> str:
    """Return the page of the endpoints, from the tables of the server and of the router."""
    from treadle.server.app import DELETE, GET, NOT_YET, POST, UNCOUNTED
    from treadle.server.router.app import OWN

    tables = (("POST", POST), ("GET", GET), ("DELETE", DELETE))
    known = {(method, path) for method, table in tables for path in table}
    lines = ["# HTTP endpoints", ""]
    lines += ["The paths of `treadle serve`. Each is there with and without `/v1`."]
    lines += ["[The server](../server.md) has their fields and limits.", ""]
    lines += ["| method | path | whose | |", "|---|---|---|---|"]
    lines += [
        endpoint_row(method, path, handler)
        for method, table in tables
        for path, handler in table.items()
    ]
    lines += ["", "## With several models", ""]
    lines += ["What [a server of several models](../router.md) has besides.", ""]
    lines += ["| method | path | |", "|---|---|---|"]
    lines += [
        f"| {method} | `{path}` | {meaning(handler)} |"
        for (method, path), handler in OWN.items()
        if (method, path) not in known
    ]
    lines += ["", "## Paths that are refused", ""]
    lines += ["Clients know these; a server of one model answers 501 with their name.", ""]
    lines += [f"- `{path}`" for path in NOT_YET]
    lines += ["", "## Paths that limits of keys do not count", ""]
    lines += [f"- `{path}`" for path in UNCOUNTED]
    return "\n".join([*lines, ""])


def endpoint_row(method: str, path: str, handler: Any) -> str:
    """Return the row of an endpoint. ``handler``: the function that answers it."""
    module = handler.__module__.rpartition(".")[2]
    name = PROTOCOLS[module]
    if path == "/embedding":
        name = "llama.cpp"
    return f"| {method} | `{path}` | {name} | {meaning(handler)} |"


def meaning(handler: Any) -> str:
    """Return the first sentence of a handler's docstring, without the path that it begins with."""
    text = " ".join((inspect.getdoc(handler) or "").split("\n\n")[0].split())
    text = re.sub(r"^``[A-Z]+ [^`]*``[:,]? ?", "", text).strip(" .")
    text = text.replace("``", "`")
    return cell(text[:1].upper() + text[1:])

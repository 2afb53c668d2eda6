"""``treadle show``: what a model is, what it can do, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from treadle.base.humanize import n_bytes, n_weights
from treadle.cli.load import find_model
from treadle.cli.options import ModelType
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import heading, printable, say, show


@click.command()
@click.argument("model", type=ModelType())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(model: str, as_json: bool) -> None:
    """Print where MODEL is, its size, its capabilities and its license, and the memory that it
    takes. `treadle inspect` prints its metadata and tensors.
    """
    with ProgressBar() as progress:
        path = find_model(model, progress)
    show(report_of(path), as_json, print_report)


def report_of(path: Path) -> dict[str, Any]:
    """Return the facts of the model at ``path``: those of ``treadle list``, and ``details_of``."""
    from treadle.catalog.names import NamedModel, name_models
    from treadle.catalog.stored import find_stored, stored_at
    from treadle.cli.model_report import report_of as listed_report

    models = find_stored()
    named = next((n for n in name_models(models) if n.model.path.resolve() == path.resolve()), None)
    report = listed_report(named or NamedModel(str(path), stored_at(path)))
    if named is None:
        report["name"] = None
    return report | details_of(path)


def details_of(path: Path) -> dict[str, Any]:
    """Return facts from a model's metadata that ``treadle list`` does not show: license, template,
    capabilities, memory, problems.
    """
    from treadle.catalog.facts import read_header
    from treadle.cli.commands.doctor import chat_of
    from treadle.cli.commands.inspect import find_problems, find_template
    from treadle.convert.open import open_model
    from treadle.models.config import USUAL_CONTEXT

    facts = read_header(path)
    with open_model(path) as gguf:
        chat = None if facts.problem else chat_of(gguf)
        return {
            "title": facts.title or None,
            "license": facts.license or None,
            "base_model": gguf.metadata.get("general.base_model.0.name"),
            "chat_template": None if facts.problem else find_template(gguf),
            "capabilities": capabilities(facts.kind, chat) if not facts.problem else [],
            "usual_context": min(USUAL_CONTEXT, facts.n_context or USUAL_CONTEXT),
            "kv_bytes": facts.kv_bytes,
            "full_kv_bytes": facts.full_kv_bytes,
            "problems": find_problems(gguf),
        }


def capabilities(kind: str, chat: Mapping[str, Any] | None) -> list[str]:
    """Return the capabilities of a model as words: "completion", "chat", "tools", "reasoning";
    "transcription"; "vectors" or "scores". ``kind``: as of ``ModelFacts``; ``chat``: facts of its
    chat template, None without one.
    """
    if kind == "speech":
        return ["transcription"]
    if kind != "text":
        return [kind]
    found = ["completion"]
    if chat is not None and chat["template"]:
        found.append("chat")
        found += [name for name in ("tools", "reasoning") if chat[name]]
    return found


def print_report(report: Mapping[str, Any]) -> None:
    """Print the facts of the model that ``report_of`` returns, as text."""
    heading(report["name"] or report["path"])
    lines = dict(lines_of(report))
    width = max(map(len, lines))
    for label, text in lines.items():
        say(f"{label:<{width}}  {printable(str(text))}", indent=" " * (width + 2))
    for problem in report["problems"]:
        say(printable(f"missing or unknown: {problem}"), indent="  ")


def lines_of(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the report as (label, text); facts that are unknown are left out."""
    from treadle.cli.model_report import ago, fits, rate, reads

    files = f" in {report['n_files']} files" if report["n_files"] > 1 else ""
    lines = [
        ("title", report["title"]),
        ("hub", report["hub"]),
        ("path", report["path"]),
        ("size", f"{n_bytes(report['n_bytes'])}{files}"),
        ("projector", report["projector"]),
        ("architecture", report["architecture"]),
        ("parameters", n_weights(report["n_parameters"] or 0)),
        ("type", report["type"]),
        ("context", f"{report['n_context']} tokens" if report["n_context"] else None),
        ("reads", reads(report)),
        ("capabilities", ", ".join(report["capabilities"])),
        ("chat template", report["chat_template"]),
        ("license", report["license"]),
        ("base model", report["base_model"]),
    ]
    if report["memory_bytes"] is not None:
        full = report["memory_bytes"] + report["full_kv_bytes"] - report["kv_bytes"]
        text = f"{n_bytes(report['memory_bytes'])} with {report['usual_context']} tokens of context"
        if report["n_context"] > report["usual_context"]:
            text += f", {n_bytes(full)} with {report['n_context']}"
        lines += [("memory", text), ("fits", fits(report))]
    if report["last_used"] is not None:
        import time

        lines.append(("used", ago(time.time() - report["last_used"])))
    for name, label in (("prompt_tok_s", "prompts"), ("text_tok_s", "text")):
        if report[name]:
            lines.append((label, f"{rate(report[name])} tokens/s (treadle bench)"))
    return [(label, text) for label, text in lines if text]

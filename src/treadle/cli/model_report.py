"""Facts of a stored model as ``treadle list`` and ``treadle show`` print them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.base.humanize import n_bytes
from treadle.catalog.facts import SPEECH_TEXT, ModelFacts, facts_of, memory_fit
from treadle.catalog.names import NamedModel
from treadle.catalog.records import last_used, usual_speed
from treadle.catalog.stored import StoredModel

NOUNS = {"image": "pictures", "audio": "sounds"}
MINUTE = 60
HOUR = 3600
DAY = 86400


def report_of(named: NamedModel) -> dict[str, Any]:
    """Return the facts of a model as a JSON object, with None for unknown ones: names, type, sizes,
    what it reads and gives, memory, speeds, problem.
    """
    model = named.model
    facts = facts_of(model)
    speed = usual_speed(model.path)
    used = last_used(model.path)
    needs = facts.memory_bytes(model) if model.is_whole and not facts.problem else None
    fit = memory_fit(needs) if needs is not None else None
    return {
        "name": named.name,
        "hub": model.hub_name or None,
        "path": str(model.path),
        "state": "whole" if model.is_whole else "partial",
        "architecture": facts.architecture or None,
        "type": type_of(model, facts),
        "n_parameters": facts.n_parameters or None,
        "n_bytes": facts.stored_bytes(model),
        "n_files": len(model.files),
        "projector": str(model.projector) if model.projector and facts.reads_media else None,
        "n_context": facts.n_context or None,
        "gives": None if facts.problem else facts.kind,
        "reads": None if facts.problem else ["text", *facts.modalities],
        "last_used": used,
        "memory_bytes": needs,
        "fits": None if fit is None else fit.machine,
        "fits_now": None if fit is None else fit.now,
        "prompt_tok_s": speed.prompt,
        "text_tok_s": speed.text,
        "problem": facts.problem or None,
    }


def type_of(model: StoredModel, facts: ModelFacts) -> str | None:
    """Return the type of a model's weights: the one in its file's name, else the one of most bytes;
    None if unknown.
    """
    return model.tag or facts.format or None


def progress_of(model: StoredModel) -> str:
    """Return how much of an unfinished download has arrived: ``1.2 GiB of 4.0 GiB``."""
    done = model.n_bytes
    whole = 0
    if model.unfinished is not None:
        done += model.unfinished.n_done if model.files else 0
        whole = model.unfinished.n_bytes
    return f"{n_bytes(done)} of {n_bytes(whole)}" if whole else f"{n_bytes(done)}, partial"


def reads(report: Mapping[str, Any]) -> str:
    """Return what a model reads, and what it gives if not text: ``text, pictures``,
    ``text; gives vectors``; "partial" or "not supported" for a model that treadle does not run.
    """
    if report["problem"]:
        return "partial" if report["state"] == "partial" else "not supported"
    if report["gives"] == SPEECH_TEXT:
        return "sound; gives text"
    kinds = [NOUNS[kind] for kind in report["reads"][1:]]
    text = ", ".join(["text", *kinds])
    return text if report["gives"] == "text" else f"{text}; gives {report['gives']}"


def fits(report: Mapping[str, Any]) -> str:
    """Return whether a model fits into memory: "yes", "no", "not now" (only if other programs free
    some), "" if unknown.
    """
    if report["fits"] is None:
        return ""
    if not report["fits"]:
        return "no"
    return "yes" if report["fits_now"] else "not now"


def ago(seconds: float) -> str:
    """Format a past time: ``5 min ago``."""
    if seconds < MINUTE:
        return "now"
    for least, unit in ((DAY, "d"), (HOUR, "h"), (MINUTE, "min")):
        if seconds >= least:
            return f"{seconds // least:.0f} {unit} ago"
    return "now"


def rate(tok_s: float | None) -> str:
    """Format tokens per second, "" if they were not measured."""
    return "" if tok_s is None else f"{tok_s:.{0 if tok_s >= 1000 else 1}f}"

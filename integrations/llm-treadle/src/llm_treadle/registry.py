"""The models that llm is offered: those on this machine, and those that were registered.

Registered models are in ``treadle.json`` of llm's own folder, so that the plugin needs no network
and opens no model to list them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import llm

from treadle.catalog.facts import TEXT, VECTORS, ModelFacts, facts_of
from treadle.catalog.names import name_models
from treadle.catalog.stored import find_stored, stored_at
from treadle.errors import TreadleError

__all__ = ["TEXT", "VECTORS", "Entry", "add_entry", "find_entries", "read_facts", "remove_entry"]

PREFIX = "treadle/"  # of the ids of models on this machine


@dataclass(frozen=True)
class Entry:
    """A model for llm.

    ``name``: its id; ``source``: what ``treadle.load`` opens; ``kind``: TEXT or VECTORS;
    ``modalities``: what it reads besides text; ``options``: those of ``treadle.load``.
    """

    name: str
    source: str
    kind: str = TEXT
    modalities: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    registered: bool = False


def registry_file() -> Path:
    """Return the path of the file of registered models."""
    return Path(llm.user_dir()) / "treadle.json"


def read_facts(path: Path) -> ModelFacts:
    """Return the facts of a model's header. Raises TreadleError for one that treadle does not
    run.
    """
    facts = facts_of(stored_at(path))
    if facts.problem:
        raise TreadleError(f"{path}: {facts.problem}")
    return facts


def registered_entries() -> dict[str, Entry]:
    """Return the registered models by name. Raises TreadleError for a broken file."""
    path = registry_file()
    try:
        found = json.loads(path.read_text("utf-8"))
        return {
            name: Entry(
                name,
                each["source"],
                each["kind"],
                tuple(each["modalities"]),
                tuple(each["aliases"]),
                each["options"],
                registered=True,
            )
            for name, each in found.items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TreadleError(
            f"{path}: expected an object of registered models, found {error!r}: mend or remove it"
        ) from error


def _write(entries: dict[str, Entry]) -> None:
    """Write the registered models; the file is replaced as a whole."""
    path = registry_file()
    content = {
        name: {key: value for key, value in asdict(entry).items() if key not in NOT_STORED}
        for name, entry in entries.items()
    }
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    part.replace(path)


NOT_STORED = ("name", "registered")


def add_entry(entry: Entry) -> None:
    """Register a model; one of the same name is replaced."""
    _write({**registered_entries(), entry.name: entry})


def remove_entry(name: str) -> None:
    """Forget a registered model; its files stay. Raises TreadleError for an unknown name."""
    entries = registered_entries()
    if entries.pop(name, None) is None:
        raise TreadleError(f"{name}: no registered model has this name: see llm treadle list")
    _write(entries)


def find_entries(*kinds: str) -> Iterator[Entry]:
    """Yield the registered models of these kinds, then those on this machine."""
    registered = registered_entries()
    yield from (entry for entry in registered.values() if entry.kind in kinds)
    for named in name_models(find_stored()):
        name = PREFIX + named.name
        if not named.model.is_whole or name in registered:
            continue
        facts = facts_of(named.model)
        if not facts.problem and facts.kind in kinds:
            yield Entry(name, str(named.model.path), facts.kind, tuple(facts.modalities))

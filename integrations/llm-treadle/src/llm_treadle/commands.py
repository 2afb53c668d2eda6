"""``llm treadle``: which models llm is offered, and registering more of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from llm_treadle.registry import (
    TEXT,
    VECTORS,
    Entry,
    add_entry,
    find_entries,
    read_facts,
    remove_entry,
)
from treadle.api.options import find_path
from treadle.errors import TreadleError

KINDS = {TEXT: "text", VECTORS: "embeddings"}


def _value(text: str) -> Any:
    """Return an option's value: JSON where it is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@contextmanager
def plain_errors() -> Iterator[None]:
    """Show errors of treadle without a traceback."""
    try:
        yield
    except TreadleError as error:
        raise click.ClickException(str(error)) from error


@click.group(name="treadle")
def treadle_group() -> None:
    """Models that treadle runs in this process."""


@treadle_group.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="As JSON")
def list_models(as_json: bool) -> None:
    """List the models that llm is offered."""
    with plain_errors():
        entries = list(find_entries(*KINDS))
    if as_json:
        fields = ("name", "source", "modalities", "aliases", "options", "registered")
        made = [
            {"kind": KINDS[entry.kind], **{name: getattr(entry, name) for name in fields}}
            for entry in entries
        ]
        click.echo(json.dumps(made, indent=2))
        return
    for entry in entries:
        reads = f" ({', '.join(entry.modalities)})" if entry.modalities else ""
        aliases = f" [{', '.join(entry.aliases)}]" if entry.aliases else ""
        click.echo(f"{entry.name}{aliases}: {KINDS[entry.kind]}{reads}, {entry.source}")
    if not entries:
        advice = "treadle pull hf:OWNER/REPO, or llm treadle register NAME PATH"
        click.echo(f"no model is here: {advice}", err=True)


@treadle_group.command()
@click.argument("name")
@click.argument("source")
@click.option("-a", "--alias", "aliases", multiple=True, help="Further name of the model")
@click.option(
    "-o",
    "--option",
    "options",
    type=(str, str),
    multiple=True,
    help="Setting of treadle.load: context 8192",
)
def register(
    name: str, source: str, aliases: tuple[str, ...], options: tuple[tuple[str, str], ...]
) -> None:
    """Offer the model SOURCE to llm as NAME: a GGUF file, a Hugging Face folder, or
    hf:OWNER/REPO:TYPE, which is downloaded now.
    """
    with plain_errors():
        path = find_path(source, projector=None)
        facts = read_facts(path)
        if facts.kind not in KINDS:
            raise click.ClickException(f"{source}: a reranking model, which llm has no use for")
        kept = str(path.resolve()) if Path(source).exists() else source
        given = {key: _value(text) for key, text in options}
        modalities = tuple(facts.modalities)
        add_entry(Entry(name, kept, facts.kind, modalities, aliases, given, registered=True))
    click.echo(f"{name}: {KINDS[facts.kind]}, {kept}")


@treadle_group.command()
@click.argument("name")
def unregister(name: str) -> None:
    """Forget a registered model; its files stay."""
    with plain_errors():
        remove_entry(name)


def add_commands(cli: click.Group) -> None:
    """Add ``llm treadle`` to llm's commands."""
    cli.add_command(treadle_group)

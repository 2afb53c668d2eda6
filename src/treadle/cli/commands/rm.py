"""``treadle rm``: remove models from this machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from treadle.base.humanize import counted, listed, n_bytes
from treadle.catalog.names import SHOWN, fitting, shortest, similar_names
from treadle.catalog.removal import RemovalPlan, check_unused, plan_removal, remove
from treadle.catalog.stored import StoredModel, find_stored
from treadle.cli.options import ModelType
from treadle.cli.ui.table import printable, remark, say
from treadle.errors import FileError


@click.command()
@click.argument(
    "names", nargs=-1, required=True, metavar="NAME...", type=ModelType(stored_only=True)
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def command(names: tuple[str, ...], yes: bool) -> None:
    """Remove each NAME, as `treadle list` shows it, after a question.

    Files that another revision of the model uses stay, and so does a model that a program has
    mapped, as a running server has.
    """
    models = find_stored()
    chosen = list(dict.fromkeys(find_one(name, models) for name in names))
    plan = plan_removal(chosen, models)
    check_unused(plan)
    if not yes:
        ask(plan, models)
    freed = remove(plan, models)
    for model in chosen:
        say(printable(f"removed {model.origin}"))
    text = f"{n_bytes(freed)} freed"
    if plan.shared:
        text += f"; {kept_files_text(plan)}"
    remark(text)


def find_one(name: str, models: Sequence[StoredModel]) -> StoredModel:
    """Return the model that a path or a name means. Raises FileError if it fits none or several."""
    found = [model for model in models if name in (str(model.path), model.hub_name)]
    found = found or fitting(name, models)
    if len(found) == 1:
        return found[0]
    if found:
        names = [shortest(model, models) for model in found]
        raise FileError(
            f"fits {len(found)} models: {listed(names, SHOWN)}: name one of them", path=name
        )
    near = similar_names(name)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `treadle list` shows all"
    raise FileError(f"no such model on this machine{hint}", path=name)


def kept_files_text(plan: RemovalPlan) -> str:
    """Return a message: the number of files that stay, and why."""
    n = len(plan.shared)
    stay = "stay" if n > 1 else "stays"
    return f"{counted(n, 'file')} {stay}, because another revision of the model uses it"


def ask(plan: RemovalPlan, models: Sequence[StoredModel]) -> None:
    """Ask on the terminal whether to remove the models; exits with code 1 for any answer but yes.
    Raises click.UsageError if standard input is no terminal.
    """
    for model in plan.models:
        size = f"{n_bytes(model.n_bytes)} in {counted(len(model.files), 'file')}"
        remark(f"{shortest(model, models)}: {model.origin}, {size}")
    if plan.shared:
        remark(kept_files_text(plan))
    if not can_ask():
        raise click.UsageError("standard input is no terminal to ask on: --yes removes them")
    if not click.confirm(f"Remove, and free {n_bytes(plan.n_bytes)}?", err=True):
        remark("nothing was removed")
        raise click.exceptions.Exit(1)


def can_ask() -> bool:
    """Return whether standard input is a terminal, on which a question can be asked."""
    return sys.stdin.isatty()

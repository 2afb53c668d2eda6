"""Parameter type of MODEL: shell completion offers the models on this machine, then files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

HELP_SHOWN = 60  # characters


class ModelType(click.Path):
    """Parameter type of MODEL: a path, ``hf:OWNER/REPO`` or a short name; ``cli.load.find_model``
    resolves it. ``stored_only``: completion offers no files.
    """

    def __init__(self, *, stored_only: bool = False) -> None:
        super().__init__(readable=False)
        self.stored_only = stored_only

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the short names that begin with ``incomplete``, then matching files."""
        from click.shell_completion import CompletionItem

        items = [
            CompletionItem(name, help=help[:HELP_SHOWN])
            for name, help in short_names()
            if name.lower().startswith(incomplete.lower())
        ]
        return (
            items if self.stored_only else [*items, *super().shell_complete(ctx, param, incomplete)]
        )


def short_names() -> list[tuple[str, str]]:
    """Return (short name, origin) of the models on this machine; [] if they cannot be listed,
    because completion shows no errors.
    """
    from treadle.catalog.names import name_models
    from treadle.catalog.stored import find_stored

    try:
        named = name_models(find_stored())
    except Exception:
        return []
    # A colon ends a word in bash, and a name with a dash in its place means the same.
    return [
        (each.name if "/" in each.name else each.name.replace(":", "-"), each.model.origin)
        for each in named
    ]

"""A plugin of Simon Willison's ``llm``: models that treadle runs, in the same process.

::

    models.py      Model and AsyncModel of llm, their options, and messages for treadle
    embedding.py   EmbeddingModel of llm
    registry.py    which models llm is offered: those on this machine, and registered ones
    loaded.py      models in memory, each opened once
    commands.py    the commands of ``llm treadle``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import llm

from llm_treadle.commands import add_commands
from llm_treadle.embedding import TreadleEmbedding
from llm_treadle.models import AsyncTreadleModel, TreadleModel
from llm_treadle.registry import TEXT, VECTORS, find_entries

__all__ = ["AsyncTreadleModel", "TreadleEmbedding", "TreadleModel"]


@llm.hookimpl
def register_models(register: Callable[..., Any]) -> None:
    """Offer the models that write text."""
    for entry in find_entries(TEXT):
        register(TreadleModel(entry), AsyncTreadleModel(entry), aliases=entry.aliases)


@llm.hookimpl
def register_embedding_models(register: Callable[..., Any]) -> None:
    """Offer the embedding models."""
    for entry in find_entries(VECTORS):
        register(TreadleEmbedding(entry), aliases=entry.aliases)


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Add ``llm treadle``."""
    add_commands(cli)

"""Configurations on disk, beside the stored plans (``devices/cpu/stored_plan.py``).

A stored configuration is used as it is: no graph is imported, and no key or tensor is checked
again. It is what ``load_config`` made of the same bytes. The new names of tensors are stored with
it, and what starts ask of its graph.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from treadle.files.gguf import GGUF
from treadle.files.stored_entries import (
    all_sources,
    are_stored,
    identity,
    key_of,
    read_object,
    write_object,
)

if TYPE_CHECKING:
    from treadle.models.config import Config

SUFFIX = ".config"


def open_config(gguf: GGUF) -> Config:
    """Return the configuration of a language model as ``load_config`` does, with the same errors
    and warnings: stored by an earlier process, or read and then stored. Tensors in ``gguf`` are
    renamed to the graph's names.
    """
    key = _key(gguf)
    config = None if key is None else _read(key, gguf)
    if config is None:
        from treadle.models.load import load_config  # imports the graphs and all architectures

        config = load_config(gguf, warn=False)
        if key is not None:
            _write(key, gguf, config)
    if config.unread:
        from treadle.models.unread_tensors import warn_of_unread  # few files have some

        warn_of_unread(gguf, config)
    return config


def _key(gguf: GGUF) -> str | None:
    """Return the key under which a file's configuration is stored on disk. None if it may not be
    stored: for models that are not unchanged GGUF files, and under ``TREADLE_PLANS=0``.
    """
    if not are_stored() or not (files := identities(gguf)):
        return None
    return key_of(all_sources(), files, "\0".join((*gguf.tensors, "", *gguf.metadata)))


def identities(gguf: GGUF) -> list[tuple[int, ...]] | None:
    """Return for each of a GGUF model's files some numbers that change with the file
    (``identity``). None if a file changed or a tensor was replaced in memory, and for other kinds
    of models, whose tensors also depend on other files.
    """
    if type(gguf) is not GGUF or not gguf.is_in_place:
        return None
    found = [identity(file) for file in gguf.mapped_files]
    return [each for each in found if each] if found and all(found) else None


def _read(key: str, gguf: GGUF) -> Config | None:
    """Return the configuration stored under ``key``, and rename the tensors of ``gguf``; None if
    there is none, or it is damaged.
    """
    found = read_object(key, SUFFIX)
    if found is None:
        return None
    names, config = found
    if len(names) != len(gguf.tensors):
        return None
    gguf.tensors = dict(zip(names, gguf.tensors.values(), strict=True))
    stored: Config = config
    return stored


def _write(key: str, gguf: GGUF, config: Config) -> None:
    """Store ``config`` under ``key``, with the names that ``load_config`` has given the tensors of
    ``gguf``. Store nothing if a field of ``config`` cannot be hashed.
    """
    with contextlib.suppress(TypeError):  # a field that has no digest
        for name in ("pools", "main_output", "unread", "digest"):
            getattr(config, name)  # computed here, it is among the attributes that pickle stores
        write_object(key, SUFFIX, ([*gguf.tensors], config))

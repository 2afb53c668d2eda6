"""Opens the drafter of a file, by the graph of its architecture."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from treadle.models.graphs.nextn import is_nextn_alone
from treadle.models.load import find_arch, load_config, rename
from treadle.spec_decode.draft_model import Drafter, open_drafter

if TYPE_CHECKING:
    from treadle.engine.engine import Engine
    from treadle.files.gguf import GGUF

# Graphs of drafters, and the functions that open them; other graphs are models of their own.
DRAFTERS = {
    "assistant": "assistant.open_assistant",
    "eagle3": "eagle3.open_eagle3",
    "dflash": "dflash.open_dflash",
    "dspark_streams": "dflash.open_dflash",
}


def open_draft(draft: GGUF, engine: Engine) -> Drafter:
    """Return the drafter of ``draft`` for ``engine``, on its device. Raises UnsupportedError if it
    cannot draft for this model, FileError for damaged tensors.
    """
    arch = find_arch(draft)
    if arch.nextn and is_nextn_alone(draft, arch):
        from treadle.spec_decode.mtp import open_nextn_file

        rename(draft, arch)
        return open_nextn_file(draft, engine)
    config = load_config(draft)
    name = DRAFTERS.get(config.arch.graph)
    if name is None:
        return open_drafter(draft, config, engine)
    module, _, function = name.partition(".")
    made: Drafter = getattr(import_module(f"treadle.spec_decode.{module}"), function)(
        draft, config, engine
    )
    return made

"""Models by name: ``hf:OWNER/REPO`` and its longer forms, downloaded once, then found in the cache.

::

    name.py       parses a name as the user types it
    offers.py     lists the models in a repository, and chooses one
    cache.py      finds the files of a repository on this machine
    failure.py    explains the hub's errors, with what to do
    resume.py     downloads a large file, and goes on where it was interrupted
    fetch.py      downloads a name's model, and returns its local path

huggingface_hub does the work, so its cache, its tokens and its variables (``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_HOME`` ...) apply as usual.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.hub.fetch import download as download
    from treadle.hub.fetch import download_projector as download_projector
    from treadle.hub.name import HubName as HubName
    from treadle.hub.name import parse as parse

__all__ = ["HubName", "download", "download_projector", "parse"]

_NAME = ("HubName", "parse")


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: programs that only read the cache import no
    more.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'name' if name in _NAME else 'fetch'}"), name)

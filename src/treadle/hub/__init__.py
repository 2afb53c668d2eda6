"""Models by name: ``hf:OWNER/REPO`` and its longer forms, downloaded once, then found in the cache.

::

    name.py       parses a name as the user types it
    offers.py     lists the models in a repository, and chooses one
    cache.py      finds the files of a repository on this machine
    failure.py    explains the hub's errors, with what to do
    fetch.py      downloads a name's model, and returns its local path

huggingface_hub does the work, so its cache, its tokens and its variables (``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_HOME`` ...) apply as usual.
"""

from treadle.hub.fetch import download, download_projector
from treadle.hub.name import HubName, parse

__all__ = ["HubName", "download", "download_projector", "parse"]

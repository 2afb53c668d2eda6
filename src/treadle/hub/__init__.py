"""Models by name: ``hf:OWNER/REPO`` and what may follow it are downloaded once, then found again.

::

    name.py       what the user typed, in parts
    offers.py     the models in a repository, and which of them to take
    cache.py      what of a repository is on this machine already
    failure.py    the hub's errors as ours, with what to do
    fetch.py      from a name to a local path

huggingface_hub does the work, so its cache, its tokens and its variables (``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_HOME`` ...) mean here what they mean everywhere.
"""

from treadle.hub.fetch import download
from treadle.hub.name import HubName, parse

__all__ = ["HubName", "download", "parse"]

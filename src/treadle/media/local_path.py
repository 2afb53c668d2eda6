"""Paths of this machine, also as ``file://`` URLs."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit


def local_path(source: str | os.PathLike[str]) -> Path:
    """Return the path on this machine that a text, a path object or a ``file://`` URL names."""
    text = os.fsdecode(source)
    if text[:7].lower() != "file://":
        return Path(text)
    from urllib.request import url2pathname  # imports http and ssl

    return Path(url2pathname(urlsplit(text).path))

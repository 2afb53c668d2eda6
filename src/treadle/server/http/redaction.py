"""Redaction of folders: no response names a folder of this machine, only file names."""

from __future__ import annotations

import os
import re

# An absolute path up to its last name, on any system. It is applied to no client text.
_FOLDERS = re.compile(r"(?<![\w.:/\\-])(?:[A-Za-z]:)?[/\\](?:[^/\\\s:'\"]*[/\\])*(?=[^/\\\s])")
_NAMES: dict[str, str] = {}  # the served files' names by their paths


def hide(path: str | os.PathLike[str]) -> None:
    """Register a served file: ``without_paths`` then names it without its folder, however its path
    is spelt.
    """
    given = os.fspath(path)
    name = os.path.basename(os.path.abspath(given))
    for spelt in (given, os.path.abspath(given), os.path.realpath(given)):
        if spelt != name and (os.sep in spelt or (os.altsep or os.sep) in spelt):
            _NAMES[spelt] = name


def without_paths(message: str) -> str:
    """Return the message with the paths of registered files shortened to their names."""
    for path in sorted(_NAMES, key=len, reverse=True):
        if path in message:
            message = message.replace(path, _NAMES[path])
    return message


def without_folders(message: str, path: str = "") -> str:
    """Return a message about files, devices or compilers without any absolute folder. ``path``: the
    file that the message is about, whose name may have spaces.
    """
    if path:
        message = message.replace(path, os.path.basename(path))
    return _FOLDERS.sub("", without_paths(message))

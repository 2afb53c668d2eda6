"""Folders of this machine, which no answer of the server names: files have their names alone."""

from __future__ import annotations

import os
import re

# An absolute path up to its last name, on any system: no client's words are in what this reads.
_FOLDERS = re.compile(r"(?<![\w.:/\\-])(?:[A-Za-z]:)?[/\\](?:[^/\\\s:'\"]*[/\\])*(?=[^/\\\s])")
_NAMES: dict[str, str] = {}  # of the served files' paths


def hide(path: str | os.PathLike[str]) -> None:
    """Have messages name a file without its folder, however its path is spelt."""
    given = os.fspath(path)
    name = os.path.basename(os.path.abspath(given))
    for spelt in (given, os.path.abspath(given), os.path.realpath(given)):
        if spelt != name and (os.sep in spelt or (os.altsep or os.sep) in spelt):
            _NAMES[spelt] = name


def without_paths(message: str) -> str:
    """A message without the folders of the files that are served."""
    for path in sorted(_NAMES, key=len, reverse=True):
        if path in message:
            message = message.replace(path, _NAMES[path])
    return message


def without_folders(message: str, path: str = "") -> str:
    """A message of the library about files, devices or compilers, without any absolute folder;
    ``path``: the file that it is about, whose name may have spaces.
    """
    if path:
        message = message.replace(path, os.path.basename(path))
    return _FOLDERS.sub("", without_paths(message))

"""Processes that have mapped a file, as far as the system tells: on Linux, those of this user."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from treadle.machine.topology import PROC
from treadle.system import SYSTEM

LONGEST = 60  # characters of a command
# Address, permissions, offset, device, inode; then the path.
_MAPPING = re.compile(rb"\S+ \S+ \S+ (\S+) (\d+)\s+(.*)")


class MappingProcess(NamedTuple):
    """A process, and the command that started it."""

    pid: int
    command: str


def mapping_processes(files: Iterable[Path], proc: Path = PROC) -> list[MappingProcess]:
    """Return the other processes that have mapped any of these files; [] where the system does not
    tell. Processes of other users, and those outside this container, are not seen.
    """
    found: list[MappingProcess] = []
    try:
        pids = sorted(int(name) for name in os.listdir(proc) if name.isdigit())
    except OSError:
        return found
    names = {os.fsencode(os.path.realpath(file)) for file in files}
    inodes = {inode_of(name) for name in names} - {None}
    for pid in pids:
        if pid == os.getpid():
            continue
        try:
            lines = (proc / str(pid) / "maps").read_bytes().splitlines()
        except OSError:  # another user's, or it has ended
            continue
        for line in lines:
            match = _MAPPING.match(line)
            if match and (match[3] in names or (match[1], match[2]) in inodes):
                found.append(MappingProcess(pid, command_of(proc / str(pid))))
                break
    return found


def inode_of(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the device and inode of the file ``name`` as in ``/proc/PID/maps``; None if there is
    no such file, or if the system has no such maps.
    """
    try:
        info = os.stat(name)
    except OSError:
        return None
    found = SYSTEM.name_in_maps(info)
    return None if found is None else (found[0].encode(), found[1].encode())


def command_of(folder: Path) -> str:
    """Return the command line of a process, cut at LONGEST characters, from its folder in
    ``/proc``; "" if it cannot be read.
    """
    try:
        words = (folder / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    text = " ".join(word for word in words if word)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"

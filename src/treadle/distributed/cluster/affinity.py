"""Prefix affinity: routes a request to the replica with its prefix cached, unless it is busy."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

BLOCK = 256  # characters of a prefix block
DEEPEST = 256  # most blocks of a prefix
KNOWN = 1 << 16  # most remembered prefixes
SLACK = 4  # most requests above the idlest replica's at which a cached prefix is preferred


def beginning(body: Any) -> list[str]:
    """Return a hash for each prefix of 1, 2, ... blocks (BLOCK characters) of the prompt in
    ``body``, a request's JSON, shortest prefix first, at most DEEPEST; [] without a prompt.
    """
    said = _said(body)
    names = []
    so_far = hashlib.sha256()
    for at in range(0, min(len(said), BLOCK * DEEPEST), BLOCK):
        so_far.update(said[at : at + BLOCK].encode("utf-8", "replace"))
        names.append(so_far.hexdigest()[:16])
    return names


def _said(body: Any) -> str:
    if not isinstance(body, dict):
        return ""
    if isinstance(body.get("messages"), list):
        said = [body.get("system"), body.get("tools"), *body["messages"]]
        return "\n".join(map(str, said))
    for name in ("prompt", "input", "content"):
        if name in body:
            return f"{body.get('instructions', '')}\n{body[name]}"
    return ""


class Affinity:
    """Remembers which replica has which prefixes cached."""

    def __init__(self) -> None:
        self._readers: OrderedDict[str, str] = OrderedDict()

    def choose(self, names: Sequence[str], loads: Mapping[str, int]) -> str:
        """Return the name of the replica for a request with the prefix hashes ``names``, and
        remember that it has them cached. ``loads``: number of running requests by replica.

        It is the replica with the longest of these prefixes, among those with at most SLACK
        requests more than the idlest; for an unknown prefix, one of the idlest (with equal loads,
        every router chooses the same).
        """
        least = min(loads.values())
        chosen = None
        for name in reversed(names):
            reader = self._readers.get(name)
            if reader in loads and reader is not None and loads[reader] <= least + SLACK:
                chosen = reader
                break
        if chosen is None:
            idle = [replica for replica, load in loads.items() if load == least]
            first = names[0] if names else ""
            chosen = max(idle, key=lambda replica: _weight(first, replica))
        for name in names:
            self._readers[name] = chosen
            self._readers.move_to_end(name)
        while len(self._readers) > KNOWN:
            self._readers.popitem(last=False)
        return chosen


def _weight(name: str, replica: str) -> bytes:
    """Return the rendezvous hash of a prefix hash ``name`` and a replica (Thaler and Ravishankar,
    1998): the replica with the largest one gets the prefix.
    """
    return hashlib.sha256(f"{name}\n{replica}".encode()).digest()

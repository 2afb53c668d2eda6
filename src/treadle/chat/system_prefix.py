"""Length of the system prompt among the token ids of a chat prompt.

The state of a recurrent layer can be reused only at positions where it was saved. It is saved at
the end of the system prompt, because other conversations share that beginning. A template may write
tools, a date or the opening of the first user message around the system prompt. So the end is found
without knowledge of the template: the conversation's beginning is rendered with two different user
texts, and the common prefix of both id lists is the system prompt.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from treadle.base.text_overlap import n_common
from treadle.chat.messages import SYSTEM
from treadle.errors import TreadleError

PROBES = ("A", "7?")  # user texts whose first tokens differ, with any vocabulary
MOST = 16  # system prompts in the cache

Messages = list[dict[str, Any]]


class SystemPrefixes:
    """Cache of the token ids of the last MOST system prompts of one model. ``encode``: tokenizes a
    rendered prompt. Thread-safe.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._found: OrderedDict[int, list[int]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def end(
        self, ids: Sequence[int], messages: Messages, render: Callable[[Messages], str], given: Any
    ) -> int:
        """Return how many of a prompt's ``ids`` are its system prompt, with all text that the
        template writes up to the first user text; 0 if that is unknown. ``render``: renders
        messages with the request's tools and variables; ``given``: these tools and variables, whose
        repr is part of the cache's key.
        """
        n = 0
        while n < len(messages) and messages[n].get("role") in SYSTEM:
            n += 1
        head = messages[:n]
        if messages[n : n + 1] and messages[n].get("role") != "user":
            return 0
        if not all(isinstance(message.get("content"), str) for message in head):
            return 0
        key = hash(repr((head, given)))
        with self._lock:
            prefix = self._found.get(key)
            if prefix is not None:
                self._found.move_to_end(key)
        if prefix is not None and ids[: len(prefix)] == prefix:
            return len(prefix)
        try:  # not cached, or the template writes another date
            one, other = (
                self._encode(render([*head, {"role": "user", "content": probe}]))
                for probe in PROBES
            )
        except TreadleError:  # the template raises on a single message
            return 0
        prefix = one[: n_common(one, other)]
        with self._lock:
            self._found[key] = prefix
            while len(self._found) > MOST:
                self._found.popitem(last=False)
        return n_common(prefix, ids)

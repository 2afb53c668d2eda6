"""How families of models write calls of tools: a row each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from typing import Any, NamedTuple

from treadle.record import dataclass


@dataclass(frozen=True)
class Row:
    """How a family writes a call: ``open``, an object of JSON with the name and the arguments,
    ``close``. Without ``open`` an answer that begins with a brace is a call.
    """

    name: str
    open: str = ""
    close: str = ""


ROWS = (
    Row("hermes", "<tool_call>", "</tool_call>"),  # Hermes, Qwen 2.5, Qwen 3
    Row("json"),  # Llama 3.1 to 3.3
)
ARGUMENTS = ("arguments", "parameters")


class ToolCall(NamedTuple):
    """One call: ``arguments`` is an object of JSON, as text."""

    id: str
    name: str
    arguments: str


class Walk:
    """Finds the end of an object of JSON that comes in parts: each character is looked at once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """Behind its last brace; None where that has not come."""
        for at in range(self._at, len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._quoted, self._escaped = char != '"', char == "\\"
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self._at = at
                    return at + 1
        self._at = len(text)
        return None


def read_call(written: str, names: Collection[str]) -> ToolCall | None:
    """A call as it was written; None for what is none, which is then content."""
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return None
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or name not in names:
        return None
    arguments: Any = next((found[key] for key in ARGUMENTS if key in found), {})
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", name, text)

"""The system's messages in the middle of a conversation: so agents tell what has changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.chat.template.messages import joined, plain

SYSTEM = ("system", "developer")


def is_text(content: Any) -> bool:
    """Whether a content can be joined; what else it may be, the template's reader refuses."""
    if isinstance(content, list):
        return all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content)
    return content is None or isinstance(content, str)


def system_in_place(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One message of the system's, and that the first: many templates raise on a later one, or
    write none. Words of a later one stay at their place, or all behind it would leave the cache:
    at the end of the user's message or the tool's result before them, else at the beginning of the
    user's next. Behind a result a message of the user's own would end the turn, and templates drop
    the reasoning of turns that are over.
    """
    made: list[dict[str, Any]] = []
    own = False  # the last message has words of the system alone
    for message in map(dict, messages):
        role, content = message.get("role"), message.get("content")
        if role not in SYSTEM or not is_text(content):
            if own and role == "user" and is_text(content):
                message["content"] = _with(made.pop().get("content"), joined(content))
            own = False
            made.append(message)
            continue
        words, last = joined(content), made[-1] if made else {}
        last_role, said = last.get("role"), last.get("content")
        if not made:
            made.append(message)
        elif not words:
            continue
        elif last_role == "tool":
            said = said if is_text(said) else json.dumps(plain(said), ensure_ascii=False)
            made[-1] = {**last, "content": _with(said, words)}
        elif is_text(said) and (last_role == "user" or (len(made) == 1 and last_role in SYSTEM)):
            made[-1] = {**last, "content": _with(said, words)}
        else:
            made.append({"role": "user", "content": words})
            own = True
    return made


def _with(content: Any, words: str) -> str:
    return "\n\n".join(filter(None, [joined(content), words]))

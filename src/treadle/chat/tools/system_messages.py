"""Moves system messages that stand in the middle of a conversation, with which agents report
changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.chat.messages import SYSTEM, can_join, join_contents, plain

BETWEEN = "\n\n"  # separator of system text and adjacent text


def system_in_place(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with only one system message, the first: many templates raise on later
    ones or drop them.

    The text of a later one stays in its place, so that the prefix cache holds for the text after
    it: at the end of the user message or tool result before it, else at the beginning of the next
    user message. A user message of its own after a tool result would end the turn, and templates
    drop the reasoning of earlier turns.
    """
    result: list[dict[str, Any]] = []
    own = False  # the last message in ``result`` has only system text
    for message in map(dict, messages):
        role = message.get("role")
        content = message.get("content")
        if role not in SYSTEM or not can_join(content):
            if own and role == "user" and can_join(content):
                before = result.pop().get("content")
                message["content"] = join_contents([before, content], BETWEEN)
            own = False
            result.append(message)
            continue
        words = join_contents([content], "")
        last = result[-1] if result else {}
        last_role = last.get("role")
        said = last.get("content")
        if not result:
            result.append(message)
        elif not words:
            continue
        elif last_role == "tool":
            said = said if can_join(said) else json.dumps(plain(said), ensure_ascii=False)
            result[-1] = {**last, "content": join_contents([said, words], BETWEEN)}
        elif can_join(said) and (last_role == "user" or (len(result) == 1 and last_role in SYSTEM)):
            result[-1] = {**last, "content": join_contents([said, words], BETWEEN)}
        else:
            result.append({"role": "user", "content": words})
            own = True
    return result

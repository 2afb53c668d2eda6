"""Earlier messages that only some templates take as they are: results without calls, empty
assistant messages, text and reasoning beside calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle.base.fast_dataclass import dataclass
from treadle.chat.messages import (
    REASONING,
    SYSTEM,
    Messages,
    can_join,
    is_text,
    join_contents,
    joined,
    parts_of,
    plain,
    with_calls,
    wrap_content,
)


@dataclass(frozen=True)
class CallContentStyle:
    """Form in which a template takes the text and reasoning of a message with calls.

    ``apart``: the text is a message before it, followed, with ``turn_between``, by an empty user
    message. ``thought_with_call``: the reasoning then stays with the call. ``in_thought``: both
    become the reasoning, joined by this string.
    """

    apart: bool = False
    thought_with_call: bool = False
    turn_between: bool = False
    in_thought: str | None = None


def needs_form(messages: Messages) -> bool:
    """Whether some templates leave out a part of a conversation, or raise on it."""
    roles = [message.get("role") for message in messages]
    others = any(role == "tool" or role in SYSTEM for role in roles[1:]) or roles[:1] == ["tool"]
    alone = bool(roles) and all(role in SYSTEM for role in roles)
    return others or alone or any(m.get("tool_calls") or _reasoning(m) for m in messages)


def results_behind_calls(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages, with results that follow no call as user messages: some templates raise
    on them, some leave them out. System messages between a call and its results move after these.
    """
    made: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message, called in with_calls(messages):
        if called and message.get("role") in SYSTEM:
            waiting.append(dict(message))
            continue
        if not called:
            made = made + waiting
            waiting = []
        if message.get("role") == "tool" and not called:
            content = message.get("content")
            if not can_join(content):
                content = json.dumps(plain(content), ensure_ascii=False)
            said = wrap_content("<tool_response>\n", content, "\n</tool_response>")
            made.append({"role": "user", "content": said})
        else:
            made.append(dict(message))
    return made + waiting


def _reasoning(message: Mapping[str, Any]) -> str:
    """Return the reasoning of a message, whichever key a client uses for it."""
    found = (message.get(name) for name in REASONING)
    return next((said for said in found if isinstance(said, str) and said), "")


def without_empty(messages: Messages, *, thoughts: bool) -> list[dict[str, Any]]:
    """Return the messages without assistant messages that have no text, no call and, with
    ``thoughts``, no reasoning.
    """

    def is_empty(message: Mapping[str, Any]) -> bool:
        content = message.get("content")
        if message.get("role") != "assistant" or message.get("tool_calls"):
            return False
        if thoughts and _reasoning(message):
            return False
        return can_join(content) and not join_contents([content], "")

    return [dict(message) for message in messages if not is_empty(message)]


def with_thought_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the assistant's reasoning as a part of its content, as in Ministral's
    template.
    """
    reasoning = _reasoning(message)
    content = message.get("content")
    if message.get("role") != "assistant" or not reasoning or not can_join(content):
        return message
    said = parts_of(join_contents([content], ""))
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *said]}


def system_alone_as_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages, the last one as a user message if all are system messages."""
    if not messages or any(message.get("role") not in SYSTEM for message in messages):
        return messages
    return [*messages[:-1], {**messages[-1], "role": "user"}]


def text_before_calls(messages: Messages, style: CallContentStyle) -> list[dict[str, Any]]:
    """Return the messages, with text and reasoning beside calls moved to where they render before
    these.
    """
    result: list[dict[str, Any]] = []
    last_words = _last_words(messages)
    for i, message in enumerate(messages):
        words = joined(message.get("content")) if is_text(message.get("content")) else ""
        reasoning = _reasoning(message)
        if not message.get("tool_calls") or not words:
            result.append(dict(message))
        elif style.apart or (style.in_thought is not None and i < last_words):
            result += _apart(message, style)
        elif style.in_thought is not None and reasoning:
            said = f"{reasoning}{style.in_thought}{words}"
            result.append({**message, "content": "", **dict.fromkeys(REASONING, said)})
        else:
            result.append(dict(message))
    return result


def _last_words(messages: Messages) -> int:
    """Return the index of the last assistant message without a call, or -1. A template leaves out
    reasoning before it.
    """
    found = -1
    for i, message in enumerate(messages):
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            found = i
    return found


def _apart(message: Mapping[str, Any], style: CallContentStyle) -> list[dict[str, Any]]:
    """Return a message with calls as two: its text first, then the calls."""
    reasoning = {key: message[key] for key in REASONING if key in message}
    words = {key: value for key, value in message.items() if key not in ("tool_calls", *REASONING)}
    call = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
    if style.thought_with_call:
        call |= reasoning
    else:
        words |= reasoning
    gap = [{"role": "user", "content": ""}] if style.turn_between else []
    return [words, *gap, call]

"""Converts earlier messages that only some templates render: results without calls, empty assistant
messages, text and reasoning of messages with calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from treadle.base.fast_classes import dataclass
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
    """Form in which a template renders the text and reasoning of a message with calls. By default
    all are one message.

    ``apart``: the text is a message of its own before the calls; with ``turn_between`` an empty
    user message follows it. ``thought_with_call``: the reasoning then stays in the message with the
    calls. ``in_thought``: the text is appended to the reasoning, after this string; None: it is
    not.
    """

    apart: bool = False
    thought_with_call: bool = False
    turn_between: bool = False
    in_thought: str | None = None


def needs_form(messages: Messages) -> bool:
    """Return whether a conversation has parts that some templates leave out or raise on: tool calls
    or results, reasoning, a system message that is not first, or only system messages.
    """
    roles = [message.get("role") for message in messages]
    others = any(role == "tool" or role in SYSTEM for role in roles[1:]) or roles[:1] == ["tool"]
    alone = bool(roles) and all(role in SYSTEM for role in roles)
    return others or alone or any(m.get("tool_calls") or _reasoning(m) for m in messages)


def results_behind_calls(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with tool results that follow no call as user messages: templates raise
    on them or leave them out. System messages between a call and its results move after the
    results.
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
    """Return the reasoning of a message, under whichever key of REASONING it stands; "" if it has
    none.
    """
    found = (message.get(name) for name in REASONING)
    return next((said for said in found if isinstance(said, str) and said), "")


def without_empty(messages: Messages, *, thoughts: bool) -> list[dict[str, Any]]:
    """Return the messages without assistant messages that have no text and no call. With
    ``thoughts`` those that have reasoning are kept.
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
    """Return an assistant message with its reasoning as the first part of its content, of type
    thinking, as Ministral's template reads it.
    """
    reasoning = _reasoning(message)
    content = message.get("content")
    if message.get("role") != "assistant" or not reasoning or not can_join(content):
        return message
    said = parts_of(join_contents([content], ""))
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *said]}


def system_alone_as_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages; if all are system messages, the last one becomes a user message."""
    if not messages or any(message.get("role") not in SYSTEM for message in messages):
        return messages
    return [*messages[:-1], {**messages[-1], "role": "user"}]


def text_before_calls(messages: Messages, style: CallContentStyle) -> list[dict[str, Any]]:
    """Return the messages with the text and reasoning of messages with calls moved as ``style``
    says, so that they are rendered before the calls.
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
    """Return the index of the last assistant message without calls, or -1. Templates may leave out
    reasoning before it.
    """
    found = -1
    for i, message in enumerate(messages):
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            found = i
    return found


def _apart(message: Mapping[str, Any], style: CallContentStyle) -> list[dict[str, Any]]:
    """Return a message with calls as two: one with its text, then one with the calls; between them
    an empty user message if ``style`` says so.
    """
    reasoning = {key: message[key] for key in REASONING if key in message}
    words = {key: value for key, value in message.items() if key not in ("tool_calls", *REASONING)}
    call = {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}
    if style.thought_with_call:
        call |= reasoning
    else:
        words |= reasoning
    gap = [{"role": "user", "content": ""}] if style.turn_between else []
    return [words, *gap, call]

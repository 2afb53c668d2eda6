"""Answers and their pieces as objects of OpenAI's chat API."""

from __future__ import annotations

from typing import Any

from treadle.chat.tools.output import OutputPiece, ParsedOutput


def delta_of(part: OutputPiece) -> dict[str, Any]:
    """Return the ``delta`` object of a streamed chat completion for one piece of an answer."""
    if part.kind == "reasoning":  # clients read either name
        return {"reasoning_content": part.text, "reasoning": part.text}
    if part.kind == "content":
        return {"content": part.text}
    call: dict[str, Any] = {"index": part.number, "function": {"arguments": part.text}}
    if part.call is not None:
        call = {"index": part.number, "id": part.call.id, "type": "function"}
        call["function"] = {"name": part.call.name, "arguments": ""}
    return {"tool_calls": [call]}


def message_of(told: ParsedOutput) -> dict[str, Any]:
    """Return a parsed answer as the ``message`` object of a chat completion."""
    result: dict[str, Any] = {"role": "assistant", "content": told.content}
    if told.reasoning:
        result["reasoning_content"] = result["reasoning"] = told.reasoning
    if told.calls:
        result["content"] = told.content or None
        result["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in told.calls
        ]
    return result

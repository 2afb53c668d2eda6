"""LlamaIndex's messages from and to the form of OpenAI's chat API."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    AudioBlock,
    CachePoint,
    ChatMessage,
    ChatResponse,
    ContentBlock,
    ImageBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.FUNCTION: "tool",
    MessageRole.DEVELOPER: "system",
}
OF_TOOLS = ("tool_call_id", "name")  # of a result's ``additional_kwargs``


def openai_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Raises TypeError for a block that no model here reads."""
    return [openai_message(message) for message in messages]


def openai_message(message: ChatMessage) -> dict[str, Any]:
    """Return one message in OpenAI's form."""
    parts: list[dict[str, Any]] = []
    calls: list[Any] = []
    thought = ""
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            calls.append(_call(block))
        elif isinstance(block, ThinkingBlock):
            thought += block.content or ""
        elif not isinstance(block, CachePoint):
            parts.append(_part(block))
    made: dict[str, Any] = {"role": ROLES.get(message.role, message.role.value)}
    texts = [part["text"] for part in parts if part["type"] == "text"]
    made["content"] = "\n".join(texts) if len(texts) == len(parts) else parts
    if thought:
        made["reasoning_content"] = thought
    calls = calls or list(message.additional_kwargs.get("tool_calls") or ())
    if calls:
        made["tool_calls"] = calls
    if made["role"] == "tool":
        made |= {k: v for k, v in message.additional_kwargs.items() if k in OF_TOOLS}
    return made


def _call(block: ToolCallBlock) -> dict[str, Any]:
    arguments = block.tool_kwargs
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": block.tool_name, "arguments": text}
    return {"id": block.tool_call_id or "", "type": "function", "function": function}


def _part(block: ContentBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, ImageBlock):
        remote = block.url is not None and block.image is None and block.path is None
        return {
            "type": "image_url",
            "image_url": {"url": str(block.url) if remote else block.inline_url()},
        }
    if isinstance(block, AudioBlock):
        sound = base64.b64encode(block.resolve_audio().read()).decode()
        return {"type": "input_audio", "input_audio": {"data": sound, "format": block.format}}
    raise TypeError(
        f"a block of type {block.block_type!r} cannot be read: give text, images, audio"
    )


class AnswerMessage:
    """Builds the message of an answer, whole or from the deltas of a stream."""

    def __init__(self) -> None:
        self.text = ""
        self._thought = ""
        self._calls: list[dict[str, str]] = []

    def add(self, delta: Mapping[str, Any]) -> str:
        """Add a delta, or a whole message; return its text."""
        text: str = delta.get("content") or ""
        self.text += text
        self._thought += delta.get("reasoning_content") or ""
        for i, call in enumerate(delta.get("tool_calls", ())):
            if call.get("index", i) == len(self._calls):
                self._calls.append({"id": "", "name": "", "arguments": ""})
            own = self._calls[call.get("index", i)]
            own["id"] += call.get("id") or ""
            own["name"] += call["function"].get("name") or ""
            own["arguments"] += call["function"].get("arguments") or ""
        return text

    def message(self) -> ChatMessage:
        """Return the message as it is so far."""
        blocks: list[Any] = [ThinkingBlock(content=self._thought)] if self._thought else []
        blocks.append(TextBlock(text=self.text))
        blocks += [
            ToolCallBlock(
                tool_call_id=call["id"],
                tool_name=call["name"],
                tool_kwargs=arguments_of(call["arguments"]),
            )
            for call in self._calls
        ]
        calls = [_call(block) for block in blocks if isinstance(block, ToolCallBlock)]
        # Parts of LlamaIndex that are older than blocks look for calls there.
        more = {"tool_calls": calls} if calls else {}
        return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=more)

    def response(self, answer: Mapping[str, Any], delta: str | None = None) -> ChatResponse:
        """Return a whole answer, or what a chunk of a stream makes it."""
        choice = answer["choices"][0]
        return ChatResponse(
            message=self.message(),
            delta=delta,
            raw=dict(answer),
            logprobs=logprobs_of(choice["logprobs"]),
            additional_kwargs=counts_of(answer),
        )


def arguments_of(text: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object; the text itself where it was cut."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return text
    return found if isinstance(found, dict) else text


def counts_of(answer: Mapping[str, Any]) -> dict[str, int]:
    """Return the token counts of an answer, where LlamaIndex's counters look for them."""
    usage = answer.get("usage") or {}
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return {name: usage[name] for name in names if name in usage}


def logprobs_of(found: Mapping[str, Any] | None) -> list[list[LogProb]] | None:
    """Return each token's log-probability and those of its alternatives, the token first."""
    if found is None:
        return None
    return [[_logprob(each), *map(_logprob, each["top_logprobs"])] for each in found["content"]]


def _logprob(entry: Mapping[str, Any]) -> LogProb:
    return LogProb(token=entry["token"], logprob=entry["logprob"], bytes=entry["bytes"])

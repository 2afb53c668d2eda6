"""LangChain's messages from and to the form of OpenAI's chat API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    UsageMetadata,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk

REASONING = "reasoning_content"  # of ``additional_kwargs``, where LangChain looks for it


def openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with the reasoning of earlier answers."""
    made = []
    for message in messages:
        converted = convert_to_openai_messages(message)
        if isinstance(message, AIMessage):
            blocks = message.content_blocks
            thought = [block["reasoning"] for block in blocks if block["type"] == "reasoning"]
            if thought:
                converted[REASONING] = "".join(thought)
            if isinstance(message.content, list):  # calls stand beside the content
                converted["content"] = message.text
        made.append(converted)
    return made


def generation_of(completion: Mapping[str, Any]) -> ChatGeneration:
    """Return an answer as LangChain's."""
    choice = completion["choices"][0]
    answer = choice["message"]
    calls = []
    invalid = []
    for raw in answer.get("tool_calls", ()):
        try:
            parsed = parse_tool_call(raw, return_id=True)
        except Exception as error:  # an answer that was cut within its arguments
            told = make_invalid_tool_call(raw, str(error))
            invalid.append(
                invalid_tool_call(**{k: told[k] for k in ("name", "args", "id", "error")})
            )
            continue
        if parsed is not None:
            calls.append(tool_call(name=parsed["name"], args=parsed["args"], id=parsed["id"]))
    metadata = {**_metadata(completion, choice), "logprobs": choice["logprobs"]}
    if choice["logprobs"] is None:
        del metadata["logprobs"]
    message = AIMessage(
        content=answer["content"] or "",
        additional_kwargs=_reasoning(answer),
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=_usage(completion["usage"]),
        response_metadata=metadata,
        id=completion["id"],
    )
    reason = choice["finish_reason"]
    return ChatGeneration(message=message, generation_info={"finish_reason": reason})


def chunk_of(chunk: Mapping[str, Any]) -> ChatGenerationChunk:
    """Return a piece of a stream as LangChain's; the last has the usage."""
    choice = chunk["choices"][0]
    delta = choice["delta"]
    calls = [
        tool_call_chunk(
            name=call["function"].get("name"),
            args=call["function"].get("arguments"),
            id=call.get("id"),
            index=call["index"],
        )
        for call in delta.get("tool_calls", ())
    ]
    last = choice["finish_reason"] is not None
    info: dict[str, Any] = {}
    if choice["logprobs"] is not None:
        info["logprobs"] = choice["logprobs"]
    message = AIMessageChunk(
        content=delta.get("content") or "",
        additional_kwargs=_reasoning(delta),
        tool_call_chunks=calls,
        usage_metadata=_usage(chunk["usage"]) if last else None,
        # These texts are joined where chunks are added, so one chunk has them.
        response_metadata=_metadata(chunk, choice) if last else {},
        id=chunk["id"],
        chunk_position="last" if last else None,
    )
    if last:
        info["finish_reason"] = choice["finish_reason"]
    if "logprobs" in info:
        message.response_metadata["logprobs"] = info["logprobs"]
    return ChatGenerationChunk(message=message, generation_info=info or None)


def _metadata(answer: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_provider": "treadle",
        "model_name": answer["model"],
        "finish_reason": choice["finish_reason"],
    }


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    thought = message.get(REASONING)
    return {REASONING: thought} if thought else {}


def _usage(usage: Mapping[str, Any]) -> UsageMetadata:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=cached),
    )

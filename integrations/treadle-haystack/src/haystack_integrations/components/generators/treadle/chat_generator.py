"""``TreadleChatGenerator``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from haystack import component, default_from_dict, default_to_dict
from haystack.components.generators.utils import _convert_streaming_chunks_to_chat_message
from haystack.dataclasses import (
    ChatMessage,
    ComponentInfo,
    StreamingCallbackT,
    StreamingChunk,
    ToolCall,
    ToolCallDelta,
    select_streaming_callback,
)
from haystack.dataclasses.chat_message import ReasoningContent
from haystack.dataclasses.streaming_chunk import _invoke_streaming_callback
from haystack.tools import (
    ToolsType,
    deserialize_tools_or_toolset_inplace,
    flatten_tools_or_toolsets,
    serialize_tools_or_toolset,
)
from haystack.utils import deserialize_callable, serialize_callable

from haystack_integrations.common.treadle import ModelSource, TreadleComponent

logger = logging.getLogger(__name__)


@component
class TreadleChatGenerator(TreadleComponent):
    """A chat generator with a model of treadle, in this process.

    ``generation_kwargs`` are fields of OpenAI's chat API (``max_tokens``, ``response_format``,
    ``tool_choice``), and any setting of ``treadle.Model.chat`` (``repeat_penalty``, ``regex``).
    Those of a run override those of the component, each by its name. Runs at the same time, by
    threads or tasks, share batches.
    """

    def __init__(
        self,
        model: ModelSource = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        tools: ToolsType | None = None,
        load_options: dict[str, Any] | None = None,
    ) -> None:
        # No super(): the decorator makes another class of this one.
        TreadleComponent.__init__(self, model, load_options)
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback
        self.tools = tools

    def to_dict(self) -> dict[str, Any]:
        """Return the component as a dict; a schema that is a class becomes a JSON schema."""
        settings = dict(self.generation_kwargs)
        form = settings.get("response_format")
        if isinstance(form, type):
            inner = {"name": form.__name__, "schema": form.model_json_schema()}  # type: ignore[attr-defined]
            settings["response_format"] = {"type": "json_schema", "json_schema": inner}
        callback = self.streaming_callback
        made: dict[str, Any] = default_to_dict(
            self,
            **self.own_parameters(),
            generation_kwargs=settings,
            streaming_callback=None if callback is None else serialize_callable(callback),
            tools=serialize_tools_or_toolset(self.tools),
        )
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TreadleChatGenerator:
        """Return the component of ``to_dict``."""
        given = data["init_parameters"]
        deserialize_tools_or_toolset_inplace(given, key="tools")
        if callback := given.get("streaming_callback"):
            given["streaming_callback"] = deserialize_callable(callback)
        made: TreadleChatGenerator = default_from_dict(cls, data)
        return made

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer a conversation; return ``replies`` with one message. ``streaming_callback`` gets
        each piece as it is written.
        """
        said = openai_messages(messages)
        if not said:
            return {"replies": []}
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=False
        )
        settings = self._settings(generation_kwargs, tools)
        if callback is None:
            return {"replies": [reply_of(self.completions.create(said, **settings))]}
        chunks = []
        for piece in self.completions.stream(said, **settings):
            chunks.append(self._chunk(piece))
            callback(chunks[-1])
        return {"replies": [joined(chunks)]}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: StreamingCallbackT | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Do what ``run`` does; the event loop stays free. A task that is cancelled ends its
        answer.
        """
        said = openai_messages(messages)
        if not said:
            return {"replies": []}
        callback = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=True
        )
        settings = self._settings(generation_kwargs, tools)
        await self.warm_up_async()
        if callback is None:
            return {"replies": [reply_of(await self.completions.acreate(said, **settings))]}
        chunks = []
        async for piece in self.completions.astream(said, **settings):
            chunks.append(self._chunk(piece))
            await _invoke_streaming_callback(callback, chunks[-1])
        return {"replies": [joined(chunks)]}

    def _settings(
        self, generation_kwargs: Mapping[str, Any] | None, tools: ToolsType | None
    ) -> dict[str, Any]:
        settings = {**self.generation_kwargs, **(generation_kwargs or {})}
        if chosen := flatten_tools_or_toolsets(self.tools if tools is None else tools):
            settings["tools"] = [
                {"type": "function", "function": dict(tool.tool_spec)} for tool in chosen
            ]
        return settings

    def _chunk(self, piece: Mapping[str, Any]) -> StreamingChunk:
        """Return a piece of a stream as Haystack's."""
        choice = piece["choices"][0]
        delta = choice["delta"]
        meta = {"model": piece["model"], "index": 0, "finish_reason": choice["finish_reason"]}
        meta["usage"] = piece.get("usage")
        if choice["logprobs"] is not None:
            meta["logprobs"] = choice["logprobs"]
        calls = [
            ToolCallDelta(
                index=call["index"],
                tool_name=call["function"].get("name"),
                arguments=call["function"].get("arguments") or None,
                id=call.get("id"),
            )
            for call in delta.get("tool_calls", ())
        ]
        thought = delta.get("reasoning_content")
        return StreamingChunk(
            content=delta.get("content") or "",
            meta=meta,
            component_info=ComponentInfo.from_component(self),
            index=calls[0].index if calls else 0,
            tool_calls=calls or None,
            start="role" in delta or any(call.tool_name is not None for call in calls),
            finish_reason=choice["finish_reason"],
            reasoning=ReasoningContent(thought) if thought else None,
        )


def openai_messages(messages: Sequence[ChatMessage] | str) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, with the reasoning of earlier answers."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    made = []
    for message in messages:
        converted: dict[str, Any] = message.to_openai_dict_format(require_tool_call_ids=False)
        if message.reasoning is not None:
            converted["reasoning_content"] = message.reasoning.reasoning_text
        made.append(converted)
    return made


def reply_of(completion: Mapping[str, Any]) -> ChatMessage:
    """Return a whole answer as Haystack's message."""
    choice = completion["choices"][0]
    answer = choice["message"]
    calls = []
    for call in answer.get("tool_calls", ()):
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            logger.warning("a call of %s was cut, and is left out", function["name"])
            continue
        calls.append(ToolCall(function["name"], arguments, id=call["id"]))
    meta = {
        "model": completion["model"],
        "index": 0,
        "finish_reason": choice["finish_reason"],
        "usage": completion["usage"],
    }
    if choice["logprobs"] is not None:
        meta["logprobs"] = choice["logprobs"]
    return ChatMessage.from_assistant(
        answer["content"] or None,
        tool_calls=calls,
        meta=meta,
        reasoning=answer.get("reasoning_content"),
    )


def joined(chunks: list[StreamingChunk]) -> ChatMessage:
    """Return the message of a stream's chunks."""
    # Haystack's own, which its other integrations use too.
    return _convert_streaming_chunks_to_chat_message(chunks)

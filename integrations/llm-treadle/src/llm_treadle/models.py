"""llm's models that write text: prompts in, events of text, reasoning and tool calls out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import TYPE_CHECKING, Any, Literal

import llm
from llm.parts import (
    AttachmentPart,
    Message,
    ReasoningPart,
    StreamEvent,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from pydantic import Field

from llm_treadle.loaded import loaded_model
from llm_treadle.registry import Entry
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle import Reply
    from treadle.chat.tools import OutputPiece

PICTURES = frozenset({"image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"})
SOUNDS = frozenset(
    {"audio/wav", "audio/x-wav", "audio/vnd.wave", "audio/mpeg", "audio/flac", "audio/ogg"}
)
OF_LOAD = ("context", "threads")  # options with which a model is opened


class TreadleOptions(llm.Options):
    """Options of a prompt; those that are not given are as the model's file recommends."""

    temperature: float | None = Field(
        None, description="Randomness of the choice of tokens; 0 takes the likeliest"
    )
    top_p: float | None = Field(
        None, ge=0, le=1, description="Keep the likeliest tokens up to this probability together"
    )
    top_k: int | None = Field(None, description="Keep this many of the likeliest tokens")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Keep tokens at least this part as likely as the likeliest"
    )
    repeat_penalty: float | None = Field(
        None, gt=0, description="Above 1: recent tokens become less likely"
    )
    frequency_penalty: float | None = Field(
        None, description="Lowers tokens by how often they were written"
    )
    presence_penalty: float | None = Field(None, description="Lowers tokens that were written")
    seed: int | None = Field(None, description="The same seed gives the same text")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of an answer")
    stop: str | None = Field(None, description="The answer ends before this text")
    grammar: str | None = Field(None, description="GBNF that the answer must follow")
    regex: str | None = Field(None, description="Pattern that the whole answer must match")
    reasoning: Literal["on", "off"] | None = Field(
        None, description="Whether the model thinks first, where it can"
    )
    reasoning_budget: int | None = Field(None, ge=0, description="Most tokens of reasoning")
    context: int | None = Field(
        None, ge=1, description="Tokens of a conversation that there is room for"
    )
    threads: int | None = Field(None, ge=1, description="Threads that compute")


def attachment_part(attachment: llm.Attachment) -> dict[str, Any]:
    """Return an attachment as a part of a message for treadle."""
    sound = str(attachment.resolve_type()).startswith("audio/")
    kind = "audio" if sound else "image"
    if attachment.path:
        return {"type": kind, "path": attachment.path}
    return {"type": kind, kind: attachment.content_bytes()}


def content_of(message: Message) -> str | list[dict[str, Any]]:
    """Return the texts and attachments of a message: one text, or a list of parts."""
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    if not any(isinstance(part, AttachmentPart) for part in message.parts):
        return "".join(texts)
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, TextPart):
            parts.append({"type": "text", "text": part.text})
        elif isinstance(part, AttachmentPart) and part.attachment is not None:
            parts.append(attachment_part(part.attachment))
    return parts


def results_of(message: Message) -> Iterator[dict[str, Any]]:
    """Yield the messages of tool results, and one of the attachments that they came with."""
    attached: list[dict[str, Any]] = []
    for part in message.parts:
        if isinstance(part, ToolResultPart):
            content = part.output if part.exception is None else f"Error: {part.exception}"
            yield {
                "role": "tool",
                "tool_call_id": part.tool_call_id,
                "name": part.name,
                "content": content,
            }
            attached += [attachment_part(each) for each in part.attachments]
    if attached:
        yield {"role": "user", "content": attached}


def messages_of(prompt: llm.Prompt) -> list[dict[str, Any]]:
    """Return the whole conversation of a prompt, as treadle reads it."""
    made: list[dict[str, Any]] = []
    for message in prompt.messages:
        if message.role == "tool":
            made += results_of(message)
            continue
        each: dict[str, Any] = {"role": message.role, "content": content_of(message)}
        if message.role == "assistant":
            calls = [part for part in message.parts if isinstance(part, ToolCallPart)]
            thoughts = [part.text for part in message.parts if isinstance(part, ReasoningPart)]
            if any(thoughts):
                each["reasoning_content"] = "".join(thoughts)
            if calls:
                each["tool_calls"] = [call_of(part) for part in calls]
        made.append(each)
    return made


def call_of(part: ToolCallPart) -> dict[str, Any]:
    """Return an earlier call of a tool, as treadle reads it."""
    function = {"name": part.name, "arguments": json.dumps(part.arguments)}
    return {"id": part.tool_call_id, "type": "function", "function": function}


def tool_of(tool: llm.Tool) -> dict[str, Any]:
    """Return a tool as treadle reads it."""
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


class AnswerEvents:
    """The events of one answer: text, reasoning, calls; ``finish`` hands llm what they made."""

    def __init__(self, entry: Entry, prompt: llm.Prompt) -> None:
        given = prompt.options.model_dump(exclude_none=True)
        opened = {name: given.pop(name) for name in OF_LOAD if name in given}
        model = loaded_model(entry.source, {**entry.options, **opened})
        settings: dict[str, Any] = {"reasoning_budget": -1, **given}
        if prompt.schema is not None:
            settings["json_schema"] = prompt.schema
        if tools := [tool_of(tool) for tool in prompt.tools if isinstance(tool, llm.Tool)]:
            settings["tools"] = tools
        self._entry = entry
        self._hide_reasoning = prompt.hide_reasoning
        self._ids: dict[int, str] = {}  # of calls, by number
        self.reply: Reply = model.chat(messages_of(prompt), **settings)

    def __iter__(self) -> Iterator[StreamEvent]:
        """Yield the events as the answer is written."""
        for piece in self.reply.parts():
            event = self._event(piece)
            if event is not None:
                yield event

    def _event(self, piece: OutputPiece) -> StreamEvent | None:
        """Return the event of a piece, None for reasoning that is not wanted."""
        if piece.kind == "content":
            return StreamEvent("text", piece.text)
        if piece.kind == "reasoning":
            return None if self._hide_reasoning else StreamEvent("reasoning", piece.text)
        if piece.call is not None:
            self._ids[piece.number] = piece.call.id
            return StreamEvent("tool_call_name", piece.call.name, tool_call_id=piece.call.id)
        return StreamEvent("tool_call_args", piece.text, tool_call_id=self._ids[piece.number])

    def finish(self, response: Any) -> None:
        """Tell llm the calls and the counts of tokens of a whole answer. Raises llm.ModelError for
        a call that was cut short.
        """
        reply = self.reply
        for call in reply.calls:
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                raise llm.ModelError(
                    f"the answer ended within its call of {call.name} ({reply.finish_reason}): "
                    "give -o max_tokens or -o context a larger number"
                ) from None
            response.add_tool_call(llm.ToolCall(call.name, arguments, call.id))
        timings = reply.timings
        details = {"cached": timings.n_cached} if timings.n_cached else None
        response.set_usage(input=timings.n_prompt, output=len(reply.ids), details=details)
        response.response_json = {
            "finish_reason": reply.finish_reason,
            "prefill_s": round(timings.prefill_s, 3),
            "decode_s": round(timings.decode_s, 3),
            "warnings": list(reply.warnings),
        }


class _Described:
    """The methods that llm calls of both kinds of models."""

    can_stream = True
    supports_schema = True
    supports_tools = True
    attachment_types: set[str] | frozenset[str]

    def __init__(self, entry: Entry) -> None:
        self.model_id = entry.name
        self.entry = entry
        pictures = PICTURES if "image" in entry.modalities else frozenset()
        sounds = SOUNDS if "audio" in entry.modalities else frozenset()
        self.attachment_types = pictures | sounds


class TreadleModel(_Described, llm.Model):
    """A model that writes text."""

    class Options(TreadleOptions):
        """See TreadleOptions; llm shows the names and descriptions."""

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str | StreamEvent]:
        """Yield the events of an answer. Raises llm.ModelError."""
        try:
            events = AnswerEvents(self.entry, prompt)
            yield from events
            events.finish(response)
        except TreadleError as error:
            raise llm.ModelError(str(error)) from error


class AsyncTreadleModel(_Described, llm.AsyncModel):
    """A model that writes text; its steps run in threads, so the event loop stays free."""

    class Options(TreadleOptions):
        """See TreadleOptions; llm shows the names and descriptions."""

    async def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.AsyncResponse,
        conversation: llm.AsyncConversation | None,
    ) -> AsyncGenerator[str | StreamEvent, None]:
        """Yield the events of an answer. Cancelling ends it after the current step. Raises
        llm.ModelError.
        """
        try:
            events = await asyncio.to_thread(AnswerEvents, self.entry, prompt)
            each = iter(events)
            try:
                while (event := await asyncio.to_thread(next, each, None)) is not None:
                    yield event
            finally:
                if events.reply.finish_reason is None:
                    events.reply.close()
            events.finish(response)
        except TreadleError as error:
            raise llm.ModelError(str(error)) from error

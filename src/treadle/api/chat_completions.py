"""Chats in the form of OpenAI's chat API, as Python objects, for integrations of frameworks.

Most frameworks have messages, tools and settings in that form, and want answers in it. The model is
called in this process: there is no server, and the package ``openai`` is not needed.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

from treadle.base.caller_warnings import warn
from treadle.chat.template.variables import EFFORT, EFFORT_TOKENS
from treadle.chat.tools.openai_objects import delta_of, message_of
from treadle.chat.tools.output import OutputPiece, ParsedOutput
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.api.generation import Generation
    from treadle.api.model import Model
    from treadle.api.tool_chat import Reply
    from treadle.chat.template.template import ChatTemplate

Fields = Mapping[str, Any]

SYNONYMS = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "parallel",
    "chat_template_kwargs": "template",
}
"""OpenAI's and vLLM's names of settings of ``Model.chat``."""

IGNORED = frozenset(
    (
        "model",
        "stream",
        "stream_options",
        "user",
        "safety_identifier",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "timeout",
    )
)
"""Fields that change nothing here."""


class ChatCompletions:
    """Answers of a model as ``/v1/chat/completions`` gives them, as dicts. Any number of threads
    and tasks may use one object; their answers share batches.

    ``fields`` of each method are those of the API: ``tools``, ``tool_choice``, ``response_format``,
    ``max_completion_tokens``, ``logprobs``, ``top_logprobs``, ``reasoning_effort``, ``logit_bias``
    and others; any other name is a setting of ``Model.chat``. A ``tool_choice`` may also be a
    tool's name or "any"; a schema in ``response_format`` or ``json_schema`` also a pydantic class.
    None means that a field is not given.

    A copy, deep or not, is the object itself, because the model cannot be copied. Raises the errors
    of ``Model.chat``: TypeError for a name that is no setting, TreadleError for a value out of
    range.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def name(self) -> str:
        """The model's name in answers: its file's, without ``.gguf``."""
        return self.model.path.name.removesuffix(".gguf")

    def __copy__(self) -> ChatCompletions:
        return self

    def __deepcopy__(self, memo: object) -> ChatCompletions:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loaded model cannot be pickled: load it in each process")

    def create(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the whole answer to ``messages`` as a ``chat.completion`` object with one
        choice.
        """
        reply = self.start(messages, **fields)
        reply.finish()
        return self._completion(reply)

    async def acreate(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Return the object that ``create`` returns, computed in threads. Cancelling the task ends
        the answer.
        """
        reply = await asyncio.to_thread(self.start, messages, **fields)
        await reply.afinish()
        return self._completion(reply)

    def stream(
        self, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the answer to ``messages`` as ``chat.completion.chunk`` objects. The last has an
        empty delta, the finish reason and the usage. Closing the iterator ends the answer.
        """
        reply = self.start(messages, **fields)
        with closing(reply):
            chunks = _Chunks(reply, self._head("chat.completion.chunk"))
            for part in reply.parts():
                yield chunks.of(part)
            yield chunks.last()

    async def astream(
        self, messages: Sequence[Mapping[str, Any]], **fields: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the objects that ``stream`` yields, computed in threads."""
        reply = await asyncio.to_thread(self.start, messages, **fields)
        with closing(reply):
            chunks = _Chunks(reply, self._head("chat.completion.chunk"))
            async for part in reply.parts():
                yield chunks.of(part)
            yield chunks.last()

    def start(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Reply:
        """Return the answer to ``messages`` as a ``Reply``, which generates when it is iterated."""
        settings = chat_settings(fields, self.model.template)
        tools = settings.pop("tools", [])
        said = [_without_nones(message) for message in messages]
        reply: Reply = self.model.chat(said, tools=tools, **settings)
        for warning in reply.warnings:
            warn(warning)
        return reply

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
        }

    def _completion(self, reply: Reply) -> dict[str, Any]:
        parsed = ParsedOutput(reply.reasoning, reply.text, reply.calls)
        choice = {
            "index": 0,
            "message": message_of(parsed),
            "logprobs": _logprobs(reply, 0),
            "finish_reason": finish_reason(reply),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage(reply)}


class _Chunks:
    """Turns the pieces of one answer, ``reply``, into the chunks of a stream. ``head``: fields that
    all chunks have.
    """

    def __init__(self, reply: Reply, head: dict[str, Any]) -> None:
        self._reply = reply
        self._head = head
        self._n_told = 0  # tokens whose log-probabilities were sent
        self._delta: dict[str, Any] = {"role": "assistant"}

    def of(self, part: OutputPiece) -> dict[str, Any]:
        """Return the chunk for a piece."""
        return self._chunk(delta_of(part), None)

    def last(self) -> dict[str, Any]:
        """Return the last chunk, with the finish reason and the usage."""
        return {**self._chunk({}, finish_reason(self._reply)), "usage": usage(self._reply)}

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": {**self._delta, **delta},
            "logprobs": _logprobs(self._reply, self._n_told),
            "finish_reason": reason,
        }
        self._n_told = len(self._reply.logprobs or ())
        self._delta = {}
        return {**self._head, "choices": [choice]}


def _logprobs(reply: Reply, start: int) -> dict[str, Any] | None:
    """Return the log-probabilities of the tokens of ``reply`` from index ``start`` on, in OpenAI's
    form ``{"content": [...]}``; None if they were not requested.
    """
    if reply.logprobs is None:
        return None
    return {"content": [entry.as_dict() for entry in reply.logprobs[start:]]}


def finish_reason(reply: Reply) -> str:
    """Return OpenAI's finish reason of ``reply``, a finished answer: "stop", "tool_calls", or
    "length", which stands for a full context too.
    """
    if reply.finish_reason == "stop":
        return "tool_calls" if reply.calls else "stop"
    return "length"


def usage(answer: Generation) -> dict[str, Any]:
    """Return the token counts of a finished answer, in OpenAI's form."""
    n_prompt = answer.timings.n_prompt
    n_written = len(answer.ids)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
        "prompt_tokens_details": {"cached_tokens": answer.timings.n_cached},
    }


# -- fields of the API as settings of ``Model.chat`` ----------------------------------------------


def chat_settings(fields: Fields, template: ChatTemplate) -> dict[str, Any]:
    """Return keyword arguments of ``Model.chat`` for ``fields`` of OpenAI's chat API; ``template``:
    the model's, which may read ``reasoning_effort`` itself. Raises TreadleError for a value that
    the API does not have.
    """
    given = {SYNONYMS.get(name, name): value for name, value in fields.items() if value is not None}
    if given.get("n", 1) != 1:
        raise TreadleError(f"n={given['n']!r:.40}: one answer is written a call, expected 1")
    settings = {name: given[name] for name in given if name not in _READERS | IGNORED | {"n"}}
    if "response_format" in given:
        settings |= _format_settings(given["response_format"])
    if given.get("logprobs"):
        n_top = given.get("top_logprobs", 0)
        # True is OpenAI's flag; a number is treadle's own setting
        settings["logprobs"] = n_top if given["logprobs"] is True else given["logprobs"]
    if "logit_bias" in given:
        settings["logit_bias"] = {int(id): float(bias) for id, bias in given["logit_bias"].items()}
    if "tool_choice" in given and given.get("tools"):
        settings["tool_choice"] = _tool_choice(given["tool_choice"])
    if EFFORT in given:
        settings |= _effort_settings(given[EFFORT], settings, template)
    return settings


_READERS = frozenset(
    ("response_format", "logprobs", "top_logprobs", "logit_bias", "tool_choice", EFFORT)
)


@cache
def chat_fields() -> frozenset[str]:
    """Return the field names that ``ChatCompletions`` takes, except variables of chat templates."""
    from treadle.api.model import SETTINGS

    replies = ("tools", "reasoning", "reasoning_budget", "continue_final_message", "parallel")
    return frozenset((*SETTINGS, *replies, *_READERS, *SYNONYMS, *IGNORED, "template", "n"))


def _format_settings(form: Any) -> dict[str, Any]:
    """Return the keyword argument of ``Model.chat`` for ``form``, a ``response_format`` or a class
    for a schema: ``json_schema``, ``grammar`` or ``regex``; {} for plain text. Raises TreadleError.
    """
    if not isinstance(form, Mapping):
        return {"json_schema": form}  # a class, such as pydantic's
    kind = form.get("type")
    if kind == "text":
        return {}
    if kind in ("grammar", "regex"):
        return {kind: form[kind]}
    inner = form.get("json_schema")
    schema = (inner if isinstance(inner, Mapping) else form).get("schema")
    if kind == "json_object":
        return {"json_schema": {"type": "object"} if schema is None else schema}
    if kind == "json_schema" and schema is not None:
        strict = (inner if isinstance(inner, Mapping) else form).get("strict")
        return {"json_schema": _kept(schema) if strict is False else schema}
    raise TreadleError(
        f"response_format={form!r:.80}: expected a type of text, json_object, grammar or regex, or "
        "json_schema with a schema"
    )


def _kept(schema: Any) -> Any:
    """Return a schema without the parts that cannot be enforced, with a warning for each."""
    from treadle.grammar.json_schema import kept_schema  # imported late: rarely needed

    kept, left_out = kept_schema(schema)
    for message in left_out:
        warn(message)
    return kept


def _tool_choice(choice: Any) -> str:
    """Return "auto", "none", "required" or a tool's name for a choice in the form of OpenAI's or
    Anthropic's API, or of LangChain. Raises TreadleError for another type.
    """
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        choice = choice.get("type") if name is None else name
    if choice is True or choice == "any":
        return "required"
    if not isinstance(choice, str):
        raise TreadleError(f"tool_choice={choice!r:.80}: expected a name")
    return choice


def _effort_settings(effort: Any, settings: Fields, template: ChatTemplate) -> dict[str, Any]:
    """Return keyword arguments of ``Model.chat`` for ``effort``, a ``reasoning_effort``: a template
    variable, beside those in ``settings``, and, if ``template`` does not read it, a reasoning
    budget in tokens. "none" turns reasoning off.
    """
    made: dict[str, Any] = {"template": {EFFORT: effort, **settings.get("template", {})}}
    if effort == "none":
        made["reasoning"] = "off"
    elif effort in EFFORT_TOKENS and EFFORT not in template.source:
        made["reasoning_budget"] = EFFORT_TOKENS[effort]
    return made


def _without_nones(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without fields that are None, which frameworks write for absent ones."""
    return {
        name: value for name, value in message.items() if value is not None or name == "content"
    }

"""Converts conversations with tools to the form that a template renders. For a template that does
not list tools, the system message lists them and tells how to call them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.chat.messages import (
    SPEAKERS,
    can_join,
    ends_with_open_answer,
    is_parts,
    join_contents,
    joined,
    plain,
    wrap_content,
)
from treadle.chat.template.renderer import LimitError
from treadle.chat.tools.arguments import arguments_of
from treadle.chat.tools.detect import TemplateDialect, dialect_of
from treadle.chat.tools.formats import ToolCallFormat
from treadle.chat.tools.history import (
    results_behind_calls,
    system_alone_as_user,
    text_before_calls,
    with_thought_parts,
    without_empty,
)
from treadle.chat.tools.reasoning import ReasoningStyle, style_of
from treadle.chat.tools.schemas import completed, simplified
from treadle.chat.tools.system_messages import BETWEEN, system_in_place
from treadle.errors import TemplateError

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate

_PROMPT = """\
You can call these functions. Each is described by an object of JSON, with a JSON schema of its \
arguments:

{tools}

To call one, write this and nothing behind it, with the function's own name and arguments:

{call}

Results are given to you in the next message. Where no function is needed, answer in words."""


def messages_for_template(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    dialect: TemplateDialect,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Convert the messages of a ``ChatMessages`` and ``tools`` (as in OpenAI's API) to the form
    that a template with this dialect renders; return messages and tools. The tools are None if the
    template is not to be given any.
    """
    placed = results_behind_calls(messages)
    placed = placed if dialect.system_stays else system_in_place(placed)
    placed = placed if dialect.system_alone else system_alone_as_user(placed)
    result = [_with_objects(message) for message in placed]
    result = (
        without_empty(result, thoughts=dialect.thought_parts) if dialect.empty_raises else result
    )
    result = _begun_by_user(result, dialect) if dialect.alternates else result
    result = _told_by_user(result) if dialect.system_raises else result
    result = in_turns(result) if dialect.alternates else result
    result = (
        [with_thought_parts(message) for message in result] if dialect.thought_parts else result
    )
    calls = bool(tools) or any(m.get("tool_calls") or m.get("role") == "tool" for m in result)
    if not calls:
        return result, None
    result = [_with_text(message, dialect) for message in result]
    if dialect.writes_calls:
        result = _one_by_one(result) if dialect.one_call else result
        result = text_before_calls(result, dialect.call_content)
        if dialect.row.id_size or dialect.row.named_ids:
            _give_ids(result)
        if dialect.row.named_ids:
            _name_ids(result)
        if dialect.gap is not None:
            result = _with_gaps(result, dialect.gap)
        result = [_call_shaped(message, dialect) for message in result]
    else:
        result = _in_words(result, dialect)
    if not tools:
        return result, None
    if dialect.shows_tools:
        return result, [{**tool, "function": _whole(tool["function"], dialect)} for tool in tools]
    return _with_prompt(result, tools, dialect), None


def continued_dialect(
    messages: Sequence[Mapping[str, Any]], dialect: TemplateDialect, *, within: bool = False
) -> TemplateDialect:
    """Return the dialect for the answer that follows ``messages``: if it continues the last
    message, no reasoning or header may begin. ``within``: it continues that message's reasoning.
    """
    if within:
        return replace(dialect, within=True)
    if not ends_with_open_answer(messages):
        return dialect
    last = messages[-1]
    said = joined(last.get("content"))
    if dialect.thought is not None and said.rstrip().endswith(dialect.thought.open.rstrip()):
        return dialect  # text that opens reasoning
    return dialect.begun() if said or last.get("reasoning_content") else dialect


def prompt_with_last_message(
    template: ChatTemplate, prompt: str, last: Mapping[str, Any], *, within: bool = False
) -> str:
    """Return ``prompt`` with ``last``, the assistant message to be continued, appended: its
    reasoning between marks, unless the prompt has opened them, and its content after the header
    that the row's format needs. ``within``: only its reasoning, without a closing mark.
    """
    dialect = dialect_of(template)
    content = joined(last.get("content"))
    row = dialect.row
    thought = dialect.thought
    reasoning = str(last.get("reasoning_content") or "")
    if not content and not reasoning:
        return prompt
    if within and thought is not None:
        style = ReasoningStyle() if dialect.channels else style_of(template, thought)
        return style.write(thought, prompt, reasoning, within=True)
    if (own := dialect.channels) is not None:
        said = reasoning and f"{own.thought.open}{reasoning}{own.end}{own.start}"
        return f"{prompt}{said}{own.final}{content}"
    if row.content and row.open and prompt.endswith(row.open):
        return f"{prompt}{row.content}{row.after}{content}"
    ends = prompt.rstrip()
    if thought is not None and content.lstrip().startswith(thought.open.rstrip()):
        opened = ends.endswith(thought.open.rstrip())
        return f"{ends.removesuffix(thought.open.rstrip()) if opened else prompt}{content}"
    if thought is not None:
        prompt = style_of(template, thought).write(thought, prompt, reasoning)
    return f"{prompt}{content}"


def in_another_form(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate, error: TemplateError
) -> list[dict[str, Any]]:
    """Return ``messages`` converted for ``template``, which raised ``error`` on them. Raises
    ``error`` again if the conversion changes nothing or the error is a LimitError.
    """
    if isinstance(error, LimitError):
        raise error
    result, _ = messages_for_template(messages, [], dialect_of(template))
    if result == list(messages):
        raise error
    return result


def _with_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message with call arguments as objects, which most templates write as
    JSON, and with "" for a content of None. Without calls it has no ``tool_calls`` key: Llama 3's
    template tests for that key.
    """
    result = dict(message)
    if result.get("content") is None:
        result["content"] = ""
    if not result.get("tool_calls"):
        result.pop("tool_calls", None)
    else:
        result["tool_calls"] = [
            {**call, "function": _with_object(call["function"])} for call in result["tool_calls"]
        ]
    return result


def _with_text(message: dict[str, Any], dialect: TemplateDialect) -> dict[str, Any]:
    """Return a tool result with its content as JSON text, unless it is a string, a list of parts,
    or a value that the template itself writes as JSON. Other messages are unchanged.
    """
    content = message.get("content")
    text = content is None or isinstance(content, str) or (is_parts(content) and content)
    written = isinstance(content, Mapping | Sequence) and not dialect.results_as_text
    if text or written or message["role"] in SPEAKERS:
        return message
    return {**message, "content": json.dumps(plain(content), ensure_ascii=False)}


def in_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with adjacent ones of one role joined, as in Anthropic's API: templates
    of Gemma and Mistral raise on two. Contents that cannot be joined stay apart.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        last = result[-1] if result else {}
        contents = [each.get("content") for each in (last, message)]
        alike = role == last.get("role") and role in ("user", "assistant")
        if not alike or not all(map(can_join, contents)):
            result.append(message)
            continue
        result[-1] = {**last, **message, "content": join_contents(contents, "\n")}
        if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
            result[-1]["tool_calls"] = calls
    return result


def _told_by_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with system text moved to the beginning of the next user message, as
    Gemma 3's template does; Gemma 2's raises on a system message.
    """
    result: list[dict[str, Any]] = []
    said: list[Any] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and can_join(content):
            said.append(content)
        elif said and message.get("role") == "user" and can_join(content):
            result.append({**message, "content": join_contents([*said, content], BETWEEN)})
            said = []
        else:
            result.append(message)
    return [*result, {"role": "user", "content": join_contents(said, BETWEEN)}] if said else result


def _begun_by_user(
    messages: list[dict[str, Any]], dialect: TemplateDialect
) -> list[dict[str, Any]]:
    """Return the messages with an empty user message before an assistant message that comes first
    (a greeting), on which templates that require alternating roles raise.
    """
    at = int(bool(messages) and messages[0].get("role") == "system")
    first = messages[at] if at < len(messages) else {}
    if first.get("role") != "assistant" or (dialect.writes_calls and first.get("tool_calls")):
        return messages
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def _with_gaps(messages: list[dict[str, Any]], said: str) -> list[dict[str, Any]]:
    """Return the messages with an assistant message of text ``said`` inserted before a user message
    that follows only calls and results: Mistral's templates do not count those as an answer, and
    raise.
    """
    result: list[dict[str, Any]] = []
    asked = False  # the last user message has no answer in words
    for message in messages:
        role = message.get("role")
        if role == "user" and asked and result[-1].get("role") != "user":
            result.append({"role": "assistant", "content": said})
        if role == "user" or (role == "assistant" and not message.get("tool_calls")):
            asked = role == "user"
        result.append(message)
    return result


def _whole(function: Mapping[str, Any], dialect: TemplateDialect) -> dict[str, Any]:
    """Return a function with the fields that templates read (Hermes' raises without a description),
    and its schema in the form that the dialect needs.
    """
    result = {key: value for key, value in function.items() if value is not None}
    result.setdefault("description", "")
    result.setdefault("parameters", {"type": "object", "properties": {}})
    if dialect.plain_schemas:
        result["parameters"] = simplified(result["parameters"])
    if dialect.full_schemas:
        result["parameters"] = completed(result["parameters"])
    return result


def _with_object(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's function with its arguments parsed: {} if there are none, the complete part
    if they were cut short.
    """
    found = arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            found = arguments_of(arguments)
    if found is None:
        found = {}
    return {**function, "arguments": found if isinstance(found, dict) else arguments}


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each call in a message of its own, followed by its result."""
    result: list[dict[str, Any]] = []
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            result.append(message)
            continue
        results: list[dict[str, Any]] = []
        while waiting and waiting[0]["role"] == "tool":
            results.append(waiting.pop(0))
        for i, call in enumerate(calls):
            result.append({**message, **({"content": ""} if i else {}), "tool_calls": [call]})
            own = [r for r in results if r.get("tool_call_id", "") == call.get("id")]
            own = own or [r for r in results[:1] if "tool_call_id" not in r]
            result += own
            results = [r for r in results if all(r is not each for each in own)]
        result += results
    return result


def _give_ids(messages: list[dict[str, Any]]) -> None:
    """Give ids to calls and results without one (Ollama's clients send none), in place: Mistral's
    templates raise on them. A result gets the id of the first call without a result that has its
    tool's name, else of the first call without a result.
    """
    n = 0
    waiting = list[dict[str, Any]]()
    for message in messages:
        calls = message.get("tool_calls") or ()
        waiting = list(calls) or waiting
        for call in calls:
            n += 1
            call["id"] = call.get("id") or f"call{n:05}"
        if message["role"] == "tool" and waiting and not message.get("tool_call_id"):
            name = message.get("tool_name", message.get("name"))
            own = [call for call in waiting if call["function"].get("name") == name] or waiting
            message["tool_call_id"] = own[0]["id"]
            waiting.remove(own[0])


def _name_ids(messages: list[dict[str, Any]]) -> None:
    """Replace the ids of calls by ``functions.NAME:NUMBER``, in place: Kimi's template writes ids
    as names.
    """
    n = 0
    named = dict[str, str]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            named[call["id"]] = call["id"] = f"functions.{call['function'].get('name')}:{n}"
            n += 1
        if message["role"] == "tool":
            id = message.get("tool_call_id", "")
            message["tool_call_id"] = named.get(id, id)


def _call_shaped(message: dict[str, Any], dialect: TemplateDialect) -> dict[str, Any]:
    if dialect.row.id_size and isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = short_id(message["tool_call_id"], dialect.row)
    if not message.get("tool_calls"):
        return message
    message["tool_calls"] = [_shaped_call(call, dialect) for call in message["tool_calls"]]
    if dialect.content_is_none and not message.get("content"):
        message["content"] = None
    return message


def _shaped_call(call: Mapping[str, Any], dialect: TemplateDialect) -> dict[str, Any]:
    function = dict(call["function"])
    if dialect.arguments_as_text and not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    result = {"type": "function", **call, "function": function}
    if dialect.row.id_size and isinstance(result.get("id"), str):
        result["id"] = short_id(result["id"], dialect.row)
    return result


def short_id(id: str, row: ToolCallFormat) -> str:
    """Return ``id`` if it matches the row's ``id_form``, else a hash of it of
    ``id_size`` digits.
    """
    if re.fullmatch(row.id_form, id):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[: row.id_size]


def _in_words(messages: list[dict[str, Any]], dialect: TemplateDialect) -> list[dict[str, Any]]:
    """Return the messages with calls written into contents and tool results as user messages, for
    templates that render neither; adjacent user messages are joined.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        content = join_contents([message.get("content")], "")
        if message.get("tool_calls"):
            functions = [call["function"] for call in message.pop("tool_calls")]
            written = dialect.row.write(*((f["name"], f["arguments"] or {}) for f in functions))
            content = join_contents([content, written], "\n")
        role = message["role"]
        if role == "tool" and not dialect.has_results:
            message.pop("tool_call_id", None)
            role = "user"
            content = wrap_content("<tool_response>\n", content, "\n</tool_response>")
        if result and role == "user" == result[-1]["role"]:
            last = result[-1]["content"]
            result[-1]["content"] = join_contents([wrap_content("", last, "\n"), content], "")
        else:
            result.append({**message, "role": role, "content": content})
    return result


def _with_prompt(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], dialect: TemplateDialect
) -> list[dict[str, Any]]:
    """Return the messages with a text that lists the tools and tells how to call them, appended to
    the system message, or to the first user message if the template has no system role.
    """
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = dialect.row.write(("NAME", {"ARGUMENT": "VALUE"}))
    words = _PROMPT.format(tools=shown, call=call)
    first, *others = messages
    if first["role"] == "system" or (not dialect.has_system and first["role"] == "user"):
        content = wrap_content("", first.get("content"), f"\n\n{words}")
        return [{**first, "content": content}, *others]
    return [{"role": "system" if dialect.has_system else "user", "content": words}, *messages]

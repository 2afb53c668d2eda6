"""From the messages of a conversation to ids, for every protocol that has messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.server.asked import check_length, check_text
from treadle.server.fields import Table, array, flag, mapping, read_fields, text, wrong
from treadle.server.problems import ApiError

if TYPE_CHECKING:
    from treadle.model import Model

_TEXT_PARTS = ("text", "input_text", "output_text")
_SYSTEM = ("system", "developer")
MAX_MESSAGES = 10_000

FIELDS: Table = {
    "messages": array,
    "tools": array,
    "tool_choice": lambda name, value: value,
    "parallel_tool_calls": flag,
    "chat_template_kwargs": mapping,
    "reasoning_effort": text,
    "continue_final_message": flag,
    "add_generation_prompt": flag,
}


def conversation_text(body: Mapping[str, Any], model: Model) -> str:
    """The prompt that the model's template makes of a body's messages. Raises ApiError, and
    TemplateError.
    """
    given = read_fields(body, FIELDS)
    if "messages" not in given:
        raise ApiError(400, "messages: required", param="messages")
    check_tools(given)
    messages = read_messages(given["messages"])
    check_text("".join(str(message.get("content") or "") for message in messages), model)
    variables = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        variables.setdefault("reasoning_effort", given["reasoning_effort"])
    continued = given.get("continue_final_message", True)
    if given.get("add_generation_prompt", True) and continued:
        return model.chat_prompt(messages, template=variables)
    if continued and "continue_final_message" in given:
        return model.chat_prompt(messages, template=variables)
    prompt = given.get("add_generation_prompt", True)
    return model.template.render(messages, add_generation_prompt=prompt, **variables)


def conversation_ids(body: Mapping[str, Any], model: Model) -> list[int]:
    """The same as ids that the context can hold. Raises ApiError, TreadleError."""
    return check_length(prompt_ids(conversation_text(body, model), model), model)


def prompt_ids(prompt: str, model: Model) -> list[int]:
    """The ids of what a template made, which spells control tokens, BOS perhaps among them."""
    bos = model.tokenizer.bos
    starts = bos is not None and prompt.startswith(model.tokenizer.piece(bos))
    return model.tokenize(prompt, bos=False if starts else None)


def check_tools(given: Mapping[str, Any]) -> None:
    """Calls of tools cannot be told from text yet: refuse them, rather than give them as text."""
    choice = given.get("tool_choice", "auto")
    if given.get("tools") and choice != "none":
        raise ApiError(
            400,
            "tools: treadle does not find the calls of tools in a model's text yet; leave tools "
            "out, or send tool_choice 'none'",
            param="tools",
            code="unsupported_parameter",
        )
    if not given.get("tools") and choice not in ("auto", "none"):
        raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")


def read_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """As templates take them: one system message, and that the first; contents as texts or parts
    of text; arguments of calls as objects. Raises ApiError.
    """
    if not messages or len(messages) > MAX_MESSAGES:
        raise wrong("messages", messages, f"1 to {MAX_MESSAGES} messages")
    system: list[str] = []
    made: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = mapping(where, message).get("role")
        if not isinstance(role, str):
            raise wrong(f"{where}.role", role, "a string, such as user")
        content = _content(f"{where}.content", message.get("content"))
        if role in _SYSTEM:
            system.append(content)
            continue
        kept = {key: value for key, value in message.items() if value is not None}
        if "tool_calls" in kept:
            calls = array(f"{where}.tool_calls", kept["tool_calls"])
            kept["tool_calls"] = [_call(f"{where}.tool_calls", call) for call in calls]
        elif message.get("content") is None and role != "assistant":
            raise ApiError(400, f"{where}.content: required", param=f"{where}.content")
        made.append({**kept, "role": role, "content": content})
    first = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return first + made


def _content(name: str, content: Any) -> str:
    """A content as one text. Raises ApiError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(name, content, "a string or an array of parts")
    said = []
    for i, part in enumerate(content):
        kind = mapping(f"{name}[{i}]", part).get("type")
        if kind not in _TEXT_PARTS:
            raise ApiError(
                400,
                f"{name}[{i}]: a part of type {kind!r:.40}: treadle reads text alone",
                param=name,
                code="unsupported_content",
            )
        said.append(text(f"{name}[{i}].text", part.get("text")))
    return "\n".join(said)


def _call(name: str, call: Any) -> dict[str, Any]:
    """A call of a tool, its arguments as the object that most templates write as JSON."""
    made = dict(mapping(name, call))
    function = dict(mapping(f"{name}.function", made.get("function")))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            function["arguments"] = found
    return {**made, "function": function}

"""From the messages of a conversation to ids, for every protocol that has messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.server.asked import check_length, check_text
from treadle.server.fields import Table, array, flag, mapping, read_fields, text, wrong
from treadle.server.problems import ApiError
from treadle.server.tools import Tools, read_tools
from treadle.speech import THINK, Speech
from treadle.text.variables import check_own

if TYPE_CHECKING:
    from treadle.model import Model
    from treadle.server.asked import Asked
    from treadle.server.service import Service

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


def read_conversation(body: Mapping[str, Any], service: Service, asked: Asked) -> None:
    """Put the prompt into ``asked``, the texts that end an answer, and what may be found in it.
    Raises ApiError, TreadleError.
    """
    model, tools = service.model, read_tools(read_fields(body, FIELDS))
    prompt = conversation_text(body, service)
    asked.prompts = [check_length(prompt_ids(prompt, model), model)]
    asked.settings["stop"] = [*asked.settings["stop"], *model.template.stop]
    if tools.forced:
        if bound(asked):
            raise ApiError(
                400, "tool_choice: with a grammar or a schema of its own, no call can be forced"
            )
        asked.settings["json_schema"] = tools.schema()
    elif tools.functions and asked.settings.get("json_schema") is not None:
        raise ApiError(
            400, "response_format: not with tools yet: the answer could not be a call",
            param="response_format", code="unsupported_parameter",
        )  # fmt: skip
    reasons = service.template.reasons and not bound(asked)
    asked.speech = Speech(
        reasons=reasons,
        opened=reasons and prompt.rstrip().endswith(THINK),
        row=service.template.row if tools.functions else None,
        names=tools.names,
        forced=bool(tools.forced),
        parallel=tools.parallel,
    )


def bound(asked: Asked) -> bool:
    """Whether the answer must follow a grammar from its first token on."""
    return any(asked.settings.get(name) is not None for name in ("grammar", "json_schema"))


def check_tools(tools: Tools, service: Service) -> None:
    """Raise ApiError where the template does not tell the model of tools, or where its calls could
    not be told from text.
    """
    if not tools.functions:
        return
    if not service.template.shows_tools:
        why = "this model's chat template has no tools"
    elif service.template.row is None and not tools.forced:
        why = "how this model writes calls is not known; tool_choice can force one"
    else:
        return
    raise ApiError(400, f"tools: {why}", param="tools", code="unsupported_parameter")


def conversation_text(body: Mapping[str, Any], service: Service) -> str:
    """The prompt that the model's template makes of a body's messages. Raises ApiError, and
    TemplateError.
    """
    given, model = read_fields(body, FIELDS), service.model
    if "messages" not in given:
        raise ApiError(400, "messages: required", param="messages")
    tools = read_tools(given)
    check_tools(tools, service)
    shown = list(tools.functions) or None
    messages = read_messages(given["messages"])
    check_text("".join(str(message.get("content") or "") for message in messages), model)
    variables = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        variables.setdefault("reasoning_effort", given["reasoning_effort"])
    continued = given.get("continue_final_message", True)
    if given.get("add_generation_prompt", True) and continued:
        return model.chat_prompt(messages, tools=shown, template=variables)
    if continued and "continue_final_message" in given:
        return model.chat_prompt(messages, tools=shown, template=variables)
    prompt = given.get("add_generation_prompt", True)
    return model.template.render(
        messages, add_generation_prompt=prompt, tools=shown, **check_own(variables)
    )


def prompt_ids(prompt: str, model: Model) -> list[int]:
    """The ids of what a template made, which spells control tokens, BOS perhaps among them."""
    bos = model.tokenizer.bos
    starts = bos is not None and prompt.startswith(model.tokenizer.piece(bos))
    return model.tokenize(prompt, bos=False if starts else None)


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

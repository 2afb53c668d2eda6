"""From chat messages to prompt ids, for every protocol that has messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.chat.template.messages import goes_on
from treadle.chat.template.variables import check_own
from treadle.chat.tools.history import lone_results
from treadle.chat.tools.media_placeholders import in_words, left_out
from treadle.chat.tools.messages import begun, gone_on, shaped
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import (
    Table,
    array,
    flag,
    mapping,
    read_fields,
    refused,
    text,
    wrong,
)
from treadle.server.requests.generation_request import check_length, check_text
from treadle.server.requests.tools import read_tools

if TYPE_CHECKING:
    from treadle.server.requests.generation_request import GenerationRequest
    from treadle.server.requests.service import Service

_TEXT_PARTS = {  # types of content parts, and the key of their text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
_SYSTEM = ("system", "developer")
MAX_MESSAGES = 10_000
EFFORTS = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096}  # tokens of reasoning

REASONING = "reasoning_content"  # llama.cpp's value to continue the last message's reasoning


def _continued(name: str, value: Any) -> bool | str:
    """Read whether the last message is continued: its content, or its reasoning."""
    if value in ("content", REASONING):
        return str(value)
    if not isinstance(value, bool):
        raise wrong(name, value, f"true, false, 'content' or {REASONING!r}")
    return value


FIELDS: Table = {
    "messages": array,
    "tools": array,
    "tool_choice": lambda name, value: value,
    "parallel_tool_calls": flag,
    "chat_template_kwargs": mapping,
    "documents": array,
    "reasoning_effort": text,
    "continue_final_message": _continued,
    "add_generation_prompt": flag,
}


MESSAGE: Table = {"function_call": refused("not supported: use tool_calls")}


def read_conversation(body: Mapping[str, Any], service: Service, asked: GenerationRequest) -> None:
    """Set the prompt, stop strings and answer plan of ``asked``. Raises ApiError, TreadleError."""
    given = read_fields(body, FIELDS)
    model = service.model
    tools = read_tools(given)
    wanted = asked.options
    if tools.forced and (wanted.grammar is not None or wanted.regex is not None):
        raise ApiError(
            400,
            "tool_choice: a tool call cannot be forced together with grammar or regex",
            param="tool_choice",
        )
    told: list[str] = []
    prompt = conversation_text(body, service, told)
    asked.prompts = [check_length(model.tokenizer.encode_prompt(prompt), model)]
    asked.settings["stop"] = [*asked.settings["stop"], *model.template.stop]
    asked.options = replace(
        wanted,
        tools=tools.schemas,
        strict=tools.strict,
        forced=tools.forced,
        parallel=tools.parallel,
        budget=_budget(given, service, wanted.budget),
    )
    continued = given.get("continue_final_message", given.get("add_generation_prompt", True))
    own = service.manner
    if continued:
        own = begun(read_messages(given["messages"]), own, within=continued == REASONING)
    asked.plan(model, own, prompt)
    if told:
        said = dict.fromkeys((*asked.planned.warnings, *told))
        asked.planned = replace(asked.planned, warnings=tuple(said))


def _budget(given: Mapping[str, Any], service: Service, asked: int | None) -> int | None:
    """Return the reasoning budget in tokens: 0 if reasoning is off, else ``asked``, else that of
    ``reasoning_effort`` if the template does not use it.
    """
    template = service.model.template
    effort = given.get("reasoning_effort")
    if template.is_off(_variables(given), budget=asked):
        return 0
    if asked is not None:
        return asked
    if effort is None or "reasoning_effort" in template.source:
        return None
    return EFFORTS.get(effort)


def conversation_text(
    body: Mapping[str, Any], service: Service, told: list[str] | None = None
) -> str:
    """Render a body's messages with the model's template. ``told`` gets a warning for each part
    that is converted or left out. Raises ApiError and TemplateError.
    """
    given = read_fields(body, FIELDS)
    model = service.model
    if "messages" not in given:
        raise ApiError(400, "messages: required", param="messages")
    said = read_messages(given["messages"])
    if told is not None:
        told += [*left_out(given["messages"]), *lone_results(said)]
    check_text("".join(str(message.get("content") or "") for message in said), model)
    prompt = given.get("add_generation_prompt", True)
    continued = given.get("continue_final_message", prompt)
    if continued and given.get("add_generation_prompt") and "continue_final_message" in given:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    last = _last_reasoning(said, service) if continued == REASONING else None
    earlier = said if last is None else said[:-1]
    messages, shown = shaped(earlier, read_tools(given).functions, service.manner)
    variables = _variables(given)
    if "documents" in given:  # vLLM's field for the template variable of the same name
        variables.setdefault("documents", given["documents"])
    if last is not None:
        asked = model.template.render(
            messages, add_generation_prompt=True, tools=shown, **check_own(variables)
        )
        result = gone_on(model.template, asked, last, within=True)
    elif continued:
        result = model.chat_prompt(messages, tools=shown, template=variables)
    else:
        result = model.template.render(
            messages, add_generation_prompt=prompt, tools=shown, **check_own(variables)
        )
    check_text(result, model)  # includes tools, tool calls and variables
    return result


def _last_reasoning(messages: list[dict[str, Any]], service: Service) -> dict[str, Any]:
    """Return the last message, whose reasoning is continued. Raises ApiError."""
    last = messages[-1] if messages else {}
    found = last.get("reasoning_content") and not last.get("content")
    if not (found and goes_on(messages)) or service.manner.thought is None:
        why = "" if found else ": the last message is not an assistant message with reasoning only"
        why = why or ": the model's chat template has no reasoning"
        raise ApiError(
            400,
            f"continue_final_message: no reasoning to continue{why}",
            param="continue_final_message",
        )
    return last


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's variables of a body."""
    variables = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        variables.setdefault("reasoning_effort", given["reasoning_effort"])
        if given["reasoning_effort"] == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def read_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Convert messages to the form that templates take: leading system messages merged into one,
    contents as strings. Raises ApiError.
    """
    if not messages or len(messages) > MAX_MESSAGES:
        raise ApiError(
            400,
            f"messages: expected 1 to {MAX_MESSAGES}, found {len(messages)}",
            param="messages",
        )
    result: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = mapping(where, message).get("role")
        if not isinstance(role, str):
            raise wrong(f"{where}.role", role, "a string, such as user")
        content = content_text(f"{where}.content", in_words(message).get("content"))
        if role in _SYSTEM:
            if len(result) == 1 and result[0]["role"] == "system":
                content = f"{result.pop()['content']}\n\n{content}"
            result.append({"role": "system", "content": content})
            continue
        kept = {key: value for key, value in message.items() if value is not None}
        read_fields(kept, MESSAGE, f"{where}.")
        if "tool_calls" in kept:
            calls = array(f"{where}.tool_calls", kept["tool_calls"])
            kept["tool_calls"] = [_call(f"{where}.tool_calls", call) for call in calls]
        elif message.get("content") is None and role not in ("assistant", "tool"):
            raise ApiError(400, f"{where}.content: required", param=f"{where}.content")
        result.append({**kept, "role": role, "content": content})
    return result


def content_text(name: str, content: Any) -> str:
    """Return a message's content as one string. Raises ApiError for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(name, content, "a string or an array of parts")
    said = []
    for i, part in enumerate(content):
        kind = mapping(f"{name}[{i}]", part).get("type")
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is None:
            raise ApiError(
                400,
                f"{name}[{i}]: content type {kind!r:.40} is not supported: treadle accepts text "
                "only",
                param=name,
                code="unsupported_content",
            )
        said.append(text(f"{name}[{i}].{key}", part.get(key)))
    return "\n".join(said)


def _call(name: str, call: Any) -> dict[str, Any]:
    """Read a tool call. Raises ApiError."""
    made = dict(mapping(name, call))
    function = dict(mapping(f"{name}.function", made.get("function")))
    text(f"{name}.function.name", function.get("name"))
    return {**made, "function": function}

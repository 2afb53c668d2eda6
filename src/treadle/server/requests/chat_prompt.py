"""From chat messages to prompt ids, for every protocol that has messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.chat import messages as chat_messages
from treadle.chat.messages import (
    SYSTEM,
    ChatMessages,
    MediaPolicy,
    PlacedPart,
    text_part,
)
from treadle.chat.prompt import ChatPrompt, PromptMedia, render_messages
from treadle.chat.template.variables import EFFORT_TOKENS, check_own, format_variables
from treadle.chat.tools.messages import continued_dialect, messages_for_template
from treadle.media.kinds import kind_of_part
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
from treadle.server.requests.request_media import chat_ids, media_errors
from treadle.server.requests.tools import read_tools

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate
    from treadle.server.requests.generation_request import GenerationRequest
    from treadle.server.requests.service import Service

_TEXT_PARTS = {  # types of content parts, and the key of their text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
MAX_MESSAGES = 10_000

REASONING = "reasoning_content"  # llama.cpp's value to continue the last message's reasoning


def _continued(name: str, value: Any) -> bool | str:
    """Return the ``value`` of the field ``name``, ``continue_final_message``: false, or true or
    "content" to continue the last message's content, or "reasoning_content" to continue its
    reasoning. Raises ApiError for other values.
    """
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
    "response_format": mapping,
    "json_schema": lambda name, value: value,
    "continue_final_message": _continued,
    "add_generation_prompt": flag,
}


_ENDINGS = ("continue_final_message", "add_generation_prompt")

MESSAGE: Table = {"function_call": refused("not supported: use tool_calls")}


def read_conversation(
    body: Mapping[str, Any], service: Service, generation: GenerationRequest
) -> None:
    """Render and tokenize the messages of ``body``; set the prompt, stop strings, tools and answer
    plan of ``generation``. Raises ApiError and TreadleError.
    """
    given = read_fields(body, FIELDS)
    model = service.model
    tools = read_tools(given)
    wanted = generation.options
    if tools.forced and (wanted.grammar is not None or wanted.regex is not None):
        raise ApiError(
            400,
            "tool_choice: a tool call cannot be forced together with grammar or regex",
            param="tool_choice",
        )
    conversation = _conversation(given, service)
    prompt = _rendered(given, conversation, service)
    ids = check_length(chat_ids(prompt, model, service.addresses), model)
    generation.prompts = [ids]

    def render(messages: list[dict[str, Any]]) -> str:
        begun = {key: value for key, value in given.items() if key not in _ENDINGS}
        return _rendered(begun, ChatMessages(messages), service).text

    own = {key: value for key, value in given.items() if key != "messages"}
    generation.system_end = model.system_end(ids, conversation.messages, render, own)
    generation.settings["stop"] = [*generation.settings["stop"], *model.template.stop]
    generation.options = replace(
        wanted,
        tools=tools.schemas,
        strict=tools.strict,
        forced=tools.forced,
        parallel=tools.parallel,
        budget=_budget(given, service, generation),
    )
    continued = given.get("continue_final_message", given.get("add_generation_prompt", True))
    dialect = service.dialect
    if continued:
        dialect = continued_dialect(conversation.messages, dialect, within=continued == REASONING)
    generation.plan(model, dialect, prompt.text)
    if conversation.warnings:
        said = dict.fromkeys((*generation.planned.warnings, *conversation.warnings))
        generation.planned = replace(generation.planned, warnings=tuple(said))


def _budget(
    given: Mapping[str, Any], service: Service, generation: GenerationRequest
) -> int | None:
    """Return the reasoning budget in tokens: 0 if reasoning is off, else the request's own, else
    that of ``reasoning_effort`` in the fields ``given`` if the template does not use it, else the
    server's. None: no limit.
    """
    template = service.model.template
    asked = generation.options.budget
    effort = given.get("reasoning_effort")
    if template.is_off(_variables(given), budget=asked):
        return 0
    if asked is not None or generation.unlimited:
        return asked
    if effort is None or "reasoning_effort" in template.source:
        return service.model.defaults.reasoning_budget
    return EFFORT_TOKENS.get(effort, service.model.defaults.reasoning_budget)


def conversation_prompt(body: Mapping[str, Any], service: Service) -> ChatPrompt:
    """Return a body's messages, rendered with the model's chat template. Raises ApiError and
    TemplateError.
    """
    given = read_fields(body, FIELDS)
    return _rendered(given, _conversation(given, service), service)


def conversation_text(body: Mapping[str, Any], service: Service) -> str:
    """Return a body's messages, rendered as a text that people may read. Raises ApiError and
    TemplateError.
    """
    return conversation_prompt(body, service).shown


def _conversation(given: Mapping[str, Any], service: Service) -> ChatMessages:
    """Return the checked messages of a body's fields ``given``. Raises ApiError and
    TemplateError.
    """
    if "messages" not in given:
        raise ApiError(400, "messages: required", param="messages")
    model = service.model
    said = read_messages(given["messages"])
    check_text("".join(_text_of(message) for message in said), model)
    kinds = model.modalities if chat_messages.may_have_media(said) else frozenset()
    policy = MediaPolicy(kinds, model.defaults.strict, local=False)
    with media_errors(model):
        return chat_messages.read_conversation(said, policy, joins_text=True)


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message that ``read_messages`` has returned, without its other parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if isinstance(part, dict))


def _rendered(given: Mapping[str, Any], conversation: ChatMessages, service: Service) -> ChatPrompt:
    """Return the conversation, rendered with the model's chat template and the variables in
    ``given``. Raises ApiError and TemplateError.
    """
    model = service.model
    said = conversation.messages
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
    messages, shown = messages_for_template(earlier, read_tools(given).functions, service.dialect)
    variables = {**_format_variables(given, model.template), **_variables(given)}
    if "documents" in given:  # vLLM's field for the template variable of the same name
        variables.setdefault("documents", given["documents"])
    media = PromptMedia.of(conversation, model.media_marks)
    text = render_messages(
        model.template,
        messages if last is None else [*messages, last],
        shown,
        check_own(variables),
        media=media,
        continued=bool(continued),
        within=last is not None,
        add_generation_prompt=bool(continued) or prompt,
    )
    check_text(text, model)  # includes tools, tool calls and variables
    return ChatPrompt(text, media)


def _last_reasoning(messages: list[dict[str, Any]], service: Service) -> dict[str, Any]:
    """Return the last message, an assistant's with reasoning only. Raises ApiError if it is another
    one, or if the template has no reasoning.
    """
    found = chat_messages.ends_with_reasoning(messages)
    if not found or service.dialect.thought is None:
        why = "" if found else ": the last message is not an assistant message with reasoning only"
        why = why or ": the model's chat template has no reasoning"
        raise ApiError(
            400,
            f"continue_final_message: no reasoning to continue{why}",
            param="continue_final_message",
        )
    return messages[-1]


def _format_variables(given: Mapping[str, Any], template: ChatTemplate) -> dict[str, Any]:
    """Return the template variables for the answer's format, its schema and ``tool_choice``, as the
    body's fields ``given`` have them; only those that the template reads.
    """
    form = given.get("response_format", {})
    own = given.get("json_schema")
    if isinstance(own, Mapping) and own and form.get("type") in (None, "text", "json_object"):
        form = {"type": "json_schema", "schema": own}
    kind = form.get("type")
    inner = form.get("json_schema")
    schema = (inner if isinstance(inner, Mapping) else form).get("schema")
    choice = given.get("tool_choice") if given.get("tools") else None
    if isinstance(choice, Mapping):  # a tool, or some that are allowed
        allowed = choice.get("allowed_tools")
        choice = (allowed if isinstance(allowed, Mapping) else choice).get("mode", "required")
    return format_variables(
        template,
        kind if kind in ("json_schema", "json_object") else None,
        schema if isinstance(schema, Mapping) else None,
        choice if choice in ("auto", "required", "none") else None,
    )


def _variables(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template variables that the body's fields ``given`` set: ``chat_template_kwargs``
    and ``reasoning_effort``, whose value "none" also sets ``enable_thinking`` to False.
    """
    variables = dict(given.get("chat_template_kwargs", {}))
    if "reasoning_effort" in given:
        variables.setdefault("reasoning_effort", given["reasoning_effort"])
        if given["reasoning_effort"] == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def read_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Return a body's messages in the form that ``chat.messages.read_conversation`` takes: leading
    system messages merged into one, contents as strings, or as lists of parts if some are not text.
    Raises ApiError.
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
        content = content_of(f"{where}.content", message.get("content"), of_tool=role == "tool")
        if role in SYSTEM:
            before = result[0]["content"] if [m["role"] for m in result] == ["system"] else None
            if isinstance(before, str) and isinstance(content, str):
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
    """Return a message's content, a string or text parts, as one string. ``name``: its field, for
    errors. Raises ApiError for parts that are not text.
    """
    made = content_of(name, content)
    if isinstance(made, str):
        return made
    (other, *_) = (part for part in made if isinstance(part, PlacedPart))
    raise unsupported(other.place, other.part.get("type"), name)


def content_of(
    name: str, content: Any, *, of_tool: bool = False
) -> str | list[dict[str, Any] | PlacedPart]:
    """Return a message's content: a string, or a list of parts if some are pictures or sounds.
    ``name``: its field, for errors. ``of_tool``: of a tool's result, whose parts may have any type.
    Raises ApiError for other parts.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(name, content, "a string or an array of parts")
    made: list[dict[str, Any] | PlacedPart] = []
    for i, part in enumerate(content):
        if isinstance(part, PlacedPart):
            made.append(part)
            continue
        where = f"{name}[{i}]"
        kind = mapping(where, part).get("type")
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if key is not None:
            made.append(text_part(text(f"{where}.{key}", part.get(key))))
        elif kind_of_part(kind) is not None or (of_tool and isinstance(kind, str)):
            made.append(PlacedPart(part, where))
        else:
            raise unsupported(where, kind, name)
    if any(isinstance(part, PlacedPart) for part in made):
        return made
    return "\n".join(part["text"] for part in made if isinstance(part, dict))


def unsupported(where: str, kind: Any, name: str) -> ApiError:
    """Return the error for the content part at ``where``, of a type ``kind`` that cannot be read,
    in the field ``name``.
    """
    return ApiError(
        400,
        f"{where}: content type {kind!r:.40} is not supported: expected text, a picture or a sound",
        param=name,
        code="unsupported_content",
    )


def _call(name: str, call: Any) -> dict[str, Any]:
    """Check ``call``, one tool call of a message, and return a copy. ``name``: its place in the
    body. Raises ApiError unless it is an object whose ``function`` has a name.
    """
    made = dict(mapping(name, call))
    function = dict(mapping(f"{name}.function", made.get("function")))
    text(f"{name}.function.name", function.get("name"))
    return {**made, "function": function}

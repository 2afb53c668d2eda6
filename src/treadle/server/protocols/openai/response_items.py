"""Items of OpenAI's ``/v1/responses``, converted to chat messages."""

from __future__ import annotations

import base64
import json
import secrets
from typing import TYPE_CHECKING, Any

from treadle.mcp.toolbox import public_name
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import array, mapping, text
from treadle.server.protocols.openai.response_tools import flat_name
from treadle.server.requests.chat_prompt import content_of, content_text

if TYPE_CHECKING:
    from treadle.server.requests.response_store import ResponseStore

PREFIXES = {  # of item ids, by item type
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
# items that the model does not see
SKIPPED = (
    *("web_search_call", "file_search_call"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
)
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # the key of their arguments
SEAL = "treadle:"  # prefix of ``encrypted_content``
RESULTS = ("function_call_output", "custom_tool_call_output")


def given_items(value: Any, responses: ResponseStore) -> list[dict[str, Any]]:
    """Return ``value``, the field ``input`` (a string or a list of items), as items that each have
    a ``type`` and an ``id``. References are replaced by the items stored in ``responses``. Raises
    ApiError.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    result: list[dict[str, Any]] = []
    for i, item in enumerate(array("input", value)):
        where = f"input[{i}]"
        kind = mapping(where, item).get("type")
        if kind is None:  # a reference has an id and nothing else
            kind = "item_reference" if item.keys() <= {"id", "type"} else "message"
        kind = text(f"{where}.type", kind)
        name = item.get("id")
        if kind == "item_reference":
            name = text(f"{where}.id", name)
            found = responses.item(name)
            if found is None:
                raise gone(where, name, "item_not_found")
            result.append(found)
        else:
            name = name if isinstance(name, str) and name else new_id(kind)
            result.append({**item, "type": kind, "id": name})
    return result


def read_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items of an ``input`` as chat messages, one or more for each. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item["type"]
        if kind == "message":
            role = text(f"{where}.role", item.get("role"))
            content = _content(f"{where}.content", item.get("content"))
            messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            thought = content_text(f"{where}.content", item.get("content"))
            thought = thought or unsealed(item.get("encrypted_content"))
            messages += [reasoning_message(thought)] if thought else []
        elif kind in CALLS:
            arguments = item.get(CALLS[kind])
            if kind == "custom_tool_call":  # a function's arguments are an object
                arguments = {"input": arguments}
            name = flat_name(item.get("namespace"), item.get("name"))
            messages.append(calling(item.get("call_id"), name, arguments))
        elif kind in RESULTS:
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            result["content"] = _content(f"{where}.output", item.get("output"), of_tool=True)
            messages.append(result)
        elif kind == "mcp_call":
            messages += server_call(where, item)
        elif kind not in SKIPPED:
            raise ApiError(
                400, f"{where}: items of type {kind!r:.40} are not supported", param="input"
            )
    return messages


def _content(name: str, content: Any, *, of_tool: bool = False) -> Any:
    """Check a message's ``content`` and return it. Pictures and sounds become placed parts, which
    keep the field's ``name`` for errors. ``of_tool``: it is a tool's result. Raises ApiError.
    """
    made = content_of(name, content, of_tool=of_tool)
    return content if isinstance(made, str) else made


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as ``/input_items`` lists it: a message's content is a list of parts."""
    said = item.get("content")
    if item["type"] == "message" and isinstance(said, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": said}
        item = {**item, "content": [part | ({"annotations": []} if kind == "output_text" else {})]}
    return {"status": "completed", **item}


def new_id(kind: str) -> str:
    """Return a new random id for an item of the type ``kind``."""
    return f"{PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}"


def gone(where: str, name: str, code: str) -> ApiError:
    """Return the error (400), with ``code``, for the id ``name`` in the field ``where``, under
    which nothing is stored.
    """
    return ApiError(
        400,
        f"{where}: no stored item or response {name[:80]!r} (it may have expired): send the "
        "whole conversation",
        param=where,
        code=code,
    )


def reasoning_message(thought: str) -> dict[str, Any]:
    """Return the reasoning ``thought`` as an assistant's chat message without content."""
    return {"role": "assistant", "content": None, "reasoning_content": thought}


def sealed(thought: str) -> str:
    """Return ``encrypted_content`` for the reasoning ``thought``: Codex sends it back instead of
    the text. It is base64 and not encrypted, because the same item has the plain text.
    """
    return SEAL + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def unsealed(value: Any) -> str:
    """Return the reasoning in ``value``, an ``encrypted_content`` that ``sealed`` made; "" for that
    of other servers.
    """
    if not isinstance(value, str) or not value.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(value.removeprefix(SEAL), validate=True).decode("utf-8")
    except ValueError:
        return ""


def server_call(where: str, item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an item of type ``mcp_call`` as two chat messages: the call and its result. ``where``:
    its place in the body. Raises ApiError.
    """
    label = text(f"{where}.server_label", item.get("server_label"))
    name = public_name(label, text(f"{where}.name", item.get("name")))
    output = item.get("output")
    said = output if isinstance(output, str) else error_text(item.get("error"))
    result = {"role": "tool", "tool_call_id": item["id"], "content": said}
    return [calling(item["id"], name, item.get("arguments")), result]


def tool_error(text: str) -> dict[str, Any]:
    """Return the ``error`` of an item of type ``mcp_call`` whose tool failed with ``text``."""
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def error_text(error: Any) -> str:
    """Return the text of an item's ``error``: the string, the texts in an object's ``content``, or
    else the object as JSON; "" for None.
    """
    if isinstance(error, str) or error is None:
        return error or ""
    parts = error.get("content") if isinstance(error, dict) else None
    texts = [part.get("text") for part in parts or () if isinstance(part, dict)]
    known = [each for each in texts if isinstance(each, str)]
    if known:
        return "\n".join(known)
    return json.dumps(error, ensure_ascii=False)


def calling(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return an assistant's chat message with one tool call: of the function ``name``, with
    ``arguments`` as JSON text.
    """
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def in_turns(messages: list[dict[str, Any]], *, goes_on: bool = False) -> list[dict[str, Any]]:
    """Merge chat messages into assistant turns: tool calls into the assistant message before them,
    reasoning into the one after it. Templates expect one turn, and some raise on a second.
    Reasoning at the end is left out, unless ``goes_on``: the model is to continue it.
    """
    result: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}  # not yet merged into a message
    for message in messages:
        calls = message.get("tool_calls")
        thinks = message.get("reasoning_content")
        own = message["role"] == "assistant"
        if thinks and not calls and message["content"] is None:
            thought = {"reasoning_content": thinks}
            continue
        if calls and result and result[-1]["role"] == "assistant":
            calls = [*result[-1].get("tool_calls", []), *calls]
            result[-1] = {**thought, **result[-1], "tool_calls": calls}
        else:
            result.append({**thought, **message} if own else message)
        thought = {}
    if thought and goes_on:
        result.append({"role": "assistant", "content": "", **thought})
    return result

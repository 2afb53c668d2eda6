"""Items of OpenAI's ``/v1/responses`` as messages of a chat."""

from __future__ import annotations

import base64
import secrets
from typing import TYPE_CHECKING, Any

from treadle.chat.tools.media_placeholders import in_words
from treadle.server.http.api_errors import ApiError
from treadle.server.http.body_fields import array, mapping, text
from treadle.server.protocols.openai.response_tools import flat_name
from treadle.server.requests.chat_prompt import content_text

if TYPE_CHECKING:
    from treadle.server.requests.response_store import ResponseStore

PREFIXES = {  # of items' ids, by their types
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}
SKIPPED = ("web_search_call", "file_search_call")  # items that say nothing to the model
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}  # and where they have them
SEAL = "treadle:"  # before reasoning that a client cannot read
RESULTS = ("function_call_output", "custom_tool_call_output")


def given_items(value: Any, talks: ResponseStore) -> list[dict[str, Any]]:
    """``input``, a text or items, as items that each have a ``type`` and an ``id``; references are
    replaced by what they lead to. Raises ApiError.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    made: list[dict[str, Any]] = []
    for i, item in enumerate(array("input", value)):
        where = f"input[{i}]"
        kind = mapping(where, item).get("type")
        if kind is None:  # a reference is known by having an id and nothing else
            kind = "item_reference" if item.keys() <= {"id", "type"} else "message"
        kind, name = text(f"{where}.type", kind), item.get("id")
        if kind == "item_reference":
            name = text(f"{where}.id", name)
            found = talks.item(name)
            if found is None:
                raise gone(where, name, "item_not_found")
            made.append(found)
        else:
            name = name if isinstance(name, str) and name else new_id(kind)
            made.append({**item, "type": kind, "id": name})
    return made


def read_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of an ``input`` as messages of a chat. Raises ApiError."""
    made: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item["type"]
        if kind == "message":
            role = text(f"{where}.role", item.get("role"))
            content_text(f"{where}.content", item.get("content"))  # said where it stands here
            made.append({"role": role, "content": item.get("content")})
        elif kind == "reasoning":
            thought = content_text(f"{where}.content", item.get("content"))
            thought = thought or unsealed(item.get("encrypted_content"))
            made += [thinking(thought)] if thought else []
        elif kind in CALLS:
            arguments = item.get(CALLS[kind])
            if kind == "custom_tool_call":  # a function's arguments are an object
                arguments = {"input": arguments}
            name = flat_name(item.get("namespace"), item.get("name"))
            made.append(calling(item.get("call_id"), name, arguments))
        elif kind in RESULTS:
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            result["content"] = item.get("output")
            content_text(f"{where}.output", in_words(result)["content"])
            made.append(result)
        elif kind not in SKIPPED:
            raise ApiError(400, f"{where}: an item of type {kind!r:.40}", param="input")
    return made


def listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item as ``input_items`` lists it: the content of a message is parts."""
    said = item.get("content")
    if item["type"] == "message" and isinstance(said, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        part: dict[str, Any] = {"type": kind, "text": said}
        item = {**item, "content": [part | ({"annotations": []} if kind == "output_text" else {})]}
    return {"status": "completed", **item}


def new_id(kind: str) -> str:
    """An id for an item of a type."""
    return f"{PREFIXES.get(kind, 'item')}_{secrets.token_hex(24)}"


def gone(where: str, name: str, code: str) -> ApiError:
    """What ``where`` of a body names is not here."""
    return ApiError(
        400,
        f"{where}: {name[:80]!r} is not kept here (any more): send the whole conversation",
        param=where,
        code=code,
    )


def thinking(thought: str) -> dict[str, Any]:
    """Reasoning as a message of a chat, of which nothing else is said."""
    return {"role": "assistant", "content": None, "reasoning_content": thought}


def sealed(thought: str) -> str:
    """``encrypted_content`` of reasoning: Codex sends this back and leaves the text out. Nobody
    needs to encrypt what the same item tells in plain.
    """
    return SEAL + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def unsealed(value: Any) -> str:
    """The reasoning in an ``encrypted_content`` of treadle's; of others nothing can be read."""
    if not isinstance(value, str) or not value.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(value.removeprefix(SEAL), validate=True).decode("utf-8")
    except ValueError:
        return ""


def calling(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A call as a message of a chat."""
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def in_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls in the message of the assistant before them, and reasoning in the one behind it: there
    they are items of their own, but templates have one turn, and some raise on a second.
    """
    made: list[dict[str, Any]] = []
    thought: dict[str, Any] = {}  # that no message has yet
    for message in messages:
        calls, thinks = message.get("tool_calls"), message.get("reasoning_content")
        own = message["role"] == "assistant"
        if thinks and not calls and message["content"] is None:
            thought = {"reasoning_content": thinks}
            continue
        if calls and made and made[-1]["role"] == "assistant":
            calls = [*made[-1].get("tool_calls", []), *calls]
            made[-1] = {**thought, **made[-1], "tool_calls": calls}
        else:
            made.append({**thought, **message} if own else message)
        thought = {}
    return made

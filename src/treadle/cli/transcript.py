"""A conversation as a JSON file: written atomically, validated when read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from treadle.errors import FileError
from treadle.files.target import part_of

# role: one of ROLES; content: a text, or parts of text, pictures and sounds. An answer may also
# have REASONING, which later prompts include, and CALLS.
Message = dict[str, Any]
REASONING = "reasoning_content"

CALLS = "tool_calls"  # of an answer; their results are messages of the role "tool"
CALL_ID = "tool_call_id"
ROLES = ("user", "assistant", "tool")
PARTS = ("text", "image", "audio")  # types, and the keys that hold their values
MAX_BYTES = 64 << 20


def path_of(name: str) -> Path:
    """Return the path of a typed file name, with ``~`` expanded. Raises FileError for an impossible
    one.
    """
    if "\0" in name:
        raise FileError("is not a file name", path=name.replace("\0", "\\0"))
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # an unknown user, as in ~nobody
        raise FileError(f"is not a file name: {error}", path=name) from error


def write_record(path: Path, system: str, messages: list[Message]) -> None:
    """Write a conversation's system prompt and messages atomically. Raises OSError on failure."""
    record = {"system": system, "messages": messages}
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    try:
        octets = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can escape and UTF-8 cannot
        octets = (json.dumps(record, indent=1) + "\n").encode()
    part = part_of(path)
    try:
        part.write_bytes(octets)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_record(path: Path) -> tuple[str, list[Message]]:
    """Return the system prompt and the messages of a file that ``/save`` wrote. Raises FileError
    for any other file, OSError for one that cannot be read.
    """
    expected = 'an object with "system" and "messages", as /save writes it'
    try:
        with path.open("rb") as file:
            octets = file.read(MAX_BYTES + 1)
        if len(octets) > MAX_BYTES:
            raise FileError(f"has more than {MAX_BYTES} bytes", path=path, expected=expected)
        record: Any = json.loads(octets.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
        raise FileError(f"not a conversation: {error}", path=path, expected=expected) from error
    messages = record.get("messages") if isinstance(record, dict) else None
    system = record.get("system", "") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not isinstance(system, str):
        raise FileError("not a conversation", path=path, expected=expected)
    for i, message in enumerate(messages):
        sound = (
            isinstance(message, dict)
            and message.get("role") in ROLES  # ROLES is a tuple, so unhashable values are fine
            and (message["role"] != "tool" or isinstance(message.get(CALL_ID), str))
            and is_content(message.get("content"))
        )
        if not sound:
            raise FileError(
                "not a message",
                path=path,
                where=f"messages[{i}]",
                expected='a "role" of user, assistant or tool, and a "content" of text or parts',
            )
    return system, [_kept(message) for message in messages]


def _kept(message: Message) -> Message:
    """Return a message with only the keys that a conversation file has."""
    made = {"role": message["role"], "content": message["content"]}
    reasoning = message.get(REASONING)
    if reasoning and isinstance(reasoning, str):
        made[REASONING] = reasoning
    for key, kind in ((CALLS, list), (CALL_ID, str)):
        if isinstance(message.get(key), kind):
            made[key] = message[key]
    return made


def is_content(content: Any) -> bool:
    """Return whether ``content`` is a text, or a list of text parts and of pictures and sounds by
    path.
    """
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(
        isinstance(part, dict)
        and part.get("type") in PARTS  # a tuple, so unhashable values are fine
        and isinstance(part.get(part["type"]), str)
        for part in content
    )

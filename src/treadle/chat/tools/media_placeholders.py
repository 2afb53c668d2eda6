"""Placeholders for pictures, sounds and files in tool results: a sentence replaces each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_KINDS = {  # by the type of a part, or by the first half of its media type
    "image": "picture",
    "image_url": "picture",
    "input_image": "picture",
    "audio": "sound",
    "input_audio": "sound",
    "audio_url": "sound",
    "video": "video",
    "video_url": "video",
    "document": "file",
    "file": "file",
    "input_file": "file",
    "resource": "file",
    "resource_link": "file",
}
_INNER = ("source", "image_url", "input_audio", "audio_url", "video_url", "file", "resource")
_DATA = ("data", "file_data", "blob", "url", "image_url", "file_url", "uri")
_TYPES = ("media_type", "mimeType", "mime_type")
_NAMES = ("filename", "title", "name", "file_id")
_WHY = "the model reads text alone"
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "refusal")  # types of parts


def in_words(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message; in a tool result, a sentence replaces each part that is not text. Otherwise
    the whole conversation would be refused.
    """
    if not _left_out(message):
        return dict(message)
    parts = (part if _is_text(part) else _sentence(part) for part in message["content"])
    return {**message, "content": list(parts)}


def left_out(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a warning for each part of a tool result that is not text."""
    return [
        f"tool result {name_of(message)!r:.80}: a {described(part)} was dropped, because the model "
        "reads only text"
        for message in messages
        for part in _left_out(message)
    ]


def name_of(message: Mapping[str, Any]) -> str:
    """Return the id of the call that a result belongs to, or the tool's name."""
    keys = ("tool_call_id", "tool_name", "name")
    return next((str(message[key]) for key in keys if message.get(key)), "")


def _left_out(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a tool result that are not text."""
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, list):
        return []
    if not all(isinstance(p, Mapping) and isinstance(p.get("type"), str) for p in content):
        return []  # arbitrary JSON
    return [part for part in content if not _is_text(part)]


def _is_text(part: Mapping[str, Any]) -> bool:
    return part["type"] in TEXTS


def described(part: Mapping[str, Any]) -> str:
    """Return a part's kind, media type or address, name and size, as far as they are given:
    ``picture (image/png, 1234 bytes)``.
    """
    kind = str(part.get("type"))
    media = _first(part, _TYPES) or _format_of(part)
    found = _first(part, _DATA)
    size = ""
    if found.startswith("data:"):
        head, _, found = found.removeprefix("data:").partition(",")
        media = head.partition(";")[0] or media
        size = _size(found)
    elif "://" in found[:16]:
        size = f"{found:.200}"
    elif found:
        size = _size(found)
    word = _KINDS.get(media.partition("/")[0]) or _KINDS.get(kind)
    word = "PDF" if media == "application/pdf" else word or f"part of type {kind!r:.40}"
    told = [f"{each:.80}" for each in (media, _first(part, _NAMES)) if each] + [size] * bool(size)
    return f"{word} ({', '.join(told)})" if told else word


def _sentence(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the placeholder of a part, for the model."""
    words = f"[The tool gave a {described(part)} here. It is left out: {_WHY}.]"
    return {"type": "text", "text": words}


def _levels(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a part, then the objects in it that hold its data."""
    yield part
    yield from (part[key] for key in _INNER if isinstance(part.get(key), Mapping))


def _first(part: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return the first string under one of ``keys``, or ""."""
    found = (level.get(key) for level in _levels(part) for key in keys)
    return next((value for value in found if isinstance(value, str) and value), "")


def _format_of(part: Mapping[str, Any]) -> str:
    """Return the media type of OpenAI's audio parts, which have only a format."""
    found = _first(part, ("format",))
    return f"audio/{found}" if found else ""


def _size(data: str) -> str:
    """Return the size of base64 data, such as "1234 bytes"."""
    return f"{len(data.rstrip('=')) * 3 // 4} bytes"

"""Placeholders for pictures, sounds and files that a model cannot read: a sentence for each."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle.errors import TreadleError

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
_DATA = ("data", "file_data", "blob", "base64", "url", "image_url", "file_url", "uri")
_LOCAL = ("image", "audio", "path")  # keys for paths and objects from callers in this process
_TYPES = ("media_type", "mimeType", "mime_type")
_NAMES = ("filename", "title", "name", "file_id")
TEXTS = ("text", "input_text", "output_text", "reasoning_text", "refusal")  # types of parts
HEAD = 1 << 18  # bytes of a picture's file in which its size is looked for


def is_text_part(part: Mapping[str, Any]) -> bool:
    """Whether a part is text, in any protocol's spelling."""
    return part.get("type") in TEXTS


def name_of(message: Mapping[str, Any]) -> str:
    """Return a tool result's name for messages: the id of its call, else the tool's
    name, else "".
    """
    keys = ("tool_call_id", "tool_name", "name")
    return next((str(message[key]) for key in keys if message.get(key)), "")


def placeholder(words: str, *, of_tool: bool, readable: str) -> dict[str, Any]:
    """Return a text part that tells the model that a part was left out.

    ``words``: the part, as ``described`` returns it. ``of_tool``: it stood in a tool result.
    ``readable``: the kinds of content that the model reads, such as "text and pictures".
    """
    place = f"The tool gave a {words} here" if of_tool else f"A {words} was sent here"
    text = f"[{place}. It is left out: the model reads {readable}.]"
    return {"type": "text", "text": text}


def described(part: Mapping[str, Any]) -> str:
    """Return a part's kind, media type or address, name and size, as far as they are given:
    ``picture (image/png, 640 x 480 pixels, 1234 bytes)``. Pixels are those of the file's header.
    """
    kind = str(part.get("type"))
    media = _first(part, _TYPES) or _format_of(part)
    found = _first(part, _DATA)
    text = next((part[key] for key in _LOCAL if isinstance(part.get(key), str)), "")
    found = found or (text if text.startswith("data:") or "://" in text[:16] else "")
    if found.startswith("data:"):
        head, _, found = found.removeprefix("data:").partition(",")
        media = head.partition(";")[0] or media
        sizes = _sizes(found)
    elif "://" in found[:16]:
        sizes = [f"{found:.200}"]
    elif found:
        sizes = _sizes(found)
    else:
        sizes = _local_sizes(part)
    word = _KINDS.get(media.partition("/")[0]) or _KINDS.get(kind)
    word = "PDF" if media == "application/pdf" else word or f"part of type {kind!r:.40}"
    told = [f"{each:.80}" for each in (media, _first(part, _NAMES)) if each] + sizes
    return f"{word} ({', '.join(told)})" if told else word


def _levels(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a part, then the objects nested in it that may hold its data, such as ``source``."""
    yield part
    yield from (part[key] for key in _INNER if isinstance(part.get(key), Mapping))


def _first(part: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """Return the first non-empty string under one of ``keys`` in the part or its nested objects, or
    "".
    """
    found = (level.get(key) for level in _levels(part) for key in keys)
    return next((value for value in found if isinstance(value, str) and value), "")


def _format_of(part: Mapping[str, Any]) -> str:
    """Return the media type of an OpenAI audio part, made from its ``format``, such as "audio/wav";
    "" if it has none.
    """
    found = _first(part, ("format",))
    return f"audio/{found}" if found else ""


def _sizes(data: str) -> list[str]:
    """Return sizes in words: of a picture in pixels, of all base64 data in bytes. A path (a short
    text with a dot near its end) gives its file name instead.
    """
    if "." in data[-6:] and len(data) < 4096:
        return [f"{Path(data).name:.80}"]
    try:
        head = base64.b64decode(data[: HEAD // 3 * 4])
    except ValueError:
        head = b""
    return [*_pixels(head), f"{len(data.rstrip('=')) * 3 // 4} bytes"]


def _local_sizes(part: Mapping[str, Any]) -> list[str]:
    """Return the size in words of a Pillow image, an array or the bytes of a file; of a path, its
    file name. [] if the part has none of these.
    """
    found = next((part[key] for key in _LOCAL if part.get(key) is not None), None)
    if isinstance(found, bytes | bytearray | memoryview):
        return [*_pixels(bytes(found[:HEAD])), f"{len(found)} bytes"]
    if isinstance(found, str | Path):
        return [f"{Path(found).name:.80}"]
    shape = getattr(found, "shape", None)
    if isinstance(shape, tuple) and len(shape) in (2, 3) and "image" in part:
        return [f"{shape[1]} x {shape[0]} pixels"]
    size = getattr(found, "size", None)
    if isinstance(size, tuple) and len(size) == 2:
        return [f"{size[0]} x {size[1]} pixels"]
    return []


def _pixels(head: bytes) -> list[str]:
    """Return ``["640 x 480 pixels"]`` from the header of a picture's file; [] if ``head`` is no
    picture or its header is damaged.
    """
    from treadle.media.file_formats import PICTURES, media_format  # imported late: rarely needed
    from treadle.media.picture_header import picture_size

    found = media_format(head)
    if found not in PICTURES:
        return []
    try:
        height, width = picture_size(head, found, "the picture")
    except TreadleError:
        return []
    return [f"{width} x {height} pixels"]

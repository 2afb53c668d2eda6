"""Pictures and sounds in messages: parts of every protocol's spelling, read into ``MediaPart``.

=====================  ============================================================================
OpenAI, Chat           ``image_url`` (``{"url"}`` or the text alone), ``input_audio`` (``data``)
OpenAI, Responses      ``input_image`` with a text ``image_url``
Anthropic              ``image`` with a ``source`` of type ``base64`` or ``url``
Model Context Protocol ``image``, ``audio`` with ``data``, as tools return them
Hugging Face           ``image``, ``audio`` with ``image``, ``audio``, ``url``, ``path``, ``base64``
vLLM                   ``audio_url``
Ollama                 a message's ``images``, sounds too: their bytes tell them apart
llama.cpp              a prompt of ``prompt_string`` and ``multimodal_data``
=====================  ============================================================================

Nothing is decoded or fetched here but base64: ``media.source`` does that. Errors begin with the
place, such as ``messages[2].content[1].image_url.url``.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.base.humanize import counted
from treadle.errors import TemplateError, UnsupportedError
from treadle.media.address_policy import is_address
from treadle.media.data_urls import decode_base64, decode_data_url, is_data_url
from treadle.media.file_formats import media_format
from treadle.media.kinds import NOUNS, MediaKind, kind_of_part
from treadle.media.limits import MediaLimits
from treadle.media.local_path import local_path

LIMITS = MediaLimits()
MARKER = "<__media__>"
"""llama.cpp's mark for a picture or sound in a prompt."""

DETAILS = ("auto", "low", "high")
HEAD = 512  # characters of a file in which its format is looked for


@dataclass(frozen=True, eq=False)
class MediaPart:
    """A picture or sound of a message: its source, which ``media.source`` decodes later, and its
    place.
    """

    kind: MediaKind
    source: Any
    """The bytes of a file; a text: an http(s) address. From a call in this process also a path, an
    image of Pillow's, an array, or an array with its rate."""
    place: str
    """Its place, for errors: ``messages[2].content[1].image_url.url``."""
    detail: str = "auto"
    """OpenAI's wish for a picture's resolution: one of DETAILS."""

    @property
    def template_part(self) -> dict[str, str]:
        """The part that a chat template is given in place of this one: ``{"type": "image"}`` or
        ``{"type": "audio"}``, without data.
        """
        return {"type": self.kind}


def read_media_part(
    part: Mapping[str, Any], place: str, *, local: bool, limits: MediaLimits = LIMITS
) -> MediaPart | None:
    """Return the picture or sound of one part of a message; None for a part of another type.
    ``place``: of the part, for errors.

    ``local``: the caller is a program in this process, which may give paths, ``file://`` URLs and
    objects; otherwise those raise UnsupportedError. Raises TemplateError for a part whose data is
    missing or of a wrong type, FileError for invalid base64, UnsupportedError beyond the limits.
    """
    name = part.get("type")
    kind = kind_of_part(name)
    if kind is None or not isinstance(name, str):
        return None
    if isinstance(part.get("source"), Mapping):
        return _anthropic(part["source"], kind, f"{place}.source", limits)
    reader = _ValueReader(kind, local, limits)
    keys = [key for key in _keys(name) if part.get(key) is not None]
    if len(keys) > 1:
        raise TemplateError(f"{place}: has both {keys[0]} and {keys[1]}: expected one of them")
    if keys:
        found = reader.read(keys[0], part[keys[0]], f"{place}.{keys[0]}")
        return replace(found, detail=_detail(part, keys[0], place))
    if part.get("file_id") is not None:
        raise UnsupportedError(f"{place}.file_id: files are not stored: send the {NOUNS[kind]}")
    raise TemplateError(
        f"{place}: a part of type {name} without a {NOUNS[kind]}: expected {_keys(name)[0]}"
    )


def _detail(part: Mapping[str, Any], key: str, place: str) -> str:
    """Return the resolution that a part requests, one of DETAILS: its own ``detail``, or that in
    the object under ``key``. Raises TemplateError, which names ``place``, for another value.
    """
    inner = part[key] if isinstance(part[key], Mapping) else {}
    given = part.get("detail", inner.get("detail"))
    if given is None or given == "original":  # what Responses calls no limit of its own
        return "auto" if given is None else "high"
    if given not in DETAILS:
        expected = ", ".join(DETAILS)
        raise TemplateError(f"{place}.detail is {given!r:.40}: expected one of {expected}")
    return str(given)


def read_images(images: Any, place: str, *, limits: MediaLimits = LIMITS) -> list[MediaPart]:
    """Return the pictures and sounds of an Ollama message's ``images``, a list of base64 texts; the
    message's text follows them.

    ``place``: the list's place for errors, such as ``messages[2].images``. Raises as
    ``read_media_part`` does.
    """
    if not isinstance(images, Sequence) or isinstance(images, str | bytes):
        raise TemplateError(f"{place} is {type(images).__name__}: expected a list")
    return [
        _ValueReader(kind_of_base64(data), False, limits).read("data", data, f"{place}[{i}]")
        for i, data in enumerate(images)
    ]


def kind_of_base64(text: Any) -> MediaKind:
    """Return "audio" if ``text``, base64 or a ``data:`` URL of it, begins as a sound file does;
    else "image".
    """
    head = text[:HEAD].rpartition(",")[2] if isinstance(text, str) else ""
    try:
        found = media_format(base64.b64decode(head[: len(head) // 4 * 4]))
    except ValueError:
        return "image"
    return "audio" if found is not None and found.kind == "audio" else "image"


def read_multimodal_prompt(
    prompt: Mapping[str, Any],
    place: str,
    *,
    marker: str = MARKER,
    limits: MediaLimits = LIMITS,
) -> list[str | MediaPart]:
    """Return the texts, pictures and sounds of llama.cpp's multimodal prompt, in their order.
    ``place``: of the prompt, for errors.

    ``prompt``: an object with ``prompt_string``, in which each ``marker`` stands for the next item
    of ``multimodal_data``, base64 texts. An item's bytes tell whether it is a picture or a sound.
    Raises TemplateError unless there are as many markers as items.
    """
    text = prompt.get("prompt_string")
    if not isinstance(text, str):
        raise TemplateError(f"{place}.prompt_string is {type(text).__name__}: expected a string")
    data = prompt.get("multimodal_data")
    data = [] if data is None else data
    where = f"{place}.multimodal_data"
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise TemplateError(f"{where} is {type(data).__name__}: expected a list")
    pieces = split_at_markers(
        text, len(data), f"{place}.prompt_string", marker=marker, required=True
    )
    return [
        piece if isinstance(piece, str) else _of_any_kind(data[piece], f"{where}[{piece}]", limits)
        for piece in pieces
    ]


def split_at_markers(
    text: str, n_media: int, place: str, *, marker: str = MARKER, required: bool = False
) -> list[str | int]:
    """Split a text at its markers: return the texts between them and, in place of each marker, the
    index of its picture or sound, from 0. Empty texts are left out.

    A text without markers is put after all media, unless ``required``. Raises TemplateError, which
    names ``place``, unless there are as many markers as media (``n_media``).
    """
    texts = text.split(marker)
    if len(texts) == 1 and not required:
        return [*range(n_media), text] if text else [*range(n_media)]
    if len(texts) != n_media + 1:
        none = "" if required else ", or none"
        raise TemplateError(
            f"{place} has {marker} {counted(len(texts) - 1, 'time')}: expected {n_media}, one for "
            f"each picture or sound{none}"
        )
    pieces: list[str | int] = [texts[0]]
    for number, following in enumerate(texts[1:]):
        pieces += [number, following]
    return [piece for piece in pieces if piece != ""]


def _of_any_kind(text: Any, place: str, limits: MediaLimits) -> MediaPart:
    """Decode the base64 ``text`` and return it as a picture or a sound, as its first bytes tell.
    ``place``: of the text, for errors. Raises as ``read_media_part`` does.
    """
    # A sound may be larger; the picture's own limit is checked once it is known to be one.
    part = _ValueReader("audio", False, limits).read("data", text, place)
    found = media_format(part.source)
    if found is not None and found.kind == "audio":
        return part
    limits.check_bytes("image", len(part.source), place)
    return MediaPart("image", part.source, place)


def _keys(name: str) -> list[str]:
    """Return the keys that may hold the data of a part of type ``name``, the usual one first."""
    if name in ("image", "audio"):
        return [name, "url", "path", "base64", "data"]
    return ["image_url"] if name == "input_image" else [name]


def _anthropic(
    source: Mapping[str, Any], kind: MediaKind, place: str, limits: MediaLimits
) -> MediaPart:
    """Return the picture or sound of a ``source`` object of Anthropic's API, of type base64 or url.
    ``place``: of the object, for errors. Raises as ``read_media_part`` does.
    """
    reader = _ValueReader(kind, False, limits)
    form = source.get("type")
    if form == "base64":
        return reader.read("data", source.get("data"), f"{place}.data")
    if form == "url":
        return reader.read("url", source.get("url"), f"{place}.url")
    if form == "file":
        raise UnsupportedError(f"{place}: files are not stored: send the {NOUNS[kind]}")
    raise TemplateError(f"{place}.type is {form!r:.40}: expected base64 or url")


@dataclass(frozen=True)
class _ValueReader:
    """Reads the value under one key of a part of type ``kind``, as the key's name requires: base64,
    a URL or, with ``local``, a path.
    """

    kind: MediaKind
    local: bool
    limits: MediaLimits

    def read(self, key: str, value: Any, place: str) -> MediaPart:
        """Return the value of ``key`` as a ``MediaPart``. ``place``: of the value, for errors.
        Raises as ``read_media_part`` does.
        """
        if key == "input_audio":
            return self._input_audio(value, place)
        if isinstance(value, Mapping) and key.endswith("_url"):
            return self.read("url", value.get("url"), f"{place}.url")
        if key in ("base64", "data"):
            return MediaPart(self.kind, self._from_base64(value, place), place)
        if isinstance(value, str):
            return MediaPart(self.kind, self._from_text(value, place), place)
        if self.local and isinstance(value, Mapping) and {"array", "sampling_rate"} <= set(value):
            return MediaPart(self.kind, (value["array"], value["sampling_rate"]), place)
        if self.local and value is not None and not isinstance(value, Mapping):
            return MediaPart(self.kind, value, place)
        raise TemplateError(f"{place} is {type(value).__name__}: expected a URL")

    def _input_audio(self, value: Any, place: str) -> MediaPart:
        """Return the sound of OpenAI's ``input_audio`` object, from its ``data``. Its ``format`` is
        ignored: the bytes tell the format.
        """
        if not isinstance(value, Mapping):
            raise TemplateError(f"{place} is {type(value).__name__}: expected an object with data")
        return self.read("data", value.get("data"), f"{place}.data")

    def _from_base64(self, value: Any, place: str) -> bytes:
        if self.local and isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if not isinstance(value, str):
            raise TemplateError(f"{place} is {type(value).__name__}: expected base64")
        if is_data_url(value):
            return decode_data_url(value, self.kind, self.limits, place)
        return decode_base64(value, self.kind, self.limits, place)

    def _from_text(self, value: str, place: str) -> bytes | str | Path:
        """Return the bytes of a ``data:`` URL, an http(s) address unchanged, or a path (only if
        ``local``).
        """
        if is_data_url(value):
            return decode_data_url(value, self.kind, self.limits, place)
        if is_address(value):
            return value
        if not self.local:
            raise UnsupportedError(
                f"{place}: {value[:40]!r} is not a data: URL or an http(s) address, and files of "
                "this machine are not read for a client"
            )
        return local_path(value)

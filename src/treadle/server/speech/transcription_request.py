"""Requests of transcriptions: the fields of the form, and the settings that they mean."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.server.http.api_errors import ApiError
from treadle.server.http.multipart import FormPart
from treadle.speech.settings import TEMPERATURES, TranscribeSettings

if TYPE_CHECKING:
    from treadle.speech.config import SpeechConfig

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STREAMED_FORMATS = ("json", "text", "verbose_json")
GRANULARITIES = ("segment", "word")
PLACE = "file"
"""Name of the sound in errors: that of its field."""
FIELDS = (
    "file",
    "model",
    "language",
    "prompt",
    "response_format",
    "temperature",
    "timestamp_granularities",
    "stream",
    "chunking_strategy",
    "seed",
    "beam_size",
    "best_of",
)


@dataclass(frozen=True)
class TranscriptionRequest:
    """The request of a form. sound: bytes of the file. format: of the answer, as OpenAI's
    ``response_format``. words, segments: whether a ``verbose_json`` has them.
    """

    sound: memoryview
    settings: TranscribeSettings
    format: str = "json"
    is_streamed: bool = False
    segments: bool = True
    words: bool = False


def read_request(parts: Sequence[FormPart], task: str) -> TranscriptionRequest:
    """Read the parts of a form. ``task``: "transcribe" or "translate". Raises ApiError for missing,
    invalid and unsupported fields.
    """
    sound: memoryview | None = None
    texts: dict[str, list[str]] = {}
    for part in parts:
        name = part.name.removesuffix("[]")
        if name == "file":
            if sound is not None:
                raise ApiError(400, "file: given twice", param="file")
            sound = part.data
        elif name in FIELDS:
            texts.setdefault(name, []).append(part.text())
        elif name in _REFUSED and part.text() not in ("", "[]", "false", "null"):
            raise ApiError(
                400, f"{name}: {_REFUSED[name]}", param=name, code="unsupported_parameter"
            )
    if sound is None:
        raise ApiError(400, "file: required: the sound, as a file of the form", param="file")
    if not len(sound):
        raise ApiError(400, "file: an empty file: expected a sound", param="file")
    return _request(sound, texts, task)


_REFUSED: Mapping[str, str] = {
    "include": "not supported: transcripts have no log-probabilities of tokens",
    "known_speaker_names": "not supported: speakers are not told apart",
    "known_speaker_references": "not supported: speakers are not told apart",
}


def _request(
    sound: memoryview, texts: Mapping[str, Sequence[str]], task: str
) -> TranscriptionRequest:
    form = _one_of("response_format", _last(texts, "response_format") or "json", FORMATS)
    is_streamed = _flag("stream", _last(texts, "stream"))
    if is_streamed and form not in STREAMED_FORMATS:
        raise ApiError(
            400,
            f"response_format: {form} is not streamed: expected one of "
            f"{', '.join(STREAMED_FORMATS)}",
            param="response_format",
        )
    wanted = [
        _one_of("timestamp_granularities", each, GRANULARITIES)
        for given in texts.get("timestamp_granularities", ())
        for each in _items(given)
    ]
    if wanted and form != "verbose_json":
        raise ApiError(
            400,
            f"timestamp_granularities: needs response_format verbose_json, found {form}",
            param="timestamp_granularities",
        )
    settings: dict[str, Any] = {"task": task, "words": "word" in wanted}
    if language := _last(texts, "language"):
        settings["language"] = language
    if prompt := _last(texts, "prompt"):
        settings["prompt"] = prompt
    temperature = _number("temperature", _last(texts, "temperature"), 0.0, 2.0)
    settings["temperatures"] = (temperature,) if temperature else TEMPERATURES
    for field, name in (("seed", "seed"), ("beam_size", "beams"), ("best_of", "best_of")):
        given_number = _last(texts, field)
        if given_number:
            settings[name] = _whole(field, given_number)
    if _last(texts, "chunking_strategy"):
        settings["text_before"] = not _chunks(_last(texts, "chunking_strategy"))
    return TranscriptionRequest(
        sound=sound,
        settings=TranscribeSettings(**settings),
        format=form,
        is_streamed=is_streamed,
        segments=not wanted or "segment" in wanted,
        words="word" in wanted,
    )


def check_language(settings: TranscribeSettings, config: SpeechConfig) -> None:
    """Raise ApiError if the model of ``config`` does not know the language in ``settings``, or if
    they ask it to translate and it knows English alone.
    """
    from treadle.errors import TreadleError
    from treadle.speech.languages import language_code

    if settings.task == "translate" and not config.multilingual:
        raise ApiError(400, "the model knows English alone: it does not translate")
    if settings.language is not None:
        try:
            language_code(settings.language, config.special.languages or ("en",))
        except TreadleError as error:
            raise ApiError(400, str(error), param="language") from None


def _last(texts: Mapping[str, Sequence[str]], name: str) -> str:
    found = texts.get(name)
    return found[-1].strip() if found else ""


def _items(given: str) -> list[str]:
    """Return the items of ``given``, a form field that holds a list: a JSON array of strings, or
    else a single item.
    """
    if given.startswith("["):
        try:
            found = json.loads(given)
        except ValueError:
            found = None
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            return found
    return [given]


def _one_of(name: str, given: str, choices: Sequence[str]) -> str:
    if given not in choices:
        raise ApiError(
            400, f"{name}: {given[:40]!r}: expected one of {', '.join(choices)}", param=name
        )
    return given


def _flag(name: str, given: str) -> bool:
    if given.lower() not in ("", "true", "false", "1", "0"):
        raise ApiError(400, f"{name}: {given[:40]!r}: expected true or false", param=name)
    return given.lower() in ("true", "1")


def _number(name: str, given: str, least: float, most: float) -> float:
    try:
        value = float(given or 0)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise ApiError(
            400,
            f"{name}: {given[:40]!r}: expected a number from {least:g} to {most:g}",
            param=name,
        )
    return value


def _whole(name: str, given: str) -> int:
    try:
        return int(given)
    except ValueError:
        raise ApiError(
            400, f"{name}: {given[:40]!r}: expected a whole number", param=name
        ) from None


def _chunks(given: str) -> bool:
    """Return True if ``given``, OpenAI's ``chunking_strategy``, cuts the sound at pauses: "auto",
    or an object of type "server_vad". Raises ApiError for all others.
    """
    kind: Any = given
    if given.startswith("{"):
        try:
            kind = json.loads(given).get("type")
        except ValueError:
            kind = given
    if kind in ("auto", "server_vad"):
        return True
    raise ApiError(
        400,
        f"chunking_strategy: {given[:40]!r}: expected auto, or an object of type server_vad",
        param="chunking_strategy",
    )

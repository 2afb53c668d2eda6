"""Formats of transcripts: plain text, subtitles (SRT, WebVTT, LRC), tables and JSON.

Source of the JSON forms: OpenAI's API reference, "Create transcription". SubRip has no standard;
WebVTT is the W3C's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.speech.transcript import Transcript, TranscriptSegment, TranscriptWord


@dataclass(frozen=True)
class CueFormat:
    """A format with one part for each segment, so that it can be written while segments are
    decoded.

    head: text before the first part.
    cue: returns the text of a segment, given its number.
    n_from: number of the first segment.
    """

    head: str
    cue: Callable[[TranscriptSegment, int], str]
    n_from: int = 0

    def part(self, segment: TranscriptSegment, index: int) -> str:
        """Return the text of ``segment``, which is written as number ``index``, from 0."""
        return self.cue(segment, index + self.n_from)


def _clock(seconds: float, point: str = ".", *, hours: bool = True) -> str:
    """Return a time as ``00:01:02.345``; without ``hours``, hours are written only if they are not
    0. ``point``: the decimal separator.
    """
    n_ms = max(0, round(seconds * 1000))
    minutes, ms = divmod(n_ms, 60_000)
    n_hours, minutes = divmod(minutes, 60)
    rest = f"{minutes:02}:{ms // 1000:02}{point}{ms % 1000:03}"
    return f"{n_hours:02}:{rest}" if hours or n_hours else rest


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _text(segment: TranscriptSegment, number: int) -> str:
    return f"{_one_line(segment.text)}\n"


def _srt(segment: TranscriptSegment, number: int) -> str:
    times = f"{_clock(segment.start, ',')} --> {_clock(segment.end, ',')}"
    return f"{number}\n{times}\n{_one_line(segment.text).replace('-->', '->')}\n\n"


def _vtt(segment: TranscriptSegment, number: int) -> str:
    times = f"{_clock(segment.start, hours=False)} --> {_clock(segment.end, hours=False)}"
    text = _one_line(segment.text)
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(plain, escaped)
    return f"{times}\n{text}\n\n"


def _tsv(segment: TranscriptSegment, number: int) -> str:
    times = f"{round(segment.start * 1000)}\t{round(segment.end * 1000)}"
    return f"{times}\t{_one_line(segment.text)}\n"


def _lrc(segment: TranscriptSegment, number: int) -> str:
    n_hundredths = max(0, round(segment.start * 100))
    minutes, rest = divmod(n_hundredths, 6000)
    return f"[{minutes:02}:{rest // 100:02}.{rest % 100:02}]{_one_line(segment.text)}\n"


CUES: dict[str, CueFormat] = {
    "text": CueFormat("", _text),
    "srt": CueFormat("", _srt, n_from=1),
    "vtt": CueFormat("WEBVTT\n\n", _vtt),
    "tsv": CueFormat("start\tend\ttext\n", _tsv),
    "lrc": CueFormat("", _lrc),
}
"""Formats with a part for each segment."""
FORMATS = ("text", "srt", "vtt", "json", "verbose_json", "tsv", "lrc")
SUFFIXES = {
    "text": ".txt",
    "srt": ".srt",
    "vtt": ".vtt",
    "json": ".json",
    "verbose_json": ".json",
    "tsv": ".tsv",
    "lrc": ".lrc",
}
"""Ends of files' names."""


def formatted(transcript: Transcript, format: str) -> str:
    """Return a transcript as text in one of FORMATS. Raises TreadleError for an unknown format."""
    if format in CUES:
        cues = CUES[format]
        parts = (cues.part(segment, i) for i, segment in enumerate(transcript.segments))
        return cues.head + "".join(parts)
    if format == "json":
        return _json({"text": transcript.text})
    if format == "verbose_json":
        return _json(verbose(transcript))
    raise TreadleError(f"format={format!r:.40}: expected one of {', '.join(FORMATS)}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=1) + "\n"


def verbose(
    transcript: Transcript, *, segments: bool = True, words: bool | None = None
) -> dict[str, Any]:
    """Return a transcript as the object of OpenAI's ``verbose_json``. ``segments``, ``words``:
    whether to include them; ``words`` None: include them if the transcript has any.
    """
    spoken = transcript.words
    value: dict[str, Any] = {
        "task": transcript.task,
        "language": transcript.language_name,
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
    }
    if segments:
        value["segments"] = [verbose_segment(segment) for segment in transcript.segments]
    if words or (words is None and spoken):
        value["words"] = verbose_words(spoken)
    return value


def verbose_segment(segment: TranscriptSegment) -> dict[str, Any]:
    """Return a segment as an object in "segments" of OpenAI's ``verbose_json``."""
    return {
        "id": segment.index,
        "seek": round(segment.window_start * 100),
        "start": round(segment.start, 3),
        "end": round(segment.end, 3),
        "text": segment.text,
        "tokens": list(segment.ids),
        "temperature": segment.temperature,
        "avg_logprob": segment.mean_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_probability,
    }


def verbose_words(words: Iterable[TranscriptWord]) -> list[dict[str, Any]]:
    """Return words as the list "words" of OpenAI's ``verbose_json``."""
    return [
        {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
        for word in words
    ]

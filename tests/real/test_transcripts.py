"""whisper-base transcribes: text and words of real speech, and no text of what is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import treadle
from tests.real.conftest import Fetched
from treadle.media.sound_file import is_installed
from treadle.media.source import read_sound

TEXT = (
    "And so my fellow Americans, ask not what your country can do for you, ask what you can do for "
    "your country."
)
# of transformers' ``generate(return_timestamps=True)``, greedily
IDS = [50364, 400, 370, 452, 7177, 6280, 11, 1029, 406, 437, 428, 1941, 393, 360, 337, 291, 11]
IDS += [1029, 437, 291, 393, 360, 337, 428, 1941, 13, 50914]
# of faster-whisper 1.2.1: begin of words that are not beside a pause
STARTS = {"so": 0.52, "my": 0.84, "fellow": 1.2, "what": 4.24, "country": 5.76, "can": 6.24}


@pytest.fixture(scope="module")
def model(fetched: Fetched) -> Iterator[treadle.SpeechRecognizer]:
    with treadle.load_speech(fetched("whisper-base"), threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def speech(data: Path) -> np.ndarray:
    if not is_installed("soundfile"):
        pytest.skip("soundfile is not installed")
    return read_sound(data / "media" / "whisper_base" / "jfk.mp3")


def test_greedy_text_is_that_of_transformers(
    model: treadle.SpeechRecognizer, speech: np.ndarray
) -> None:
    result = model.transcribe(speech, beams=1, words=True).finish()
    (segment,) = result.segments
    assert [*segment.ids] == IDS
    assert result.text == TEXT
    assert (result.language, result.seconds) == ("en", 11.0)
    found = {word.text.strip(): word.start for word in reversed(result.words)}
    for word, start in STARTS.items():
        assert abs(found[word] - start) <= 0.08, word
    assert result.words[-1].end <= 11.0


def test_settings_that_give_the_same_words(
    model: treadle.SpeechRecognizer, speech: np.ndarray
) -> None:
    plain = {word.strip(",.").lower() for word in TEXT.split()}
    stereo = np.stack([speech, speech], axis=1)
    for sound, text_before in ((stereo, True), (speech, False)):
        text = model.transcribe(sound, text_before=text_before).finish().text
        assert {word.strip(",.").lower() for word in text.split()} == plain
    assert next(iter(model.detect_language(speech))) == "en"


def test_silence_and_noise_have_no_text(model: treadle.SpeechRecognizer) -> None:
    noise = 0.05 * np.random.default_rng(0).standard_normal(16000 * 31).astype(np.float32)
    for sound in (np.zeros(16000 * 40, np.float32), noise):
        result = model.transcribe(sound).finish()
        assert result.text == ""
        assert result.seconds == len(sound) / 16000

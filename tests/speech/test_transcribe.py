"""The loop, with a model that follows a script."""

from __future__ import annotations

import io
import pickle
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.speech.scripted import (
    ENGLISH,
    SPECIAL,
    UNSURE,
    Attempt,
    ScriptedModel,
    at,
    config_of,
    recognizer,
    said,
    voice,
)
from treadle.errors import FileError, NotFiniteError, TreadleError, UnsupportedError
from treadle.speech.languages import LANGUAGES, language_code
from treadle.speech.settings import TranscribeSettings
from treadle.speech.transcribe import transcribe
from treadle.speech.transcript import Transcript
from treadle.speech.window_decoding import MOST_ROWS

HI = Attempt(said(0.0, " hi", 1.0))
GREEDY: dict[str, Any] = {"beams": 1}


def model_of(speech: treadle.SpeechRecognizer) -> ScriptedModel:
    assert isinstance(speech.model, ScriptedModel)
    return speech.model


def spans(result: Transcript) -> list[tuple[float, float, str]]:
    return [(round(s.start, 2), round(s.end, 2), s.text) for s in result.segments]


def test_windows_begin_at_the_last_timestamp() -> None:
    speech = recognizer(
        Attempt(said(0.0, " one", 1.0, 1.0, " two", 2.0, 2.0, " thr")),
        Attempt(said(0.0, " three", 1.5)),
        Attempt(said(0.0, " four", 0.5)),
    )
    result = speech.transcribe(voice(6.0), **GREEDY).finish()
    assert spans(result) == [
        (0.0, 1.0, " one"),
        (1.0, 2.0, " two"),
        (2.0, 3.5, " three"),
        (5.0, 5.5, " four"),
    ]
    assert result.text == "one two three four"
    assert (result.language, result.language_name, result.seconds) == ("en", "english", 6.0)
    assert [segment.index for segment in result.segments] == [0, 1, 2, 3]
    model = model_of(speech)
    # each window's prompt has the text before it
    assert model.prompts[0] == [SPECIAL.sot, 258, SPECIAL.transcribe]
    before = [id for s in result.segments[:2] for id in s.ids]
    assert model.prompts[1] == [SPECIAL.sot_prev, *before, SPECIAL.sot, 258, SPECIAL.transcribe]
    assert not any(window.is_open for window in model.windows)
    # its frames are those of the whole sound
    from treadle.media.mel import log_mel

    whole = log_mel(voice(6.0), 4)
    assert np.abs(model.mels[1][:, 5:250] - whole[:, 205:450]).max() < 1e-5


def test_text_before_is_bounded() -> None:
    speech = recognizer(Attempt(said(0.0, " " + "abcdefghijklmnopqrstuvwxyz" * 2, 3.0)))
    speech.transcribe(voice(9.0), prompt="Names", **GREEDY).finish()
    prompts = model_of(speech).prompts
    assert prompts[0][:7] == [SPECIAL.sot_prev, *b" Names"]
    assert [len(prompt) for prompt in prompts] == [10, 1 + 6 + 55 + 3, 1 + 63 + 3]


def test_a_doubtful_text_is_tried_at_higher_temperatures() -> None:
    loop = Attempt(said(0.0, " no" * 30, 2.0))
    unsure = Attempt(said(0.0, " maybe", 2.0), sure=UNSURE)
    speech = recognizer([HI, loop, unsure, HI], [HI, HI])
    result = speech.transcribe(voice(4.0), best_of=2, **GREEDY).finish()
    assert spans(result)[0] == (0.0, 1.0, " hi")
    assert result.segments[0].temperature == pytest.approx(0.4)
    assert model_of(speech).most_rows == 2
    # after a temperature above 0.5 the text is no prompt
    hot = recognizer([HI, loop, loop, loop, loop, HI], HI)
    result = hot.transcribe(voice(6.0), best_of=1, **GREEDY).finish()
    assert result.segments[0].temperature == pytest.approx(0.8)
    assert model_of(hot).prompts[-1][0] == SPECIAL.sot


def test_endless_repetition_is_cut() -> None:
    speech = recognizer(Attempt(said(0.0, " no" * 40)))
    result = speech.transcribe(voice(2.9), language="en", **GREEDY).finish()
    (segment,) = result.segments
    assert segment.text == " no"
    assert len(model_of(speech).prompts) == 6  # all temperatures were tried
    # a text without an end is bounded
    speech = recognizer(Attempt([at(0.0), *(65 + i % 23 + i // 23 for i in range(500))]))
    result = speech.transcribe(voice(2.9), max_compression=None, **GREEDY).finish()
    assert len(result.segments[0].ids) == 64


def test_a_timestamp_that_goes_on_nowhere() -> None:
    """A pair at 0.02 s would begin 150 windows within 3 s."""
    speech = recognizer(Attempt(said(0.0, " a", 0.02, 0.02, " b")))
    result = speech.transcribe(voice(6.0), **GREEDY).finish()
    assert spans(result) == [
        (0.0, 0.02, " a"),
        (0.02, 3.0, " b"),
        (3.0, 3.02, " a"),
        (3.02, 6.0, " b"),
    ]


def test_no_speech() -> None:
    guess = Attempt(said(0.0, " thanks", 1.0), sure=UNSURE, no_speech=0.9)
    speech = recognizer(guess)
    result = speech.transcribe(voice(6.0), **GREEDY).finish()
    assert result.segments == ()
    assert result.text == ""
    assert len(model_of(speech).windows) == 2
    sure = recognizer(Attempt(said(0.0, " thanks", 1.0), no_speech=0.9))
    (segment, _) = sure.transcribe(voice(6.0), **GREEDY).finish().segments
    assert segment.no_speech_probability == pytest.approx(0.9, abs=0.01)
    anyway = recognizer(guess)
    result = anyway.transcribe(voice(2.0), no_speech=None, min_logprob=None, **GREEDY).finish()
    assert result.text == "thanks"


def test_silence_never_reaches_the_model() -> None:
    speech = recognizer(HI)
    transcription = speech.transcribe(np.zeros(16000 * 60, np.float32))
    result = transcription.finish()
    assert (result.segments, result.seconds) == ((), 60.0)
    assert model_of(speech).windows == []
    silence = np.zeros(16000 * 5, np.float32)
    found = recognizer(HI).transcribe(np.concatenate([silence, voice(2.0)]), **GREEDY).finish()
    ((start, end, _),) = spans(found)
    assert 4.0 <= start < 5.0
    assert end == round(start + 1.0, 2)
    heard = recognizer(HI)
    heard.transcribe(silence, voice_activity="off", **GREEDY).finish()
    assert len(model_of(heard).windows) == 2


def test_empty_segments_are_left_out() -> None:
    speech = recognizer(Attempt(said(0.0, " ", 1.0, 1.0, " y", 2.0)))
    assert spans(speech.transcribe(voice(2.5), **GREEDY).finish()) == [(1.0, 2.0, " y")]


def test_several_at_once_without_text_before() -> None:
    speech = recognizer(Attempt(said(0.0, " part", 1.0, 1.0, " rest")))
    transcription = speech.transcribe(voice(11.0), text_before=False, batch=3, **GREEDY)
    result = transcription.finish()
    model = model_of(speech)
    assert model.most_together == 3
    assert len(model.windows) in (4, 5, 6)
    assert all(prompt == [SPECIAL.sot, 258, SPECIAL.transcribe] for prompt in model.prompts)
    ends = [segment.end for segment in result.segments]
    starts = [segment.start for segment in result.segments]
    assert all(s >= e - 1e-9 for s, e in zip(starts[1:], ends, strict=False))  # in order
    assert ends[-1] == 11.0
    quiet = np.concatenate([voice(1.0), np.zeros(16000 * 20, np.float32), voice(1.0)])
    speech = recognizer(Attempt(said(0.0, " part", 1.0)))
    assert len(speech.transcribe(quiet, text_before=False, **GREEDY).finish().segments) == 2
    nothing = recognizer(Attempt(said(0.0, " thanks", 1.0), sure=UNSURE, no_speech=0.9))
    assert nothing.transcribe(voice(5.0), text_before=False, **GREEDY).finish().text == ""


def test_beams() -> None:
    speech = recognizer(HI)
    result = speech.transcribe(voice(2.0), beams=4).finish()
    assert result.text == "hi"
    assert result.segments[0].mean_logprob > -0.01
    assert model_of(speech).most_rows == 4
    loops = recognizer(Attempt(said(0.0, " no" * 40)))
    result = loops.transcribe(voice(2.0), beams=2, temperatures=0.0).finish()
    assert result.text == "no"
    many = recognizer(HI)
    many.transcribe(voice(30.0), text_before=False, beams=8).finish()
    assert model_of(many).most_rows <= MOST_ROWS


def test_words_and_no_timestamps() -> None:
    speech = recognizer(Attempt(said(0.0, " one two.", 1.0, 1.0, " three", 2.0)))
    result = speech.transcribe(voice(2.5), words=True, **GREEDY).finish()
    assert [word.text for word in result.words] == [" one", " two.", " three"]
    first = result.segments[0]
    assert (first.start, first.end) == (first.words[0].start, first.words[-1].end)
    plain = recognizer(Attempt(said(" one two")))
    result = plain.transcribe(voice(2.5), timestamps=False, **GREEDY).finish()
    assert spans(result) == [(0.0, 2.5, " one two")]
    assert model_of(plain).prompts[0][-1] == SPECIAL.no_timestamps


def test_languages_and_tasks() -> None:
    speech = recognizer(HI, language="de")
    assert speech.languages == ("en", "de")
    result = speech.transcribe(voice(2.0), task="translate", **GREEDY).finish()
    assert (result.language, result.task) == ("de", "translate")
    assert model_of(speech).prompts[0] == [SPECIAL.sot, 259, SPECIAL.translate]
    assert [*speech.detect_language(voice(1.0))] == ["de", "en"]
    named = speech.transcribe(voice(2.0), language="English", **GREEDY).finish()
    assert named.language == "en"
    with pytest.raises(TreadleError, match=r"language='fr': expected a code.*"):
        speech.transcribe(voice(2.0), language="fr")
    named = speech.transcribe(voice(2.0), language="Auto", **GREEDY).finish()
    assert named.language == "de"
    with pytest.raises(TreadleError, match="language=0: expected a text"):
        speech.transcribe(voice(2.0), language=0)  # type: ignore[arg-type]
    with pytest.raises(TreadleError, match="did you mean german"):
        language_code("germn", LANGUAGES)
    with pytest.raises(TreadleError, match=r"or a name$"):
        language_code("deu", LANGUAGES)  # ISO 639-2
    assert language_code("pt-BR", LANGUAGES) == "pt"
    assert language_code("Mandarin", LANGUAGES) == "zh"
    alone = recognizer(HI, config=config_of(ENGLISH))
    assert alone.languages == ("en",)
    result = alone.transcribe(voice(2.0), **GREEDY).finish()
    assert (result.text, result.language) == ("hi", "en")
    assert model_of(alone).prompts == [[SPECIAL.sot]]
    with pytest.raises(UnsupportedError, match="English alone"):
        alone.transcribe(voice(2.0), task="translate")
    with pytest.raises(TreadleError, match="knows no other than en"):
        alone.transcribe(voice(2.0), language="de")
    with pytest.raises(TreadleError, match="English alone"):
        alone.detect_language(voice(1.0))


def test_segments_come_while_the_sound_is_read(tmp_path: Path) -> None:
    read: list[int] = []

    def blocks() -> Iterator[np.ndarray]:
        for i in range(100):
            read.append(i)
            yield voice(1.0)

    model: Any = ScriptedModel([HI])
    parts = transcribe(model, blocks(), TranscribeSettings(beams=1))
    first = next(parts)
    assert [segment.text for segment in first.segments] == [" hi"]
    assert len(read) <= 4
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        stereo = np.repeat((voice(7.0, 8000) * 32767).astype("<i2"), 2)
        file.writeframes(stereo.tobytes())
    speech = recognizer(HI)
    transcription = speech.transcribe(path, **GREEDY)
    assert transcription.seconds == 7.0
    assert "not finished" in repr(transcription)
    assert next(transcription).text == " hi"
    assert transcription.seconds_done == 3.0
    transcription.close()
    assert [*transcription] == []
    assert transcription.result().text == "hi"
    with pytest.raises(TypeError):
        pickle.dumps(transcription)
    for source in (path.read_bytes(), io.BytesIO(path.read_bytes()), str(path)):
        with recognizer(HI).transcribe(source, **GREEDY) as each:
            assert each.finish().text == "hi hi hi"
    assert repr(recognizer(HI)) == "SpeechRecognizer('scripted.gguf', 2 languages, 1 threads)"
    with pytest.raises(TypeError):
        pickle.dumps(speech)
    with speech:
        pass
    assert model_of(speech).is_closed


def test_hours_take_no_more_memory_than_a_minute() -> None:
    """Eighteen minutes, mostly silent, and the largest part of them that is held."""
    from treadle.speech.sample_buffer import SampleBuffer
    from treadle.speech.transcribe import _TranscribeLoop

    second = voice(1.0)
    silence = np.zeros(16000 * 9, np.float32)
    most = 0

    class Watched(SampleBuffer):
        def drop(self, before: int) -> None:
            nonlocal most
            most = max(most, len(self._held))
            super().drop(before)

    def blocks() -> Iterator[np.ndarray]:
        for _ in range(20):
            yield second
            yield from [silence] * 6

    buffer = Watched(blocks())
    model: Any = ScriptedModel([HI])
    loop = _TranscribeLoop(model, buffer, TranscribeSettings(beams=1), "en")
    parts = [*loop.parts()]
    assert sum(len(part.segments) for part in parts) == 20
    assert parts[-1].seconds_done == 1100.0
    assert most < 16000 * 20


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (b"", FileError, "an empty file"),
        (b"RIFF\0\0\0\0WAVE", FileError, "no samples"),
        (np.zeros(0, np.float32), FileError, "no samples"),
        (np.full(16000, np.nan, np.float32), FileError, "NaN"),
        (b"plain text", UnsupportedError, "unknown format"),
        ("/no/such/file.wav", FileError, "No such file"),
        (3, TreadleError, "int is not read as a sound"),
    ],
)
def test_what_is_no_sound(source: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        recognizer(HI).transcribe(source).finish()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("task", "sing"),
        ("voice_activity", "loud"),
        ("language", 3),
        ("prompt", 3),
        ("temperatures", ()),
        ("temperatures", 3.0),
        ("temperatures", "0"),
        ("beams", 0),
        ("batch", 9),
        ("best_of", 1.5),
        ("min_logprob", 1.0),
        ("max_compression", 0.0),
        ("no_speech", "x"),
        ("words", 2),
        ("seed", -1),
    ],
)
def test_settings_out_of_range(name: str, value: Any) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(TreadleError, match=name):
        recognizer(HI).transcribe(voice(1.0), **settings)


def test_logits_that_are_not_finite() -> None:
    speech = recognizer(Attempt(said(0.0, " hi", 1.0), sure=float("nan")))
    with pytest.raises(NotFiniteError, match="damaged"):
        speech.transcribe(voice(1.0), language="en", **GREEDY).finish()


def test_a_short_sound() -> None:
    """10 ms have no word, but are a sound."""
    result = recognizer(HI).transcribe(voice(0.01), voice_activity="off", **GREEDY).finish()
    assert result.seconds == 0.01

"""``load_speech`` and ``SpeechRecognizer``: sound in, text with times out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from treadle.api.options import find_path
from treadle.base.validate import listed, positive, suggesting
from treadle.files.splits import shown_name
from treadle.media.mel import log_mel
from treadle.media.sound_stream import LONG_SOUNDS, open_sound_stream
from treadle.speech.model import SpeechModel, open_speech_model
from treadle.speech.sample_buffer import SampleBuffer
from treadle.speech.settings import TEMPERATURES, TranscribeSettings
from treadle.speech.transcribe import language_odds, transcribe
from treadle.speech.transcription import Transcription

if TYPE_CHECKING:
    from pathlib import Path

    from treadle.media.limits import MediaLimits

Progress = Callable[[str, int, int], None]


@suggesting()
def load_speech(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    device: str = "cpu",
    isa: str | None = None,
    progress: Progress | None = None,
) -> SpeechRecognizer:
    """Open a speech model (Whisper).

    ``path``: a Hugging Face folder, a folder or ``model.bin`` of CTranslate2 (faster-whisper), a
    ``ggml-*.bin`` of whisper.cpp, or a GGUF file of ``treadle convert``; a name on the hub,
    ``hf:OWNER/REPO``; or the short name of a downloaded model. ``threads``, ``device``, ``isa`` and
    ``progress`` are as in ``treadle.load``.

    Raises FileError, UnsupportedError for a model that does not transcribe sound, DeviceError, and
    TreadleError for settings out of range.
    """
    if threads is not None:
        threads = positive("threads", threads)
    found = find_path(path, progress=progress)
    model = open_speech_model(found, threads=threads, device=device, isa=isa, progress=progress)
    return SpeechRecognizer(model, found)


class SpeechRecognizer:
    """A loaded speech model; ``load_speech`` makes it. Use it as a context manager, or ``close``
    it.

    Several threads may use it at once: their windows are run in turns.
    """

    def __init__(self, model: SpeechModel, path: Path) -> None:
        self.model = model
        self.path = path
        self.n_threads = model.n_threads

    def __repr__(self) -> str:
        n = len(self.languages)
        known = "English" if n == 1 else f"{n} languages"
        return f"SpeechRecognizer({shown_name(self.path)!r}, {known}, {self.n_threads} threads)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SpeechRecognizer cannot be pickled or copied: load it in each process")

    @property
    def languages(self) -> tuple[str, ...]:
        """Codes of the languages that the model knows: ("en",) for a model of English alone."""
        return (*self.model.config.special.languages,) or ("en",)

    @suggesting()
    def transcribe(
        self,
        sound: Any,
        *,
        language: str | None = None,
        task: str = "transcribe",
        words: bool = False,
        timestamps: bool = True,
        prompt: str = "",
        text_before: bool = True,
        batch: int = 8,
        voice_activity: str = "energy",
        temperatures: float | Sequence[float] = TEMPERATURES,
        beams: int = 5,
        best_of: int = 5,
        min_logprob: float | None = -1.0,
        max_compression: float | None = 2.4,
        no_speech: float | None = 0.6,
        seed: int = 0,
        limits: MediaLimits = LONG_SOUNDS,
    ) -> Transcription:
        """Transcribe a sound; return an iterator over segments, whose ``finish()`` returns a
        ``Transcript``. The sound is read while it is transcribed, so that hours of it take no more
        memory than a minute.

        ``sound``: a path, the bytes of a file (WAV; FLAC, Ogg, MP3, AAC, MP4 and WebM if a library
        for them is installed), an open binary file, a ``data:`` URL, an array ``[n]`` or
        ``[n, channels]`` of floats or int16 at 16 kHz, or a tuple of such an array and its rate in
        Hz.

        ``language``: code or English name; None detects it. ``task``: "transcribe", or "translate"
        into English. ``words``: compute times of words too. ``timestamps``: False gives one segment
        for each window (30 s). ``prompt``: names and spellings that occur. ``text_before``: each
        window sees the text before it; without it, up to ``batch`` windows are decoded together,
        which is faster. ``voice_activity``: "energy" skips silence, "silero" all but speech, "off"
        nothing. ``beams``: width of the beam search, 1 for greedy. ``temperatures``, ``best_of``,
        ``min_logprob``, ``max_compression``, ``no_speech``, ``seed``: as of
        ``speech.settings.TranscribeSettings``. ``limits``: bounds of the sound's size.

        Raises FileError for a damaged or empty file; UnsupportedError for another format, a sound
        beyond the limits, and translation by a model of English alone; TreadleError for settings
        out of range, an unknown language, and another type of ``sound``.
        """
        given = [temperatures] if isinstance(temperatures, int | float) else temperatures
        settings = TranscribeSettings(
            language=language,
            task=task,
            prompt=prompt,
            text_before=text_before,
            timestamps=timestamps,
            words=words,
            temperatures=tuple(listed("temperatures", given)),
            beams=beams,
            best_of=best_of,
            min_logprob=min_logprob,
            max_compression=max_compression,
            no_speech=no_speech,
            voice_activity=voice_activity,
            batch=batch,
            seed=seed,
        )
        return self.run(sound, settings, limits)

    def run(
        self,
        sound: Any,
        settings: TranscribeSettings,
        limits: MediaLimits = LONG_SOUNDS,
        place: str | None = None,
    ) -> Transcription:
        """Transcribe a sound with ``settings``; ``transcribe`` calls it. ``limits``: bounds of the
        sound's size; ``place``: a name of the sound for errors, None without one.
        """
        stream = open_sound_stream(sound, limits, place)
        try:
            parts = transcribe(self.model, stream, settings)
        except BaseException:
            stream.close()
            raise
        return Transcription(stream, parts, settings.task)

    def detect_language(self, sound: Any) -> dict[str, float]:
        """Return the probability of each language code, the largest first, for the first window (30
        s) of a sound. Raises the errors of ``transcribe``, and TreadleError for a model of English
        alone.
        """
        config = self.model.config
        with open_sound_stream(sound) as stream:
            samples = SampleBuffer(stream).get(0, config.n_samples)
        mel = log_mel(samples, config.n_mels, config.n_samples)
        (encoded,) = self.model.encode(np.asarray(mel)[None])
        with encoded:
            odds = language_odds(self.model, encoded)
        return dict(sorted(odds.items(), key=lambda each: -each[1]))

    def close(self) -> None:
        """Stop the threads and close the file."""
        self.model.close()

    def __enter__(self) -> SpeechRecognizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

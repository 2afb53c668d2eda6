"""The loop of a transcription: one window after another, segments as they are decoded.

A window is 30 s of sound. The next one begins at the last timestamp that the model wrote, so that
no word is cut; its prompt has the text before it. Without ``text_before`` the sound is instead cut
at pauses, and several parts are decoded together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError, UnsupportedError
from treadle.media.mel import HOP, N_FFT, log_mel
from treadle.media.sound_buffer import RATE
from treadle.speech.languages import language_code
from treadle.speech.sample_buffer import SampleBuffer
from treadle.speech.token_rules import log_softmax
from treadle.speech.transcript import TranscriptSegment, TranscriptWord
from treadle.speech.voice_activity import quietest_place, voice_detector, voice_spans
from treadle.speech.window_decoding import WindowDecoder, check_finite
from treadle.speech.window_segments import SegmentSpan, cut_window
from treadle.speech.word_times import word_times

if TYPE_CHECKING:
    from collections.abc import Iterable

    from treadle.speech.model import EncodedWindow, SpeechModel
    from treadle.speech.settings import TranscribeSettings
    from treadle.speech.window_text import WindowText

LEAST_SECONDS = 0.1  # least length of a window after the first: less has no word
LEAST_SKIPPED_S = 1.0  # least silence before speech that is skipped
RESET_ABOVE = 0.5  # temperature above which a text is not in the next prompt
_AROUND = -(-N_FFT // 2 // HOP) * HOP  # samples beside a window that its outer frames see
CUT_FROM = 0.6  # share of a window after which it may be cut for a batch


@dataclass(frozen=True)
class TranscriptPart:
    """Result of one step of the loop.

    segments: the segments of the step's windows.
    seconds_done: seconds of the sound whose text is final.
    language: code of the language, "" while it is unknown.
    """

    segments: tuple[TranscriptSegment, ...]
    seconds_done: float
    language: str


@dataclass(frozen=True)
class SoundWindow:
    """At most 30 s of a sound.

    first: number of its first sample in the sound.
    samples: f32 ``[n]`` at 16 kHz. mel: f32 ``[n_mels, n_frames]``, of a whole window.
    """

    first: int
    samples: np.ndarray
    mel: np.ndarray

    @property
    def start(self) -> float:
        """Seconds from the sound's beginning to the window's."""
        return self.first / RATE

    @property
    def seconds(self) -> float:
        """Length of the window's sound in seconds, without padding."""
        return len(self.samples) / RATE


def transcribe(
    model: SpeechModel, blocks: Iterable[np.ndarray], settings: TranscribeSettings
) -> Iterator[TranscriptPart]:
    """Transcribe a sound of float32 blocks at 16 kHz; memory does not grow with its length. The
    settings are checked at once; the work is done as the result is iterated.

    Raises TreadleError for a language or task that the model lacks. Iterating raises what reading
    the sound raises.
    """
    config = model.config
    language = ""
    if not config.multilingual:
        language = "en"
        if settings.language is not None:
            language_code(settings.language, ("en",))
        if settings.task == "translate":
            raise UnsupportedError("task='translate': the model knows English alone")
    elif settings.language is not None:
        language = language_code(settings.language, config.special.languages)
    return _TranscribeLoop(model, SampleBuffer(blocks), settings, language).parts()


class _TranscribeLoop:
    """The state of one transcription."""

    def __init__(
        self, model: SpeechModel, buffer: SampleBuffer, settings: TranscribeSettings, language: str
    ) -> None:
        self._model = model
        self._config = model.config
        self._buffer = buffer
        self._settings = settings
        self._language = language
        self._decoder = WindowDecoder(model, settings)
        self._detector = voice_detector(settings.voice_activity)
        self._n_segments = 0
        self._first_words = self._prompt_ids(settings.prompt)
        self._before = list(self._first_words)  # text before the next window

    def _prompt_ids(self, text: str) -> list[int]:
        words = text.strip()
        return self._model.tokenizer.encode(f" {words}", bos=False) if words else []

    def parts(self) -> Iterator[TranscriptPart]:
        """Yield the result of each window, or of each batch of windows."""
        return self._one_by_one() if self._settings.text_before else self._together()

    # -- windows one by one ------------------------------------------------------------------------

    def _one_by_one(self) -> Iterator[TranscriptPart]:
        n = self._config.n_samples
        first = 0
        while True:
            samples = self._buffer.get(first, first + n)
            if len(samples) < LEAST_SECONDS * RATE and (first or not len(samples)):
                break
            skipped = self._silent_beginning(samples)
            if skipped:
                first += skipped
                yield self._part([], first / RATE)
            else:
                window = self._window(first, samples)
                segments, advance = self._decided(window)
                first += max(1, round(advance * RATE))
                yield self._part(segments, min(first, self._buffer.last) / RATE)
            self._buffer.drop(first - _AROUND)

    def _silent_beginning(self, samples: np.ndarray) -> int:
        """Return how many samples at a window's beginning have no speech and may be skipped: 0 if
        they take less than LEAST_SKIPPED_S, or if ``voice_activity`` is "off".
        """
        if self._detector is None:
            return 0
        spans = voice_spans(self._detector, samples)
        if spans:
            first = spans[0].first
            return first if first >= LEAST_SKIPPED_S * RATE else 0
        if self._buffer.ended and len(samples) < self._config.n_samples:
            return len(samples)
        return len(samples) - round(LEAST_SKIPPED_S * RATE)  # a word may begin in the last second

    def _decided(self, window: SoundWindow) -> tuple[list[TranscriptSegment], float]:
        """Decode one window; return its segments ([] if it is silent), and the seconds from its
        beginning to that of the next window.
        """
        (encoded,) = self._model.encode(window.mel[None])
        with encoded:
            self._detect(encoded)
            (text,) = self._decoder.best([encoded], [self._beginning()])
            if text.is_silence(self._settings):
                return [], window.seconds
            special = self._config.special
            cut = cut_window(text.ids, special.timestamp_begin, window.seconds)
            segments = self._segments(window, encoded, text, cut.spans)
        if text.temperature > RESET_ABOVE or text.repeats(self._settings):
            self._before = []
        else:
            self._before += [id for segment in segments for id in segment.ids]
            self._before = self._before[-self._most_before :]
        return segments, cut.advance

    # -- several at once ---------------------------------------------------------------------------

    def _together(self) -> Iterator[TranscriptPart]:
        first = 0
        windows: list[SoundWindow] = []
        while True:
            cut = self._next_cut(first)
            if cut is None:
                break
            window, first = cut
            self._buffer.drop(first - _AROUND)
            if window is not None:
                windows.append(window)
            if len(windows) == self._settings.batch:
                yield self._decided_together(windows)
                windows = []
            elif window is None and not windows:
                yield self._part([], first / RATE)
        if windows:
            yield self._decided_together(windows)

    def _next_cut(self, first: int) -> tuple[SoundWindow | None, int] | None:
        """Return the window that begins at sample ``first``, cut at a pause, and the number of the
        sample after it. The window is None if that part of the sound has no speech; the result is
        None at the sound's end.
        """
        n = self._config.n_samples
        samples = self._buffer.get(first, first + n)
        if len(samples) < LEAST_SECONDS * RATE and (first or not len(samples)):
            return None
        skipped = self._silent_beginning(samples)
        if skipped:
            return None, first + skipped
        last = len(samples)
        if last == n:
            last = quietest_place(samples, round(CUT_FROM * n), n)
        return self._window(first, samples[:last]), first + last

    def _decided_together(self, windows: Sequence[SoundWindow]) -> TranscriptPart:
        segments: list[TranscriptSegment] = []
        with ExitStack() as stack:
            encoded = self._model.encode(np.stack([window.mel for window in windows]))
            for each in encoded:
                stack.enter_context(each)
            self._detect(encoded[0])
            beginning = self._beginning()
            texts = self._decoder.best(encoded, [beginning] * len(encoded))
            for window, of_window, text in zip(windows, encoded, texts, strict=True):
                if text.is_silence(self._settings):
                    continue
                begin = self._config.special.timestamp_begin
                cut = cut_window(text.ids, begin, window.seconds, whole=True)
                segments += self._segments(window, of_window, text, cut.spans)
        return self._part(segments, windows[-1].start + windows[-1].seconds)

    # -- one window --------------------------------------------------------------------------------

    def _window(self, first: int, samples: np.ndarray) -> SoundWindow:
        """Return the window of ``samples``, f32 ``[n]``, the first of which has the number
        ``first``, with its mel spectrogram, padded with silence. Frames at its edges include the
        sound around the window, as if the whole sound were transformed at once.
        """
        n = self._config.n_samples
        before = self._buffer.get(max(0, first - _AROUND), first)
        behind = samples[:0]
        if len(samples) == n:
            behind = self._buffer.get(first + n, first + n + _AROUND)
        around = np.concatenate([before, samples, behind])
        n_before = len(before) // HOP
        wide = log_mel(around[len(before) % HOP :], self._config.n_mels, n + 2 * _AROUND)
        mel = wide[:, n_before : n_before + self._config.n_frames]
        return SoundWindow(first, samples, np.ascontiguousarray(mel))

    def _detect(self, encoded: EncodedWindow) -> None:
        """Set the transcription's language to that spoken in ``encoded``, unless it is known."""
        if not self._language:
            self._language = detected_language(self._model, encoded)

    def _task_ids(self) -> list[int]:
        """Return the ids of a prompt after any earlier text: ``sot`` and, for multilingual models,
        language and task.
        """
        special = self._config.special
        if not self._config.multilingual:
            return [special.sot]
        task = special.translate if self._settings.task == "translate" else special.transcribe
        return [special.sot, special.languages[self._language], task]

    @property
    def _most_before(self) -> int:
        """Most ids of earlier text in a prompt: half of the context, minus one for ``sot_prev``,
        which precedes it.
        """
        return self._config.n_text_ctx // 2 - 1

    def _beginning(self) -> list[int]:
        """Return the ids of the next window's prompt: ``sot_prev`` and earlier text, if there is
        any, ``sot``, language and task, and ``no_timestamps`` if the settings ask for none.
        """
        special = self._config.special
        ids = self._task_ids()
        if not self._settings.timestamps and special.no_timestamps >= 0:
            ids.append(special.no_timestamps)
        before = self._before[-self._most_before :]
        return [special.sot_prev, *before, *ids] if before and special.sot_prev >= 0 else ids

    def _segments(
        self,
        window: SoundWindow,
        encoded: EncodedWindow,
        text: WindowText,
        spans: Sequence[SegmentSpan],
    ) -> list[TranscriptSegment]:
        """Return the segments of a window's text, without empty ones. ``spans``: parts of the text,
        from ``cut_window``.
        """
        groups = [self._decoder.words_of(span.ids) for span in spans]
        words: list[list[TranscriptWord]] = [[] for _ in spans]
        if self._settings.words:
            words = self._words(window, encoded, text, groups)
        made: list[TranscriptSegment] = []
        for span, ids, own in zip(spans, groups, words, strict=True):
            said = self._model.tokenizer.decode(ids, start=False)
            if not said.strip() or span.start >= span.end:
                continue
            made.append(
                TranscriptSegment(
                    index=self._n_segments,
                    start=own[0].start if own else window.start + span.start,
                    end=own[-1].end if own else window.start + span.end,
                    text=said,
                    ids=span.ids,
                    window_start=window.start,
                    temperature=text.temperature,
                    mean_logprob=text.mean_logprob,
                    compression_ratio=text.compression,
                    no_speech_probability=text.no_speech,
                    words=tuple(own),
                )
            )
            self._n_segments += 1
        return made

    def _words(
        self,
        window: SoundWindow,
        encoded: EncodedWindow,
        text: WindowText,
        groups: Sequence[Sequence[int]],
    ) -> list[list[TranscriptWord]]:
        """Return the words of each group of ids, with times in seconds from the sound's beginning.
        ``text``: the window's text; ``groups``: the ids of each of its spans, without timestamps.
        """
        eot = self._config.special.eot
        pairs = zip(text.ids, text.logprobs, strict=True)
        logprobs = [logprob for id, logprob in pairs if id < eot]
        language = "en" if self._settings.task == "translate" else self._language
        found = word_times(
            self._model, encoded, self._task_ids(), groups, logprobs, language, window.seconds
        )
        at = window.start
        return [
            [
                TranscriptWord(word.text, at + word.start, at + word.end, word.probability)
                for word in words
            ]
            for words in found
        ]

    def _part(self, segments: Sequence[TranscriptSegment], seconds: float) -> TranscriptPart:
        return TranscriptPart(tuple(segments), seconds, self._language)


def detected_language(model: SpeechModel, encoded: EncodedWindow) -> str:
    """Return the code of the language that is most probably spoken in a window. Raises TreadleError
    for an English-only model.
    """
    return max(language_odds(model, encoded).items(), key=lambda each: each[1])[0]


def language_odds(model: SpeechModel, encoded: EncodedWindow) -> dict[str, float]:
    """Return the probability of each of the model's languages, by code, in a window. Raises
    TreadleError for an English-only model.
    """
    special = model.config.special
    if not special.languages:
        raise TreadleError("the model knows English alone")
    with model.decoder([encoded]) as batch:
        logits = batch.step([[special.sot]])
    check_finite(logits)
    ids = [*special.languages.values()]
    odds = np.exp(log_softmax(logits[:, ids]))[0]
    return dict(zip(special.languages, odds.tolist(), strict=True))

"""``Transcription``: the result of ``transcribe``, computed while it is iterated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from treadle.speech.languages import language_name
from treadle.speech.transcript import Transcript, TranscriptSegment

if TYPE_CHECKING:
    from treadle.media.sound_stream import SoundStream
    from treadle.speech.transcribe import TranscriptPart


class Transcription:
    """An iterator over segments, as they are decoded::

        for segment in model.transcribe("talk.mp3"):
            print(f"{segment.start:.1f} s:{segment.text}")

    language: code of the spoken language, "" until it is known.
    seconds_done: seconds of the sound whose text is final.
    seconds: the sound's length; None until the end if its file does not state it.
    segments: the segments so far.

    Nothing is computed before the first segment is requested. ``finish`` transcribes the rest,
    ``close`` stops.
    """

    def __init__(self, sound: SoundStream, parts: Iterator[TranscriptPart], task: str) -> None:
        self.language = ""
        self.task = task
        self.seconds_done = 0.0
        self.seconds = sound.seconds
        self.segments: list[TranscriptSegment] = []
        self._sound = sound
        self._parts = parts
        self._waiting: deque[TranscriptSegment] = deque()
        self._ended = False

    def __repr__(self) -> str:
        text = "".join(segment.text for segment in self.segments).strip()
        shown = repr(text) if len(text) <= 60 else f"{text[:59]!r}..."
        end = "finished" if self._ended else "not finished"
        return f"Transcription({shown}, {self.seconds_done:.1f} s, {end})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Transcription cannot be pickled or copied: finish() gives its result")

    def __iter__(self) -> Iterator[TranscriptSegment]:
        return self

    def __next__(self) -> TranscriptSegment:
        while not self._waiting:
            if not self.step():
                raise StopIteration
        return self._waiting.popleft()

    @property
    def language_name(self) -> str:
        """The English name of the language, in lower case."""
        return language_name(self.language)

    def step(self) -> bool:
        """Decode the next window, or batch of windows: ``segments`` and ``seconds_done`` grow.
        Return False at the end of the sound. Raises what reading the sound and the model raise.
        """
        if self._ended:
            return False
        try:
            part = next(self._parts, None)
        except BaseException:
            self.close()
            raise
        if part is None:
            self.seconds = self.seconds_done
            self.close()
            return False
        self.language = part.language
        self.seconds_done = part.seconds_done
        self.segments += part.segments
        self._waiting += part.segments
        return True

    def finish(self) -> Transcript:
        """Transcribe the rest; return the whole result."""
        while self.step():
            pass
        return self.result()

    def result(self) -> Transcript:
        """Return the result so far."""
        seconds = self.seconds_done if self.seconds is None else self.seconds
        return Transcript(tuple(self.segments), self.language, seconds, self.task)

    def close(self) -> None:
        """Stop, and close the sound. Segments decoded so far can still be read."""
        self._ended = True
        close = getattr(self._parts, "close", None)
        if close is not None:
            with suppress(ValueError):  # another thread is running the generator
                close()
        self._sound.close()

    def __enter__(self) -> Transcription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Results of a transcription: segments of text with their times, and words with theirs."""

from __future__ import annotations

from treadle.base.fast_dataclass import dataclass
from treadle.speech.languages import language_name


@dataclass(frozen=True)
class TranscriptWord:
    """One word, with the spaces and punctuation that belong to it.

    start, end: seconds from the sound's beginning. probability: mean of its tokens'.
    """

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class TranscriptSegment:
    """Text between two timestamps, a sentence or a part of one.

    index: from 0 on. start, end: seconds from the sound's beginning. text: mostly with a space
    before it. ids: its tokens, timestamps among them. window_start: seconds at which the window
    begins of which it was decoded; of all text of this window are: temperature, mean_logprob (mean
    of the tokens' log-probabilities), compression_ratio (length by that of the text compressed with
    zlib: large for repetitions), no_speech_probability. words: empty unless they were asked for.
    """

    index: int
    start: float
    end: float
    text: str
    ids: tuple[int, ...] = ()
    window_start: float = 0.0
    temperature: float = 0.0
    mean_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_probability: float = 0.0
    words: tuple[TranscriptWord, ...] = ()


@dataclass(frozen=True)
class Transcript:
    """The whole result of a transcription.

    language: code of the spoken language. seconds: length of the sound. task: "transcribe", or
    "translate" into English.
    """

    segments: tuple[TranscriptSegment, ...]
    language: str
    seconds: float
    task: str = "transcribe"

    @property
    def text(self) -> str:
        """The text of all segments."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def words(self) -> tuple[TranscriptWord, ...]:
        """The words of all segments."""
        return tuple(word for segment in self.segments for word in segment.words)

    @property
    def language_name(self) -> str:
        """The English name of the language, in lower case."""
        return language_name(self.language)

    def __str__(self) -> str:
        return self.text

    def to(self, format: str) -> str:
        """Return the transcript in a format of ``transcript_formats.FORMATS``: "text", "srt",
        "vtt", "json", "verbose_json", "tsv" or "lrc". Raises TreadleError for another one.
        """
        from treadle.speech.transcript_formats import formatted

        return formatted(self, format)

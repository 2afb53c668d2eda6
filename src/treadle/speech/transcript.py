"""Results of a transcription: segments of text and words, with their times."""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.speech.languages import language_name


@dataclass(frozen=True)
class TranscriptWord:
    """One word, with the spaces and punctuation that belong to it.

    start, end: seconds from the sound's beginning.
    probability: mean probability of its tokens.
    """

    text: str
    start: float
    end: float
    probability: float


@dataclass(frozen=True)
class TranscriptSegment:
    """Text between two timestamps: a sentence or a part of one.

    index: number of the segment, from 0.
    start, end: seconds from the sound's beginning.
    text: usually begins with a space.
    ids: its token ids, with timestamps.
    window_start: seconds at which the decoded window begins.
    temperature, mean_logprob, compression_ratio, no_speech_probability: of the text of the whole
        window. mean_logprob is the mean log-probability of its tokens; compression_ratio its length
        divided by that of its zlib form, large for repetitions.
    words: empty unless they were requested.
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

    language: code of the spoken language.
    seconds: length of the sound.
    task: "transcribe", or "translate" into English.
    """

    segments: tuple[TranscriptSegment, ...]
    language: str
    seconds: float
    task: str = "transcribe"

    @property
    def text(self) -> str:
        """The text of all segments, without outer white space."""
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
        """Return the transcript as text in a format: "text", "srt", "vtt", "json", "verbose_json",
        "tsv" or "lrc". Raises TreadleError for another one.
        """
        from treadle.speech.transcript_formats import formatted

        return formatted(self, format)

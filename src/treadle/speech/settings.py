"""Settings of a transcription, and their checks."""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.base.validate import flag, number_between, one_of, positive, ranged
from treadle.errors import TreadleError

TASKS = ("transcribe", "translate")
DETECTORS = ("energy", "silero", "off")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_CHOICES = 16  # most beams, or samples of one window
MOST_WINDOWS = 8  # of one batch: the default ``max_windows`` of a model


@dataclass(frozen=True)
class TranscribeSettings:
    """Settings of one transcription.

    language: code or English name; None, or "auto", which becomes None: detected in the first
        window with speech.
    task: "transcribe" writes the spoken language, "translate" English.
    prompt: text given to the model before the first window: names and spellings that occur.
    text_before: whether each window's prompt has the text of the windows before it. Otherwise
        ``batch`` windows are decoded together.
    timestamps: whether the model writes timestamps; otherwise a segment is a whole window.
    words: whether words get times, from cross-attention weights.
    temperatures: those of successive attempts at one window; 0 takes the most probable token.
    beams: width of the beam search at temperature 0; 1: greedy. best_of: samples at other
        temperatures.
    min_logprob: least mean log-probability, and max_compression: largest compression ratio, of an
        accepted text; otherwise the next temperature is tried. None: no such check.
    no_speech: probability of the no-speech token above which a window without confident text counts
        as silence; None: no such check.
    voice_activity: "energy" leaves out silence, "silero" everything but speech (pip install
        "treadle[vad]"), "off" nothing.
    seed: of the samples.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str = ""
    text_before: bool = True
    timestamps: bool = True
    words: bool = False
    temperatures: tuple[float, ...] = TEMPERATURES
    beams: int = 5
    best_of: int = 5
    min_logprob: float | None = -1.0
    max_compression: float | None = 2.4
    no_speech: float | None = 0.6
    voice_activity: str = "energy"
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        """Check all values. Raises TreadleError."""
        if self.language is not None:
            _text("language", self.language)
            if self.language.strip().lower() == "auto":
                object.__setattr__(self, "language", None)
        _text("prompt", self.prompt)
        _chosen("task", self.task, TASKS)
        _chosen("voice_activity", self.voice_activity, DETECTORS)
        for name in ("text_before", "timestamps", "words"):
            flag(name, getattr(self, name))
        for name in ("beams", "best_of"):
            positive(name, getattr(self, name), MOST_CHOICES)
        positive("batch", self.batch, MOST_WINDOWS)
        ranged("seed", self.seed, 0, 2**63 - 1)
        if not self.temperatures:
            raise TreadleError("temperatures: expected at least one")
        for temperature in self.temperatures:
            _number("temperatures", temperature, 0.0, 2.0)
        _optional("min_logprob", self.min_logprob, -100.0, 0.0)
        _optional("max_compression", self.max_compression, 1.0, 1000.0)
        _optional("no_speech", self.no_speech, 0.0, 1.0)


def _text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TreadleError(f"{name}={value!r:.40}: expected a text")


def _chosen(name: str, value: object, choices: tuple[str, ...]) -> None:
    if one_of(value, choices) is None:
        raise TreadleError(f"{name}={value!r:.40}: expected one of {', '.join(choices)}")


def _number(name: str, value: object, least: float, most: float) -> None:
    if number_between(value, least, most) is None:
        raise TreadleError(f"{name}={value!r:.40}: expected a number from {least:g} to {most:g}")


def _optional(name: str, value: object, least: float, most: float) -> None:
    if value is not None:
        _number(name, value, least, most)

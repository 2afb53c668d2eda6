"""The text that one attempt at a window gives, and what tells whether it is to be trusted."""

from __future__ import annotations

from treadle.base.fast_dataclass import dataclass
from treadle.speech.repetition import compression_ratio
from treadle.speech.settings import TranscribeSettings


@dataclass(frozen=True)
class WindowText:
    """The decoded text of a window.

    ids: timestamps among them, without the end token. logprobs: of each id. mean_logprob: of all
    and of the end token. no_speech: probability of the no-speech token at the text's start.
    loops: whether it was ended because its end repeats.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    mean_logprob: float
    temperature: float
    no_speech: float
    text: str
    loops: bool = False

    @property
    def compression(self) -> float:
        """The compression ratio of the text."""
        return compression_ratio(self.text)

    def repeats(self, settings: TranscribeSettings) -> bool:
        """Whether it repeats itself."""
        most = settings.max_compression
        return self.loops or (most is not None and self.compression > most)

    def is_silence(self, settings: TranscribeSettings) -> bool:
        """Whether the window has no speech: the model says so, and is not sure of its text."""
        if settings.no_speech is None or self.no_speech <= settings.no_speech:
            return False
        return settings.min_logprob is None or self.mean_logprob <= settings.min_logprob

    def is_good(self, settings: TranscribeSettings) -> bool:
        """Whether no other temperature needs to be tried."""
        if self.is_silence(settings):
            return True
        least = settings.min_logprob
        return not self.repeats(settings) and (least is None or self.mean_logprob >= least)


def best_text(attempts: list[WindowText], settings: TranscribeSettings) -> WindowText:
    """Return the best of several attempts at one window: of those that do not repeat themselves the
    most probable one.
    """
    return max(attempts, key=lambda each: (not each.repeats(settings), each.mean_logprob))

"""The text of one attempt at a window, and whether to trust it."""

from __future__ import annotations

from treadle.base.fast_classes import dataclass
from treadle.speech.repetition import compression_ratio
from treadle.speech.settings import TranscribeSettings


@dataclass(frozen=True)
class WindowText:
    """The decoded text of a window.

    ids: with timestamps, without the end token.
    logprobs: log-probability of each id.
    mean_logprob: mean log-probability of all decoded ids and the end token.
    no_speech: probability of the no-speech token after ``sot``.
    loops: whether decoding was stopped because the text's end repeats itself.
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
        """The compression ratio of the text (``repetition.compression_ratio``)."""
        return compression_ratio(self.text)

    def repeats(self, settings: TranscribeSettings) -> bool:
        """Return whether the text repeats itself: decoding was stopped for that, or its compression
        ratio is above ``settings.max_compression``.
        """
        most = settings.max_compression
        return self.loops or (most is not None and self.compression > most)

    def is_silence(self, settings: TranscribeSettings) -> bool:
        """Return whether the window has no speech: the no-speech token is more probable than
        ``settings.no_speech``, and the text's ``mean_logprob`` is at most ``settings.min_logprob``
        or that is None.
        """
        if settings.no_speech is None or self.no_speech <= settings.no_speech:
            return False
        return settings.min_logprob is None or self.mean_logprob <= settings.min_logprob

    def is_good(self, settings: TranscribeSettings) -> bool:
        """Return whether the text is accepted, so that no other temperature is tried: the window is
        silent, or the text neither repeats itself nor is less probable than
        ``settings.min_logprob``.
        """
        if self.is_silence(settings):
            return True
        least = settings.min_logprob
        return not self.repeats(settings) and (least is None or self.mean_logprob >= least)


def best_text(attempts: list[WindowText], settings: TranscribeSettings) -> WindowText:
    """Return the best of several attempts at one window: that with the largest ``mean_logprob``
    among those that do not repeat themselves, or among all if every one does.
    """
    return max(attempts, key=lambda each: (not each.repeats(settings), each.mean_logprob))

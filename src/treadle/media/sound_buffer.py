"""Collects a sound's samples from blocks at the file's rate, resampled to 16 kHz."""

from __future__ import annotations

import numpy as np

from treadle.errors import FileError
from treadle.media.limits import MediaLimits
from treadle.media.resample import Resampler

RATE = 16_000
"""Samples a second that every model's sound tower takes."""
MIN_RATE = 1_000
MAX_RATE = 384_000


class SoundResampling:
    """Resamples a sound of one channel to 16 kHz, block by block, and checks its length as it
    grows. ``rate``: the file's, in Hz; ``place`` names the sound in errors.
    """

    def __init__(self, rate: int, limits: MediaLimits, place: str) -> None:
        if not MIN_RATE <= rate <= MAX_RATE:
            raise FileError(
                f"{rate} samples a second", path=place, expected=f"{MIN_RATE} to {MAX_RATE}"
            )
        self.rate = rate
        self._limits = limits
        self._place = place
        self._resampler = Resampler(rate, RATE)
        self._n_frames = 0

    def add(self, samples: np.ndarray) -> np.ndarray:
        """Add float32 ``[n]`` at the file's rate; return the samples at 16 kHz that are now
        complete, float32 ``[m]``. Raises UnsupportedError beyond the limits, FileError for NaN and
        infinity.
        """
        self._n_frames += len(samples)
        self._limits.check_seconds(self._n_frames / self.rate, self._place)
        check_finite(samples, self._place)
        return self._resampler.push(samples)

    def finish(self) -> np.ndarray:
        """Return the remaining samples, float32 ``[m]``. Raises FileError if the sound had no
        samples.
        """
        if not self._n_frames:
            raise FileError("no samples", path=self._place, expected="a sound")
        return self._resampler.finish()


class SoundBuffer:
    """Collects all samples of a sound of one channel, resampled to 16 kHz, and checks the limits as
    it grows. ``rate``: the file's, in Hz; ``place`` names the sound in errors.
    """

    def __init__(self, rate: int, limits: MediaLimits, place: str) -> None:
        self._resampling = SoundResampling(rate, limits, place)
        self._limits = limits
        self._place = place
        self._parts = list[np.ndarray]()
        self._n_frames = 0

    def expect(self, n_frames: int) -> None:
        """Raise UnsupportedError if ``n_frames`` samples at the file's rate would exceed the
        limits.
        """
        seconds = n_frames / self._resampling.rate
        self._limits.check_seconds(seconds, self._place)
        self._limits.check_bytes("audio", int(seconds * RATE) * 4, self._place)

    def add(self, samples: np.ndarray) -> None:
        """Append float32 [n] at the file's rate. Raises UnsupportedError beyond the limits,
        FileError for NaN and infinity.
        """
        self._n_frames += len(samples)
        self.expect(self._n_frames)
        self._parts.append(self._resampling.add(samples))

    def finish(self) -> np.ndarray:
        """Return all samples, float32 [n]. Raises FileError if there are none."""
        return np.concatenate([*self._parts, self._resampling.finish()])


def check_finite(samples: np.ndarray, place: str) -> None:
    """Raise FileError if any sample is NaN or infinite; ``place`` names the sound in the error."""
    if not np.isfinite(samples).all():
        raise FileError("NaN or infinite samples", path=place)

"""A sound's log-mel frames as inputs of a tower, computed when they are first read.

Counting a prompt's tokens and finding its rows in the cache need only the number of frames.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from treadle.base.fast_classes import cached_property, dataclass
from treadle.media.mel import HOP, log_mel


class MelSpectrogram:
    """The log-mel frames of a whole sound. They are computed together, because its loudest frame
    limits the values of the quietest (``log_mel``).

    samples: f32 ``[n]`` at 16 kHz; not to be changed afterwards.
    n_mels: mel bins of a frame.
    n_samples: length to which the samples are padded with zeros, at least ``n``.
    """

    def __init__(self, samples: np.ndarray, n_mels: int, n_samples: int) -> None:
        assert len(samples) <= n_samples
        self.n_mels = n_mels
        self._samples = samples
        self._n_samples = n_samples

    @cached_property
    def frames(self) -> np.ndarray:
        """All frames, f32 ``[n_samples // 160, n_mels]``."""
        return np.ascontiguousarray(log_mel(self._samples, self.n_mels, self._n_samples).T)


@dataclass(frozen=True, eq=False)
class MelInput:
    """The input of one pass of a sound's tower, a range of mel frames. It has the attributes of a
    ``TowerInput`` and is used in its place.

    sound: the spectrogram of the whole sound.
    frames: the range of its frames that the pass reads; frames after its end are zeros.
    grid: 1 and the number of rows in the tower's layers.
    """

    sound: MelSpectrogram = field(repr=False)
    frames: range
    grid: tuple[int, int]

    @property
    def patches(self) -> np.ndarray:
        """The mel frames that the pass reads, f32 ``[n_frames, n_mels]``; the first access computes
        those of the whole sound.
        """
        found = self.sound.frames[self.frames.start : self.frames.stop]
        missing = len(self.frames) - len(found)
        return np.pad(found, ((0, missing), (0, 0))) if missing else found

    @property
    def n_rows(self) -> int:
        """Number of rows in the tower's layers."""
        return self.grid[1]

    @property
    def n_bytes(self) -> int:
        """Bytes of the sound's samples from which the frames are computed, f32."""
        return len(self.frames) * HOP * 4

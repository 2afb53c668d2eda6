"""A sound's log-mel frames as inputs of a tower, computed when they are needed.

Counting the tokens of a prompt, and finding its rows in the cache, need the number of frames alone.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from treadle.base.cached_property import cached_property
from treadle.base.fast_dataclass import dataclass
from treadle.media.mel import HOP, log_mel


class MelSpectrogram:
    """The frames of a whole sound: the loudest of them bounds the quietest, see ``log_mel``.

    samples: f32 ``[n]`` at 16 kHz; not to be changed afterwards.
    n_samples: length to which they are padded with zeros; the sound is not longer.
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
    """The input of one pass of a tower of sound, in place of a ``TowerInput``.

    frames: those of the sound that the pass reads; those behind its end are zeros.
    grid: 1 and the number of rows that the tower's layers see.
    """

    sound: MelSpectrogram = field(repr=False)
    frames: range
    grid: tuple[int, int]

    @property
    def patches(self) -> np.ndarray:
        """The frames, f32 ``[n_frames, n_mels]``; the first access computes the whole sound's."""
        found = self.sound.frames[self.frames.start : self.frames.stop]
        missing = len(self.frames) - len(found)
        return np.pad(found, ((0, missing), (0, 0))) if missing else found

    @property
    def n_rows(self) -> int:
        """Rows that the tower's layers see."""
        return self.grid[1]

    @property
    def n_bytes(self) -> int:
        """Bytes of its samples."""
        return len(self.frames) * HOP * 4

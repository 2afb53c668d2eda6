"""The base of families that read sounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from treadle.errors import TreadleError
from treadle.media.family import MediaFamily
from treadle.media.prepared import PreparedMedia

if TYPE_CHECKING:
    from treadle.media.mel_input import MelInput
    from treadle.media.prepared import TowerInput


class SoundFamily(MediaFamily):
    """A family of sounds. ``before`` and ``behind``: special tokens around a sound's rows, "" for
    none; a sound's tokens are causal.
    """

    kind = "audio"
    before: ClassVar[str] = ""
    behind: ClassVar[str] = ""

    def samples_of(self, data: np.ndarray, n_rows: int, max_rows: int | None) -> np.ndarray:
        """Return the samples of a sound of so many rows, f32. Raises TreadleError for no samples,
        or more rows than ``max_rows``.
        """
        if not len(data):
            raise TreadleError("a sound without samples")
        if max_rows is not None and n_rows > max_rows:
            raise TreadleError(f"a sound of {n_rows} rows, more than {max_rows}")
        return np.asarray(data, np.float32)

    def sound(
        self,
        samples: np.ndarray,
        inputs: Sequence[TowerInput | MelInput],
        n_rows: int,
        n_samples: int,
    ) -> PreparedMedia:
        """Return what was prepared of ``samples``, which were padded to ``n_samples``."""
        layout = [each for each in (self.before, range(n_rows), self.behind) if each != ""]
        return PreparedMedia(
            kind=self.kind,
            inputs=tuple(inputs),
            layout=tuple(layout),
            n_rows=n_rows,
            positions=None,
            advance=n_rows,
            bidirectional=(),
            size=(1, len(samples)),
            resized=(1, n_samples),
            digest=self.digest(samples),
        )

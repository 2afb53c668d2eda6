"""The base of families for sounds."""

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
    """Base of families for sounds, whose tokens attend causally. ``before``, ``behind``: special
    tokens around a sound's rows, or "".
    """

    kind = "audio"
    before: ClassVar[str] = ""
    behind: ClassVar[str] = ""

    def samples_of(self, data: np.ndarray, n_rows: int, max_rows: int | None) -> np.ndarray:
        """Return a sound's samples ``data`` as f32 ``[n]``. Raises TreadleError if there are none,
        or if its ``n_rows`` media rows are more than ``max_rows`` (None: any number).
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
        """Return a sound's prepared form. ``samples``: the sound as given; ``inputs``: the tower's,
        for these samples padded to ``n_samples``; ``n_rows``: number of its media rows.
        """
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

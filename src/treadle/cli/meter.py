"""A progress bar for work measured in tokens or bytes: its rate, and how it goes."""

from __future__ import annotations

import time

from treadle.cli.progress import ProgressBar
from treadle.cli.table import scaled


class Meter(ProgressBar):
    """A ``ProgressBar`` that shows units per second behind the name of its stage, and a note.

    ``unit`` is what is counted, "B" or "tok"; set ``note`` to what the work shows so far. Stages
    that the meter was not made for (compiling, say) are drawn as ever.
    """

    def __init__(self, stage: str, unit: str) -> None:
        super().__init__()
        self.metered, self.unit, self.note = stage, unit, ""

    def __enter__(self) -> Meter:
        """Return itself."""
        return self

    def _draw(self, stage: str, done: int, total: int) -> None:
        super()._draw(stage, done, total)
        if stage == self.metered and self._drawn is not None and self._task is not None:
            seconds = max(time.monotonic() - self._started, 1e-9)
            parts = [stage, scaled(done / seconds, f"{self.unit}/s"), self.note]
            self._drawn.update(self._task, description="  ".join(filter(None, parts)))

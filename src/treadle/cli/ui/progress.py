"""A progress bar on standard error for slow work, shown only on a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from treadle.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

NAMES = {
    "compile": "compiling kernels",
    "unpack": "unpacking weights",
    "measure": "measuring this machine",
}  # display names of stages; others are shown as they are
PATIENCE_S = 0.25  # shorter work shows no bar, and then rich (50 ms) is never imported


class ProgressBar:
    """Progress bar on standard error, called as ``bar(stage, done, total)``; ``total`` 0 means
    unknown. It appears after PATIENCE_S, and disappears when the stage is done.

    Counts of a stage whose name starts with "download" are bytes. It is also a context manager:
    leaving it removes the bar. For the stage ``metered`` the bar shows ``unit`` ("B", "tok") per
    second, and ``note``, an interim result.
    """

    def __init__(self, metered: str | None = None, unit: str = "") -> None:
        self.enabled = sys.stderr.isatty()
        self.metered = metered
        self.unit = unit
        self.note = ""
        self._stage = ""
        self._started = 0.0
        self._drawn: RichProgress | None = None
        self._task: TaskID | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` units of ``stage`` are done."""
        if not self.enabled:
            return
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage = stage
            self._started = now
        if total and done >= total:
            self.close()
        elif now - self._started >= PATIENCE_S or is_download(stage):  # its calls may be rare
            self._draw(stage, done, total)

    def _draw(self, stage: str, done: int, total: int) -> None:
        if self._drawn is None:
            self._drawn = build_bar(in_bytes=is_download(stage))
            self._task = self._drawn.add_task(
                printable(NAMES.get(stage, stage)), completed=done, total=total or None
            )
            self._drawn.start()
        assert self._task is not None
        self._drawn.update(self._task, completed=done, total=total or None)
        if stage == self.metered:
            from treadle.base.humanize import scaled

            rate = scaled(done / max(time.monotonic() - self._started, 1e-9), f"{self.unit}/s")
            told = "  ".join(filter(None, (stage, rate, self.note)))
            self._drawn.update(self._task, description=told)

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._drawn is not None:
            self._drawn.stop()
        self._drawn = None
        self._task = None
        self._stage = ""

    def __enter__(self) -> ProgressBar:
        """Return this bar."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar from the screen, also after an error."""
        self.close()


def is_download(stage: str) -> bool:
    """Return whether the counts of ``stage`` are downloaded bytes."""
    return stage.startswith("download")


def build_bar(*, in_bytes: bool) -> RichProgress:
    """Build rich's progress bar, which erases itself when it stops. ``in_bytes``: counts are bytes,
    else plain numbers.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts = [DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # a command's output is not part of the bar
        redirect_stderr=False,
    )

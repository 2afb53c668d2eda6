"""A tiny model that reads pictures, behind the server at a socket; pictures, and a slow tower."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import treadle
from tests.chat.tools.families import HERMES_TEMPLATE
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import Projector

N_CTX = 1024
ROWS = 77  # of plain.png
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def load(data: Path, name: str = "qwen3vl", **settings: Any) -> treadle.Model:
    """A model of ``shared/data/media`` with a chat template that has tools."""
    given = {"threads": 2, "context": N_CTX, "n_sequences": 4, "deterministic": True, **settings}
    path = data / "media" / name / "text.gguf"
    return treadle.load(path, chat_template=HERMES_TEMPLATE, **given)


def base64_of(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def data_url(path: Path) -> str:
    return f"data:image/png;base64,{base64_of(path)}"


class SlowTower:
    """In place of a projector's tower: gives its rows after ``go``, in slices of a millisecond."""

    def __init__(self, projector: Projector) -> None:
        self._encode = Projector.encode_runs
        self._projector = projector
        self.go = threading.Event()
        self.n_begun = self.n_slices = self.n_closed = 0

    def __call__(
        self, prepared: Sequence[PreparedMedia], *_: Any
    ) -> Generator[None, None, list[np.ndarray]]:
        self.n_begun += 1
        try:
            while not self.go.is_set():
                self.n_slices += 1
                time.sleep(0.001)
                yield
            return (yield from self._encode(self._projector, prepared))
        finally:
            self.n_closed += 1

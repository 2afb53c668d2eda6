"""Compilation of every plan that transcriptions need, before the first one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.speech.model import SpeechModel

ROWS = (1, 5)  # of text: the usual one, and those of samples


def warm_model(model: SpeechModel) -> None:
    """Run a window of silence, and texts of every usual number of rows."""
    model.tokenizer.prepare()
    config = model.config
    silence = np.zeros((1, config.n_mels, config.n_frames), np.float32)
    (window,) = model.encode(silence)
    with window:
        for n_rows in ROWS:
            with model.decoder([window] * n_rows) as batch:
                batch.step([[config.special.sot] * 3] * n_rows)
                batch.step([[config.special.sot]] * n_rows)

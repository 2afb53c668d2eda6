"""Compiles the plans of a transcription in advance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from treadle.speech.model import SpeechModel

ROWS = (1, 5)  # rows of text: greedy, and the default beams or samples
PROMPT = 3  # ids that name language and task


def warm_model(model: SpeechModel) -> None:
    """Compile the plans of a transcription by running a window of silence, with prompts and rows as
    they usually occur.
    """
    model.tokenizer.prepare()
    config = model.config
    silence = np.zeros((1, config.n_mels, config.n_frames), np.float32)
    (window,) = model.encode(silence)
    sot = config.special.sot
    with window:
        for n_ids in (PROMPT, config.n_text_ctx // 2 + PROMPT):  # without and with text before
            with model.decoder([window]) as batch:
                batch.logits_at([[sot] * n_ids], [n_ids - PROMPT])
        for n_rows in ROWS:
            with model.decoder([window] * n_rows) as batch:
                batch.step([[sot]] * n_rows)

"""Cross-attention weights of the tiny Whisper beside those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from tests.speech.whisper_cases import folder_of, opened, truth_of


def test_weights_of_cross_attention(data: Path) -> None:
    truth = truth_of(data)
    theirs = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder_of(data), dtype=torch.float64, attn_implementation="eager"
    )
    ids = truth["decoder_input_ids"]
    with torch.no_grad():
        found = theirs(
            torch.from_numpy(truth["input_features"]).double(),
            decoder_input_ids=torch.from_numpy(ids).long(),
            output_attentions=True,
        ).cross_attentions
    with opened(folder_of(data)) as model:
        (window,) = model.encode(truth["input_features"])
        with window:
            weights = model.alignment(window, ids[0].tolist())
    expected = found[1][0].numpy()  # the upper of two layers
    assert np.abs(weights - expected).max() < 1e-5

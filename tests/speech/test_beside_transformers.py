"""Tiny Whisper models beside transformers: cross-attention weights, and the shape of turbo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers

from tests.speech.whisper_cases import folder_of, off, opened, truth_of


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


def test_logits_of_turbo_s_shape(data: Path, tmp_path: Path) -> None:
    """Fewer layers in the decoder than in the encoder, 128 mels, and large-v3's vocabulary."""
    sizes = {"encoder_layers": 3, "decoder_layers": 1, "num_mel_bins": 128, "vocab_size": 51866}
    config = transformers.WhisperConfig.from_pretrained(folder_of(data), **sizes)
    torch.manual_seed(1)
    theirs = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for each in theirs.parameters():
            each.mul_(3.0)  # random ones are so small that layers would not matter
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder_of(data) / "tokenizer.json").read_bytes())
    ids = [281, 282, 283, 286, 5, 40000, 51865]
    with opened(tmp_path) as model:
        n_frames = model.config.n_frames
        mel = np.random.default_rng(1).standard_normal((1, 128, n_frames)).astype(np.float32)
        (window,) = model.encode(mel)
        with window, model.decoder([window]) as batch:
            first, last = batch.logits_at([ids[:4]], [0])
            found = np.concatenate([first, last, *(batch.step([[i]]) for i in ids[4:])])
    with torch.no_grad():
        features = torch.from_numpy(mel).double()
        logits = theirs.double()(features, decoder_input_ids=torch.tensor([ids])).logits[0]
    assert off(found, logits.numpy()[[0, 3, 4, 5, 6]]) < 1e-5

"""Log-mel spectrograms beside those of transformers, of the sound in shared/data/media."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from treadle.errors import TreadleError
from treadle.media.mel import log_mel, mel_filters

TORCH_STFT = 1e-5  # transformers' own tolerance between its two ways; they use this one with torch


def sound(seconds: float = 3.0) -> np.ndarray:
    """The sound of the truth: ``make/picture.py`` beside the data's README."""
    t = np.arange(int(seconds * 16_000)) / 16_000
    sweep = 0.3 * np.sin(2 * np.pi * (200 + 300 * t) * t)
    tone = 0.1 * np.sin(2 * np.pi * 1800 * t) * (np.sin(2 * np.pi * 3 * t) > 0)
    noise = 0.02 * np.random.default_rng(5).standard_normal(t.shape)
    return (sweep + tone + noise).astype(np.float32)


def test_values_are_those_of_transformers(data: Path) -> None:
    truth = np.load(data / "media" / "whisper" / "truth.npz")["input_features"][0]
    mel = log_mel(sound())
    assert mel.shape == (80, 300)
    assert mel.dtype == np.float32
    assert np.abs(mel - truth).max() < TORCH_STFT


def test_128_mels_are_those_of_transformers(data: Path) -> None:
    truth = np.load(data / "media" / "voxtral" / "truth.npz")["input_features"][0]
    mel = log_mel(sound(), 128)[:, : truth.shape[1]]  # the truth was cut
    assert np.abs(mel - truth).max() < 2 * TORCH_STFT


def test_a_window_is_padded_and_cut() -> None:
    samples = sound(1.0)
    padded = np.concatenate([samples, np.zeros(8_000, np.float32)])
    assert np.array_equal(log_mel(samples, n_samples=24_000), log_mel(padded))
    assert np.array_equal(log_mel(samples, n_samples=8_000), log_mel(samples[:8_000]))


def test_blocks_change_nothing() -> None:
    long = np.tile(sound(), 11)  # 33 s: more than one block
    short = long[: 32 * 16_000]
    assert np.allclose(log_mel(long)[:, :3150], log_mel(short)[:, :3150], atol=1e-6)


def test_silence_and_the_filters() -> None:
    assert np.array_equal(log_mel(np.zeros(1600, np.float32)), np.full((80, 10), -1.5, np.float32))
    filters = mel_filters(80)
    assert filters.shape == (80, 201)
    areas = filters.sum(1) * 40  # 40 Hz from bin to bin
    assert np.allclose(areas[40:], 1, atol=0.1)


@pytest.mark.parametrize("samples", [np.zeros(159, np.float32), np.zeros((2, 1600), np.float32)])
def test_errors(samples: np.ndarray) -> None:
    with pytest.raises(TreadleError, match="samples"):
        log_mel(samples)

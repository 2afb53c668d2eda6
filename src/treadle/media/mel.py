"""Log-mel spectrograms as Whisper, and models built on its encoder, read them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from treadle.errors import TreadleError
from treadle.media.sound_buffer import RATE

HOP = 160
"""Samples from one frame to the next: 10 ms."""
N_FFT = 400
"""Samples of a frame: 25 ms."""

_MAX_HZ = RATE / 2
_FLOOR = 1e-10  # smallest power: silence is -10 in log10
_DYNAMIC_RANGE = 8.0  # log10 below the loudest value; quieter ones are raised to it
_BLOCK = 3000  # frames transformed at once, which bounds memory

# Slaney's mel scale: linear up to 1000 Hz, which is 15 mel, logarithmic above.
_LINEAR_HZ = 200 / 3  # of a mel
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _LINEAR_HZ
_LOG_STEP = np.log(6.4) / 27  # of a mel


def log_mel(samples: np.ndarray, n_mels: int = 80, n_samples: int | None = None) -> np.ndarray:
    """Return the log-mel spectrogram f32 ``[n_mels, n_frames]`` of samples f32 ``[n]`` at 16 kHz.

    ``n_frames`` is ``n // 160``. With ``n_samples`` the sound is first cut or padded with zeros to
    that many samples: 480000 for a window of 30 s. Values are those of transformers'
    ``WhisperFeatureExtractor``: log10 of the power, raised to at least 8 below the largest of all
    frames, plus 4, divided by 4. Raises TreadleError for less than one frame (160 samples), or
    another shape.
    """
    if samples.ndim != 1:
        raise TreadleError(f"samples of shape {samples.shape}: expected [n], one channel")
    if n_samples is not None:
        samples = samples[:n_samples]
        samples = np.pad(samples, (0, n_samples - len(samples)))
    n_frames = len(samples) // HOP
    if not n_frames:
        raise TreadleError(f"a sound of {len(samples)} samples: expected {HOP} or more at 16 kHz")
    padded = np.pad(samples.astype(np.float64), N_FFT // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, N_FFT)[::HOP][:n_frames]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)
    filters = mel_filters(n_mels)
    mel = np.empty((n_mels, n_frames))
    for at in range(0, n_frames, _BLOCK):
        spectrum = np.fft.rfft(frames[at : at + _BLOCK] * window, axis=1)
        power = spectrum.real**2 + spectrum.imag**2
        mel[:, at : at + _BLOCK] = np.log10(np.maximum(filters @ power.T, _FLOOR))
    np.maximum(mel, mel.max() - _DYNAMIC_RANGE, out=mel)
    return ((mel + 4.0) / 4.0).astype(np.float32)


@lru_cache
def mel_filters(n_mels: int) -> np.ndarray:
    """Return Slaney's mel filters (triangles of unit area), f64 ``[n_mels, 201]``: the weights of a
    frame's 201 spectrum bins in each mel bin, from 0 to 8000 Hz. Read-only.
    """
    bins = np.linspace(0, RATE / 2, N_FFT // 2 + 1)
    top = _BREAK_MEL + np.log(_MAX_HZ / _BREAK_HZ) / _LOG_STEP
    edges = _hz(np.linspace(0, top, n_mels + 2))
    widths = np.diff(edges)[:, None]
    rising = (bins - edges[:-2, None]) / widths[:-1]
    falling = (edges[2:, None] - bins) / widths[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    filters = np.asarray(triangles * (2 / (edges[2:] - edges[:-2]))[:, None])
    filters.flags.writeable = False
    return filters


def _hz(mel: np.ndarray) -> np.ndarray:
    """Return the frequencies in Hz of the values ``mel`` of Slaney's mel scale."""
    above = _BREAK_HZ * np.exp((mel - _BREAK_MEL) * _LOG_STEP)
    return np.asarray(np.where(mel < _BREAK_MEL, mel * _LINEAR_HZ, above))

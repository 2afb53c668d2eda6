"""The encoder: mel spectrograms in, rows of states out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fork_safety import UseLock
from treadle.media.tower_engine import GIVEN, STATES, RunItem, TowerEngine
from treadle.speech.read import TAPS

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.speech.read import WhisperParts

STRIDES = 1, 2  # of the convolutions
POSITIONS = "position_embd.weight"


class SoundEncoder:
    """Encodes windows one by one. ``lock``: that of the decoder, which uses the same device;
    ``exact``: all products in f32, see ``TowerEngine``.
    """

    def __init__(
        self, parts: WhisperParts, device: Device, lock: UseLock, *, exact: bool = False
    ) -> None:
        of = parts.encoder
        self._convolutions = [
            TowerEngine(of, config, device, exact=exact, lock=lock) for config in parts.convolutions
        ]
        self._layers = TowerEngine(of, parts.tower, device, exact=exact, lock=lock)
        self._turn = UseLock()  # a window's runs, between whose slices others use the device
        self._positions = parts.encoder.tensors[POSITIONS].dequantize()

    def run(self, mel: np.ndarray) -> np.ndarray:
        """Return the states of a window, f32 ``[n_audio_ctx, n_embd]``, of its mel spectrogram, f32
        ``[n_mels, n_frames]``. Threads take turns, window by window.
        """
        with self._turn:
            x = np.ascontiguousarray(mel.T)
            for engine, stride in zip(self._convolutions, STRIDES, strict=True):
                x = _run(engine, neighbours(x, stride))
            return _run(self._layers, x + self._positions)

    def close(self) -> None:
        """Release plans and weights."""
        for engine in (*self._convolutions, self._layers):
            engine.close()


def _run(engine: TowerEngine, rows: np.ndarray) -> np.ndarray:
    """Run all slices of a run of rows that see each other; return their states."""
    run = engine.run({GIVEN: rows}, [RunItem(len(rows))])
    while True:
        try:
            next(run)
        except StopIteration as end:
            states: np.ndarray = end.value[STATES]
            return states


def neighbours(x: np.ndarray, stride: int) -> np.ndarray:
    """Return the inputs of a convolution over ``TAPS`` rows, padded with a row of zeros at each
    end: f32 ``[n / stride, c * TAPS]`` of ``x [n, c]``, in the order of weights ``[out, c, TAPS]``.
    """
    n, width = x.shape
    padded = np.zeros((n + 2, width), np.float32)
    padded[1:-1] = x
    taps = np.lib.stride_tricks.sliding_window_view(padded, TAPS, axis=0)[::stride]
    return np.ascontiguousarray(taps.reshape(len(taps), width * TAPS))

"""The encoder: mel spectrograms in, rows of states out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fork_safety import UseLock
from treadle.media.convolutions import rows_of_1d
from treadle.media.tower_engine import GIVEN, STATES, RunItem, TowerEngine

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
                x = _run(engine, rows_of_1d(x, stride))
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

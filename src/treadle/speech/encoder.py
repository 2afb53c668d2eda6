"""Runs the encoder: mel spectrograms to rows of states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fork_safety import UseLock
from treadle.media.convolutions import rows_of_1d
from treadle.media.family import POSITION_TABLE, POSITIONS
from treadle.media.tower_engine import GIVEN, STATES, RunItem, TowerEngine
from treadle.models.towers.whisper import STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treadle.devices.protocol import Device
    from treadle.speech.read import WhisperParts


class SoundEncoder:
    """Encodes windows one at a time. ``lock``: the lock of the decoder's engine, which uses the
    same device. ``exact``: all products in f32, as in ``TowerEngine``.
    """

    def __init__(
        self, parts: WhisperParts, device: Device, lock: UseLock, *, exact: bool = False
    ) -> None:
        of = parts.encoder
        self._stems = [
            TowerEngine(of, config, device, exact=exact, lock=lock) for config in parts.stems
        ]
        self._layers = TowerEngine(of, parts.tower, device, exact=exact, lock=lock)
        self._lock = UseLock()  # held for one window; between slices, others use the device
        self._positions = parts.encoder.tensors[POSITION_TABLE].dequantize()

    def run(self, mel: np.ndarray) -> np.ndarray:
        """Return the states of a window, f32 ``[n_audio_ctx, n_embd]``, from its mel spectrogram,
        f32 ``[n_mels, n_frames]``. Threads take turns, one window each.
        """
        with self._lock:
            x = np.ascontiguousarray(mel.T)
            for engine, step in zip(self._stems, STEPS, strict=True):
                x = _run(engine, {GIVEN: rows_of_1d(x, step)})
            return _run(self._layers, {GIVEN: x, POSITIONS: self._positions})

    def close(self) -> None:
        """Release plans and weights."""
        for engine in (*self._stems, self._layers):
            engine.close()


def _run(engine: TowerEngine, given: Mapping[str, np.ndarray]) -> np.ndarray:
    """Run ``engine`` to the end on the input rows ``given`` by name, which all attend to each
    other; return its output "states", f32 ``[n_rows, width]``.
    """
    run = engine.run(given, [RunItem(len(given[GIVEN]))])
    while True:
        try:
            next(run)
        except StopIteration as end:
            states: np.ndarray = end.value[STATES]
            return states

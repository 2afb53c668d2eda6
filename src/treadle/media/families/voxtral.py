"""Voxtral: Whisper's encoder in windows of 30 s, the last one padded with silence; four states are
one media row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.errors import FileError
from treadle.files.metadata import MetadataReader
from treadle.media.clip_config import ClipConfig
from treadle.media.hf_projector import HfNames
from treadle.media.mel_input import MelInput, MelSpectrogram
from treadle.media.prepared import PreparedMedia
from treadle.media.whisper_family import (
    ENCODER,
    MADE,
    PREFIXES,
    WhisperTower,
    read_encoder,
    stack_factor,
)
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import ActivationStage, LinearStage
from treadle.models.towers.whisper import GELU


class Voxtral(WhisperTower):
    """Sounds of any length, padded to whole windows of 30 s."""

    decoders = frozenset({"llama"})
    row_mark = "[AUDIO]"
    before = "[BEGIN_AUDIO]"
    placeholders = (f"{before}{row_mark}", row_mark)
    marks = (row_mark, before)

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.stack = stack_factor(clip)
        if self.n_positions % self.stack:
            what = f"{self.n_positions} positions, of which {self.stack} are one row"
            raise FileError(what, path=clip.gguf.path, expected="a whole number of rows")
        self.projectors = (
            tower_config(
                f"{clip.projector_type}.projector",
                n_given=self.stack * clip.n_embd,
                stem=(
                    LinearStage("mm.a.mlp.1"),
                    ActivationStage(GELU),
                    LinearStage("mm.a.mlp.2"),
                ),
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Cut a sound into windows of 30 s, one input each, the last one padded with silence.
        ``pixels``: its samples, f32 ``[n]`` at 16 kHz.
        """
        n_windows = -(-len(pixels) // self.n_samples)
        n_rows = n_windows * self.n_positions // self.stack
        samples = self.samples_of(pixels, n_rows, max_rows)
        n_samples = n_windows * self.n_samples
        mel = MelSpectrogram(samples, self.n_mels, n_samples)
        inputs = [
            MelInput(mel, range(at, at + self.n_frames), (1, self.n_positions))
            for at in range(0, n_windows * self.n_frames, self.n_frames)
        ]
        return self.sound(samples, inputs, n_rows, n_samples)

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Join each ``stack`` consecutive states to one row."""
        return states.reshape(len(states) // self.stack, -1)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    keys = read_encoder(config, "voxtral")
    n_embd, n_ff = keys["audio.embedding_length"], keys["audio.feed_forward_length"]
    # transformers cuts the states into rows of the FFN's width.
    keys["audio.projector.stack_factor"] = n_ff // n_embd
    return keys


VOXTRAL = HfNames(
    read=_read,
    names={
        **ENCODER,
        "multi_modal_projector.linear_1": "mm.a.mlp.1",
        "multi_modal_projector.linear_2": "mm.a.mlp.2",
    },
    prefixes=PREFIXES,
    made=MADE,
)

"""Ultravox: Whisper's encoder in windows of 30 s, without padding of the last one; eight states are
one media row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from treadle.files.metadata import MetadataReader
from treadle.files.tensor import Tensor
from treadle.media.clip_config import ClipConfig
from treadle.media.hf_projector import HfNames
from treadle.media.mel import HOP
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
from treadle.models.towers.stages import GatedStage, LinearStage, NormStage

RMS_EPS = 1e-6  # of the projector's norms; files state the encoder's
STACK = 8  # states of a row, where a folder does not state it
FEWEST = 2  # frames; shorter sounds are filled with silence
WIDE = "mm.a.mlp.1.weight"  # the rows of up, then those of gate
UP = "mm.a.mlp.1.up"
GATE = "mm.a.mlp.1.gate"


class Ultravox(WhisperTower):
    """Sounds of any length, for decoders that were trained on text alone."""

    row_mark = "<|audio|>"
    placeholders = (row_mark,)
    marks = (row_mark,)

    def __init__(self, clip: ClipConfig) -> None:
        wide = clip.gguf.tensors.get(WIDE)
        if wide is not None:
            clip = clip.with_tensors(_halves(wide))
        super().__init__(clip)
        self.stack = stack_factor(clip)
        self.projectors = (
            tower_config(
                f"{clip.projector_type}.projector",
                n_given=self.stack * clip.n_embd,
                stem=(
                    NormStage("mm.a.norm_pre", centred=False),
                    GatedStage(GATE, UP, "silu"),
                    NormStage("mm.a.norm_mid", centred=False),
                    LinearStage("mm.a.mlp.2"),
                ),
                norm_eps=RMS_EPS,
                norm="rms",
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Cut a sound into windows of 30 s, one input each. ``pixels``: its samples, f32 ``[n]`` at
        16 kHz. A window's last media row may have fewer states, filled with zeros.
        """
        n_frames = max(-(-len(pixels) // HOP), FEWEST)
        firsts = range(0, n_frames, self.n_frames)
        windows = [range(at, min(at + self.n_frames, n_frames)) for at in firsts]
        n_states = [-(-len(window) // 2) for window in windows]
        n_rows = sum(-(-n // self.stack) for n in n_states)
        samples = self.samples_of(pixels, n_rows, max_rows)
        n_samples = n_frames * HOP
        mel = MelSpectrogram(samples, self.n_mels, n_samples)
        inputs = [
            MelInput(mel, window, (1, n)) for window, n in zip(windows, n_states, strict=True)
        ]
        return self.sound(samples, inputs, n_rows, n_samples)

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Join each ``stack`` consecutive states to one row; the last row is filled with zeros."""
        n = -(-len(states) // self.stack)
        padded = np.pad(states, ((0, n * self.stack - len(states)), (0, 0)))
        return padded.reshape(n, -1)


def _halves(tensor: Tensor) -> dict[str, Tensor]:
    """Return the first half of the matrix ``tensor``'s rows as the tensor UP and the second half as
    GATE, by name. Raises FileError for an odd number of rows.
    """
    n, *columns = tensor.shape
    if n % 2 or len(columns) != 1:
        raise tensor.error(f"shape {list(tensor.shape)}", "[n, width] of an even n")
    size = tensor.n_bytes // 2
    made = {}
    for i, name in enumerate((UP, GATE)):
        name = f"{name}.weight"
        place = tensor.offset + i * size
        made[name] = replace(
            tensor, name=name, shape=(n // 2, *columns), n_bytes=size, offset=place
        )
    return made


# -- folders ----------------------------------------------------------------------------------


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    """Return the projector file's keys, by name without ``clip.``, for a folder of Ultravox. The
    decoder may be in another folder; its width is then None. Raises UnsupportedError for projectors
    of versions before 0.5.
    """
    if config.text("projector_act", "swiglu") != "swiglu":
        config.refuse("projector_act", f"{config.get('projector_act')!r:.60} (expected 'swiglu')")
    if not config.flag("projector_ln_mid", False):
        config.refuse("projector_ln_mid", "projectors of versions before 0.5 are not supported")
    for key in ("num_projector_layers", "audio_latency_block_size"):
        if config.get(key):
            config.refuse(key, f"{config.get(key)!r:.60} is not supported")
    keys = read_encoder(config, "ultravox", width=None)
    keys["audio.projector.stack_factor"] = config.integer("stack_factor", STACK)
    return keys


ULTRAVOX = HfNames(
    read=_read,
    names={
        **ENCODER,
        "multi_modal_projector.ln_pre": "mm.a.norm_pre",
        "multi_modal_projector.linear_1": "mm.a.mlp.1",
        "multi_modal_projector.ln_mid": "mm.a.norm_mid",
        "multi_modal_projector.linear_2": "mm.a.mlp.2",
    },
    prefixes=PREFIXES,
    made=MADE,
)

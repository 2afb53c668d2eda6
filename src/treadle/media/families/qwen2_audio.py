"""Qwen2-Audio: Whisper's encoder for sounds of at most 30 s, without padding to a window; a media
row is the mean of two states.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.errors import TreadleError
from treadle.files.metadata import MetadataReader
from treadle.media.clip_config import ClipConfig
from treadle.media.hf_projector import HfNames
from treadle.media.mel import HOP
from treadle.media.mel_input import MelInput, MelSpectrogram
from treadle.media.prepared import PreparedMedia
from treadle.media.sound_buffer import RATE
from treadle.media.whisper_family import ENCODER, MADE, PREFIXES, WhisperTower, read_encoder
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import LinearStage, NormStage

POOL = 2  # states of one row
FEWEST = 3  # frames that give one row
EDGE = 4  # frames behind the last one: neither it nor its neighbour reads reflected samples


class Qwen2Audio(WhisperTower):
    """Sounds of up to one window of 30 s. The tower does not read silence after a sound."""

    decoders = frozenset({"qwen2"})
    row_mark = "<|AUDIO|>"
    before = "<|audio_bos|>"
    behind = "<|audio_eos|>"
    placeholders = (f"{before}{row_mark}{behind}", row_mark)
    marks = (row_mark, before, behind)
    tail = ()  # the last norm follows the means

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.projectors = (
            tower_config(
                f"{clip.projector_type}.projector",
                n_given=clip.n_embd,
                stem=(NormStage("post_ln"), LinearStage("mm.a.fc")),
                norm_eps=clip.norm_eps,
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Prepare a sound as one input of the tower. ``pixels``: its samples, f32 ``[n]`` at 16
        kHz. Raises TreadleError if it is longer than one window of 30 s.
        """
        n_frames = max(-(-len(pixels) // HOP), FEWEST)
        if n_frames > self.n_frames:
            seconds = len(pixels) / RATE
            raise TreadleError(
                f"a sound of {seconds:.1f} s: this model hears at most "
                f"{self.n_samples / RATE:g} s at once: send it in parts"
            )
        n_states = -(-n_frames // 2)
        samples = self.samples_of(pixels, n_states // POOL, max_rows)
        last = min(2 * n_states + 1, self.n_frames)  # the last state's convolutions read so far
        n_samples = min((last + EDGE) * HOP, self.n_samples)
        mel = MelSpectrogram(samples, self.n_mels, n_samples)
        one = MelInput(mel, range(last), (1, n_states))
        return self.sound(samples, [one], n_states // POOL, n_samples)

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the mean of each two consecutive states, f32 ``[len(states) // 2, n_embd]``; a
        single last state is left out.
        """
        n = len(states) // POOL
        means = states[: n * POOL].astype(np.float64).reshape(n, POOL, -1).mean(1)
        return np.asarray(means, np.float32)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    return read_encoder(config, "qwen2a")


QWEN2_AUDIO = HfNames(
    read=_read,
    names={**ENCODER, "multi_modal_projector.linear": "mm.a.fc"},
    prefixes=PREFIXES,
    made=MADE,
)

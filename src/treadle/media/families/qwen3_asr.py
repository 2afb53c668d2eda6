"""Qwen3-ASR: convolutions over pieces of 1 s, then layers over windows of 8 s."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from treadle.files.metadata import MetadataReader
from treadle.media.clip_config import ClipConfig
from treadle.media.convolutions import rows_of_2d
from treadle.media.family import POSITION_TABLE, POSITIONS, GridInputs
from treadle.media.hf_projector import HfNames, part_of
from treadle.media.mel import HOP
from treadle.media.mel_input import MelInput, MelSpectrogram
from treadle.media.prepared import PreparedMedia
from treadle.media.sound_family import SoundFamily
from treadle.media.whisper_family import LAYERS, read_encoder, tower_of_clip
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import ActivationStage, LinearStage, NormStage
from treadle.models.towers.whisper import GELU, convolution_stems

PIECE = 100  # frames whose convolutions and positions stand alone
WINDOW = 800  # frames whose states see each other
N_CONV = 3  # convolutions, each over 3 x 3 in steps of 2
SHORTEST = 8000  # samples; shorter sounds are filled with silence
N_POSITIONS = 1500  # rows of the table in files
SLOWEST = 10000.0  # of the sinusoids


def halved(n: int, times: int = 1) -> int:
    """Return the length, rounded up, of an axis of length ``n`` after ``times`` convolutions in
    steps of 2.
    """
    for _ in range(times):
        n = -(-n // 2)
    return n


N_ROWS = halved(PIECE, N_CONV)  # of a piece: 13


class Qwen3Asr(SoundFamily):
    """Sounds of any length: 13 media rows a second."""

    decoders = frozenset({"qwen3vl", "qwen3vlmoe"})
    row_mark = "<|audio_pad|>"
    before = "<|audio_start|>"
    behind = "<|audio_end|>"
    placeholders = (f"{before}{row_mark}{behind}", row_mark)
    marks = (row_mark, before, behind)
    stem_share = 0.5

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.n_mels = clip.keys.integer("num_mel_bins", lo=1, hi=1024)
        table = clip.floats(POSITION_TABLE)
        if table.ndim != 2 or len(table) < N_ROWS or table.shape[1] != clip.n_embd:
            tensor = clip.gguf.tensors[POSITION_TABLE]
            raise tensor.error(f"shape {list(tensor.shape)}", f"[{N_ROWS} or more, {clip.n_embd}]")
        self._table = table[:N_ROWS]
        names = [f"conv2d.{i}" for i in range(1, N_CONV + 1)]
        channels = [1, *(clip.tensor(f"{name}.weight").shape[0] for name in names)]
        reads = {name: 9 * n_in for name, n_in in zip(names, channels, strict=False)}
        self.stems = convolution_stems(clip.projector_type, reads)
        self.tower = tower_of_clip(
            clip,
            tail=(NormStage("post_ln"),),
            n_given=channels[-1] * halved(self.n_mels, N_CONV),
            stem=(LinearStage("conv_out"),),
        )
        self.projectors = (
            tower_config(
                f"{clip.projector_type}.projector",
                n_given=clip.n_embd,
                stem=(
                    LinearStage("mm.a.mlp.1"),
                    ActivationStage(GELU),
                    LinearStage("mm.a.mlp.2"),
                ),
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Cut a sound into windows of 8 s, one input each. ``pixels``: its samples, f32 ``[n]`` at
        16 kHz. Sounds shorter than SHORTEST samples are padded with silence; samples at the end
        that fill no frame are left out.
        """
        n_samples = max(len(pixels), SHORTEST)
        n_frames = n_samples // HOP
        inputs = []
        for at in range(0, n_frames, WINDOW):
            inputs.append((at, _n_rows(min(WINDOW, n_frames - at))))
        n_rows = sum(n for _, n in inputs)
        samples = self.samples_of(pixels, n_rows, max_rows)
        mel = MelSpectrogram(samples, self.n_mels, n_samples)
        made = [MelInput(mel, range(at, at + -(-n // N_ROWS) * PIECE), (1, n)) for at, n in inputs]
        return self.sound(samples, made, n_rows, n_samples)

    def pieces(self, patches: np.ndarray) -> Sequence[np.ndarray]:
        """Return ``patches``, mel frames f32 ``[n, n_mels]``, cut into pieces of 1 s."""
        return np.split(patches, len(patches) // PIECE)

    def stem_input(self, stem: int, rows: np.ndarray) -> np.ndarray:
        """Return the im2col rows for convolution number ``stem``, which reads a piece as a picture
        of mel bins by frames; after the last convolution, one row for each time step, for the
        tower. ``rows``: the piece's frames for stem 0, else the results of the convolution before.
        """
        if stem == 0:
            return rows_of_2d(rows.T[:, :, None], 2)
        h, w = halved(self.n_mels, stem), halved(PIECE, stem)
        states = rows.reshape(h, w, -1)
        if stem < N_CONV:
            return rows_of_2d(states, 2)
        return np.ascontiguousarray(states.transpose(1, 2, 0).reshape(w, -1))

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the positions of ``grid[1]`` rows, which begin at 0 in each piece of 1 s."""
        return GridInputs(rows={POSITIONS: self._table[np.arange(grid[1]) % N_ROWS]})


def _n_rows(n_frames: int) -> int:
    """Return the number of media rows of a window of ``n_frames`` mel frames."""
    whole, rest = divmod(n_frames, PIECE)
    return whole * N_ROWS + halved(rest, N_CONV)


# -- folders ----------------------------------------------------------------------------------


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    audio = part_of(config, "audio_config")
    for key, expected in (("n_window", PIECE // 2), ("n_window_infer", WINDOW)):
        found = audio.integer(key, expected)
        if found != expected:
            audio.refuse(key, f"{found} frames are not supported (expected {expected})")
    keys = read_encoder(config, "qwen3a")
    keys["audio.projector_type"] = keys.pop("projector_type")
    return keys


def _positions(keys: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the table of sinusoidal positions, computed in f32: projector files have it, folders
    do not.
    """
    n = keys["audio.embedding_length"] // 2
    steps = np.float32(-math.log(SLOWEST) / (n - 1)) * np.arange(n, dtype=np.float32)
    angles = np.arange(N_POSITIONS, dtype=np.float32)[:, None] * np.exp(steps)
    return {"a.position_embd.weight": np.concatenate([np.sin(angles), np.cos(angles)], axis=1)}


def _plane(bias: np.ndarray) -> np.ndarray:
    """Return a convolution's bias ``[n]`` in the shape of projector files: ``[n, 1, 1]``."""
    return bias[:, None, None]


QWEN3_ASR = HfNames(
    read=_read,
    names={
        **LAYERS,
        **{f"audio_tower.conv2d{i}": f"a.conv2d.{i}" for i in range(1, N_CONV + 1)},
        "audio_tower.conv_out": "a.conv_out",
        "audio_tower.ln_post": "a.post_ln",
        **{f"multi_modal_projector.linear_{i}": f"mm.a.mlp.{i}" for i in (1, 2)},
        **{f"audio_tower.proj{i}": f"mm.a.mlp.{i}" for i in (1, 2)},  # of the first folders
    },
    prefixes=("audio_tower.", "multi_modal_projector."),
    made={f"a.conv2d.{i}.bias": _plane for i in range(1, N_CONV + 1)},
    added=_positions,
)

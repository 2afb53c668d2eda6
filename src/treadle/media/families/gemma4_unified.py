"""Gemma 4 12B ("unified"): no towers. A square of pixels, or 40 ms of samples, becomes a media row
by norms and matrix products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.files.metadata import MetadataReader
from treadle.media import pixels as px
from treadle.media.clip_config import ClipConfig
from treadle.media.families.gemma4 import EPS, MARKS, GemmaSquares, read_squares
from treadle.media.family import PATCHES, POSITIONS, GridInputs
from treadle.media.hf_projector import HfNames, colours_first, part_of
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.media.sound_family import SoundFamily
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import AddGivenStage, LinearStage, NormStage

LAYER_NORM_EPS = 1e-5
N_MELS = 128  # in files: llama.cpp requires the key, and nothing reads it


class Gemma4UnifiedVision(GemmaSquares):
    """Gemma 4 12B's pictures: each square's pixels go through a product, with norms, and learned
    positions are added.
    """

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        n = 3 * self.step**2
        norms = [NormStage(f"patch_norm.{i}", eps=LAYER_NORM_EPS) for i in (1, 2, 3)]
        self.tower = tower_config(
            clip.projector_type,
            n_given=n,
            stem=(
                norms[0],
                LinearStage(PATCHES),
                norms[1],
                AddGivenStage(POSITIONS),
                norms[2],
                NormStage("", centred=False),
                LinearStage("mm.input_projection"),
            ),
            norm_eps=EPS,
        )

    def prepare(self, pixels: px.Pixels, max_rows: int | None) -> PreparedMedia:
        """Resize a picture to at most ``max_rows`` media rows and cut it into one patch for each
        row, of values from 0 to 1.
        """
        resized = self.resized(pixels, max_rows)
        values = px.normalise(resized, self.clip.mean, self.clip.std)
        return self.prepared(pixels, resized, px.patches(values, self.step), self.step)

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the learned positions of a grid of patches."""
        return GridInputs(rows={POSITIONS: self.positions(grid)})


class Gemma4UnifiedAudio(SoundFamily):
    """Gemma 4 12B's sound: 640 samples at 16 kHz (40 ms) go through a norm and a product."""

    decoders = frozenset({"gemma4"})
    row_mark = "<|audio|>"
    before = "<|audio>"
    behind = "<audio|>"
    placeholders = (f"{before}{row_mark}{behind}", row_mark)
    marks = MARKS

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.tower = tower_config(
            clip.projector_type,
            n_given=clip.n_embd,
            stem=(NormStage("", centred=False), LinearStage("mm.a.input_projection")),
            norm_eps=EPS,
            norm="rms",
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Cut a sound into media rows of 640 samples, the last one padded with zeros. ``pixels``:
        its samples, f32 ``[n]`` at 16 kHz.
        """
        width = self.clip.n_embd
        n = -(-len(pixels) // width)
        samples = self.samples_of(pixels, n, max_rows)
        rows = np.pad(samples, (0, n * width - len(samples))).reshape(n, width)
        return self.sound(samples, [TowerInput(rows, (1, n))], n, n * width)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    sound = config.within("audio_config")
    keys = read_squares(config, preprocessor, vision)
    keys |= {
        "vision.projector_type": "gemma4uv",
        "vision.embedding_length": vision.integer("mm_embed_dim"),
        **no_layers("vision"),
    }
    if sound is not None:
        keys |= {
            "has_audio_encoder": True,
            "audio.projector_type": "gemma4ua",
            "audio.embedding_length": sound.integer("audio_embed_dim"),
            "audio.projection_dim": keys["vision.projection_dim"],
            "audio.num_mel_bins": N_MELS,
            **no_layers("audio"),
        }
    return keys


def no_layers(modality: str) -> dict[str, Any]:
    """Return the keys, by name without ``clip.``, that llama.cpp requires for a tower without
    layers: sizes of 0, and an epsilon. ``modality``: "vision" or "audio".
    """
    zero = ("feed_forward_length", "block_count", "attention.head_count")
    return {
        **{f"{modality}.{key}": 0 for key in zero},
        f"{modality}.attention.layer_norm_epsilon": EPS,
    }


GEMMA4_UNIFIED = HfNames(
    read=_read,
    names={
        "vision_embedder.patch_ln1": "v.patch_norm.1",
        "vision_embedder.patch_dense": "v.patch_embd",
        "vision_embedder.patch_ln2": "v.patch_norm.2",
        "vision_embedder.pos_embedding": "v.position_embd.weight",
        "vision_embedder.pos_norm": "v.patch_norm.3",
        "embed_vision.embedding_projection": "mm.input_projection",
        "embed_audio.embedding_projection": "mm.a.input_projection",
    },
    prefixes=("vision_embedder.", "embed_vision.", "embed_audio."),
    made={
        "v.patch_embd.weight": colours_first,
        "v.patch_norm.1.weight": colours_first,
        "v.patch_norm.1.bias": colours_first,
        "v.position_embd.weight": lambda table: table.transpose(1, 0, 2),
    },
)

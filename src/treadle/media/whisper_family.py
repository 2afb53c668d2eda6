"""The base of families with Whisper's encoder: two convolutions, learned positions, layers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.files.metadata import MetadataReader
from treadle.media.clip_config import ClipConfig
from treadle.media.convolutions import rows_of_1d
from treadle.media.family import POSITION_TABLE, POSITIONS, GridInputs
from treadle.media.hf_projector import part_of
from treadle.media.mel import HOP
from treadle.media.sound_family import SoundFamily
from treadle.models.towers.stages import NormStage
from treadle.models.towers.whisper import CONVOLUTIONS, STEPS, whisper_stems, whisper_tower

if TYPE_CHECKING:
    from treadle.models.towers.config import TowerConfig
    from treadle.models.towers.stages import TowerStage

EPS = 1e-5
TEXT_WIDTH = 4096  # transformers' own, which Qwen2-Audio's folders omit


class WhisperTower(SoundFamily):
    """Base of families whose tower is Whisper's encoder. ``tail``: stages after its layers, by
    default the last norm.
    """

    stem_share = 0.02
    tail: tuple[TowerStage, ...] = (NormStage("post_ln"),)

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.n_mels = clip.keys.integer("num_mel_bins", lo=1, hi=1024)
        self._table = clip.floats(POSITION_TABLE)
        if self._table.ndim != 2 or self._table.shape[1] != clip.n_embd:
            tensor = clip.gguf.tensors[POSITION_TABLE]
            raise tensor.error(f"shape {list(tensor.shape)}", f"[n, {clip.n_embd}]")
        for name in CONVOLUTIONS:
            matrix = clip.tensor(f"{name}.weight")
            if matrix.shape[0] != clip.n_embd:
                raise matrix.error(f"shape {list(matrix.shape)}", f"{clip.n_embd} rows")
        self.stems = whisper_stems(clip.projector_type, self.n_mels, clip.n_embd)
        self.tower = tower_of_clip(clip, self.tail)

    @property
    def n_positions(self) -> int:
        """Most rows of one pass of the tower's layers: those of the file's table of positions."""
        return len(self._table)

    @property
    def n_frames(self) -> int:
        """Most mel frames of one pass."""
        return prod(STEPS) * self.n_positions

    @property
    def n_samples(self) -> int:
        """Most samples of one pass, at 16 kHz."""
        return HOP * self.n_frames

    def stem_input(self, stem: int, rows: np.ndarray) -> np.ndarray:
        """Return the im2col rows for convolution number ``stem``. ``rows``: mel frames
        ``[n, n_mels]`` for stem 0, else the results of the convolution before; after the last one
        they are returned unchanged, for the tower.
        """
        return rows if stem == len(self.stems) else rows_of_1d(rows, STEPS[stem])

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the learned positions of the first ``grid[1]`` rows."""
        return GridInputs(rows={POSITIONS: self._table[: grid[1]]})


def tower_of_clip(
    clip: ClipConfig,
    tail: tuple[TowerStage, ...],
    n_given: int = 0,
    stem: tuple[TowerStage, ...] = (),
) -> TowerConfig:
    """Return the configuration of Whisper's encoder with the sizes of a projector file. ``tail``,
    ``n_given``, ``stem``: as in ``whisper_tower``.
    """
    return whisper_tower(
        clip.projector_type,
        n_embd=clip.n_embd,
        n_layer=clip.n_layer,
        n_head=clip.n_head,
        n_ff=clip.n_ff,
        norm_eps=clip.norm_eps,
        tail=tail,
        n_given=n_given,
        stem=stem,
    )


def stack_factor(clip: ClipConfig) -> int:
    """Return how many consecutive states are joined to one media row, from the file's key. Raises
    FileError if it is missing.
    """
    return clip.keys.integer("projector.stack_factor", lo=1, hi=64)


def read_encoder(
    config: MetadataReader, projector_type: str, *, width: int | None = TEXT_WIDTH
) -> dict[str, Any]:
    """Return the projector file's keys, by name without ``clip.``, for the encoder of a Hugging
    Face folder (its ``audio_config``). ``width``: the decoder's width if ``text_config`` omits it;
    None: the folder may lack ``text_config``, and the key of the width may be None.
    """
    audio = part_of(config, "audio_config")
    text = config.within("text_config") if width is None else part_of(config, "text_config")

    def size(names: tuple[str, str]) -> int:
        return audio.integer(names[0] if audio.get(names[0]) is not None else names[1])

    return {
        "has_audio_encoder": True,
        "projector_type": projector_type,
        "audio.embedding_length": size(("d_model", "hidden_size")),
        "audio.feed_forward_length": size(("encoder_ffn_dim", "intermediate_size")),
        "audio.block_count": size(("encoder_layers", "num_hidden_layers")),
        "audio.attention.head_count": size(("encoder_attention_heads", "num_attention_heads")),
        "audio.attention.layer_norm_epsilon": EPS,
        "audio.num_mel_bins": audio.integer("num_mel_bins"),
        "audio.projection_dim": _width(text, width),
    }


def _width(text: MetadataReader | None, usual: int | None) -> int | None:
    if text is None or (usual is None and text.get("hidden_size") is None):
        return usual
    return text.integer("hidden_size", usual)


LAYERS: Mapping[str, str] = {
    "audio_tower.layers.{}.self_attn_layer_norm": "a.blk.{}.ln1",
    "audio_tower.layers.{}.final_layer_norm": "a.blk.{}.ln2",
    "audio_tower.layers.{}.self_attn.q_proj": "a.blk.{}.attn_q",
    "audio_tower.layers.{}.self_attn.k_proj": "a.blk.{}.attn_k",
    "audio_tower.layers.{}.self_attn.v_proj": "a.blk.{}.attn_v",
    "audio_tower.layers.{}.self_attn.out_proj": "a.blk.{}.attn_out",
    "audio_tower.layers.{}.fc1": "a.blk.{}.ffn_up",
    "audio_tower.layers.{}.fc2": "a.blk.{}.ffn_down",
}
ENCODER: Mapping[str, str] = {
    **LAYERS,
    "audio_tower.conv1": "a.conv1d.1",
    "audio_tower.conv2": "a.conv1d.2",
    "audio_tower.embed_positions": "a.position_embd",
    "audio_tower.layer_norm": "a.post_ln",
}
PREFIXES = ("audio_tower.", "multi_modal_projector.")


def column(bias: np.ndarray) -> np.ndarray:
    """Return a convolution's bias ``[n]`` in the shape of projector files: ``[n, 1]``."""
    return bias[:, None]


MADE = {"a.conv1d.1.bias": column, "a.conv1d.2.bias": column}

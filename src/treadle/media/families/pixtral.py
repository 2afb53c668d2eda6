"""Pixtral, Mistral Small 3.x, Ministral 3 (``pixtral``): pictures of any shape; in the prompt a
special token ends each line of media rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.media.family import PATCHES, GridInputs, PreparedMedia
from treadle.media.hf_projector import HfNames, part_of
from treadle.media.picture_family import CLIP_MEAN, CLIP_STD, PictureFamily, join_patches
from treadle.media.pixels import resize
from treadle.media.tiles import Size, check_rows
from treadle.models.rope import Rope
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import ActivationStage, LinearStage, NormStage

if TYPE_CHECKING:
    from treadle.files.metadata import MetadataReader
    from treadle.media.clip_config import ClipConfig

ROW = "[IMG]"
BREAK = "[IMG_BREAK]"
END = "[IMG_END]"
BASE = 10000.0  # of the rotation; projector files do not name it
EPS = 1e-5  # of the norms; that of joined patches has the decoder's, which is the same
HALVES = "treadle.rope_halves"  # of folders: pairs that turn lie half a head apart
DEFAULT_ROWS = 576  # on a CPU, of towers that join patches: 2304 patches of 2 x 2
DEFAULT_PATCHES = 1024  # of the others, whose every patch is a row


def scaled_size(size: Size, longest: int, step: int, max_rows: int | None) -> Size:
    """Return the size of the resized picture: at most ``longest`` pixels a side, rounded up to
    multiples of ``step`` (a media row's side), and of at most ``max_rows`` media rows (None: no
    such limit).

    Raises TreadleError if ``max_rows`` is less than one row or one column of the picture.
    """
    while True:
        height, width = size
        ratio = max(height, width) / longest
        if ratio > 1:
            height = max(1, math.floor(height / ratio))
            width = max(1, math.floor(width / ratio))
        rows = (height - 1) // step + 1
        columns = (width - 1) // step + 1
        if max_rows is None or rows * columns <= max_rows:
            return rows * step, columns * step
        if longest <= step:
            check_rows(rows * columns, max_rows)
        longest = max(step, min(longest, max(height, width)) - step)


def layout(grid: Size) -> tuple[str | range, ...]:
    """Return the prompt's media row ranges, one for each line of the ``grid`` of media rows, and
    after each a special token: BREAK, or END after the last line.
    """
    rows, columns = grid
    parts: list[str | range] = []
    for row in range(rows):
        parts += [range(row * columns, (row + 1) * columns), BREAK]
    parts[-1] = END
    return tuple(parts)


def axial_angles(grid: Size, dims: int) -> np.ndarray:
    """Return the rotation angles of a grid's patches, f64 ``[rows * columns, dims / 2]``: the first
    half of the pairs turns by the row at the even frequencies, the second half by the column at the
    odd ones.
    """
    rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    frequencies = BASE ** (-np.arange(0, dims, 2) / dims)
    by_row = rows[:, None] * frequencies[::2]
    by_column = columns[:, None] * frequencies[1::2]
    return np.concatenate([by_row, by_column], axis=1)


class Pixtral(PictureFamily):
    """Pictures for a tower with rotations by row and column and without learned positions. Mistral
    Small 3.x joins 2 x 2 patches to a media row, Pixtral 12B makes one of each patch.
    """

    placeholders = (ROW,)
    row_mark = ROW
    marks = (ROW, BREAK, END)

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.joined_side = clip.keys.integer("spatial_merge_size", 1, hi=8)
        step = self.joined_side * clip.patch_size
        if clip.image_size < step:
            clip.keys.fail("image_size", f"is {clip.image_size}", f"at least {step}")
        self.dims = clip.n_embd // clip.n_head
        if self.dims % 4:
            expected = f"one that divides {clip.n_embd} into multiples of 4"
            clip.keys.fail("attention.head_count", f"is {clip.n_head}", expected)
        has_norm = clip.has("mm.input_norm.weight")  # of each patch, before they are joined
        eps = clip.keys.number("projector.layer_norm_epsilon", EPS, lo=0.0, hi=1.0)
        norms = (NormStage("mm.input_norm", centred=False, eps=eps),) if has_norm else ()
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), NormStage("pre_ln", centred=False)),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=self.layers(gated=True, rope=True),
            tail=norms,
            activation="silu",
            norm="rms",
            # llama.cpp's converter reorders queries and keys, so that the pairs are neighbours.
            pairs="neox" if clip.keys.flag(HALVES, False) else "norm",
            ropes=(Rope(self.dims, BASE),),
        )
        merger = (LinearStage("mm.patch_merger"),) if self.joined_side > 1 else ()
        self.projectors = (
            tower_config(
                f"{clip.projector_type} projector",
                n_given=clip.n_embd * self.joined_side**2,
                stem=(
                    *merger,
                    LinearStage("mm.1"),
                    ActivationStage("gelu_erf"),
                    LinearStage("mm.2"),
                ),
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Resize a picture to at most ``max_rows`` media rows; by default DEFAULT_ROWS, or
        DEFAULT_PATCHES if each patch is a row.
        """
        clip = self.clip
        bound = DEFAULT_ROWS if self.joined_side > 1 else DEFAULT_PATCHES
        step = clip.patch_size * self.joined_side
        most = bound if max_rows is None else max_rows
        size = scaled_size(self.checked_size(pixels), clip.image_size, step, most)
        grid = size[0] // step, size[1] // step
        scaled = resize(pixels, size, "bicubic")
        return self.image(pixels, [scaled], layout=layout(grid), resized=size)

    def grid_inputs(self, grid: Size) -> GridInputs:
        """Return the rotations of a grid of patches, by row and column."""
        angles = axial_angles(grid, self.dims)
        turns = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        return GridInputs(ropes=(turns.astype(np.float32),))

    def projector_input(self, states: np.ndarray, grid: Size) -> np.ndarray:
        """Join the states of each block of patches of the ``grid`` to one row, with the values in
        the order of torch's unfold; unchanged if blocks are single patches.
        """
        if self.joined_side == 1:
            return states
        return join_patches(states, grid, self.joined_side, "values")


PIXTRAL_NAMES = {
    "vision_tower.transformer.layers.{}.attention_norm": "v.blk.{}.ln1",
    "vision_tower.transformer.layers.{}.ffn_norm": "v.blk.{}.ln2",
    "vision_tower.transformer.layers.{}.attention.q_proj": "v.blk.{}.attn_q",
    "vision_tower.transformer.layers.{}.attention.k_proj": "v.blk.{}.attn_k",
    "vision_tower.transformer.layers.{}.attention.v_proj": "v.blk.{}.attn_v",
    "vision_tower.transformer.layers.{}.attention.o_proj": "v.blk.{}.attn_out",
    "vision_tower.transformer.layers.{}.feed_forward.gate_proj": "v.blk.{}.ffn_gate",
    "vision_tower.transformer.layers.{}.feed_forward.up_proj": "v.blk.{}.ffn_up",
    "vision_tower.transformer.layers.{}.feed_forward.down_proj": "v.blk.{}.ffn_down",
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.ln_pre": "v.pre_ln",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
}


def read_pixtral(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    """Return the projector file's keys, by name without ``clip.``, for a folder of Pixtral or
    Mistral Small 3.x.
    """
    vision = part_of(config, "vision_config")
    text = config.within("text_config") or config
    size = preprocessor.within("size")
    image_size = vision.integer("image_size", 1024)
    rope = vision.within("rope_parameters") or vision
    if rope.number("rope_theta", BASE, lo=1.0) != BASE:
        rope.refuse("rope_theta", f"expected {BASE:g}")
    return {
        "has_vision_encoder": True,
        "projector_type": "pixtral",
        "use_silu": True,
        "vision.embedding_length": vision.integer("hidden_size", 1024),
        "vision.feed_forward_length": vision.integer("intermediate_size", 4096),
        "vision.block_count": vision.integer("num_hidden_layers", 24),
        "vision.attention.head_count": vision.integer("num_attention_heads", 16),
        "vision.attention.layer_norm_epsilon": EPS,
        "vision.projector.layer_norm_epsilon": text.get("rms_norm_eps"),
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": size.integer("longest_edge", image_size) if size else image_size,
        "vision.patch_size": vision.integer("patch_size", 16),
        "vision.spatial_merge_size": config.get("spatial_merge_size"),
        f"vision.{HALVES}": True,
        "vision.image_mean": preprocessor.get("image_mean") or CLIP_MEAN,
        "vision.image_std": preprocessor.get("image_std") or CLIP_STD,
    }


def _read_mistral3(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    keys = read_pixtral(config, preprocessor)
    return {**keys, "vision.spatial_merge_size": config.integer("spatial_merge_size", 2)}


MISTRAL3 = HfNames(
    read=_read_mistral3,
    names={
        **PIXTRAL_NAMES,
        "multi_modal_projector.norm": "mm.input_norm",
        "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    },
    prefixes=("vision_tower.", "multi_modal_projector."),
)

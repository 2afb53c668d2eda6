"""Llama 4 (``llama4``): square tiles of a canvas close to the picture's shape, then the whole
picture.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.media.family import PATCHES, POSITIONS, GridInputs, PreparedMedia
from treadle.media.hf_projector import HfNames, colours, part_of
from treadle.media.picture_family import PictureFamily, join_patches, with_stems
from treadle.media.pixels import axial_rotations, resize
from treadle.media.tiles import Size, tiles_of, tiles_within
from treadle.models.rope import Rope
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import ActivationStage, AddGivenStage, LinearStage, NormStage

if TYPE_CHECKING:
    from treadle.files.metadata import MetadataReader
    from treadle.media.clip_config import ClipConfig

BEGIN = "<|image_start|>"
END = "<|image_end|>"
WHOLE = "<|image|>"
ROW = "<|patch|>"
NEXT_COLUMN = "<|tile_x_separator|>"
NEXT_ROW = "<|tile_y_separator|>"
BASE = 10000.0  # of the rotation; the files do not name it
MOST_TILES = 16  # of the published models; files do not say it
DEFAULT_TILES = 8  # on a CPU: a tile has 144 rows


def canvases(n_max: int, tile: int) -> list[Size]:
    """Return the sizes in pixels of all grids of at most ``n_max`` tiles of ``tile`` pixels a side:
    grids of one ratio together, those with most tiles first.
    """
    shapes: dict[float, list[Size]] = {}
    for n in range(n_max, 0, -1):
        for rows in (factor for factor in range(1, n + 1) if n % factor == 0):
            columns = n // rows
            shapes.setdefault(rows / columns, []).append((rows * tile, columns * tile))
    return [canvas for group in shapes.values() for canvas in group]


def best_canvas(size: Size, sizes: list[Size]) -> Size:
    """Return that of the canvas ``sizes`` that a picture of ``size`` fits with the least
    enlargement, or, if none is large enough, with the least reduction; of several, the smallest.
    """
    sides = np.asarray(sizes, np.float32) / np.asarray(size, np.float32)
    scales = sides.min(1)
    larger = scales[scales >= 1]
    scale = larger.min() if len(larger) else scales.max()
    fitting = [canvas for canvas, each in zip(sizes, scales, strict=True) if each == scale]
    return min(fitting, key=lambda canvas: canvas[0] * canvas[1])


def fitted_size(size: Size, canvas: Size, tile: int) -> Size:
    """Return the size to which a picture is scaled, in its ratio, to fit a canvas; rounded down. A
    picture is enlarged to at most one tile of ``tile`` pixels a side.
    """
    height, width = size
    room = min(max(height, tile), canvas[0]), min(max(width, tile), canvas[1])
    across = room[1] / width
    down = room[0] / height
    if across < down:
        return max(1, min(math.floor(height * across), room[0])), room[1]
    return room[0], max(1, min(math.floor(width * down), room[1]))


def cut(pixels: np.ndarray, tile: int, n_max: int) -> tuple[list[np.ndarray], Size]:
    """Return a picture's tiles, row by row, from a black canvas with the picture at its upper left,
    followed by the whole picture squeezed to a tile if there are several; and the number of rows
    and columns of tiles. ``tile``: pixels of a tile's side; ``n_max``: most tiles of the canvas.
    """
    size = pixels.shape[0], pixels.shape[1]
    canvas = best_canvas(size, canvases(n_max, tile))
    grid = canvas[0] // tile, canvas[1] // tile
    height, width = fitted_size(size, canvas, tile)
    board = np.zeros((*canvas, 3), np.uint8)
    board[:height, :width] = resize(pixels, (height, width), "bilinear")
    tiles = tiles_of(board, tile, tile)
    if len(tiles) == 1:
        return tiles, grid
    return [*tiles, resize(pixels, (tile, tile), "bilinear")], grid


def layout(grid: Size, per_tile: int) -> tuple[str | range, ...]:
    """Return the prompt's special tokens and media row ranges for ``grid`` (rows and columns of)
    tiles, then the whole picture; each has ``per_tile`` media rows.
    """
    rows, columns = grid
    parts: list[str | range] = []
    text = BEGIN
    first = 0
    for _ in range(rows if rows * columns > 1 else 0):
        for column in range(columns):
            parts += [text, range(first, first + per_tile)]
            first += per_tile
            text = NEXT_COLUMN if column + 1 < columns else NEXT_ROW
    parts += [f"{text}{WHOLE}", range(first, first + per_tile), END]
    return tuple(parts)


class Llama4Vision(PictureFamily):
    """Pictures for a tower with learned positions and rotations by column and row, both numbered
    from 1. The class token is last and is not rotated. Blocks of 2 x 2 patches are joined.
    """

    decoders = frozenset({"llama4"})
    placeholders = (WHOLE,)
    row_mark = ROW
    marks = (BEGIN, END, WHOLE, ROW, NEXT_COLUMN, NEXT_ROW)
    class_row = "last"

    def __init__(self, clip: ClipConfig) -> None:
        if not clip.has("blk.0.ffn_norm.weight"):
            # llama.cpp's converter of 2026 names the norm before the FFN as if it came after
            # attention.
            clip = with_stems(clip, {"post_attention_norm": "ffn_norm"})
        super().__init__(clip)
        self.joined_side = self.scale_factor(2)
        self.check_square(self.joined_side)
        self.dims = clip.n_embd // clip.n_head
        if self.dims % 4:
            expected = f"one that divides {clip.n_embd} into multiples of 4"
            clip.keys.fail("attention.head_count", f"is {clip.n_head}", expected)
        self.max_tiles = clip.keys.integer("preproc_max_tiles", MOST_TILES, hi=64)
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), AddGivenStage(POSITIONS), NormStage("pre_ln")),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=self.layers(rope=True),
            tail=(NormStage("post_ln"),),
            activation="gelu_erf",
            pairs="norm",
            ropes=(Rope(self.dims, BASE),),
        )
        self._positions = self.position_rows()
        self.projectors = (
            tower_config(
                f"{clip.projector_type} projector",
                n_given=clip.n_embd * self.joined_side**2,
                stem=(
                    LinearStage("mm.model.mlp.1"),
                    ActivationStage("gelu_erf"),
                    LinearStage("mm.model.mlp.2"),
                    ActivationStage("gelu_erf"),
                    LinearStage("mm.model.fc"),
                ),
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Cut a picture into tiles of at most ``max_rows`` media rows together, by default at most
        DEFAULT_TILES tiles and the whole picture.
        """
        side = self.clip.image_size
        per_tile = (self.side // self.joined_side) ** 2
        n_max = min(DEFAULT_TILES, self.max_tiles)
        if max_rows is not None:
            n_max = tiles_within(max_rows, per_tile, self.max_tiles)
        self.checked_size(pixels)
        tiles, grid = cut(pixels, side, n_max)
        resized = grid[0] * side, grid[1] * side
        return self.image(pixels, tiles, layout=layout(grid, per_tile), resized=resized)

    def grid_inputs(self, grid: Size) -> GridInputs:
        """Return a tile's learned positions, and its rotations by the column and row of each patch
        of the ``grid``; the class token's angle is 0.
        """
        rows, columns = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
        turns = axial_rotations(columns + 1, rows + 1, self.dims, BASE)
        still = np.zeros((1, *turns.shape[1:]), np.float32)
        still[:, 0] = 1.0
        return GridInputs({POSITIONS: self._positions}, (np.concatenate([turns, still]),))

    def projector_input(self, states: np.ndarray, grid: Size) -> np.ndarray:
        """Drop the class token's state, and join the states of each block of patches to one row."""
        return join_patches(self.patches_alone(states), grid, self.joined_side)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    text = config.within("text_config") or config
    rope = vision.within("rope_parameters") or vision
    if rope.number("rope_theta", BASE, lo=1.0) != BASE:
        rope.refuse("rope_theta", f"expected {BASE:g}")
    return {
        "has_vision_encoder": True,
        "projector_type": "llama4",
        "use_gelu": True,
        "vision.embedding_length": vision.integer("hidden_size", 768),
        "vision.feed_forward_length": vision.integer("intermediate_size", 5632),
        "vision.block_count": vision.integer("num_hidden_layers", 34),
        "vision.attention.head_count": vision.integer("num_attention_heads", 16),
        "vision.attention.layer_norm_epsilon": vision.number("norm_eps", 1e-5, lo=0.0),
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": vision.integer("image_size", 448),
        "vision.patch_size": vision.integer("patch_size", 14),
        "vision.projector.scale_factor": round(
            1 / vision.number("pixel_shuffle_ratio", 0.5, lo=0.1)
        ),
        "vision.preproc_max_tiles": preprocessor.integer("max_patches", MOST_TILES, hi=64),
        **colours(preprocessor, 0.5, 0.5),
    }


LLAMA4 = HfNames(
    read=_read,
    names={
        "vision_model.class_embedding": "v.class_embd",
        "vision_model.positional_embedding_vlm": "v.position_embd.weight",
        "vision_model.patch_embedding.linear": "v.patch_embd",
        "vision_model.layernorm_pre": "v.pre_ln",
        "vision_model.layernorm_post": "v.post_ln",
        "vision_model.model.layers.{}.input_layernorm": "v.blk.{}.ln1",
        "vision_model.model.layers.{}.post_attention_layernorm": "v.blk.{}.ln2",
        "vision_model.model.layers.{}.self_attn.q_proj": "v.blk.{}.attn_q",
        "vision_model.model.layers.{}.self_attn.k_proj": "v.blk.{}.attn_k",
        "vision_model.model.layers.{}.self_attn.v_proj": "v.blk.{}.attn_v",
        "vision_model.model.layers.{}.self_attn.o_proj": "v.blk.{}.attn_out",
        "vision_model.model.layers.{}.mlp.fc1": "v.blk.{}.ffn_up",
        "vision_model.model.layers.{}.mlp.fc2": "v.blk.{}.ffn_down",
        "vision_model.vision_adapter.mlp.fc1": "mm.model.mlp.1",
        "vision_model.vision_adapter.mlp.fc2": "mm.model.mlp.2",
        "multi_modal_projector.linear_1": "mm.model.fc",
    },
    prefixes=("vision_model.", "multi_modal_projector."),
)

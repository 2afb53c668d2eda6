"""InternVL 2.5 to 3.5 (``internvl``): square tiles and the whole picture, nothing between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treadle.media.family import GridInputs, PreparedMedia
from treadle.media.picture_family import PATCHES, POSITIONS, PictureFamily, join_patches
from treadle.media.pixels import resize
from treadle.media.tiles import Size, closest_grid, tiles_of, tiles_within
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import ActivationStage, AddGivenStage, LinearStage, NormStage

if TYPE_CHECKING:
    from treadle.media.clip_config import ClipConfig

BEGIN = "<img>"
END = "</img>"
ROW = "<IMG_CONTEXT>"
MOST_TILES = 12  # of the published models; files of llama.cpp's converter may not say it
DEFAULT_TILES = 4  # on a CPU: a tile has 256 rows
MLP = "mm.model.mlp"
PROJECTOR_EPS = 1e-5  # of its norm, torch's default
# Products whose results the layer scales multiply.
SCALED = {"ls1": "attn_output", "ls2": "ffn_down"}


def cut(pixels: np.ndarray, tile: int, n_min: int, n_max: int) -> tuple[list[np.ndarray], Size]:
    """Return a picture as ``n_min`` to ``n_max`` square tiles of ``tile`` pixels a side, row by
    row, and, where there are several, the whole picture as one more; and the size of the tiles
    together.
    """
    rows, columns = closest_grid((pixels.shape[0], pixels.shape[1]), tile, n_min, n_max)
    size = rows * tile, columns * tile
    tiles = tiles_of(resize(pixels, size, "bicubic"), tile, tile)
    if len(tiles) == 1:
        return tiles, size
    return [*tiles, resize(pixels, (tile, tile), "bicubic")], size


def with_layer_scales(clip: ClipConfig) -> ClipConfig:
    """Return the file with each layer's scales (``ls1``, ``ls2``), by which the results of two
    products are multiplied, multiplied into the matrices and biases of these. They become f32.

    Raises FileError for scales or matrices of a wrong shape.
    """
    made: dict[str, np.ndarray] = {}
    for i in range(clip.n_layer):
        for scale, stem in SCALED.items():
            if not clip.has(f"blk.{i}.{scale}.weight"):
                continue
            name = f"blk.{i}.{stem}"
            gains = clip.floats(f"blk.{i}.{scale}.weight").reshape(-1)
            matrix = clip.floats(f"{name}.weight")
            if matrix.shape[0] != len(gains):
                tensor = clip.gguf.tensors[f"blk.{i}.{scale}.weight"]
                raise tensor.error(f"shape {list(tensor.shape)}", f"[{matrix.shape[0]}]")
            made[f"{name}.weight"] = matrix * gains[:, None]
            if clip.has(f"{name}.bias"):
                made[f"{name}.bias"] = clip.floats(f"{name}.bias") * gains
    return clip.replaced(made) if made else clip


class InternVl(PictureFamily):
    """An InternViT tower of square tiles with a class token; 2 x 2 patches are joined."""

    placeholders = (f"{BEGIN}{ROW}{END}", ROW)
    row_mark = ROW
    marks = (BEGIN, END, ROW)
    class_row = "first"

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(with_layer_scales(clip))
        clip = self.clip
        self.joined_side = self.scale_factor(2)
        self.check_square(self.joined_side)
        self.min_tiles = clip.keys.integer("preproc_min_tiles", 1, hi=64)
        self.max_tiles = clip.keys.integer(
            "preproc_max_tiles", MOST_TILES, lo=self.min_tiles, hi=64
        )
        norms = (NormStage("post_ln"),) if clip.has("post_ln.weight") else ()
        # The tower of 6 billion parameters has RMS norms, the smaller ones LayerNorms.
        centred = clip.has("blk.0.attn_norm.bias")
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), AddGivenStage(POSITIONS)),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=self.layers(),
            tail=norms,
            activation="gelu_erf",
            norm="layer" if centred else "rms",
        )
        self.projectors = (
            tower_config(
                f"{clip.projector_type} projector",
                n_given=clip.n_embd * self.joined_side**2,
                stem=(
                    NormStage(f"{MLP}.0", eps=PROJECTOR_EPS),
                    LinearStage(f"{MLP}.1"),
                    ActivationStage("gelu_erf"),
                    LinearStage(f"{MLP}.3"),
                ),
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        side = self.clip.image_size
        per_tile = (self.side // self.joined_side) ** 2
        n_max = min(DEFAULT_TILES, self.max_tiles)
        if max_rows is not None:
            n_max = tiles_within(max_rows, per_tile, self.max_tiles)
        self.size_of(pixels)
        tiles, resized = cut(pixels, side, min(self.min_tiles, n_max), n_max)
        layout = (BEGIN, range(len(tiles) * per_tile), END)
        return self.image(pixels, tiles, layout=layout, resized=resized)

    def grid_inputs(self, grid: Size) -> GridInputs:
        return GridInputs({POSITIONS: self.position_rows()})

    def joined(self, states: np.ndarray, grid: Size) -> np.ndarray:
        return join_patches(self.patches_alone(states), grid, self.joined_side)

"""LFM2-VL (``lfm2``): a SigLIP 2 tower for pictures of any shape; large ones are cut into square
tiles, followed by the whole picture at a smaller size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.media.families.gemma3 import siglip_names
from treadle.media.family import PATCHES, POSITIONS, GridInputs, PreparedMedia, square_table
from treadle.media.hf_projector import HfNames, colours, part_of, patch_convolution
from treadle.media.picture_family import PictureFamily, join_patches
from treadle.media.pixels import resize
from treadle.media.tiles import Size, check_rows, closest_grid, tiles_of
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import ActivationStage, AddGivenStage, LinearStage, NormStage

if TYPE_CHECKING:
    from treadle.files.metadata import MetadataReader
    from treadle.media.clip_config import ClipConfig

BEGIN = "<|image_start|>"
END = "<|image_end|>"
ROW = "<image>"
THUMBNAIL = "<|img_thumbnail|>"
MOST_TILES = 10  # rows and columns that tokenizers have names for
DEFAULT_ROWS = 1280  # on a CPU: four tiles and the whole picture
PROJECTOR_EPS = 1e-5  # of its norm, torch's default


@dataclass(frozen=True)
class Lfm2Limits:
    """Limits of a picture in media rows, and of its tiles. The defaults, for files that do not
    state them, are those of the published models (LiquidAI/LFM2-VL-1.6B's
    preprocessor_config.json).
    """

    min_rows: int = 64  # of the whole picture, resized
    max_rows: int = 256  # of the same
    tile: int = 512  # pixels of a tile's side
    min_tiles: int = 2  # of a picture that is cut, as max_tiles
    max_tiles: int = 10
    tolerance: float = 2.0  # a picture of more than ``tolerance * max_rows`` rows is cut


def scaled_size(size: Size, step: int, limits: Lfm2Limits) -> Size:
    """Return the size in pixels to which the whole picture of ``size`` is resized: multiples of
    ``step`` (a media row's side), within ``min_rows`` and ``max_rows`` of ``limits``.
    """
    height, width = size
    rows = max(1, round(height / step))
    columns = max(1, round(width / step))
    if rows * columns > limits.max_rows:
        scale = math.sqrt(height * width / (limits.max_rows * step * step))
        rows = max(1, math.floor(height / scale / step))
        columns = max(1, math.floor(width / scale / step))
        # A long picture's shorter side cannot shrink below one row; transformers exceeds small
        # limits there.
        rows = min(rows, limits.max_rows // columns) or 1
        columns = min(columns, limits.max_rows // rows)
    elif rows * columns < limits.min_rows:
        scale = math.sqrt(limits.min_rows * step * step / (height * width))
        rows = math.ceil(height * scale / step)
        columns = math.ceil(width * scale / step)
    return rows * step, columns * step


def tile_grid(size: Size, step: int, limits: Lfm2Limits) -> Size:
    """Return the number of rows and columns of tiles for a picture of ``size``; (1, 1) if it is not
    cut. ``step``: pixels of a media row's side.
    """
    rows = max(1, round(size[0] / step))
    columns = max(1, round(size[1] / step))
    if rows * columns <= limits.max_rows * limits.tolerance or limits.max_tiles < 2:
        return 1, 1
    n_min = min(limits.min_tiles, limits.max_tiles)
    return closest_grid(size, limits.tile, n_min, limits.max_tiles)


def cut(pixels: np.ndarray, step: int, limits: Lfm2Limits) -> tuple[list[np.ndarray], Size]:
    """Return a picture's tiles, row by row, and after them the whole picture in its own shape; and
    the number of rows and columns of tiles. For a picture that is not cut, only the whole and (1,
    1). ``step``: pixels of a media row's side.
    """
    size = pixels.shape[0], pixels.shape[1]
    whole = resize(pixels, scaled_size(size, step, limits), "bilinear")
    grid = tile_grid(size, step, limits)
    if grid == (1, 1):
        return [whole], grid
    side = limits.tile
    canvas = resize(pixels, (grid[0] * side, grid[1] * side), "bilinear")
    return [*tiles_of(canvas, side, side), whole], grid


def layout(grid: Size, per_tile: int, per_whole: int) -> tuple[str | range, ...]:
    """Return the prompt's special tokens and media row ranges for ``grid`` (rows and columns of)
    tiles of ``per_tile`` media rows each, then the whole picture of ``per_whole`` rows.
    """
    if grid == (1, 1):
        return BEGIN, range(per_whole), END
    parts: list[str | range] = []
    text = BEGIN
    first = 0
    for row in range(1, grid[0] + 1):
        for column in range(1, grid[1] + 1):
            parts += [f"{text}<|img_row_{row}_col_{column}|>", range(first, first + per_tile)]
            first += per_tile
            text = ""
    whole = range(first, first + per_whole)
    return *parts, THUMBNAIL, whole, END


def resized_positions(table: np.ndarray, grid: Size) -> np.ndarray:
    """Return a square table of positions ``[side, side, d]`` resized to ``grid`` (bilinear with
    antialiasing): f32 ``[rows * columns, d]``.
    """
    side = len(table)
    squares = table.astype(np.float64)
    down = _triangles(grid[0], side)
    across = _triangles(grid[1], side)
    rows: np.ndarray = np.einsum("ra,cb,abd->rcd", down, across, squares)
    made: np.ndarray = rows.reshape(grid[0] * grid[1], -1).astype(np.float32)
    return made


def _triangles(n: int, side: int) -> np.ndarray:
    """Return the weights ``[n, side]`` by which ``side`` samples are resampled to ``n``: triangles
    that widen when the number shrinks.
    """
    scale = side / n
    centres = (np.arange(n) + 0.5) * scale - 0.5
    distances = np.abs(np.arange(side) - centres[:, None])
    weights = np.maximum(0.0, 1 - distances / max(scale, 1.0))
    made: np.ndarray = weights / weights.sum(1, keepdims=True)
    return made


class Lfm2(PictureFamily):
    """Pictures for a SigLIP 2 tower whose table of positions is resized to each picture; blocks of
    2 x 2 patches are joined.
    """

    decoders = frozenset({"lfm2", "lfm2moe"})
    placeholders = (f"{BEGIN}{ROW}{END}", ROW)
    row_mark = ROW
    marks = (
        BEGIN,
        END,
        ROW,
        THUMBNAIL,
        *(
            f"<|img_row_{i}_col_{j}|>"
            for i in range(1, MOST_TILES + 1)
            for j in range(1, MOST_TILES + 1)
        ),
    )

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.joined_side = self.scale_factor(2)
        self.step = clip.patch_size * self.joined_side
        self.limits = self._limits()
        self._table = square_table(clip)
        norms = (NormStage("mm.input_norm", eps=PROJECTOR_EPS),)
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), AddGivenStage(POSITIONS)),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=self.layers(),
            tail=(NormStage("post_ln"),),
            activation="gelu",
        )
        self.projectors = (
            tower_config(
                f"{clip.projector_type} projector",
                n_given=clip.n_embd * self.joined_side**2,
                stem=(
                    *(norms if clip.has("mm.input_norm.weight") else ()),
                    LinearStage("mm.1"),
                    ActivationStage("gelu_erf"),
                    LinearStage("mm.2"),
                ),
            ),
        )

    def _limits(self) -> Lfm2Limits:
        """Return the limits that the file's keys state, and the published ones for missing keys."""
        clip = self.clip
        usual = Lfm2Limits()
        area = self.step**2
        tile = clip.keys.integer("preproc_image_size", usual.tile, hi=1 << 12)
        if tile % self.step:
            clip.keys.fail("preproc_image_size", f"is {tile}", f"a multiple of {self.step}")
        n_min = clip.keys.integer("preproc_min_tiles", usual.min_tiles, hi=MOST_TILES)
        max_rows = max(1, clip.max_pixels // area) if clip.max_pixels else usual.max_rows
        min_rows = max(1, clip.min_pixels // area) if clip.min_pixels else usual.min_rows
        return Lfm2Limits(
            min_rows=min(min_rows, max_rows),
            max_rows=max_rows,
            tile=tile,
            min_tiles=n_min,
            max_tiles=clip.keys.integer(
                "preproc_max_tiles", max(n_min, usual.max_tiles), lo=n_min, hi=MOST_TILES
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Resize a picture, and cut it into tiles if it is large, within ``max_rows`` media rows
        (by default DEFAULT_ROWS).
        """
        size = self.checked_size(pixels)
        per_tile = (self.limits.tile // self.step) ** 2
        most = DEFAULT_ROWS if max_rows is None else max_rows
        check_rows(1, most)
        rows = min(self.limits.max_rows, most)
        limits = replace(self.limits, max_rows=rows, min_rows=min(self.limits.min_rows, rows))
        whole = scaled_size(size, self.step, limits)
        per_whole = whole[0] * whole[1] // self.step**2
        limits = replace(limits, max_tiles=min(limits.max_tiles, (most - per_whole) // per_tile))
        pictures, grid = cut(pixels, self.step, limits)
        resized = whole if grid == (1, 1) else (grid[0] * limits.tile, grid[1] * limits.tile)
        return self.image(
            pixels, pictures, layout=layout(grid, per_tile, per_whole), resized=resized
        )

    def grid_inputs(self, grid: Size) -> GridInputs:
        """Return the learned positions, resized to the grid of patches."""
        return GridInputs({POSITIONS: resized_positions(self._table, grid)})

    def projector_input(self, states: np.ndarray, grid: Size) -> np.ndarray:
        """Join the states of each block of 2 x 2 patches of the ``grid`` to one row."""
        return join_patches(states, grid, self.joined_side)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    text = config.within("text_config") or config
    patch = vision.integer("patch_size", 16)
    factor = config.integer("downsample_factor", 2)
    usual = Lfm2Limits()

    def limit(key: str, default: int) -> int:
        """Older folders have the limits in config.json."""
        return preprocessor.integer(key, config.integer(key, default))

    splits = preprocessor.flag("do_image_splitting", config.flag("do_image_splitting", True))
    area = (patch * factor) ** 2
    return {
        "has_vision_encoder": True,
        "projector_type": "lfm2",
        "use_gelu": True,
        "vision.embedding_length": vision.integer("hidden_size", 768),
        "vision.feed_forward_length": vision.integer("intermediate_size", 3072),
        "vision.block_count": vision.integer("num_hidden_layers", 12),
        "vision.attention.head_count": vision.integer("num_attention_heads", 12),
        "vision.attention.layer_norm_epsilon": vision.number("layer_norm_eps", 1e-6, lo=0.0),
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": patch * math.isqrt(vision.integer("num_patches", 256)),
        "vision.patch_size": patch,
        "vision.projector.scale_factor": factor,
        "vision.image_min_pixels": area * limit("min_image_tokens", usual.min_rows),
        "vision.image_max_pixels": area * limit("max_image_tokens", usual.max_rows),
        "vision.preproc_image_size": limit("tile_size", usual.tile),
        "vision.preproc_min_tiles": limit("min_tiles", usual.min_tiles) if splits else 1,
        "vision.preproc_max_tiles": limit("max_tiles", usual.max_tiles) if splits else 1,
        **colours(preprocessor, 0.5, 0.5),
    }


LFM2_VL = HfNames(
    read=_read,
    names={
        **siglip_names("vision_tower.vision_model", "vision_tower"),
        "multi_modal_projector.layer_norm": "mm.input_norm",
        "multi_modal_projector.linear_1": "mm.1",
        "multi_modal_projector.linear_2": "mm.2",
    },
    prefixes=("vision_tower.", "multi_modal_projector."),
    made={"v.patch_embd.weight": patch_convolution},
)

"""SmolVLM, SmolVLM2, Idefics 3, Granite-Docling (``idefics3``): square tiles, then the whole
picture as one more tile; special tokens in the prompt name each tile's row and column.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.media.families.gemma3 import siglip_names
from treadle.media.family import PATCHES, POSITIONS, GridInputs, PreparedMedia
from treadle.media.hf_projector import HfNames, colours, part_of
from treadle.media.picture_family import PictureFamily, join_patches
from treadle.media.pixels import resize
from treadle.media.tiles import Size, check_rows, tiles_of
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import AddGivenStage, LinearStage, NormStage

if TYPE_CHECKING:
    from treadle.files.metadata import MetadataReader
    from treadle.media.clip_config import ClipConfig

LARGEST = 4096  # pixels of the longer side, whatever the settings say
MOST_TILES = 6  # rows and columns that tokenizers have names for
DEFAULT_ROWS = 1088  # all 17 tiles of SmolVLM; fewer of towers with more rows a tile
FAKE = "<fake_token_around_image>"
GLOBAL = "<global-img>"


def scaled_size(size: Size, longest: int) -> Size:
    """Return the size, in the picture's ratio, whose longer side is ``longest`` pixels (at most
    LARGEST); the shorter one is rounded up to an even number.
    """
    height, width = size
    ratio = width / height
    if width >= height:
        width = longest
        height = int(width / ratio)
        height += height % 2
    else:
        height = longest
        width = int(height * ratio)
        width += width % 2
    return _within(max(height, 1), max(width, 1))


def _within(height: int, width: int) -> Size:
    """Return the size scaled down so that its longer side is at most LARGEST."""
    ratio = width / height
    if width >= height and width > LARGEST:
        width = LARGEST
        height = int(width / ratio)
    elif height > width and height > LARGEST:
        height = LARGEST
        width = int(height * ratio)
    return max(height, 1), max(width, 1)


def canvas_size(size: Size, tile: int) -> Size:
    """Return a size of whole tiles for a picture of ``size``: the longer side is rounded up to a
    multiple of ``tile`` pixels, the shorter one is scaled with it and then rounded up too.
    """
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        height = math.ceil(int(width / ratio) / tile) * tile
    else:
        height = math.ceil(height / tile) * tile
        width = math.ceil(int(height * ratio) / tile) * tile
    return height, width


def cut(
    pixels: np.ndarray, tile: int, longest: int, per_tile: int, max_rows: int | None
) -> tuple[list[np.ndarray], Size]:
    """Return a picture's tiles, row by row, and after them the whole picture as a tile; and the
    number of rows and columns of tiles. For a picture of one tile, only the whole and (0, 0).

    tile: pixels of a tile's side. longest: pixels of the scaled picture's longer side.
    per_tile: media rows of a tile. max_rows: most media rows of all tiles together.

    The steps are those of transformers' ``Idefics3ImageProcessor``: the picture is resized twice.
    Raises TreadleError if one tile has more than ``max_rows``.
    """
    size = pixels.shape[0], pixels.shape[1]
    check_rows(per_tile, max_rows)
    while True:
        scaled = scaled_size(size, longest)
        canvas = canvas_size(scaled, tile)
        grid = canvas[0] // tile, canvas[1] // tile
        n_tiles = grid[0] * grid[1]
        if n_tiles == 1 or max_rows is None or (n_tiles + 1) * per_tile <= max_rows:
            break
        longest -= tile
    whole = resize(resize(pixels, scaled, "lanczos"), canvas, "lanczos")
    if n_tiles == 1:
        return [whole], (0, 0)
    return [*tiles_of(whole, tile, tile), resize(whole, (tile, tile), "lanczos")], grid


def layout(grid: Size, per_tile: int) -> tuple[str | range, ...]:
    """Return the prompt's special tokens and media row ranges for ``grid`` (rows and columns of)
    tiles, then the whole picture; each has ``per_tile`` media rows.
    """
    rows, columns = grid
    parts: list[str | range] = []
    text = ""
    first = 0
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            parts += [f"{text}{FAKE}<row_{row}_col_{column}>", range(first, first + per_tile)]
            first += per_tile
            text = ""
        text = "\n"
    text = "\n\n" if rows else ""
    parts += [f"{text}{FAKE}{GLOBAL}", range(first, first + per_tile), FAKE]
    return tuple(parts)


class Idefics3(PictureFamily):
    """Pictures for a SigLIP tower of square tiles; blocks of patches are joined, and one product
    makes media rows of them.
    """

    placeholders = ("<image>",)
    row_mark = "<image>"
    marks = (
        "<image>",
        FAKE,
        GLOBAL,
        *(f"<row_{i}_col_{j}>" for i in range(1, MOST_TILES + 1) for j in range(1, MOST_TILES + 1)),
    )

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.joined_side = self.scale_factor(4)
        self.check_square(self.joined_side)
        # Files of before autumn 2025 lack the key; in all published models it is four tiles.
        longest = clip.keys.integer("preproc_image_size", 4 * clip.image_size, hi=LARGEST)
        self.longest = min(longest, MOST_TILES * clip.image_size)
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), AddGivenStage(POSITIONS)),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=self.layers(),
            tail=(NormStage("post_ln"),),
            activation=clip.activation,
        )
        self._positions = self.position_rows()
        self.projectors = (
            tower_config(
                f"{clip.projector_type} projector",
                n_given=clip.n_embd * self.joined_side**2,
                stem=(LinearStage("mm.model.fc"),),
            ),
        )

    @property
    def per_tile(self) -> int:
        """Media rows of a tile."""
        return (self.side // self.joined_side) ** 2

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Cut a picture into tiles of at most ``max_rows`` media rows together, by default
        DEFAULT_ROWS.
        """
        self.checked_size(pixels)
        bound = max(DEFAULT_ROWS, self.per_tile) if max_rows is None else max_rows
        tiles, grid = cut(pixels, self.clip.image_size, self.longest, self.per_tile, bound)
        side = self.clip.image_size
        resized = max(1, grid[0]) * side, max(1, grid[1]) * side
        return self.image(pixels, tiles, layout=layout(grid, self.per_tile), resized=resized)

    def grid_inputs(self, grid: Size) -> GridInputs:
        """Return the learned positions of a tile, whatever the ``grid``."""
        return GridInputs({POSITIONS: self._positions})

    def projector_input(self, states: np.ndarray, grid: Size) -> np.ndarray:
        """Join the states of each block of patches of the ``grid`` to one row."""
        return join_patches(states, grid, self.joined_side)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    text = config.within("text_config") or config
    image_size = vision.integer("image_size", 224)
    size = preprocessor.within("size")
    longest = size.integer("longest_edge", 4 * image_size) if size else None
    if not preprocessor.flag("do_image_splitting", True):
        longest = image_size
    return {
        "has_vision_encoder": True,
        "projector_type": "idefics3",
        "use_gelu": True,
        "vision.embedding_length": vision.integer("hidden_size", 1152),
        "vision.feed_forward_length": vision.integer("intermediate_size", 3072),
        "vision.block_count": vision.integer("num_hidden_layers", 12),
        "vision.attention.head_count": vision.integer("num_attention_heads", 16),
        "vision.attention.layer_norm_epsilon": vision.number("layer_norm_eps", 1e-6, lo=0.0),
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": image_size,
        "vision.patch_size": vision.integer("patch_size", 32),
        "vision.projector.scale_factor": config.integer("scale_factor", 2),
        "vision.preproc_image_size": longest,
        **colours(preprocessor, 0.5, 0.5),
    }


IDEFICS3 = HfNames(
    read=_read,
    names={
        **siglip_names("vision_model"),
        "connector.modality_projection.proj": "mm.model.fc",
    },
    prefixes=("vision_model.", "connector."),
)

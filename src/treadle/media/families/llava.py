"""LLaVA 1.5 and 1.6 (``mlp``): a CLIP tower for a square picture, or for the whole picture and
tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.media.families.gemma3 import siglip_names
from treadle.media.families.pixtral import PIXTRAL_NAMES, read_pixtral
from treadle.media.family import PATCHES, POSITIONS, GridInputs, PreparedMedia
from treadle.media.hf_projector import HfNames, part_of
from treadle.media.picture_family import CLASS, CLIP_MEAN, CLIP_STD, PictureFamily, with_stems
from treadle.media.pixels import resize
from treadle.media.tiles import Size, check_rows, tiles_of
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import ActivationStage, AddGivenStage, LinearStage, NormStage

if TYPE_CHECKING:
    from treadle.files.metadata import MetadataReader
    from treadle.media.clip_config import ClipConfig

NEWLINES = ("image_newline", "model.image_newline")  # the second: files of before 2025
PINPOINTS = "image_grid_pinpoints"
UNPADDED = "spatial_unpad"
MOST_PINPOINTS = 64
TOWERS = "vision_tower.vision_model", "vision_tower"  # names in folders of transformers 4 and 5
MOST_TILES = 16  # along a side of a canvas
NORM = "post_ln.weight"


def centre_square(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return the middle square, ``side`` pixels a side, of a picture whose shorter side is scaled
    to ``side``.
    """
    height, width, _ = pixels.shape
    long = int(side * max(height, width) / min(height, width))
    size = (long, side) if height > width else (side, long)
    scaled = resize(pixels, size, "bicubic")
    top = (size[0] - side) // 2
    left = (size[1] - side) // 2
    return scaled[top : top + side, left : left + side]


def padded_square(pixels: np.ndarray, side: int, mean: Sequence[float]) -> np.ndarray:
    """Return the whole picture, its longer side scaled to ``side``, in the middle of a square of
    the colour ``mean`` (0 to 1).

    LLaVA's own code pads before it scales, which needs memory for the square of a large picture's
    longer side; the values differ at the picture's edges.
    """
    size = pixels.shape[0], pixels.shape[1]
    height, width = (max(1, round(each * side / max(size))) for each in size)
    board = np.full((side, side, 3), [int(255 * part) for part in mean], np.uint8)
    top = (side - height) // 2
    left = (side - width) // 2
    board[top : top + height, left : left + width] = resize(pixels, (height, width), "bicubic")
    return board


def best_canvas(size: Size, canvases: Sequence[Size]) -> Size:
    """Return the canvas that keeps most of the pixels of a picture of ``size`` when this is scaled
    to fit; of several, the one with the smallest unused area.
    """
    height, width = size
    kept_most = 0
    wasted_least = math.inf
    best = canvases[0]
    for canvas in canvases:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas[0] * canvas[1] - kept
        if kept > kept_most or (kept == kept_most and wasted < wasted_least):
            kept_most = kept
            wasted_least = wasted
            best = canvas
    return best


def fitted_size(size: Size, canvas: Size) -> Size:
    """Return the size to which a picture of ``size`` is scaled, in its ratio, so that one side has
    the canvas's length and the other is at most that long; the latter is rounded up.
    """
    height, width = size
    across = canvas[1] / width
    down = canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


def cut(pixels: np.ndarray, canvas: Size, side: int) -> list[np.ndarray]:
    """Return the whole picture squeezed to a square of ``side`` pixels, then, row by row, the tiles
    of a black ``canvas`` with the picture, scaled to fit, in its middle.
    """
    size = pixels.shape[0], pixels.shape[1]
    fitted = fitted_size(size, canvas)
    board = np.zeros((*canvas, 3), np.uint8)
    top = (canvas[0] - fitted[0]) // 2
    left = (canvas[1] - fitted[1]) // 2
    scaled = resize(pixels, fitted, "bicubic")
    board[top : top + fitted[0], left : left + fitted[1]] = scaled
    return [resize(pixels, (side, side), "bicubic"), *tiles_of(board, side, side)]


def unpadded(size: Size, grid: Size) -> tuple[slice, slice]:
    """Return the slices of rows and of columns, in a canvas's ``grid`` of patches, that a picture
    of ``size`` scaled to fit the canvas covers, without the black edges.
    """
    height, width = size
    rows, columns = grid
    if width / height > columns / rows:
        covered = int(round(height * (columns / width), 7))
        padding = (rows - covered) // 2
        return slice(padding, rows - padding), slice(0, columns)
    covered = int(round(width * (rows / height), 7))
    padding = (columns - covered) // 2
    return slice(0, rows), slice(padding, columns - padding)


class Llava(PictureFamily):
    """Pictures for a CLIP tower that ends at the layer whose states are the features; an MLP makes
    media rows of them. A norm after the layers is applied if a projector file has one
    (moondream2's); that of folders is not read.

    Files with canvas sizes (LLaVA 1.6) give the whole picture and tiles. With others the tower
    reads the middle square, as in transformers, or, if the file says "pad", the whole picture in a
    square of the mean colour, as llama.cpp always does.
    """

    placeholders = ("<image>",)
    row_mark = "<image>"
    marks = ("<image>",)

    def __init__(self, clip: ClipConfig) -> None:
        if clip.has(CLASS) or clip.has(f"{CLASS}.weight"):
            self.class_row = "first"
        clip = replace(with_ffn_names(clip), n_layer=feature_layer(clip))
        super().__init__(clip)
        self.check_square()
        self.canvases = canvases_of(clip)
        self.newline = newline_of(clip) if self.canvases else None
        self.pads = clip.keys.text("image_aspect_ratio", "square") == "pad"
        norms = (NormStage("pre_ln"),) if clip.has("pre_ln.weight") else ()
        self.tower = tower_config(
            "llava",
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), AddGivenStage(POSITIONS), *norms),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=self.layers(),
            tail=(NormStage("post_ln"),) if clip.has(NORM) else (),
            activation=clip.activation,
        )
        first = "mm.1" if clip.has("mm.1.weight") else "mm.0"  # the former: in folders
        second = (
            (ActivationStage("gelu_erf"), LinearStage("mm.2")) if clip.has("mm.2.weight") else ()
        )
        self._positions = self.position_rows()
        self.projectors = (
            tower_config(
                "llava projector", n_given=clip.n_embd, stem=(LinearStage(first), *second)
            ),
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Resize a picture to a square, or to the canvas that keeps most of it within ``max_rows``
        media rows, cut into tiles.
        """
        side = self.clip.image_size
        size = self.checked_size(pixels)
        if not self.canvases:
            check_rows(self.side**2, max_rows)
            square = (
                padded_square(pixels, side, self.clip.mean)
                if self.pads
                else centre_square(pixels, side)
            )
            return self.image(pixels, [square], layout=(range(self.side**2),), resized=(side, side))
        whole = resize(pixels, (side, side), "bicubic")
        fitting = [
            canvas
            for canvas in self.canvases
            if max_rows is None or self._n_rows(size, canvas) <= max_rows
        ]
        if not fitting:
            n = self.side**2 + (self.newline is not None)
            check_rows(n, max_rows)
            return self.image(pixels, [whole], layout=(range(n),), resized=(side, side))
        canvas = best_canvas(size, fitting)
        tiles = cut(pixels, canvas, side)
        layout = (range(self._n_rows(size, canvas)),)
        return self.image(pixels, tiles, layout=layout, resized=canvas)

    def _n_rows(self, size: Size, canvas: Size) -> int:
        """Return the number of media rows of a picture of ``size`` on a canvas: those of its tiles,
        with newline rows if the file has one, and those of the whole picture as a tile.
        """
        per_tile = self.side**2
        grid = canvas[0] // self.clip.patch_size, canvas[1] // self.clip.patch_size
        if self.newline is None:
            return per_tile + grid[0] * grid[1]
        down, across = unpadded(size, grid)
        n_rows = len(range(grid[0])[down])
        return per_tile + n_rows * (len(range(grid[1])[across]) + 1)

    def grid_inputs(self, grid: Size) -> GridInputs:
        """Return the learned positions of a tile, whatever the ``grid``."""
        return GridInputs({POSITIONS: self._positions})

    def projector_input(self, states: np.ndarray, grid: Size) -> np.ndarray:
        """Return the states of the patches, without the class token's."""
        return self.patches_alone(states)

    def compose(self, prepared: PreparedMedia, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the whole picture's rows, then those of all tiles as one grid: without the rows of
        black edges, and with the newline row at the end of each line. In files without a newline
        row, the ``rows`` of the tower's inputs follow one another unchanged.
        """
        if self.newline is None:
            return np.concatenate(rows)
        newline = self.newline[None].astype(np.float32)
        if len(rows) == 1:
            return np.concatenate([rows[0], newline])
        side = self.side
        tiles_down = prepared.resized[0] // self.clip.image_size
        tiles_across = prepared.resized[1] // self.clip.image_size
        tiles = np.stack(rows[1:]).reshape(tiles_down, tiles_across, side, side, -1)
        grid = tiles.transpose(0, 2, 1, 3, 4).reshape(tiles_down * side, tiles_across * side, -1)
        down, across = unpadded(prepared.size, (grid.shape[0], grid.shape[1]))
        kept = grid[down, across]
        ends = np.broadcast_to(newline[None], (len(kept), 1, newline.shape[1]))
        lines = np.concatenate([kept, ends], axis=1)
        return np.concatenate([rows[0], lines.reshape(-1, newline.shape[1])])


def with_ffn_names(clip: ClipConfig) -> ClipConfig:
    """Return the file with ``ffn_up`` naming the FFN's first matrix and ``ffn_down`` the second: in
    files from before 2025 the names are swapped, which the matrices' shapes show.
    """
    down = clip.gguf.tensors.get("blk.0.ffn_down.weight")
    if down is None or down.shape != (clip.n_ff, clip.n_embd) or clip.n_ff == clip.n_embd:
        return clip
    return with_stems(clip, {"ffn_up": "ffn_down", "ffn_down": "ffn_up"})


def feature_layer(clip: ClipConfig) -> int:
    """Return the number of layers to run; the states after them are the features. Files without the
    key ``feature_layer`` have only these layers, unless they also have a norm after the layers:
    then the last layer is in the file twice, since llama.cpp skips one, and is run once.
    """
    found = clip.keys.get("feature_layer")
    if found is None:
        return max(1, clip.n_layer - 1) if clip.has(NORM) else clip.n_layer
    several = isinstance(found, Sequence) and not isinstance(found, str)
    numbers = list(found) if several else [found]
    if len(numbers) > 1:
        clip.keys.refuse("feature_layer", f"features of {len(numbers)} layers are not supported")
    n = numbers[0] if numbers and type(numbers[0]) is int else 0
    n = n + clip.n_layer + 1 if n < 0 else n
    if not 1 <= n <= clip.n_layer:
        clip.keys.fail("feature_layer", f"is {found!r:.60}", f"one number from 1 to {clip.n_layer}")
    return n


def newline_of(clip: ClipConfig) -> np.ndarray | None:
    """Return the media row that ends each line of a picture in tiles, f32 ``[n_embd]``; None if the
    file has none or joins tiles without it. Raises FileError for a wrong shape.
    """
    name = next((name for name in NEWLINES if clip.has(name)), "")
    how = clip.keys.text("mm_patch_merge_type", UNPADDED)
    if how not in (UNPADDED, "flat"):
        clip.keys.refuse("mm_patch_merge_type", f"{how!r:.60} is not supported")
    if not name or how != UNPADDED:
        return None
    row = clip.floats(name).reshape(-1)
    products = (clip.gguf.tensors.get(f"{stem}.weight") for stem in ("mm.2", "mm.1", "mm.0"))
    last = next(filter(None, products), None)
    if last is not None and len(row) != last.shape[0]:
        tensor = clip.gguf.tensors[name]
        raise tensor.error(f"shape {list(tensor.shape)}", f"[{last.shape[0]}]")
    return row


def canvases_of(clip: ClipConfig) -> tuple[Size, ...]:
    """Return the sizes (height, width) of the canvases for tiles, in pixels; () if pictures are not
    cut. The file has a flat list of width and height in turn.
    """
    found = clip.keys.get(PINPOINTS)
    if found is None:
        return ()
    numbers = list(found) if isinstance(found, Sequence) else []
    side = clip.image_size
    sound = all(type(n) is int and 0 < n <= MOST_TILES * side and n % side == 0 for n in numbers)
    if not numbers or len(numbers) % 2 or len(numbers) > 2 * MOST_PINPOINTS or not sound:
        expected = f"pairs of width and height, multiples of {side}"
        clip.keys.fail(PINPOINTS, f"is {found!r:.60}", expected)
    return tuple(zip(numbers[1::2], numbers[::2], strict=True))


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    """Return the projector file's keys, by name without ``clip.``, for a folder of LLaVA 1.5 or
    1.6, or of Pixtral, whose ``model_type`` is "llava" too.
    """
    vision = part_of(config, "vision_config")
    kind = vision.text("model_type", "clip_vision_model")
    if kind == "pixtral":
        return read_pixtral(config, preprocessor)
    if kind not in CLIP_TOWERS:
        vision.refuse("model_type", f"{kind!r:.60} is not supported in LLaVA")
    if kind == CLIP_TOWERS[0] and config.text(SELECT, "default") != "default":
        config.refuse(SELECT, "expected 'default': rows of class tokens are not supported")
    text = config.within("text_config") or config
    pins = config.get(PINPOINTS) or []
    if not isinstance(pins, list) or any(type(pin) is not list or len(pin) != 2 for pin in pins):
        config.fail(PINPOINTS, f"is {pins!r:.60}", "pairs of height and width")
    n_layer = vision.integer("num_hidden_layers", 24)
    layer = config.get("vision_feature_layer")
    layer = -2 if layer is None else layer
    if type(layer) is int:  # as llama.cpp reads it
        layer = [layer + n_layer + 1 if layer < 0 else layer]
    activation = vision.text("hidden_act", "quick_gelu")
    return {
        "has_vision_encoder": True,
        "projector_type": "mlp",
        "use_gelu": activation != "quick_gelu",
        "vision.embedding_length": vision.integer("hidden_size", 1024),
        "vision.feed_forward_length": vision.integer("intermediate_size", 4096),
        "vision.block_count": n_layer,
        "vision.attention.head_count": vision.integer("num_attention_heads", 16),
        "vision.attention.layer_norm_epsilon": vision.number("layer_norm_eps", 1e-5, lo=0.0),
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": vision.integer("image_size", 336),
        "vision.patch_size": vision.integer("patch_size", 14),
        "vision.feature_layer": layer,
        f"vision.{PINPOINTS}": [n for pin in pins for n in reversed(pin)] or None,
        "vision.image_mean": preprocessor.get("image_mean") or CLIP_MEAN,
        "vision.image_std": preprocessor.get("image_std") or CLIP_STD,
    }


SELECT = "vision_feature_select_strategy"
CLIP_TOWERS = "clip_vision_model", "siglip_vision_model"
LLAVA = HfNames(
    read=_read,
    names={
        **PIXTRAL_NAMES,
        **siglip_names(*TOWERS),
        **{f"{tower}.embeddings.class_embedding": "v.class_embd" for tower in TOWERS},
        **{f"{tower}.pre_layrnorm": "v.pre_ln" for tower in TOWERS},
        "image_newline": "v.image_newline",
    },
    prefixes=("vision_tower.", "multi_modal_projector.", "image_newline"),
    unread=tuple(
        f"{tower}.{name}"
        for tower in TOWERS
        # The features are taken before the last norm, which llama.cpp applies if a file has it.
        for name in ("embeddings.position_ids", "post_layernorm.weight", "post_layernorm.bias")
    ),
)

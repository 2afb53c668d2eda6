"""InternVL 2.5 to 3.5 (``internvl``): square tiles and the whole picture, without tokens between
them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.files.metadata import MetadataReader
from treadle.media.family import PATCHES, POSITIONS, GridInputs, PreparedMedia
from treadle.media.hf_projector import HfNames, part_of
from treadle.media.picture_family import PictureFamily, join_patches
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
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
PROJECTOR_EPS = 1e-5  # of its norm, torch's default
# Products whose results the layer scales multiply.
SCALED = {"ls1": "attn_output", "ls2": "ffn_down"}


def cut(pixels: np.ndarray, tile: int, n_min: int, n_max: int) -> tuple[list[np.ndarray], Size]:
    """Return ``n_min`` to ``n_max`` square tiles of a picture, of ``tile`` pixels a side, row by
    row, followed by the whole picture as a tile if there are several; and height and width in
    pixels of the resized picture that was cut.
    """
    rows, columns = closest_grid((pixels.shape[0], pixels.shape[1]), tile, n_min, n_max)
    size = rows * tile, columns * tile
    tiles = tiles_of(resize(pixels, size, "bicubic"), tile, tile)
    if len(tiles) == 1:
        return tiles, size
    return [*tiles, resize(pixels, (tile, tile), "bicubic")], size


def with_layer_scales(clip: ClipConfig) -> ClipConfig:
    """Return the file with each layer's scales (``ls1``, ``ls2``) multiplied into the matrices and
    biases whose results they scale. These become f32.

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
    """Pictures for an InternViT tower of square tiles, with a class token; blocks of 2 x 2 patches
    are joined.
    """

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
        self._positions = self.position_rows()
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
        """Cut a picture into tiles of at most ``max_rows`` media rows together, by default at most
        DEFAULT_TILES tiles and the whole picture.
        """
        side = self.clip.image_size
        per_tile = (self.side // self.joined_side) ** 2
        n_max = min(DEFAULT_TILES, self.max_tiles)
        if max_rows is not None:
            n_max = tiles_within(max_rows, per_tile, self.max_tiles)
        self.checked_size(pixels)
        tiles, resized = cut(pixels, side, min(self.min_tiles, n_max), n_max)
        layout = (BEGIN, range(len(tiles) * per_tile), END)
        return self.image(pixels, tiles, layout=layout, resized=resized)

    def grid_inputs(self, grid: Size) -> GridInputs:
        """Return the learned positions of a tile, whatever the ``grid``."""
        return GridInputs({POSITIONS: self._positions})

    def projector_input(self, states: np.ndarray, grid: Size) -> np.ndarray:
        """Drop the class token's state, and join the states of each block of patches to one row."""
        return join_patches(self.patches_alone(states), grid, self.joined_side)


def _side(vision: MetadataReader, key: str, default: int) -> int:
    """Return the value of an integer key that may also be a list of two equal integers; ``default``
    if it is missing. Raises FileError for another value.
    """
    found = vision.get(key)
    if isinstance(found, list) and len(found) == 2 and found[0] == found[1]:
        return MetadataReader({key: found[0]}, vision.path, prefix=vision.prefix).integer(key)
    return vision.integer(key, default)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    text = config.within("text_config") or config.within("llm_config") or config
    # Folders of model_type internvl_chat have the tiles in config.json.
    most = config.integer("max_dynamic_patch", MOST_TILES, hi=64)
    most = preprocessor.integer("max_patches", most, hi=64)
    least = preprocessor.integer("min_patches", config.integer("min_dynamic_patch", 1), hi=most)
    return {
        "has_vision_encoder": True,
        "projector_type": "internvl",
        "use_gelu": True,
        "vision.embedding_length": vision.integer("hidden_size", 1024),
        "vision.feed_forward_length": vision.integer("intermediate_size", 4096),
        "vision.block_count": vision.integer("num_hidden_layers", 24),
        "vision.attention.head_count": vision.integer("num_attention_heads", 16),
        "vision.attention.layer_norm_epsilon": vision.number("layer_norm_eps", 1e-6, lo=0.0),
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": _side(vision, "image_size", 448),
        "vision.patch_size": _side(vision, "patch_size", 14),
        "vision.projector.scale_factor": round(1 / config.number("downsample_ratio", 0.5, lo=0.1)),
        "vision.preproc_min_tiles": least,
        "vision.preproc_max_tiles": most,
        "vision.image_mean": preprocessor.get("image_mean") or IMAGENET_MEAN,
        "vision.image_std": preprocessor.get("image_std") or IMAGENET_STD,
    }


INTERNVL = HfNames(
    read=_read,
    names={
        "vision_tower.embeddings.cls_token": "v.class_embd",
        "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
        "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
        "vision_tower.encoder.layer.{}.attention.q_proj": "v.blk.{}.attn_q",
        "vision_tower.encoder.layer.{}.attention.k_proj": "v.blk.{}.attn_k",
        "vision_tower.encoder.layer.{}.attention.v_proj": "v.blk.{}.attn_v",
        "vision_tower.encoder.layer.{}.attention.q_norm": "v.blk.{}.attn_q_norm",
        "vision_tower.encoder.layer.{}.attention.k_norm": "v.blk.{}.attn_k_norm",
        "vision_tower.encoder.layer.{}.attention.projection_layer": "v.blk.{}.attn_out",
        "vision_tower.encoder.layer.{}.lambda_1": "v.blk.{}.ls1.weight",
        "vision_tower.encoder.layer.{}.lambda_2": "v.blk.{}.ls2.weight",
        "vision_tower.encoder.layer.{}.layernorm_before": "v.blk.{}.ln1",
        "vision_tower.encoder.layer.{}.layernorm_after": "v.blk.{}.ln2",
        "vision_tower.encoder.layer.{}.mlp.fc1": "v.blk.{}.ffn_up",
        "vision_tower.encoder.layer.{}.mlp.fc2": "v.blk.{}.ffn_down",
        "vision_tower.layernorm": "v.post_ln",
        "multi_modal_projector.layer_norm": f"{MLP}.0",
        "multi_modal_projector.linear_1": f"{MLP}.1",
        "multi_modal_projector.linear_2": f"{MLP}.3",
    },
    prefixes=("vision_tower.", "multi_modal_projector."),
    unread=("vision_tower.embeddings.mask_token",),
)
INTERNVL_CHAT = replace(
    INTERNVL,
    splits_qkv=True,
    names={
        "vision_model.embeddings.class_embedding": "v.class_embd",
        "vision_model.embeddings.position_embedding": "v.position_embd.weight",
        "vision_model.embeddings.patch_embedding": "v.patch_embd",
        "vision_model.encoder.layers.{}.attn.qkv": "v.blk.{}.attn_qkv",
        "vision_model.encoder.layers.{}.attn.proj": "v.blk.{}.attn_out",
        "vision_model.encoder.layers.{}.attn.q_norm": "v.blk.{}.attn_q_norm",
        "vision_model.encoder.layers.{}.attn.k_norm": "v.blk.{}.attn_k_norm",
        "vision_model.encoder.layers.{}.ls1": "v.blk.{}.ls1.weight",
        "vision_model.encoder.layers.{}.ls2": "v.blk.{}.ls2.weight",
        "vision_model.encoder.layers.{}.norm1": "v.blk.{}.ln1",
        "vision_model.encoder.layers.{}.norm2": "v.blk.{}.ln2",
        "vision_model.encoder.layers.{}.mlp.fc1": "v.blk.{}.ffn_up",
        "vision_model.encoder.layers.{}.mlp.fc2": "v.blk.{}.ffn_down",
        "mlp1.0": f"{MLP}.0",
        "mlp1.1": f"{MLP}.1",
        "mlp1.3": f"{MLP}.3",
    },
    prefixes=("vision_model.", "mlp1."),
)

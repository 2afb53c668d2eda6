"""Gemma 3: a SigLIP tower of square pictures, whose states are averaged to 256 rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treadle.errors import FileError, TreadleError
from treadle.files.metadata import MetadataReader
from treadle.media import pixels as px
from treadle.media.clip_config import ClipConfig
from treadle.media.family import PATCHES, POSITION_TABLE, POSITIONS, GridInputs, MediaFamily
from treadle.media.hf_projector import HfNames, colours, part_of
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.models.towers.config import tower_config, tower_layer
from treadle.models.towers.stages import AddGivenStage, LinearStage, NormStage

POOL = 4  # patches of a pool's side, where the file does not state it


class Gemma3Vision(MediaFamily):
    """Gemma 3's pictures: resized to one square; all tokens of a picture attend to each other."""

    decoders = frozenset({"gemma3"})
    placeholders = ("<start_of_image>",)
    row_mark = "<image_soft_token>"
    marks = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")

    def __init__(self, clip: ClipConfig) -> None:
        # The file's matrix is [vision, text], as in the checkpoint.
        projection = clip.floats("mm.input_projection.weight").T
        super().__init__(clip.replaced({"mm.input_projection.weight": projection}))
        side = clip.image_size // clip.patch_size
        self.pool = clip.keys.integer("projector.scale_factor", POOL)
        if not side or clip.image_size % clip.patch_size or side % self.pool:
            what = f"image_size {clip.image_size}"
            expected = f"a multiple of {clip.patch_size * self.pool}"
            raise FileError(what, path=clip.gguf.path, where="clip.vision", expected=expected)
        self.grid = side, side
        self.n_rows = (side // self.pool) ** 2
        self._table = clip.floats(POSITION_TABLE)
        if self._table.shape != (side * side, clip.n_embd):
            tensor = clip.gguf.tensors[POSITION_TABLE]
            raise tensor.error(f"shape {list(tensor.shape)}", f"[{side * side}, {clip.n_embd}]")
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), AddGivenStage(POSITIONS)),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=tuple(
                tower_layer(i, n_embd=clip.n_embd, n_head=clip.n_head, n_ff=clip.n_ff)
                for i in range(clip.n_layer)
            ),
            tail=(NormStage("post_ln"),),
            activation="gelu",
        )
        self.projectors = (
            tower_config(
                f"{clip.projector_type}.projector",
                n_given=clip.n_embd,
                stem=(
                    NormStage("mm.soft_emb_norm", centred=False),
                    LinearStage("mm.input_projection"),
                ),
                norm_eps=clip.norm_eps,
                norm="rms",
            ),
        )

    def prepare(self, pixels: px.Pixels, max_rows: int | None) -> PreparedMedia:
        """Resize a picture to the tower's square and cut it into patches. Every picture has
        ``n_rows`` media rows; raises TreadleError if ``max_rows`` is less.
        """
        n = self.n_rows
        if max_rows is not None and max_rows < n:
            raise TreadleError(f"a picture of this model has {n} rows, more than {max_rows}")
        clip = self.clip
        resized = (clip.image_size,) * 2
        values = px.normalise(px.resize(pixels, resized, "bilinear"), clip.mean, clip.std)
        return PreparedMedia(
            kind=self.kind,
            inputs=(TowerInput(px.patches(values, clip.patch_size), self.grid),),
            layout=("\n\n<start_of_image>", range(n), "<end_of_image>\n\n"),
            n_rows=n,
            positions=None,
            advance=n,
            bidirectional=((0, n),),
            size=(pixels.shape[0], pixels.shape[1]),
            resized=resized,
            digest=self.digest(pixels, resized),
        )

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the learned positions of the tower's square, whatever the ``grid``."""
        return GridInputs(rows={POSITIONS: self._table})

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the mean of the states of each square of ``pool`` x ``pool`` patches, f32
        ``[n_rows, n_embd]``; ``grid``: rows and columns of patches.
        """
        return pooled(states, grid, self.pool)


def pooled(states: np.ndarray, grid: tuple[int, int], side: int) -> np.ndarray:
    """Return the mean of the states of each square of ``side`` x ``side`` patches, f32
    ``[h * w / side**2, n]``. ``states``: ``[h * w, n]``, row by row; ``grid``: (h, w).
    """
    h, w = grid
    squares = states.astype(np.float64).reshape(h // side, side, w // side, side, -1)
    means = squares.mean((1, 3)).reshape(h * w // math.prod((side, side)), -1)
    return np.asarray(means, np.float32)


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    text = config.within("text_config") or config
    image_size = vision.integer("image_size", 896)
    patch_size = vision.integer("patch_size", 14)
    rows = config.integer("mm_tokens_per_image", 256)
    return {
        "has_vision_encoder": True,
        "projector_type": "gemma3",
        "use_gelu": True,
        "vision.embedding_length": vision.integer("hidden_size", 1152),
        "vision.feed_forward_length": vision.integer("intermediate_size", 4304),
        "vision.block_count": vision.integer("num_hidden_layers", 27),
        "vision.attention.head_count": vision.integer("num_attention_heads", 16),
        "vision.attention.layer_norm_epsilon": vision.number("layer_norm_eps", 1e-6, lo=0.0),
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": image_size,
        "vision.patch_size": patch_size,
        "vision.projector.scale_factor": image_size // patch_size // math.isqrt(rows),
        **colours(preprocessor, 0.5, 0.5),
    }


SIGLIP_LAYERS = {
    "{}.encoder.layers.{{}}.layer_norm1": "v.blk.{{}}.ln1",
    "{}.encoder.layers.{{}}.layer_norm2": "v.blk.{{}}.ln2",
    "{}.encoder.layers.{{}}.self_attn.q_proj": "v.blk.{{}}.attn_q",
    "{}.encoder.layers.{{}}.self_attn.k_proj": "v.blk.{{}}.attn_k",
    "{}.encoder.layers.{{}}.self_attn.v_proj": "v.blk.{{}}.attn_v",
    "{}.encoder.layers.{{}}.self_attn.out_proj": "v.blk.{{}}.attn_out",
    "{}.encoder.layers.{{}}.mlp.fc1": "v.blk.{{}}.ffn_up",
    "{}.encoder.layers.{{}}.mlp.fc2": "v.blk.{{}}.ffn_down",
    "{}.embeddings.patch_embedding": "v.patch_embd",
    "{}.embeddings.position_embedding": "v.position_embd",
    "{}.post_layernorm": "v.post_ln",
}


def siglip_names(*towers: str) -> dict[str, str]:
    """Return the projector file's names of the tensors of a SigLIP or CLIP tower, by their names in
    a Hugging Face folder. ``towers``: prefixes that folders may use for the tower.
    """
    return {
        theirs.format(tower): name.format()
        for tower in towers
        for theirs, name in SIGLIP_LAYERS.items()
    }


GEMMA3 = HfNames(
    read=_read,
    names={
        **siglip_names("vision_tower.vision_model", "vision_tower"),
        "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
        "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    },
    prefixes=("vision_tower.", "multi_modal_projector."),
    made={"mm.soft_emb_norm.weight": lambda weight: weight + 1},
)

"""Gemma 4: a tower for pictures of any shape, whose states are averaged over 3 x 3 patches. In E2B
and E4B the inputs and results of the layers' matrices are clamped.

::

    patches -> product + positions -> layers with 2-D rope and norms before and after each half
    -> 3 x 3 means, times sqrt(n_embd), standardised -> RMS norm, product
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from treadle.errors import TreadleError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.media import pixels as px
from treadle.media.clip_config import AUDIO, ClipConfig
from treadle.media.families.gemma3 import pooled
from treadle.media.family import PATCHES, POSITION_TABLE, POSITIONS, GridInputs, MediaFamily
from treadle.media.hf_projector import HfNames, colours, part_of, patch_convolution
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.models.rope import Rope
from treadle.models.towers.bounds import SUFFIXES
from treadle.models.towers.config import tower_config, tower_layer
from treadle.models.towers.stages import AddGivenStage, LinearStage, NormStage

POOL = 3  # patches of a pool's side
DEFAULT_ROWS = 280
IMAGE_SIZE = 224  # in files: llama.cpp requires the key, and nothing reads it
ROPE_BASE = 100.0
EPS = 1e-6
BEGIN = "<|image>"
END = "<image|>"
ROW = "<|image|>"
MARKS = (BEGIN, END, ROW, "<|video|>", "<|audio>", "<audio|>", "<|audio|>")


class GemmaSquares(MediaFamily):
    """Base of Gemma 4's picture families: a media row stands for a square of ``pool`` x ``pool``
    patches (3 by default), and pictures are resized to fill the allowed number of rows.
    """

    decoders = frozenset({"gemma4"})
    placeholders = (f"{BEGIN}{ROW}{END}", ROW)
    row_mark = ROW
    marks = MARKS

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self._table = clip.floats(POSITION_TABLE)
        if self._table.ndim != 3 or self._table.shape[::2] != (2, clip.n_embd):
            tensor = clip.gguf.tensors[POSITION_TABLE]
            raise tensor.error(f"shape {list(tensor.shape)}", f"[2, n, {clip.n_embd}]")
        self.pool = clip.keys.integer("projector.scale_factor", POOL)
        self.step = self.pool * clip.patch_size  # pixels of a row's side

    def resized(self, pixels: px.Pixels, max_rows: int | None) -> px.Pixels:
        """Return the picture resized, in its own ratio, to the largest size of at most ``max_rows``
        media rows, both sides rounded down to whole rows.
        """
        rows = self.clip.max_pixels // self.step**2 or DEFAULT_ROWS
        rows = rows if max_rows is None else max_rows
        if rows < 1:
            raise TreadleError(f"a picture needs at least one row, not {rows}")
        size = pixels.shape[0], pixels.shape[1]
        px.check_ratio(size)
        scale = math.sqrt(rows * self.step**2 / (size[0] * size[1]))
        h, w = (math.floor(side * scale / self.step) for side in size)
        if not h:
            h, w = 1, min(size[1] // size[0], rows)
        elif not w:
            h, w = min(size[0] // size[1], rows), 1
        return px.resize(pixels, (h * self.step, w * self.step), "bicubic")

    def prepared(
        self, pixels: px.Pixels, resized: px.Pixels, rows: np.ndarray, side: int
    ) -> PreparedMedia:
        """Return a prepared picture. ``pixels``: the original; ``resized``: its resized pixels;
        ``rows``: the patches of these, f32 ``[n, 3 * side**2]``, of ``side`` pixels a side. Raises
        TreadleError if the file has too few positions.
        """
        h, w = resized.shape[0], resized.shape[1]
        n = h * w // self.step**2
        most = self._table.shape[1]
        if max(h, w) > most * side:
            what = f"a picture of {w // side} x {h // side} patches"
            raise TreadleError(f"{what}: the file has positions for {most} on a side")
        return PreparedMedia(
            kind=self.kind,
            inputs=(TowerInput(rows, (h // side, w // side)),),
            layout=(BEGIN, range(n), END),
            n_rows=n,
            positions=None,
            advance=n,
            bidirectional=((0, n),),
            size=(pixels.shape[0], pixels.shape[1]),
            resized=(h, w),
            digest=self.digest(pixels, (h, w)),
        )

    def positions(self, grid: tuple[int, int]) -> px.Floats:
        """Return the learned positions of the patches of a grid (rows, columns), f32
        ``[n_patches, n_embd]``: the sum of a table row for the column and one for the row.
        """
        row, column = _places(grid)
        made: px.Floats = self._table[0][column] + self._table[1][row]
        return made


class Gemma4Vision(GemmaSquares):
    """Gemma 4's pictures. Files have no flag for the activation, which is the tanh form of GELU."""

    def __init__(self, clip: ClipConfig) -> None:
        norm = clip.gguf.tensors.get("blk.0.attn_q_norm.weight")
        dims = norm.shape[0] if norm else clip.n_embd // max(1, clip.n_head)
        if dims % 4:
            what = f"heads of {dims} values, expected a multiple of 4"
            raise UnsupportedError(f"{clip.gguf.path}: {what}")
        super().__init__(_halves(clip, dims))
        clip = self.clip
        self._std = None
        if clip.has("std_scale"):
            self._std = clip.floats("std_bias"), clip.floats("std_scale")
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), AddGivenStage(POSITIONS)),
            n_embd=clip.n_embd,
            norm_eps=EPS,
            layers=tuple(
                tower_layer(
                    i,
                    n_embd=clip.n_embd,
                    n_head=clip.n_head,
                    n_ff=clip.n_ff,
                    gated=True,
                    rope=True,
                    head_dim=dims,
                    v_norm=True,
                )
                for i in range(clip.n_layer)
            ),
            activation="gelu",
            norm="rms",
            pairs="neox",
            ropes=(Rope(dims, ROPE_BASE),),
            attn_scale=1.0,
        )
        self.projectors = (
            tower_config(
                f"{clip.projector_type}.projector",
                n_given=clip.n_embd,
                stem=(NormStage("", centred=False), LinearStage("mm.input_projection")),
                norm_eps=EPS,
                norm="rms",
            ),
        )

    def prepare(self, pixels: px.Pixels, max_rows: int | None) -> PreparedMedia:
        """Resize a picture to at most ``max_rows`` media rows and cut it into patches of values
        from -1 to 1.
        """
        side = self.clip.patch_size
        resized = self.resized(pixels, max_rows)
        values = px.normalise(resized, self.clip.mean, self.clip.std)
        return self.prepared(pixels, resized, px.patches(values, side) * 2 - 1, side)

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the learned positions and the rotations of a grid of patches; the first half of
        each head's pairs turns by the column, the second half by the row.
        """
        row, column = _places(grid)
        ropes = px.axial_rotations(column, row, self.tower.layers[0].head_dim, ROPE_BASE)
        return GridInputs(rows={POSITIONS: self.positions(grid)}, ropes=(ropes,))

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the mean of the states of each square of patches, times sqrt(n_embd); if the file
        has ``std_scale``, it is standardised: minus ``std_bias``, times ``std_scale``.
        """
        means = pooled(states, grid, self.pool) * np.float32(math.sqrt(states.shape[1]))
        if self._std is None:
            return means
        bias, scale = self._std
        return np.asarray((means - bias) * scale, np.float32)


def _places(grid: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays, int64 ``[n_patches]``: the row and the column of each patch of a grid, row
    by row.
    """
    row, column = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    return row, column


def _halves(clip: ClipConfig, dims: int) -> ClipConfig:
    """Return the file with the rows of queries and keys, heads of ``dims`` rows, reordered. The
    file's heads rotate each half separately, in pairs a quarter of a head apart; the reordered
    pairs are half a head apart.
    """
    order = np.arange(dims).reshape(4, dims // 4)[[0, 2, 1, 3]].ravel()
    orders = {}
    for i in range(clip.n_layer):
        for stem in (f"blk.{i}.attn_q", f"blk.{i}.attn_k"):
            matrix = clip.gguf.tensors.get(f"{stem}.weight")
            if matrix is not None and matrix.shape[0] % dims == 0:
                heads = np.arange(matrix.shape[0]).reshape(-1, dims)
                orders[f"{stem}.weight"] = heads[:, order].ravel()
            norm = clip.gguf.tensors.get(f"{stem}_norm.weight")
            if norm is not None and norm.shape == (dims,):
                orders[f"{stem}_norm.weight"] = order
    return clip.reordered(orders)


def read_squares(
    config: MetadataReader, preprocessor: MetadataReader, vision: MetadataReader
) -> dict[str, Any]:
    """Return the keys of a projector file that are made alike for all folders of Gemma 4, by name
    without ``clip.``. ``vision``: the reader of the folder's ``vision_config``.
    """
    text = config.within("text_config") or config
    pool = vision.integer("pooling_kernel_size", POOL)
    patch_size = vision.integer("patch_size", 16)
    rows = preprocessor.integer("max_soft_tokens", DEFAULT_ROWS)
    return {
        "has_vision_encoder": True,
        "vision.projection_dim": text.get("hidden_size"),
        "vision.image_size": IMAGE_SIZE,
        "vision.patch_size": patch_size,
        "vision.projector.scale_factor": pool,
        "vision.image_max_pixels": rows * (pool * patch_size) ** 2,
        **colours(preprocessor, 0.0, 1.0),
    }


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    return {
        **read_squares(config, preprocessor, vision),
        "vision.projector_type": "gemma4v",
        "use_gelu": True,  # llama.cpp takes the quick GELU without
        "vision.embedding_length": vision.integer("hidden_size"),
        "vision.feed_forward_length": vision.integer("intermediate_size"),
        "vision.block_count": vision.integer("num_hidden_layers"),
        "vision.attention.head_count": vision.integer("num_attention_heads"),
        "vision.attention.layer_norm_epsilon": EPS,
    }


_LAYER = "vision_tower.encoder.layers.{}."
_MATRICES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_out",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA4 = HfNames(
    read=_read,
    names={
        f"{_LAYER}input_layernorm": "v.blk.{}.ln1",
        f"{_LAYER}post_attention_layernorm": "v.blk.{}.attn_post_norm",
        f"{_LAYER}pre_feedforward_layernorm": "v.blk.{}.ln2",
        f"{_LAYER}post_feedforward_layernorm": "v.blk.{}.ffn_post_norm",
        f"{_LAYER}self_attn.q_norm": "v.blk.{}.attn_q_norm",
        f"{_LAYER}self_attn.k_norm": "v.blk.{}.attn_k_norm",
        **{f"{_LAYER}{theirs}.linear": f"v.blk.{{}}.{own}" for theirs, own in _MATRICES.items()},
        **{
            f"{_LAYER}{theirs}{bound}": f"v.blk.{{}}.{own}{bound}"
            for theirs, own in _MATRICES.items()
            for bound in SUFFIXES
        },
        "vision_tower.patch_embedder.input_proj": "v.patch_embd",
        "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
        "vision_tower.std_bias": "v.std_bias",
        "vision_tower.std_scale": "v.std_scale",
        "embed_vision.embedding_projection": "mm.input_projection",
    },
    prefixes=("vision_tower.", "embed_vision."),
    left_out={AUDIO: ("audio_tower.", "gemma4a")},
    made={"v.patch_embd.weight": patch_convolution},
)

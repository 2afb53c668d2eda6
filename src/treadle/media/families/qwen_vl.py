"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: towers whose rows stand in blocks of 2 x 2 patches.

::

    patches -> product (+ positions) -> layers with 2-D rope -> norm -> 2 x 2 joined -> MLP

Qwen2.5-VL: most layers see windows of 8 x 8 patches only. Qwen3-VL: positions are learned, and the
states of some layers are added in the decoder (deepstack).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from treadle.files.metadata import MetadataReader
from treadle.media import pixels as px
from treadle.media.clip_config import ClipConfig
from treadle.media.family import PATCHES, POSITIONS, GridInputs, MediaFamily, square_table
from treadle.media.hf_projector import HfNames, colours, part_of, two_frames
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.models.rope import Rope
from treadle.models.towers.config import TowerConfig, tower_config, tower_layer
from treadle.models.towers.stages import (
    ActivationStage,
    AddGivenStage,
    LinearStage,
    NormStage,
    TowerStage,
)

MERGE = 2  # patches of a block's side
DEFAULT_ROWS = 576  # about 10 to 40 s of a tower on two CPU cores
EPS = 1e-6  # of all towers; Qwen3-VL's files state the decoder's epsilon instead
WINDOW = 112  # pixels of a window's side, where the file does not state it
# Of folders: transformers' defaults, and the size that llama.cpp's converter writes for the towers
# without learned positions, which read pictures of any size.
WHOLE_LAYERS = (7, 15, 23, 31)
N_POSITIONS = 2304
IMAGE_SIZE = 560
DEEPSTACK = "vision.deepstack"  # numbers of layers, in the order of the folder's tensors


class BlockFamily(MediaFamily):
    """Base of families whose tower rows are ordered by blocks of 2 x 2 patches; each block becomes
    one media row.

    least_rows: media rows to which smaller pictures are enlarged, unless the file states
        ``min_pixels``.
    most_rows: most media rows; fewer if the file states ``max_pixels``.
    begin, end: special tokens around a picture's rows.
    """

    least_rows: ClassVar[int] = 4
    most_rows: ClassVar[int] = 8192
    placeholders: tuple[str, ...] = ("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>")
    row_mark = "<|image_pad|>"
    begin: ClassVar[str] = "<|vision_start|>"
    end: ClassVar[str] = "<|vision_end|>"
    marks: tuple[str, ...] = (
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )

    def __init__(self, clip: ClipConfig) -> None:
        if clip.keys.integer("spatial_merge_size", MERGE) != MERGE:
            clip.keys.refuse("spatial_merge_size", f"expected {MERGE}")
        if clip.has("patch_embd.weight.1"):
            # Both frames of a still picture are equal, so their matrices can be added.
            frames = [clip.floats(f"patch_embd.weight{end}") for end in ("", ".1")]
            clip = clip.replaced({"patch_embd.weight": frames[0] + frames[1]})
        super().__init__(clip)
        self.step = MERGE * clip.patch_size

    def target_size(self, size: tuple[int, int], max_rows: int | None) -> tuple[int, int]:
        """Return height and width of the resized picture, in whole blocks, for at most ``max_rows``
        media rows (by default DEFAULT_ROWS).
        """
        area = self.step**2
        rows = min(DEFAULT_ROWS if max_rows is None else max_rows, self.most_rows)
        most = min(self.clip.max_pixels or area * rows, area * rows)
        return px.area_size(size, self.step, self.clip.min_pixels or self.least_rows * area, most)

    def prepare(self, pixels: px.Pixels, max_rows: int | None) -> PreparedMedia:
        """Resize a picture (bicubic) to the target size; the decoder's positions are the rows and
        columns of blocks.
        """
        clip = self.clip
        size = pixels.shape[0], pixels.shape[1]
        h, w = resized = self.target_size(size, max_rows)
        values = px.normalise(px.resize(pixels, resized, "bicubic"), clip.mean, clip.std)
        grid = h // clip.patch_size, w // clip.patch_size
        rows = px.patches(values, clip.patch_size)[px.block_order(grid, MERGE)]
        h, w = h // self.step, w // self.step
        row, column = np.divmod(np.arange(h * w), w)
        return PreparedMedia(
            kind=self.kind,
            inputs=(TowerInput(np.ascontiguousarray(rows), grid),),
            layout=(self.begin, range(h * w), self.end),
            n_rows=h * w,
            positions=np.stack([0 * row, row, column]).astype(np.int32),
            advance=max(h, w),
            bidirectional=(),
            size=size,
            resized=resized,
            digest=self.digest(pixels, resized),
        )

    def rotations(self, grid: tuple[int, int]) -> px.Floats:
        """Return the cosines and sines of a grid's patches, in the order of blocks: f32
        ``[n_patches, 2, head_dim / 2]``.
        """
        row, column = np.divmod(px.block_order(grid, MERGE), grid[1])
        return px.axial_rotations(row, column, self.tower.layers[0].head_dim)

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the rotations of a grid of patches, in the order of blocks."""
        return GridInputs(ropes=(self.rotations(grid),))

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the four states of each block side by side: ``[n_blocks, 4 * n_embd]``."""
        return states.reshape(-1, MERGE * MERGE * states.shape[1])

    def blocks(
        self,
        stem: tuple[TowerStage, ...] = (),
        tail: tuple[TowerStage, ...] = (),
        *,
        activation: str,
        rms: bool = False,
        gated: bool = False,
        eps: float = EPS,
        deep: Sequence[int] = (),
        windowed: Sequence[int] = (),
        n_ff: int = 0,
    ) -> TowerConfig:
        """Return the tower's configuration. ``stem``: stages after the patches' product; ``tail``:
        stages after the layers; ``rms``: norms are RMS norms, not LayerNorms; ``gated``: FFNs have
        a gate; ``eps``: of the norms; ``deep``: layers whose states are results too; ``windowed``:
        layers that attend within windows; ``n_ff``: 0 for the file's.
        """
        clip = self.clip
        head_dim = clip.n_embd // clip.n_head
        layers = [
            tower_layer(
                i,
                n_embd=clip.n_embd,
                n_head=clip.n_head,
                n_ff=n_ff or clip.n_ff,
                gated=gated,
                fused=clip.has(f"blk.{i}.attn_qkv.weight"),
                rope=True,
                windowed=i in windowed,
            )
            for i in range(clip.n_layer)
        ]
        return tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage(PATCHES), *stem),
            n_embd=clip.n_embd,
            norm_eps=eps,
            layers=tuple(layers),
            tail=tail,
            deep=tuple(deep),
            activation=activation,
            norm="rms" if rms else "layer",
            pairs="neox",
            ropes=(Rope(head_dim, 10000.0),),
        )

    def merger(self, first: str, second: str, *before: TowerStage) -> TowerConfig:
        """Return the configuration of a projector that reads the joined states of a block: the
        stages ``before``, then an MLP of the matrices ``first`` and ``second`` (stems) with the
        exact GELU between them.
        """
        name = f"{self.clip.projector_type}.{first}"
        stem = (*before, LinearStage(first), ActivationStage("gelu_erf"), LinearStage(second))
        return tower_config(name, n_given=MERGE * MERGE * self.clip.n_embd, stem=stem, norm_eps=EPS)


class Qwen2Vl(BlockFamily):
    """Qwen2-VL: LayerNorm and quick GELU. Its files do not state the FFN's width."""

    decoders = frozenset({"qwen2vl"})

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        up = clip.gguf.tensors.get("blk.0.ffn_up.weight")
        self.tower = self.blocks(
            tail=(NormStage("post_ln"),), activation="gelu_quick", n_ff=up.shape[0] if up else 0
        )
        self.projectors = (self.merger("mm.0", "mm.2"),)


class Qwen25Vl(BlockFamily):
    """Qwen2.5-VL: RMS norm, gated SiLU, and attention within windows in most layers."""

    decoders = frozenset({"qwen2vl"})

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        window = clip.keys.integer("window_size", WINDOW)
        if window % self.step:
            clip.keys.fail("window_size", f"is {window}", f"a multiple of {self.step}")
        self.side = window // self.step  # of a window, in blocks
        self.tower = self.blocks(
            tail=(NormStage("post_ln", centred=False),),
            activation="silu",
            rms=True,
            gated=True,
            windowed=sorted(set(range(clip.n_layer)) - self._whole_layers()),
        )
        self.projectors = (self.merger("mm.0", "mm.2"),)

    def _whole_layers(self) -> set[int]:
        """Return the numbers of the layers that attend to the whole picture: those that the file
        lists, or every ``n_wa_pattern``-th, or all if the file has neither key.
        """
        keys = self.clip.keys
        listed = keys.get("wa_layer_indexes")
        if isinstance(listed, Sequence) and not isinstance(listed, str):
            return {int(i) for i in listed}
        every = keys.integer("n_wa_pattern", 0, lo=0)
        return {i for i in range(self.clip.n_layer) if not every or not (i + 1) % every}

    def _order(self, grid: tuple[int, int]) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
        """Return the row-major numbers of a grid's blocks in the order of windows, int64
        ``[n_blocks]``, and for each window the index of its first block in that array. Windows at
        the lower and right edges are smaller.
        """
        h, w = (n // MERGE for n in grid)
        blocks = np.arange(h * w).reshape(h, w)
        side = self.side
        windows = [
            blocks[i : i + side, j : j + side].ravel()
            for i in range(0, h, side)
            for j in range(0, w, side)
        ]
        firsts = np.cumsum([0, *map(len, windows[:-1])])
        return np.concatenate(windows), tuple(firsts.tolist())

    def prepare(self, pixels: px.Pixels, max_rows: int | None) -> PreparedMedia:
        """Prepare as ``BlockFamily.prepare``, with the patches in the order of windows."""
        made = super().prepare(pixels, max_rows)
        (only,) = made.inputs
        order, _ = self._order(only.grid)
        rows = _moved(only.patches, order)
        return replace(made, inputs=(TowerInput(rows, only.grid),))

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the rotations in the order of windows, and the first patch of each window."""
        order, firsts = self._order(grid)
        ropes = _moved(self.rotations(grid), order)
        return GridInputs(ropes=(ropes,), windows=tuple(MERGE * MERGE * at for at in firsts))

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the four states of each block side by side, with the blocks back in the picture's
        order.
        """
        order, _ = self._order(grid)
        rows = super().projector_input(states, grid)
        made = np.empty_like(rows)
        made[order] = rows
        return made


def _moved(rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return rows of patches ``[n_patches, ...]`` with their blocks of 2 x 2 rearranged: block
    ``i`` of the result is block ``order[i]`` of ``rows``.
    """
    blocks = rows.reshape(len(order), MERGE * MERGE, *rows.shape[1:])
    return np.ascontiguousarray(blocks[order].reshape(rows.shape))


class Qwen3Vl(BlockFamily):
    """Qwen3-VL, Qwen3.5 and Qwen3.6: learned positions, interpolated to the grid, and deepstack in
    Qwen3-VL.
    """

    decoders = frozenset({"qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"})
    least_rows = 64

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        deep = [i for i in range(clip.n_layer) if clip.has(f"deepstack.{i}.fc1.weight")]
        self.tower = self.blocks(
            stem=(AddGivenStage(POSITIONS),),
            tail=(NormStage("post_ln"),),
            activation="gelu",
            deep=deep,
        )
        self.projectors = (self.merger("mm.0", "mm.2"), *map(self._deep_merger, deep))
        self._table = square_table(clip).astype(np.float64)

    def _deep_merger(self, i: int) -> TowerConfig:
        name = f"deepstack.{i}"
        return self.merger(f"{name}.fc1", f"{name}.fc2", NormStage(f"{name}.norm"))

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the rotations of a grid and its learned positions, interpolated linearly with the
        table's corners on the grid's corners.
        """
        side = len(self._table)
        rows, columns = (_corner_weights(n, side) for n in grid)
        made = np.einsum("ha,wb,abd->hwd", rows, columns, self._table, optimize=True)
        flat = made.reshape(-1, made.shape[2])[px.block_order(grid, MERGE)]
        positions = flat.astype(np.float32)
        return GridInputs(rows={POSITIONS: positions}, ropes=(self.rotations(grid),))


def _corner_weights(n: int, side: int) -> npt.NDArray[np.float64]:
    """Return the weights ``[n, side]`` of ``side`` table rows for each of ``n`` positions: linear,
    with the first and last positions on the first and last rows.
    """
    at = np.linspace(0, side - 1, n)
    return np.maximum(0.0, 1.0 - np.abs(at[:, None] - np.arange(side)))


def _read_qwen(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    """Return the projector file's keys, by name without ``clip.``, for a folder of Qwen2-VL to
    Qwen3.6.
    """
    vision = part_of(config, "vision_config")
    kind = vision.text("model_type", config.text("model_type"))
    old = kind.startswith("qwen2_vl")  # here hidden_size is the decoder's
    n_embd = vision.integer("embed_dim") if old else vision.integer("hidden_size")
    ratio = vision.number("mlp_ratio", 4.0, lo=0.01)
    n_ff = round(ratio * n_embd) if old else vision.integer("intermediate_size")
    n_out = vision.integer("hidden_size" if old else "out_hidden_size")
    types = {"qwen2_vl": "qwen2vl_merger", "qwen2_5": "qwen2.5vl_merger"}
    found = (name for start, name in types.items() if kind.startswith(start))
    projector_type = next(found, "qwen3vl_merger")
    n_layer = vision.integer("depth")
    patch_size = vision.integer("patch_size")
    deep = vision.get("deepstack_visual_indexes") or []
    size = preprocessor.within("size")
    least, most = "min_pixels", "max_pixels"
    pixels = [preprocessor.integer(key, 0, lo=0, hi=1 << 40) for key in (least, most)]
    if size is not None and not any(pixels):
        edges = "shortest_edge", "longest_edge"
        pixels = [size.integer(key, 0, lo=0, hi=1 << 40) for key in edges]
    keys: dict[str, Any] = {
        "has_vision_encoder": True,
        "projector_type": projector_type,
        "vision.embedding_length": n_embd,
        "vision.feed_forward_length": n_ff,
        "vision.block_count": n_layer,
        "vision.attention.head_count": vision.integer("num_heads"),
        "vision.attention.layer_norm_epsilon": EPS,
        "vision.projection_dim": n_out,
        "vision.image_size": vision.integer("image_size", IMAGE_SIZE),
        "vision.patch_size": patch_size,
        "vision.spatial_merge_size": vision.integer("spatial_merge_size", MERGE),
        "vision.image_min_pixels": pixels[0] or None,
        "vision.image_max_pixels": pixels[1] or None,
        **colours(preprocessor, 0.5, 0.5),
    }
    if projector_type == "qwen2.5vl_merger":
        keys |= {"use_silu": True, **_windows(vision, n_layer)}
    if projector_type == "qwen3vl_merger":
        side = math.isqrt(vision.integer("num_position_embeddings", N_POSITIONS))
        keys |= {
            "use_gelu": True,
            "vision.image_size": side * patch_size,
            "vision.is_deepstack_layers": [i in deep for i in range(n_layer)],
            DEEPSTACK: deep,
        }
    return keys


def _windows(vision: MetadataReader, n_layer: int) -> dict[str, Any]:
    """Return the projector file's keys of windows, by name without ``clip.``: which of ``n_layer``
    layers have none, as a period (``n_wa_pattern``), as llama.cpp reads it, or listed if they have
    no period; and the window's size unless it is WINDOW.
    """
    found = vision.get("fullatt_block_indexes")
    whole = list(WHOLE_LAYERS) if found is None else found
    if not isinstance(whole, list) or not all(type(i) is int for i in whole):
        vision.fail("fullatt_block_indexes", f"is {whole!r:.60}", "numbers of layers")
    size = vision.integer("window_size", WINDOW)
    keys: dict[str, Any] = {"vision.window_size": None if size == WINDOW else size}
    every = min(whole, default=0) + 1
    if sorted(whole) == list(range(every - 1, n_layer, every)):
        return keys | {"vision.n_wa_pattern": every}
    return keys | {"vision.wa_layer_indexes": whole}


_BLOCKS = {
    "visual.blocks.{}.norm1": "v.blk.{}.ln1",
    "visual.blocks.{}.norm2": "v.blk.{}.ln2",
    "visual.blocks.{}.attn.qkv": "v.blk.{}.attn_qkv",
    "visual.blocks.{}.attn.proj": "v.blk.{}.attn_out",
    "visual.patch_embed.proj": "v.patch_embd",
}
_MERGER_2 = {
    "visual.merger.ln_q": "v.post_ln",
    "visual.merger.mlp.0": "mm.0",
    "visual.merger.mlp.2": "mm.2",
}
GATED_BLOCKS = {
    **_BLOCKS,
    "visual.blocks.{}.mlp.gate_proj": "v.blk.{}.ffn_gate",
    "visual.blocks.{}.mlp.up_proj": "v.blk.{}.ffn_up",
    "visual.blocks.{}.mlp.down_proj": "v.blk.{}.ffn_down",
}
_FRAMES = {"v.patch_embd.weight": two_frames}
QWEN2_VL = HfNames(
    read=_read_qwen,
    names={
        **_BLOCKS,
        **_MERGER_2,
        "visual.blocks.{}.mlp.fc1": "v.blk.{}.ffn_up",
        "visual.blocks.{}.mlp.fc2": "v.blk.{}.ffn_down",
    },
    prefixes=("visual.",),
    made=_FRAMES,
    splits_qkv=True,
)
QWEN25_VL = replace(QWEN2_VL, names={**GATED_BLOCKS, **_MERGER_2})
QWEN3_VL = replace(
    QWEN2_VL,
    names={
        **_BLOCKS,
        "visual.blocks.{}.mlp.linear_fc1": "v.blk.{}.ffn_up",
        "visual.blocks.{}.mlp.linear_fc2": "v.blk.{}.ffn_down",
        "visual.pos_embed": "v.position_embd",
        "visual.merger.norm": "v.post_ln",
        "visual.merger.linear_fc1": "mm.0",
        "visual.merger.linear_fc2": "mm.2",
        "visual.deepstack_merger_list.{}.norm": "v.deepstack.{}.norm",
        "visual.deepstack_merger_list.{}.linear_fc1": "v.deepstack.{}.fc1",
        "visual.deepstack_merger_list.{}.linear_fc2": "v.deepstack.{}.fc2",
    },
    numbered={"visual.deepstack_merger_list.": DEEPSTACK},
    splits_qkv=False,
)

"""GLM-4.1V to GLM-4.6V and GLM-OCR: blocks of 2 x 2 patches as Qwen2-VL's, RMS norms, gated SiLU.

::

    patches -> product -> norm, + positions -> layers with 2-D rope -> norm -> 2 x 2 joined
    -> product, product, LayerNorm, GELU, gated MLP
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.files.metadata import MetadataReader
from treadle.media import pixels as px
from treadle.media.clip_config import ClipConfig
from treadle.media.families.qwen_vl import GATED_BLOCKS, MERGE, BlockFamily
from treadle.media.family import POSITIONS, GridInputs, square_table
from treadle.media.hf_projector import HfNames, colours, part_of, two_frames
from treadle.models.towers.config import TowerConfig, tower_config
from treadle.models.towers.stages import (
    ActivationStage,
    AddGivenStage,
    GatedStage,
    LinearStage,
    NormStage,
)

LAYER_NORM_EPS = 1e-5  # of the norm between the merger's products
FRAMES = 2  # of a still picture, in a folder's bounds of pixels
BICUBIC = -0.75  # Keys's parameter of the interpolation of positions


class Glm4v(BlockFamily):
    """The pictures of GLM-4.1V to GLM-4.6V and GLM-OCR."""

    decoders = frozenset({"glm4", "glm4moe"})
    least_rows = 8
    most_rows = 6144
    placeholders = ("<|begin_of_image|><|image|><|end_of_image|>", "<|image|>")
    row_mark = "<|image|>"
    begin = "<|begin_of_image|>"
    end = "<|end_of_image|>"
    marks = (
        *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>"),
        *("<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
    )

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        up = clip.gguf.tensors.get("blk.0.ffn_up.weight")
        self.tower = self.blocks(
            stem=(NormStage("norm_embd", centred=False), AddGivenStage(POSITIONS)),
            tail=(NormStage("post_ln", centred=False),),
            activation="silu",
            rms=True,
            gated=True,
            eps=clip.norm_eps,
            n_ff=up.shape[0] if up else 0,  # the file states the merger's
        )
        self.projectors = (self._merger(),)
        self._table = square_table(self.clip).astype(np.float64)

    def _merger(self) -> TowerConfig:
        return tower_config(
            f"{self.clip.projector_type}.merger",
            n_given=MERGE * MERGE * self.clip.n_embd,
            stem=(
                LinearStage("mm.patch_merger"),
                LinearStage("mm.model.fc"),
                NormStage("mm.post_norm", eps=LAYER_NORM_EPS),
                ActivationStage("gelu_erf"),
                GatedStage("mm.gate", "mm.up", "silu"),
                LinearStage("mm.down"),
            ),
        )

    def target_size(self, size: tuple[int, int], max_rows: int | None) -> tuple[int, int]:
        """Return height and width of the resized picture, as ``BlockFamily.target_size``. A picture
        with a side shorter than a block is first enlarged, in its ratio, to one block.
        """
        px.check_ratio(size)
        grow = max(1.0, *(self.step / side for side in size))
        h, w = (int(side * grow) for side in size)
        return super().target_size((h, w), max_rows)

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the rotations of a grid and its learned positions, interpolated from the table by
        bicubic resampling with aligned pixel centres.
        """
        side = len(self._table)
        rows, columns = (_bicubic_weights(n, side) for n in grid)
        made = np.einsum("ha,wb,abd->hwd", rows, columns, self._table, optimize=True)
        flat = made.reshape(-1, made.shape[2])[px.block_order(grid, MERGE)]
        positions = flat.astype(np.float32)
        return GridInputs(rows={POSITIONS: positions}, ropes=(self.rotations(grid),))

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return one row for each block of 2 x 2 patches: the first value of all four patches'
        states, then the second of all four, and so on, as a convolution's weights have them.
        """
        blocks = states.reshape(-1, MERGE * MERGE, states.shape[1])
        return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(len(blocks), -1)


def _bicubic_weights(n: int, side: int) -> npt.NDArray[np.float64]:
    """Return the weights ``[n, side]`` of ``side`` table rows for each of ``n`` positions, by cubic
    convolution (Keys, 1981) with the edges repeated.
    """
    at = (np.arange(n) + 0.5) * side / n - 0.5
    made = np.zeros((n, side))
    for tap in range(-1, 3):
        index = np.floor(at).astype(int) + tap
        share = _keys(np.abs(at - index))
        np.add.at(made, (np.arange(n), np.clip(index, 0, side - 1)), share)
    return made


def _keys(x: np.ndarray) -> np.ndarray:
    """Return the weights of Keys's cubic kernel at the distances ``x``, each from 0 to 2."""
    a = BICUBIC
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _read(config: MetadataReader, preprocessor: MetadataReader) -> dict[str, Any]:
    vision = part_of(config, "vision_config")
    size = preprocessor.within("size") or MetadataReader({}, preprocessor.path)
    # The folder's bounds count both frames of a still picture.
    edges = "shortest_edge", "longest_edge"
    least, most = (size.integer(key, 0, lo=0, hi=1 << 40) // FRAMES for key in edges)
    return {
        "has_vision_encoder": True,
        "projector_type": "glm4v",
        "use_silu": True,
        "vision.embedding_length": vision.integer("hidden_size"),
        "vision.feed_forward_length": vision.integer("intermediate_size"),
        "vision.block_count": vision.integer("depth"),
        "vision.attention.head_count": vision.integer("num_heads"),
        "vision.attention.layer_norm_epsilon": vision.number("rms_norm_eps", 1e-5, lo=0.0),
        "vision.projection_dim": vision.integer("out_hidden_size"),
        "vision.image_size": vision.integer("image_size"),
        "vision.patch_size": vision.integer("patch_size"),
        "vision.spatial_merge_size": vision.integer("spatial_merge_size", MERGE),
        "vision.image_min_pixels": least or None,
        "vision.image_max_pixels": most or None,
        **colours(preprocessor, 0.5, 0.5),
    }


GLM4V = HfNames(
    read=_read,
    names={
        **GATED_BLOCKS,
        "visual.embeddings.position_embedding": "v.position_embd",
        "visual.post_conv_layernorm": "v.norm_embd",
        "visual.post_layernorm": "v.post_ln",
        "visual.downsample": "mm.patch_merger",
        "visual.merger.proj": "mm.model.fc",
        "visual.merger.post_projection_norm": "mm.post_norm",
        "visual.merger.gate_proj": "mm.gate",
        "visual.merger.up_proj": "mm.up",
        "visual.merger.down_proj": "mm.down",
    },
    prefixes=("visual.",),
    made={"v.patch_embd.weight": two_frames},
)

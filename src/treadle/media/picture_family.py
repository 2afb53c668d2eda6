"""The base of families for pictures: the tower's layers, table of positions, and inputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Literal

import numpy as np

from treadle.media.family import PATCHES, POSITION_TABLE, MediaFamily, PreparedMedia, TowerInput
from treadle.media.pixels import check_ratio, normalise, patches
from treadle.media.tiles import Size
from treadle.models.towers.config import tower_layer

if TYPE_CHECKING:
    from treadle.media.clip_config import ClipConfig
    from treadle.models.config import Layer

CLASS = "class_embd"
# Of OpenAI's CLIP, by colour: preparation where a folder does not state it.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class PictureFamily(MediaFamily):
    """Base of families for pictures.

    class_row: where the class token stands among a tower input's patches and in the table of
        positions, if the tower has one. Its patch is zeros, so that the first product gives only
        that product's bias; ``position_rows`` adds the token's embedding.
    """

    class_row: Literal["none", "first", "last"] = "none"

    def layers(self, *, gated: bool = False, rope: bool = False) -> tuple[Layer, ...]:
        """Return the records of the tower's layers. ``gated``: the FFN has a gate; ``rope``:
        queries and keys are rotated. The file's tensors show whether queries, keys and values are
        one matrix, and whether q/k norms span all heads.
        """
        clip = self.clip
        fused = clip.has("blk.0.attn_qkv.weight")
        norm = clip.gguf.tensors.get("blk.0.attn_q_norm.weight")
        wide = norm is not None and prod(norm.shape) == clip.n_embd
        made = []
        for i in range(clip.n_layer):
            layer = tower_layer(
                i,
                n_embd=clip.n_embd,
                n_head=clip.n_head,
                n_ff=clip.n_ff,
                gated=gated,
                fused=fused,
                rope=rope,
            )
            made.append(replace(layer, wide_norm=wide))
        return tuple(made)

    @property
    def side(self) -> int:
        """Number of patches along a side of the square that the tower was trained on."""
        return self.clip.image_size // self.clip.patch_size

    @property
    def n_positions(self) -> int:
        """Number of patches of the tower's square, and the class token if there is one."""
        return self.side**2 + (self.class_row != "none")

    def check_square(self, joined: int = 1) -> None:
        """Raise FileError unless the tower's square is a whole number of blocks of ``joined``
        patches a side. Pixels at the right and lower edges that fill no patch are ignored: 384
        pixels are 27 patches of 14.
        """
        clip = self.clip
        if not self.side or self.side % joined:
            what = f"is {clip.image_size}: {self.side} patches a side"
            clip.keys.fail("image_size", what, f"a multiple of {joined}")

    def checked_size(self, pixels: np.ndarray) -> Size:
        """Return a picture's height and width. Raises TreadleError if one is more than MOST_RATIO
        times the other (``check_ratio``).
        """
        size = pixels.shape[0], pixels.shape[1]
        check_ratio(size)
        return size

    def scale_factor(self, default: int, most: int = 8) -> int:
        """Return the side, in patches, of the blocks that become one media row each: the file's
        key, from 1 to ``most``, or ``default``.
        """
        return self.clip.keys.integer("projector.scale_factor", default, lo=1, hi=most)

    def position_rows(self) -> np.ndarray:
        """Return the learned positions of the tower's square, f32 ``[n_positions, n_embd]``, with
        ``class_values`` added to the class token's row, if there is one. Raises FileError for a
        table of another shape.
        """
        clip = self.clip
        table = clip.floats(POSITION_TABLE)
        if table.size != self.n_positions * clip.n_embd or table.shape[-1] != clip.n_embd:
            tensor = clip.gguf.tensors[POSITION_TABLE]
            expected = f"[{self.n_positions}, {clip.n_embd}]"
            raise tensor.error(f"shape {list(tensor.shape)}", expected)
        table = table.reshape(-1, clip.n_embd)
        if self.class_row == "none":
            return table
        rows = table.copy()
        at = 0 if self.class_row == "first" else len(rows) - 1
        rows[at] += self.class_values()
        return rows

    def class_values(self) -> np.ndarray:
        """Return the class token's embedding, f32 ``[n_embd]``, minus the bias that the patches'
        product adds.
        """
        clip = self.clip
        name = CLASS if clip.has(CLASS) else f"{CLASS}.weight"
        values = clip.floats(name).reshape(-1)
        if len(values) != clip.n_embd:
            tensor = clip.gguf.tensors[name]
            raise tensor.error(f"shape {list(tensor.shape)}", f"[{clip.n_embd}]")
        bias = f"{PATCHES}.bias"
        return values - clip.floats(bias) if clip.has(bias) else values

    def patches_alone(self, states: np.ndarray) -> np.ndarray:
        """Return a tower input's states without the row of the class token, if it has one."""
        return {"none": states, "first": states[1:], "last": states[:-1]}[self.class_row]

    def image(
        self,
        pixels: np.ndarray,
        pictures: Sequence[np.ndarray],
        *,
        layout: tuple[str | range, ...],
        resized: Size,
    ) -> PreparedMedia:
        """Return the prepared form of a picture ``pixels``, uint8 ``[height, width, 3]``.
        ``pictures``: its resized pixels or tiles, each an input of the tower; ``layout`` and
        ``resized``: as in ``PreparedMedia``.
        """
        n_rows = sum(len(part) for part in layout if isinstance(part, range))
        return PreparedMedia(
            kind=self.kind,
            inputs=tuple(map(self._input, pictures)),
            layout=layout,
            n_rows=n_rows,
            positions=None,
            advance=n_rows,
            bidirectional=(),
            size=(pixels.shape[0], pixels.shape[1]),
            resized=resized,
            digest=self.digest(pixels, layout, resized, [each.shape for each in pictures]),
        )

    def _input(self, picture: np.ndarray) -> TowerInput:
        clip = self.clip
        grid = picture.shape[0] // clip.patch_size, picture.shape[1] // clip.patch_size
        whole = picture[: grid[0] * clip.patch_size, : grid[1] * clip.patch_size]
        rows = patches(normalise(whole, clip.mean, clip.std), clip.patch_size)
        empty = np.zeros((1, rows.shape[1]), np.float32)
        if self.class_row == "first":
            rows = np.concatenate([empty, rows])
        elif self.class_row == "last":
            rows = np.concatenate([rows, empty])
        return TowerInput(rows, grid)


def join_patches(
    states: np.ndarray, grid: Size, side: int, order: Literal["patches", "values"] = "patches"
) -> np.ndarray:
    """Join each block of ``side`` x ``side`` patches into one row: f32
    ``[n_blocks, side**2 * width]``. ``states``: ``[n_patches, width]`` of the patches of ``grid``,
    row by row.

    order: "patches": one patch's values after another's (row, column, value); "values": the first
        value of all patches, then the second of all (value, row, column), as in torch's unfold and
        a convolution's weights.
    """
    rows, columns = grid
    blocks = states.reshape(rows // side, side, columns // side, side, states.shape[1])
    axes = (0, 2, 1, 3, 4) if order == "patches" else (0, 2, 4, 1, 3)
    n_blocks = len(states) // side**2
    return np.ascontiguousarray(blocks.transpose(axes).reshape(n_blocks, -1))


def with_stems(clip: ClipConfig, stems: Mapping[str, str]) -> ClipConfig:
    """Return the file with tensors of layers renamed. ``stems``: new names by old ones, without
    "blk.N." and suffix, such as ``ffn_up``.
    """
    view = copy.copy(clip.gguf)
    view.tensors = {}
    for name, tensor in clip.gguf.tensors.items():
        if name.startswith("blk."):
            layer, stem, kind = name.rsplit(".", 2)
            name = f"{layer}.{stems.get(stem, stem)}.{kind}"
        view.tensors[name] = tensor
    return replace(clip, gguf=view)

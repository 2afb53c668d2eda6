"""Gemma 3: a SigLIP tower of square pictures, whose states are averaged to 256 rows."""

from __future__ import annotations

import math

import numpy as np

from treadle.errors import FileError, TreadleError
from treadle.media import pixels as px
from treadle.media.clip_config import ClipConfig
from treadle.media.family import GridInputs, MediaFamily
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.models.towers.config import tower_config, tower_layer
from treadle.models.towers.stages import AddGivenStage, LinearStage, NormStage

POOL = 4  # patches of a pool's side, where the file does not state it


class Gemma3Vision(MediaFamily):
    """Gemma 3's pictures: squeezed to a square; all tokens of a picture see each other."""

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
        self._table = clip.floats("position_embd.weight")
        if self._table.shape != (side * side, clip.n_embd):
            tensor = clip.gguf.tensors["position_embd.weight"]
            raise tensor.error(f"shape {list(tensor.shape)}", f"[{side * side}, {clip.n_embd}]")
        layer = {"n_embd": clip.n_embd, "n_head": clip.n_head, "n_ff": clip.n_ff}
        self.tower = tower_config(
            clip.projector_type,
            n_given=3 * clip.patch_size**2,
            stem=(LinearStage("patch_embd"), AddGivenStage("positions")),
            n_embd=clip.n_embd,
            norm_eps=clip.norm_eps,
            layers=tuple(tower_layer(i, **layer) for i in range(clip.n_layer)),
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
        """See ``MediaFamily``. Every picture has the same number of rows; raises TreadleError if
        ``max_rows`` is less.
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
        """See ``MediaFamily``."""
        return GridInputs(rows={"positions": self._table})

    def joined(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the means of squares of patches."""
        return pooled(states, grid, self.pool)


def pooled(states: np.ndarray, grid: tuple[int, int], side: int) -> np.ndarray:
    """Return the mean of the states of each square of ``side`` times ``side`` patches, f32."""
    h, w = grid
    squares = states.astype(np.float64).reshape(h // side, side, w // side, side, -1)
    means = squares.mean((1, 3)).reshape(h * w // math.prod((side, side)), -1)
    return np.asarray(means, np.float32)

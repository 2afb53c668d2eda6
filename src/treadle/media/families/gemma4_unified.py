"""Gemma 4 12B ("unified"): no towers. Squares of pixels, and 40 ms of samples, become rows by norms
and products.
"""

from __future__ import annotations

import numpy as np

from treadle.errors import TreadleError
from treadle.media import pixels as px
from treadle.media.clip_config import ClipConfig
from treadle.media.families.gemma4 import EPS, MARKS, GemmaSquares
from treadle.media.family import GridInputs, MediaFamily
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.models.towers.config import tower_config
from treadle.models.towers.stages import AddGivenStage, LinearStage, NormStage

LAYER_NORM_EPS = 1e-5


class Gemma4UnifiedVision(GemmaSquares):
    """Pictures: a product of each square's pixels, with norms, and learned positions."""

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        n = 3 * self.step**2
        norms = [NormStage(f"patch_norm.{i}", eps=LAYER_NORM_EPS) for i in (1, 2, 3)]
        self.tower = tower_config(
            clip.projector_type,
            n_given=n,
            stem=(
                norms[0],
                LinearStage("patch_embd"),
                norms[1],
                AddGivenStage("positions"),
                norms[2],
                NormStage("", centred=False),
                LinearStage("mm.input_projection"),
            ),
            norm_eps=EPS,
        )

    def prepare(self, pixels: px.Pixels, max_rows: int | None) -> PreparedMedia:
        """See ``MediaFamily``. Values are from 0 to 1."""
        resized = self.resized(pixels, max_rows)
        values = px.normalise(resized, self.clip.mean, self.clip.std)
        return self.prepared(pixels, resized, px.patches(values, self.step), self.step)

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """See ``MediaFamily``."""
        return GridInputs(rows={"positions": self.positions(grid)})


class Gemma4UnifiedAudio(MediaFamily):
    """Sound: a norm and a product of 640 samples at 16 kHz. Its tokens are causal."""

    kind = "audio"
    decoders = frozenset({"gemma4"})
    row_mark = "<|audio|>"
    placeholders = ("<|audio><|audio|><audio|>", row_mark)
    marks = MARKS

    def __init__(self, clip: ClipConfig) -> None:
        super().__init__(clip)
        self.tower = tower_config(
            clip.projector_type,
            n_given=clip.n_embd,
            stem=(NormStage("", centred=False), LinearStage("mm.a.input_projection")),
            norm_eps=EPS,
            norm="rms",
        )

    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Prepare samples, f32 ``[n]`` at 16 kHz, padded with zeros to whole rows. Raises
        TreadleError for no samples, or more than ``max_rows`` rows.
        """
        samples = np.asarray(pixels, np.float32)
        width = self.clip.n_embd
        n = -(-len(samples) // width)
        if not n:
            raise TreadleError("a sound without samples")
        if max_rows is not None and n > max_rows:
            raise TreadleError(f"a sound of {n} rows, more than {max_rows}")
        rows = np.pad(samples, (0, n * width - len(samples))).reshape(n, width)
        return PreparedMedia(
            kind=self.kind,
            inputs=(TowerInput(rows, (1, n)),),
            layout=("<|audio>", range(n), "<audio|>"),
            n_rows=n,
            positions=None,
            advance=n,
            bidirectional=(),
            size=(1, len(samples)),
            resized=(1, n * width),
            digest=self.digest(samples),
        )

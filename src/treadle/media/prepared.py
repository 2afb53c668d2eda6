"""A picture or sound, prepared for the tower of one projector file."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass

if TYPE_CHECKING:
    from treadle.media.mel_input import MelInput


@dataclass(frozen=True, eq=False)
class TowerInput:
    """The input of one pass of the tower: a whole picture, one tile of it, or a sound's samples.

    patches: f32 ``[n_patches, patch_width]``, rows for the tower's first product.
    grid: number of rows and columns of patches; of a sound, 1 and the number of rows.
    """

    patches: np.ndarray = field(repr=False)
    grid: tuple[int, int]

    @property
    def n_rows(self) -> int:
        """Number of rows in the tower's layers."""
        return len(self.patches)

    @property
    def n_bytes(self) -> int:
        """Bytes of memory that the input uses until it is encoded."""
        return self.patches.nbytes


@dataclass(frozen=True, eq=False)
class PreparedMedia:
    """A picture or sound as the inputs of its tower, and its place in the prompt.

    kind: "image" or "audio".
    inputs: the tower's inputs, in the order of their rows.
    layout: the picture's part of the prompt, in order: texts of special tokens, and ranges of media
        rows. The ranges cover 0 to ``n_rows`` in ascending order.
    n_rows: number of media rows, each in place of one token of the decoder.
    positions: i32 ``[3, n_rows]`` (time, row, column), relative to the position of the first media
        row; None: consecutive.
    advance: distance from the position of the first media row to that of the text after the last
        one; ``n_rows`` where ``positions`` is None and the ranges of ``layout`` are adjacent.
    bidirectional: ranges of media rows (first, end) whose tokens attend to each other.
    size: height and width as given, in pixels; of a sound, 1 and its number of samples.
    resized: height and width of the resized picture, or of all its tiles together; of a sound, 1
        and its number of samples with padding.
    digest: sha256 of the pixels or samples, the settings of the preparation, and the identity of
        the projector's file. Equal digests mean equal rows.
    """

    kind: str
    inputs: tuple[TowerInput | MelInput, ...]
    layout: tuple[str | range, ...]
    n_rows: int
    positions: np.ndarray | None
    advance: int
    bidirectional: tuple[tuple[int, int], ...]
    size: tuple[int, int]
    resized: tuple[int, int]
    digest: bytes

    @property
    def n_bytes(self) -> int:
        """Bytes of the tower's inputs."""
        return sum(each.n_bytes for each in self.inputs)
